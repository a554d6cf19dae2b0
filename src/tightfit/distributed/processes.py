"""Tell how many processes a run has, and which rank and which device this process has.

A run has one process for each device. `join` initializes the default process group, from which all
other groups are created.
"""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.distributed.rendezvous import choose_interface, join_store
from tightfit.errors import InputError
from tightfit.plan import Plan

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def world_size() -> int:
    """Return the number of processes of the run.

    It is that of the process group, if this has been initialized. Otherwise the launcher (torchrun,
    srun, `tightfit train --nproc`) gives it in WORLD_SIZE. Without a launcher it is 1.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return the rank of this process among all processes of the run, counted from 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def is_rank_zero() -> bool:
    """Return whether this process has rank 0. That process writes files and prints for all
    processes.
    """
    return rank() == 0


def join(kind: str, store: dist.Store | None = None, timeout: timedelta | None = None) -> None:
    """Initialize the default process group, unless that has been done. It is destroyed when the program
    ends without an error, because threads of a group that still exists can abort the process at its exit.

    kind     the kind of the processes' devices: "cpu" (then the backend is gloo) or "cuda" (NCCL)
    store    the store through which the processes find each other; None: create one
    timeout  the time-out of each collective; None: torch's default

    Raises InputError if more than one GPU is visible to this process, but fewer than there are
    processes on its host.
    """
    if not dist.is_initialized():
        if kind == "cuda":
            torch.cuda.set_device(local_device(kind))
        choose_interface(None)
        count = world_size()
        store = dist.HashStore() if count == 1 else dist.PrefixStore("groups", store or join_store())
        dist.init_process_group(BACKENDS[kind], store=store, rank=rank(), world_size=count, timeout=timeout)
        atexit.register(_leave)


def _leave() -> None:
    """Destroy the process group at the end of the program. After an error it is left as it is, because
    destroying it could wait for processes that wait for this one."""
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def check_world(plan: Plan) -> None:
    """Raise InputError unless there is one process for each device of the plan."""
    processes = world_size()
    if plan.devices != processes:
        named = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        sizes = " x ".join(f"{axis}={getattr(plan, axis)}" for axis in named if getattr(plan, axis) > 1)
        sizes += " + a server" if plan.servers else ""
        asked = f"plan: {plan.devices} devices ({sizes})" if sizes else "plan: one device"
        raise InputError(
            asked,
            f"{processes} {'process trains' if processes == 1 else 'processes train'}",
            f"start it with --nproc {plan.devices} (or torchrun --nproc-per-node {plan.devices}), or use a plan for "
            f"{processes} {'device' if processes == 1 else 'devices'}, such as {_plan_for(plan, processes)}",
        )


def _plan_for(plan: Plan, devices: int) -> str:
    """Return the fields that change `plan` into one of `devices` replicas, as text."""
    fields = [
        f"dp_replicate: {devices}",
        *(f"{axis}: 1" for axis in ("pp", "dp_shard", "cp", "tp") if getattr(plan, axis) > 1),
    ]
    fields += ["zero: 0"] if plan.zero else []
    return ", ".join([*fields, *(["parameter_server: none"] if plan.servers else [])])


def local_device(kind: str) -> torch.device:
    """Return the device of this process on its host.

    For "cuda" this is the GPU whose number is the process's LOCAL_RANK. If the launcher shows each
    process only its own GPU, it is GPU 0.

    kind  the kind of device: "cpu" or "cuda"

    Raises InputError if more than one GPU is visible, but fewer than there are processes on this
    host.
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
    """Return an fp32 tensor of `numbers` on `device`. The host does not wait for a GPU.

    To that end the numbers are copied from page-locked memory. A copy from pageable memory would
    wait for the GPU's other work.
    """
    on_host = torch.tensor(numbers, dtype=torch.float32)
    return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host.to(device)
