"""The kind of device (cpu or cuda) that a run is meant for.

Normally this is the kind of the run's own device. In a dry run the fake tensors are on the CPU,
and the kind is that of the machine that the dry run predicts. Methods ask `kind_of` wherever
PyTorch behaves differently on the two.
"""

from __future__ import annotations

from contextvars import ContextVar

import torch

TARGET: ContextVar[str | None] = ContextVar("target", default=None)
"""The kind of device (cpu, cuda) that a dry run's fake tensors represent; None outside of one."""


def kind_of(device: torch.device) -> str:
    """The kind of device (cpu, cuda) that a run is meant for: a dry run's target, else `device`'s
    own."""
    return TARGET.get() or device.type


def has_own_memory(device: torch.device) -> bool:
    """Whether a device computes only on its own memory, as a GPU does.

    A CPU computes on everything that is mapped. In a dry run for a GPU, the CPU that holds its fake
    tensors counts as a GPU.
    """
    return device.type != "cpu" or TARGET.get() == "cuda"
