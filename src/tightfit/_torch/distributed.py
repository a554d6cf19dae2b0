"""Functions for process groups and DTensor that use private names of torch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce
from torch.distributed.tensor import DTensor


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return how long a collective of a process group waits before it fails.

    device  the device whose backend (gloo, NCCL) is asked
    """
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    """Set how long the collectives of a process group wait before they fail."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def init_fake_process_group(rank: int, world_size: int) -> None:
    """Initialize torch.distributed with a fake process group, whose collectives return at once and
    send nothing. This process takes the given rank in a world of `world_size` processes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def local_shard(tensor: Any) -> Tensor:
    """Return the tensor object in which a DTensor holds this device's shard. `DTensor.to_local`, in
    contrast, creates a new tensor object."""
    local: Tensor = tensor._local_tensor
    return local


def set_local_shard(tensor: Any, shard: Tensor) -> None:
    """Replace the tensor object in which a DTensor holds this device's shard by `shard`."""
    tensor._local_tensor = shard


def sharded_like(shard: Tensor, like: Any) -> DTensor:
    """Return a DTensor without gradient whose part on this device is `shard`, with the global
    shape, mesh and placements of `like`, a DTensor."""
    return DTensor(shard.detach(), like._spec, requires_grad=False)


__all__ = [
    "functional_all_reduce",
    "group_timeout",
    "init_fake_process_group",
    "local_shard",
    "set_group_timeout",
    "set_local_shard",
    "sharded_like",
]
