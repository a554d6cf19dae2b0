"""Collectives: rows of a tensor, one for each device of a group, that are summed for it or come from it.

gloo has no reduce-scatter of its own: it sums everything everywhere and takes a part, which sends twice as much, and what it gathers
it copies once more. On its groups each row is reduced to its device, and sent from it, by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def begin_scatter_rows(part: Tensor, rows: Tensor, group: dist.ProcessGroup) -> Any:
    """Begin to sum all devices' rows, (count, ...), each for the device of its number, which finds it in `part` when what is
    returned has been waited for. What is left in `rows` is of no use."""
    if not goes_by_row(group):
        return _reduce_scatter(part.view(-1), rows.view(-1), group=group, async_op=True)
    works = [dist.reduce(row, group=group, group_dst=place, async_op=True) for place, row in enumerate(rows)]
    return _Summed(works, rows[dist.get_rank(group)], part)


def scatter_rows(part: Tensor, rows: Tensor, group: dist.ProcessGroup) -> None:
    """The same, waited for."""
    if goes_by_row(group):
        begin_scatter_rows(part, rows, group).wait()
    else:
        _reduce_scatter(part.view(-1), rows.view(-1), group=group)


def summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of all devices' tensors, a new one. In a compiled region nothing is summed in place: of what a forward returns so,
    torch 2.11 makes gradients that are zero."""
    if torch.compiler.is_compiling():
        return all_reduce(tensor.contiguous(), "sum", group)
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def gather_rows(rows: Tensor, group: dist.ProcessGroup) -> None:
    """Of (count, ...) each device has filled the row of its number: now they have all."""
    if not goes_by_row(group):
        _all_gather(rows.view(-1), rows[dist.get_rank(group)].view(-1), group=group)
        return
    works = [dist.broadcast(row, group=group, group_src=place, async_op=True) for place, row in enumerate(rows)]
    for work in works:
        work.wait()


class _Allocates:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ScatterByRow(_Allocates):
    """`scatter_rows` as what fully_shard reduces gradients by, in its signature. Sums only."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        scatter_rows(output_tensor, input_tensor.view(group.size(), -1), group)


class GatherByRow(_Allocates):
    """`gather_rows` as what fully_shard gathers parameters by: `input_tensor` is this device's row of `output_tensor`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        gather_rows(output_tensor.view(group.size(), -1), group)


def goes_by_row(group: dist.ProcessGroup) -> bool:
    """Not what is compiled: a compiler knows the common collectives only."""
    return not torch.compiler.is_compiling() and bool(dist.get_backend(group) == "gloo")


@dataclass
class _Summed:
    """Work on rows, of which this device's is taken when all are done."""

    works: list[Any]
    row: Tensor
    part: Tensor

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.part.view(-1).copy_(self.row.view(-1))


__all__ = ["GatherByRow", "ScatterByRow", "begin_scatter_rows", "gather_rows", "goes_by_row", "scatter_rows", "summed"]
