"""Fake tensors: tensors that have a shape, a dtype and a device, but no values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode, detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    is_fake,
    unset_fake_temporarily,
)


def known_value(value: Any) -> Tensor | None:
    """Return the real tensor with the values of a fake tensor, if torch has kept it. Return None if
    the values are unknown or if `value` is no fake tensor."""
    return value.constant if isinstance(value, FakeTensor) else None


def set_known_value(fake: FakeTensor, value: Tensor | None) -> None:
    """Set the real tensor that torch uses when an operation needs the values of `fake`.

    value  the real tensor; None: the values are unknown
    """
    fake.constant = value


def device_of(fake: FakeTensor) -> torch.device:
    """Return the device that a fake tensor pretends to be on. Unlike `fake.device`, this dispatches
    no operation, so it is fast."""
    return fake.fake_device


__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "active_fake_mode",
    "detect_fake_mode",
    "device_of",
    "is_fake",
    "known_value",
    "set_known_value",
    "unset_fake_temporarily",
]
