"""Compute the norms of full parameters for LAMB and LARS, even if this device holds only a shard of
each parameter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Sum = Callable[[Tensor], Tensor]  # sums over the devices that hold one parameter's shards


def mark_shard(weight: Tensor, total: Sum) -> None:
    """Mark `weight` as a shard of a parameter, so that `full_norms` sums over all shards.

    total  a function that returns the sum of a vector over the devices that hold the parameter's
           shards (all-reduce)
    """
    weight.all_reduce_over_shards = total  # type: ignore[attr-defined]


def copy_shard_mark(copy: Tensor, weight: Tensor) -> Tensor:
    """Mark `copy` as a shard of a parameter, as `mark_shard` does, if `weight` is marked as one.
    Return `copy`, which is a tensor that takes the place of `weight` during an update."""
    if hasattr(weight, "all_reduce_over_shards"):
        mark_shard(copy, weight.all_reduce_over_shards)
    return copy


def full_norms(weight: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return the norm of each of `tensors`, as a scalar tensor. If the tensors are shards, return
    the norms of the full tensors.

    weight   a parameter, or this device's shard of it, which `mark_shard` has marked
    tensors  tensors that are sharded in the same way as `weight`, such as the weight itself, its
             gradient and its update

    If `weight` is a shard, this is a collective operation: all devices that hold a shard of the
    parameter must call it. The host does not wait for the norms.
    """
    found = [torch.linalg.vector_norm(tensor) for tensor in tensors]
    if hasattr(weight, "all_reduce_over_shards"):
        found = list(weight.all_reduce_over_shards(torch.stack(found).square()).sqrt().unbind())
    return found
