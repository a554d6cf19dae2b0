"""Compute the outputs of operations on fake tensors for which torch's own fake kernels fail.

These are operations whose output shape depends on values (nonzero, boolean masks), and grouped
matrix products (the experts of a mixture of experts). The tracers call `fake_output`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tightfit._torch.loggers import FAKE_TENSORS
from tightfit._torch.operations import GROUPED_MM


def grouped_mm_output(left: Tensor, right: Tensor, offsets: Tensor | None = None, *unused: Any, **named: Any) -> Tensor:
    """Return an empty tensor with the shape and type of torch._grouped_mm's result. The arguments
    are those of torch._grouped_mm.

    left, right  the operands. A 3-D operand has one matrix for each group. A 2-D operand is divided
                 into groups by `offsets`
    offsets      (groups,): where each group ends; also accepted under torch's name `offs`

    Example: (64, 16) x (4, 16, 32) gives (64, 32).
    """
    offsets = named.get("offs", offsets)
    groups: Sequence[int] = ()
    if left.dim() == right.dim():  # one result matrix for each group
        groups = left.shape[:1] if left.dim() == 3 or offsets is None else offsets.shape
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]), dtype=named.get("out_dtype") or left.dtype)


def grouped_mm_sizes(left: Sequence[int], right: Sequence[int], groups: int) -> tuple[float, float, float, float]:
    """Return (groups, rows, columns, depth) for a call of torch._grouped_mm: it computes `groups`
    matrix products, each (rows, depth) x (depth, columns) on average.

    left, right  the shapes of the operands
    groups       the number of groups

    Example: (64, 16) x (4, 16, 32) in 4 groups gives (4, 16, 32, 16): each of the 4 products is
    (16, 16) x (16, 32).
    """
    rows, columns, depth = float(left[-2]), float(right[-1]), float(left[-1])
    if len(left) == len(right) == 2:
        depth /= groups
    elif len(left) == 2:
        rows /= groups
    elif len(right) == 2:
        columns /= groups
    return float(groups), rows, columns, depth


def grouped_mm_flops(left: Sequence[int], right: Sequence[int], offsets: Any = None, *unused: Any, **named: Any) -> int:
    """Return the FLOPs of a call of torch._grouped_mm. The arguments are the shapes of its
    arguments, as torch's FLOP counter passes them."""
    offsets = named.get("offs", offsets)
    groups = offsets[0] if offsets is not None else left[0] if len(left) == 3 else 1
    return round(2 * math.prod(grouped_mm_sizes(left, right, groups)))


def fake_output(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the operation `func` on fake tensors and return its output. If the shape of the output
    depends on values, which fake tensors do not have, the output has the largest possible shape.

    Example: nonzero of a (3, 4) tensor gives (12, 2), as if all 12 elements were nonzero.
    """
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
    if func is GROUPED_MM.default:
        return grouped_mm_output(*args, **kwargs)
    return func(*args, **kwargs)


def group_norm_gradients(func: Any, args: Any) -> Any:
    """Return what the backward of a group norm returns for a 16-bit input beside fp32 weights, as under
    autocast on a CPU: the gradient of the input has its dtype. torch's own fake kernel says fp32. Return None
    for any other operation, and if the dtypes are equal."""
    if func is not torch.ops.aten.native_group_norm_backward.default:
        return None
    given, weight, wanted = args[1], args[4], args[9]
    if weight is None or weight.dtype == given.dtype:
        return None
    return (
        torch.empty_like(given) if wanted[0] else None,
        torch.empty_like(weight) if wanted[1] else None,
        torch.empty_like(weight) if wanted[2] else None,
    )


@contextmanager
def without_fake_tensor_logs() -> Iterator[None]:
    """Inside this context, torch does not log a traceback when an operation fails on fake tensors.
    The error is still raised, and the caller must explain it."""
    logger = logging.getLogger(FAKE_TENSORS)
    logger.addFilter(_drop_record)
    try:
        yield
    finally:
        logger.removeFilter(_drop_record)


def _drop_record(record: logging.LogRecord) -> bool:
    return False


__all__ = [
    "GROUPED_MM",
    "group_norm_gradients",
    "grouped_mm_flops",
    "grouped_mm_output",
    "grouped_mm_sizes",
    "without_fake_tensor_logs",
]
