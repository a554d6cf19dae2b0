"""Reduce-scatter, all-gather and all-reduce tensors that have one row for each device of a group.

The gradient buckets, the weight gathers, tensor parallelism and fully_shard (ZeRO-3) use these
functions.

gloo has no reduce-scatter of its own: it all-reduces the tensor and takes a part, which sends twice
as many bytes. Its all-gather makes one more copy. So on gloo groups, this module reduces each row
to the device that needs it, and broadcasts each row from the device that has it.
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
    """Begin a reduce-scatter (sum) of `rows`, and return a handle. Its `wait` method completes it.

    part   the tensor that gets this device's result: the sum of row `rank` over all devices. It has
           as many elements as one row, and is valid after `wait`
    rows   shape (group size, ...): row i is this device's contribution to the result of device i.
           The contents are undefined afterwards
    group  the process group; all of its devices must call this function
    """
    if not uses_row_collectives(group):
        return _reduce_scatter(part.view(-1), rows.view(-1), group=group, async_op=True)
    works = [dist.reduce(row, group=group, group_dst=rank, async_op=True) for rank, row in enumerate(rows)]
    return _RowReduces(works, rows[dist.get_rank(group)], part)


def reduce_scatter(part: Tensor, rows: Tensor, group: dist.ProcessGroup) -> None:
    """Reduce-scatter (sum) `rows`, and wait for the result.

    part   the tensor that gets this device's result: the sum of row `rank` over all devices
    rows   shape (group size, ...): row i is this device's contribution to the result of device i.
           The contents are undefined afterwards
    group  the process group; all of its devices must call this function
    """
    if uses_row_collectives(group):
        begin_reduce_scatter(part, rows, group).wait()
    else:
        _reduce_scatter(part.view(-1), rows.view(-1), group=group)


def all_reduced(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of `tensor` over the devices of `group`, as a new tensor of the same shape.

    A compiled region does not reduce in place: if a forward returns a tensor that was reduced in
    place, torch 2.11 computes zero gradients for it.
    """
    if torch.compiler.is_compiling():
        return functional_all_reduce(tensor.contiguous(), "sum", group)
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def all_gather(rows: Tensor, group: dist.ProcessGroup) -> None:
    """All-gather `rows` in place.

    rows   shape (group size, ...). Before the call, this device has filled row number `rank`. After
           the call, each device has all rows
    group  the process group; all of its devices must call this function
    """
    if not uses_row_collectives(group):
        _all_gather(rows.view(-1), rows[dist.get_rank(group)].view(-1), group=group)
        return
    works = [dist.broadcast(row, group=group, group_src=rank, async_op=True) for rank, row in enumerate(rows)]
    for work in works:
        work.wait()


class _Allocator:
    """Base class with the `allocate` method that fully_shard calls on a custom collective. The
    method returns a new uninitialized tensor.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class RowReduceScatter(_Allocator):
    """A custom reduce-scatter for fully_shard, which calls it with the arguments below. It runs
    this module's `reduce_scatter`.

    output_tensor  gets this device's shard of the sum
    input_tensor   this device's contributions to the shards of all devices, in the order of the
                   ranks
    group          the process group
    op             ignored: the reduction is always a sum
    async_op       ignored: the call waits for the result
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        reduce_scatter(output_tensor, input_tensor.view(group.size(), -1), group)


class RowAllGather(_Allocator):
    """A custom all-gather for fully_shard, which calls it with the arguments below. It runs this
    module's `all_gather`.

    output_tensor  gets the shards of all devices, in the order of the ranks
    input_tensor   this device's shard, already stored at its place in `output_tensor`
    group          the process group
    async_op       ignored: the call waits for the result
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        all_gather(output_tensor.view(group.size(), -1), group)


def uses_row_collectives(group: dist.ProcessGroup) -> bool:
    """Return whether this module communicates with `group` one row at a time, by reduces and
    broadcasts.

    It does on gloo. It does not in compiled code, because torch.compile supports only the usual
    collectives.
    """
    return not torch.compiler.is_compiling() and bool(dist.get_backend(group) == "gloo")


@dataclass
class _RowReduces:
    """The handle of a reduce-scatter that runs as one reduce for each row.

    `wait` waits for all reduces, and copies this device's summed row into `part`.

    works  the handles of the reduces in flight
    row    this device's row, which holds the sum when the reduces are complete
    part   the tensor that gets the result
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
