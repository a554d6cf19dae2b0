"""The tests for a GPU are there, of every method for one device, whatever machine collects them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.test_contract import ON_GPU_ONLY, SINGLES, is_compiled, named, on_several
from tightfit.methods import METHODS

ROOT = Path(__file__).parent.parent
LEAST = 150


@pytest.fixture(scope="module")
def collected() -> list[str]:
    """The ids of what `scripts/test --gpu` runs, as a process of its own collects them."""
    (marks,) = re.findall(r"--gpu\) .*?marks=\"(.*?)\"", (ROOT / "scripts" / "test").read_text())
    command = [sys.executable, "-m", "pytest", "-m", marks, "--collect-only", "-q", "-o", "addopts=--strict-markers"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_the_suite_for_a_gpu_is_large(collected: list[str]) -> None:
    assert len(collected) >= LEAST


def test_every_variant_of_one_device_is_tried_on_a_gpu(collected: list[str]) -> None:
    """On each model, or compiled on one; with the settings that only a GPU has."""
    alone = [items for items in SINGLES if not on_several(items)]
    for items in [*alone, *ON_GPU_ONLY]:
        found = [one for one in collected if f"[{named(items)}-" in one and one.endswith("-cuda]")]
        assert len(found) >= (1 if is_compiled(items) else 4), named(items)


def test_every_method_of_one_device_has_a_variant(collected: list[str]) -> None:
    there = {method for items in SINGLES if not on_several(items) for method, _ in items}
    several = {method for items in SINGLES if on_several(items) for method, _ in items} - there
    assert there | several == {method.__name__.rpartition(".")[2] for method in METHODS if method.VARIANTS}
    assert {"precision", "recompute", "loss", "optimizer_states", "compile", "attention", "allocator"} <= there
    assert {"loader", "offload", "materialize", "microbatch"} <= there


@pytest.mark.parametrize("file", ["engine/test_checkpoint", "measure/test_predicted", "methods/test_offload"])
def test_what_goes_with_a_training_is_tried_on_a_gpu(file: str, collected: list[str]) -> None:
    assert sum(one.startswith(f"tests/{file}.py") for one in collected) >= 10
