"""Answers: what operations give on tensors without values, where torch does not know it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GROUPED_PRODUCT = torch.ops.aten._grouped_mm


class GroupedProducts(TorchDispatchMode):
    """Within, products of groups, as of experts, have a result in every type: torch has one in bf16 only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is GROUPED_PRODUCT.default:
            return grouped_product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def grouped_product(left: Tensor, right: Tensor, offsets: Tensor | None = None, *unused: Any, **named: Any) -> Tensor:
    """A tensor of the shape of torch._grouped_mm's: `left` and `right` are 2-D, cut by `offsets`, or have a group in each row."""
    offsets = named.get("offs", offsets)
    several: Sequence[int] = ()
    if left.dim() == right.dim():  # a product for each group
        several = left.shape[:1] if left.dim() == 3 or offsets is None else offsets.shape
    return left.new_empty((*several, left.shape[-2], right.shape[-1]), dtype=named.get("out_dtype") or left.dtype)


def grouped_sizes(left: Sequence[int], right: Sequence[int], groups: int) -> tuple[float, float, float, float]:
    """(groups, rows, columns, depth) of the mean product of torch._grouped_mm, by the shapes of its operands."""
    rows, columns, depth = float(left[-2]), float(right[-1]), float(left[-1])
    if len(left) == len(right) == 2:
        depth /= groups
    elif len(left) == 2:
        rows /= groups
    elif len(right) == 2:
        columns /= groups
    return float(groups), rows, columns, depth


def grouped_flops(left: Sequence[int], right: Sequence[int], offsets: Any = None, *unused: Any, **named: Any) -> int:
    """As torch's formulas of FLOPs are called."""
    offsets = named.get("offs", offsets)
    groups = offsets[0] if offsets is not None else left[0] if len(left) == 3 else 1
    return round(2 * math.prod(grouped_sizes(left, right, groups)))


def answer(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation gives on tensors without values: where the shape depends on values, the largest that it may have."""
    aten = torch.ops.aten
    if func is aten.nonzero.default:
        return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
    if func is aten.masked_select.default:
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return args[0].new_empty(shape.numel())
    if func is aten.index.Tensor and any(
        isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1]
    ):
        indices: list[Any] = []
        for one in args[1]:
            if isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8):
                indices += [one.new_empty(one.numel(), dtype=torch.int64) for _ in range(one.dim())]
            else:
                indices.append(one)
        return func(args[0], indices)
    if func is GROUPED_PRODUCT.default:
        return grouped_product(*args, **kwargs)
    return func(*args, **kwargs)


@contextmanager
def failures_unlogged() -> Iterator[None]:
    """torch logs a traceback for each operation that fails on tensors without values. Within it does not: who catches the error
    says what it means."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(_none)
    try:
        yield
    finally:
        logger.removeFilter(_none)


def _none(record: logging.LogRecord) -> bool:
    return False


__all__ = [
    "GROUPED_PRODUCT",
    "GroupedProducts",
    "failures_unlogged",
    "grouped_flops",
    "grouped_product",
    "grouped_sizes",
]
