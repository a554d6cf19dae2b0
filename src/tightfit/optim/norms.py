"""Norms of whole parameters, of which this device may hold a part only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Sum = Callable[[Tensor], Tensor]


def mark_part(weight: Tensor, total: Sum) -> None:
    """Say that `weight` is a part of a parameter; `total` sums a vector over the devices that hold the other parts."""
    weight.total_over_parts = total  # type: ignore[attr-defined]


def mark_alike(copy: Tensor, weight: Tensor) -> Tensor:
    """`copy`, marked as `weight` is."""
    if hasattr(weight, "total_over_parts"):
        mark_part(copy, weight.total_over_parts)
    return copy


def norms(weight: Tensor, *tensors: Tensor) -> list[Tensor]:
    """The norms of `tensors`, each of which lies as `weight` does: scalar tensors, of the whole parameter. All devices that
    hold a part of it take part. Reads no value on the host."""
    found = [torch.linalg.vector_norm(tensor) for tensor in tensors]
    if hasattr(weight, "total_over_parts"):
        found = list(weight.total_over_parts(torch.stack(found).square()).sqrt().unbind())
    return found
