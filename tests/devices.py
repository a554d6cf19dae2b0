"""The devices that a test runs on, as a parameter; that of a GPU carries the mark `gpu`."""

from __future__ import annotations

from typing import Any

import pytest

import tightfit
from tightfit.machine import Machine

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]
on_each_device = pytest.mark.parametrize("device", DEVICES)


def machine(device: str) -> Machine:
    """This machine as one of devices of that kind: a test for processors runs on them where there is a GPU, too."""
    return tightfit.Machine.detect().replace(device=device)


def on_gpu(case: Any, *marks: Any, name: str = "") -> Any:
    """A parameter list of a case and the device cuda, with the mark `gpu` and others."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, "cuda", marks=[pytest.mark.gpu, *marks], id=f"{name or case}-cuda")


def need_float8(recipe: str) -> None:
    """Skip a test that multiplies in 8 bits on a GPU without units for it, or without torchao."""
    import torch

    from tightfit.machines.gpus import architecture_of, multiplies_float8

    pytest.importorskip("torchao")
    found = architecture_of(torch.cuda.get_device_properties(0))
    if not multiplies_float8(found, recipe == "rowwise"):
        pytest.skip(f"needs units for float8 ({recipe}), and {found} is here")


def need(count: int, device: str) -> None:
    """Skip a test that needs more devices of a kind than are here. Of a processor there are as many as one wants."""
    if device == "cpu":
        return
    import torch

    found = torch.cuda.device_count()
    if found < count:
        pytest.skip(f"needs {count} CUDA devices, and {found} {'is' if found == 1 else 'are'} here")
