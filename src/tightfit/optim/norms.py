"""Compute the norms of full parameters for LAMB and LARS. This device may hold only a shard of
each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Sum = Callable[[Tensor], Tensor]  # sums over the devices that hold one parameter's shards


def mark_shard(weight: Tensor, total: Sum) -> None:
    """Mark `weight` as a shard of a parameter.

    total  all-reduces (sums) a vector over the devices that hold the parameter's shards
    """
    weight.all_reduce_over_shards = total  # type: ignore[attr-defined]


def copy_shard_mark(copy: Tensor, weight: Tensor) -> Tensor:
    """Mark `copy` as a shard if `weight` is marked as a shard. Return `copy`."""
    if hasattr(weight, "all_reduce_over_shards"):
        mark_shard(copy, weight.all_reduce_over_shards)
    return copy


def full_norms(weight: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return the norms of full tensors, as scalar tensors.

    weight   a parameter, or this device's shard of it
    tensors  tensors that are sharded as `weight` is, such as the weight, its gradient and its
             update

    If `weight` is a shard, this is a collective operation of all devices that hold a shard of the
    parameter. The host does not wait for the norms.
    """
    found = [torch.linalg.vector_norm(tensor) for tensor in tensors]
    if hasattr(weight, "all_reduce_over_shards"):
        found = list(weight.all_reduce_over_shards(torch.stack(found).square()).sqrt().unbind())
    return found
