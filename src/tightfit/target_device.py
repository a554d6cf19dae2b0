"""The kind of device that a run is meant for: its own, or the one that a dry run stands for while its fake tensors lie on the CPU."""

from __future__ import annotations

from contextvars import ContextVar

import torch

TARGET: ContextVar[str | None] = ContextVar("target", default=None)
"""The kind of device (cpu, cuda) that fake tensors stand for; None outside of a dry run."""


def kind_of(device: torch.device) -> str:
    """The kind of device (cpu, cuda) that a run is meant for: in a dry run the target's, else the device's own."""
    return TARGET.get() or device.type


def is_apart(device: torch.device) -> bool:
    """Whether a device computes only with what lies in its own memory. A CPU computes with everything that is mapped."""
    return device.type != "cpu" or TARGET.get() == "cuda"
