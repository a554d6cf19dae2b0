"""Reduce-scatter, all-gather and all-reduce of tensors with one row for each device of a group.

The gradient buckets, the weight gathers, tensor parallelism and fully_shard (ZeRO-3) call them.

gloo has no reduce-scatter of its own: it all-reduces the tensor and takes a part, which sends twice
as many bytes. Its all-gather makes one more copy. On gloo groups this module therefore reduces each
row to its device, and broadcasts each row from its device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit._torch.distributed import functional_all_reduce

# renamed in torch 2.13
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def begin_reduce_scatter(part: Tensor, rows: Tensor, group: dist.ProcessGroup) -> Any:
    """Begin a reduce-scatter (sum) of `rows`.

    part   this device's result, with as many elements as one row; valid when the returned work has
           been waited for
    rows   (group size, ...): row i is this device's contribution to device i. Its contents are
           undefined afterwards
    group  the devices; all must call it

    Returns a work with a `wait` method.
    """
    if not uses_row_collectives(group):
        return _reduce_scatter(part.view(-1), rows.view(-1), group=group, async_op=True)
    works = [dist.reduce(row, group=group, group_dst=place, async_op=True) for place, row in enumerate(rows)]
    return _RowReduces(works, rows[dist.get_rank(group)], part)


def reduce_scatter(part: Tensor, rows: Tensor, group: dist.ProcessGroup) -> None:
    """The blocking reduce-scatter: see `begin_reduce_scatter`."""
    if uses_row_collectives(group):
        begin_reduce_scatter(part, rows, group).wait()
    else:
        _reduce_scatter(part.view(-1), rows.view(-1), group=group)


def all_reduced(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The all-reduced (summed) tensor, a new one of the same shape.

    A compiled region does not reduce in place: if a forward returns a tensor that was reduced in
    place, torch 2.11 computes zero gradients for it.
    """
    if torch.compiler.is_compiling():
        return functional_all_reduce(tensor.contiguous(), "sum", group)
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def all_gather(rows: Tensor, group: dist.ProcessGroup) -> None:
    """All-gather in place: each device has filled row `rank` of `rows`, (group size, ...);
    afterwards all devices have all rows.
    """
    if not uses_row_collectives(group):
        _all_gather(rows.view(-1), rows[dist.get_rank(group)].view(-1), group=group)
        return
    works = [dist.broadcast(row, group=group, group_src=place, async_op=True) for place, row in enumerate(rows)]
    for work in works:
        work.wait()


class _Allocator:
    """The `allocate` method that fully_shard asks a custom collective for."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class RowReduceScatter(_Allocator):
    """`reduce_scatter` with the signature that fully_shard asks a custom reduce-scatter for. It
    sums, whatever `op` is.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        reduce_scatter(output_tensor, input_tensor.view(group.size(), -1), group)


class RowAllGather(_Allocator):
    """`all_gather` with the signature that fully_shard asks a custom all-gather for: `input_tensor`
    is this device's row of `output_tensor`.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        all_gather(output_tensor.view(group.size(), -1), group)


def uses_row_collectives(group: dist.ProcessGroup) -> bool:
    """Whether rows are sent one by one: on gloo, but not in compiled code, since a compiler knows
    only the common collectives.
    """
    return not torch.compiler.is_compiling() and bool(dist.get_backend(group) == "gloo")


@dataclass
class _RowReduces:
    """The pending reduces of all rows. `wait` waits for all of them and copies this device's row
    into `part`.
    """

    works: list[Any]
    row: Tensor
    part: Tensor

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.part.view(-1).copy_(self.row.view(-1))


__all__ = [
    "RowAllGather",
    "RowReduceScatter",
    "all_gather",
    "all_reduced",
    "begin_reduce_scatter",
    "reduce_scatter",
    "uses_row_collectives",
]
