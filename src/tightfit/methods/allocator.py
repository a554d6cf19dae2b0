"""Sets how the process allocates memory. `tuned` keeps freed memory in the process and reuses it,
instead of requesting it from the operating system at every step. On a CPU, `lean` does the
opposite: it returns freed memory at once, so that the process takes little more than its tensors.

Saves   `tuned` on a CPU: time. By default, glibc returns large memory blocks to the kernel, which
        zeroes them again at every step. `tuned` on CUDA: memory, because expandable segments
        fragment it less. `lean`: memory on a CPU.
Costs   `tuned` on a CPU: the process keeps its largest size until it ends, including the unused
        memory between blocks of different sizes, which is much if parameters are gathered and
        freed. glibc's caches of small memory blocks are off, so that freed small blocks can be
        merged into large ones; this saves a quarter of the memory if much is recomputed. `lean`
        does not fragment memory, but each large memory block is requested anew.
When    `tuned` always, `lean` if memory is short. Allocator settings in the user's environment take
        precedence over both.
Order   first: it decides how all later memory is allocated.
Source  glibc manual, "Malloc Tunable Parameters" (mallopt, glibc.malloc.hugetlb); PyTorch, "CUDA
        semantics", expandable_segments.

This module changes the settings that a running process can change. Two settings must be in the
environment variable GLIBC_TUNABLES before the process starts: huge pages, and no caches of small
memory blocks. The command line sets them (`engine/launch.py`). If your own program trains within a
memory limit, start it with the same GLIBC_TUNABLES, because the predictions for `tuned` assume
them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from dataclasses import replace

from tightfit._torch.devices import set_allocator_settings
from tightfit.cost.ledger import Ledger
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.plan import Plan
from tightfit.runtime.method import Default
from tightfit.runtime.run import Run

FIELDS = ("allocator",)
VARIANTS = ({"allocator": "tuned"}, {"allocator": "lean"})
MMAP_THRESHOLD_BYTES = 2**20  # lean maps each block of this size or more separately

# mallopt's parameters, from malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -3, -4, -8


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Return the ledger (the predicted memory and time of a step) with the allocator's behaviour.

    With `tuned`, the process reuses freed memory. With `lean`, each allocation of a large memory
    block is requested from the operating system, which zeroes it.
    """
    return (
        replace(ledger, caches_memory=True)
        if plan.allocator == "tuned"
        else replace(ledger, mmap_threshold=MMAP_THRESHOLD_BYTES)
    )


def enabled(plan: Plan) -> bool:
    return plan.allocator != "default"


def defaults(job: Job, machine: Machine) -> Iterator[Default]:
    yield Default("allocator", "tuned", "freed memory is kept in the process and reused")


def apply(run: Run, plan: Plan) -> Run:
    """Set up the allocator of this process and return the run unchanged. Nothing is set if the
    environment already has allocator settings."""
    if run.device.type == "cuda":
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ and "PYTORCH_ALLOC_CONF" not in os.environ:
            set_allocator_settings("expandable_segments:True")
    elif "GLIBC_TUNABLES" not in os.environ and plan.allocator == "tuned":
        keep_freed_memory()
    elif "GLIBC_TUNABLES" not in os.environ:
        give_back_freed_memory()
    return run


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory in the process, and to take large memory blocks from its heap
    instead of a memory mapping of their own.

    Returns True if glibc accepted all settings; False otherwise, such as on a system without glibc.
    """
    return _set_mallopt((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26))


def give_back_freed_memory() -> bool:
    """Tell glibc to map every large memory block separately and to use one heap for all threads.

    A separately mapped memory block returns to the operating system when it is freed.

    Returns True if glibc accepted all settings; False otherwise, such as on a system without glibc.
    """
    return _set_mallopt(
        (M_MMAP_MAX, 2**20),
        (M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
        (M_TRIM_THRESHOLD, MMAP_THRESHOLD_BYTES),
        (M_ARENA_MAX, 1),
    )


def _set_mallopt(*settings: tuple[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return all(mallopt(name, value) for name, value in settings)
