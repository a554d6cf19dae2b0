"""The processes of a run, one for each device: how many, which one this is, and its device.

`join` initializes the default process group, through which all others are created.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.distributed.rendezvous import choose_interface, join_store
from tightfit.errors import InputError
from tightfit.plan import Plan

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def world_size() -> int:
    """The number of processes of the run, as the process group or the launcher (torchrun, srun,
    `tightfit train --nproc`) gives it.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The rank of this process among all processes of the run, from 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def is_rank_zero() -> bool:
    """Whether this process has rank 0: it writes files and prints for all processes."""
    return rank() == 0


def join(kind: str, store: dist.Store | None = None, timeout: timedelta | None = None) -> None:
    """Initialize the default process group, unless that has been done.

    kind     the kind of the processes' devices ("cpu" or "cuda"), which selects gloo or NCCL
    store    the store through which the processes find each other; None: one is made
    timeout  the time-out of each collective; None: torch's default

    Raises InputError when this process has no GPU of its own.
    """
    if not dist.is_initialized():
        if kind == "cuda":
            torch.cuda.set_device(local_device(kind))
        choose_interface(None)
        count = world_size()
        store = dist.HashStore() if count == 1 else dist.PrefixStore("groups", store or join_store())
        dist.init_process_group(BACKENDS[kind], store=store, rank=rank(), world_size=count, timeout=timeout)


def check_world(plan: Plan) -> None:
    """Check that there is one process for each device of the plan. Raises InputError otherwise."""
    there = world_size()
    if plan.devices != there:
        named = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        sizes = " x ".join(f"{axis}={getattr(plan, axis)}" for axis in named if getattr(plan, axis) > 1)
        sizes += " + a server" if plan.servers else ""
        asked = f"plan: {plan.devices} devices ({sizes})" if sizes else "plan: one device"
        raise InputError(
            asked,
            f"{there} {'process trains' if there == 1 else 'processes train'}",
            f"start it with --nproc {plan.devices} (or torchrun --nproc-per-node {plan.devices}), or use dp_replicate: {there} "
            "and zero: 0",
        )


def local_device(kind: str) -> torch.device:
    """The device of this process on its host. A launcher may show each process only its own GPU,
    which is then GPU 0.

    Raises InputError when more than one GPU is visible, but fewer than there are processes.
    """
    if kind != "cuda":
        return torch.device(kind)
    number, visible = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= visible > 1:
        raise InputError(
            f"process {number} of this host",
            f"{visible} CUDA devices are visible to it",
            "start as many processes on a host as it has GPUs, and show each either all of them or its own",
        )
    return torch.device(kind, 0 if visible == 1 else number)


def copy_to_device(numbers: list[float], device: torch.device) -> Tensor:
    """An fp32 tensor of `numbers` on `device`, without waiting: a copy from pageable memory would
    wait for the device's other work.
    """
    there = torch.tensor(numbers, dtype=torch.float32)
    return there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there.to(device)
