"""The kind of device (cpu or cuda) that a run is meant for.

Normally this is the kind of the run's own device. In a dry run, which trains on fake tensors to
predict memory, the tensors are on the CPU, and the kind is that of the machine that the dry run
predicts. Methods ask `kind_of` wherever PyTorch behaves differently on a CPU and on a GPU.
"""

from __future__ import annotations

from contextvars import ContextVar

import torch

TARGET: ContextVar[str | None] = ContextVar("target", default=None)
"""The kind of device (cpu, cuda) that a dry run's fake tensors represent; None outside of a dry
run."""


def kind_of(device: torch.device) -> str:
    """Return the kind of device (cpu, cuda) that a run is meant for. In a dry run, this is the kind
    of the predicted machine's devices; outside of a dry run, it is the type of `device`."""
    return TARGET.get() or device.type


def has_own_memory(device: torch.device) -> bool:
    """Return whether `device` computes only on its own memory, as a GPU does.

    A CPU can compute on all memory that is mapped, files included. In a dry run for a GPU, the fake
    tensors are on the CPU, but `device` counts as a GPU.
    """
    return device.type != "cpu" or TARGET.get() == "cuda"
