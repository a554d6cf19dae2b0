"""Keeps freed memory in the process and reuses it, instead of fetching it from the operating system
at every step. On a CPU, `lean` does the opposite: it returns freed memory at once, so that the
process takes no more than its tensors.

Saves   time: on CPU, glibc returns large blocks to the kernel and fetches (and zeroes) them again
        at every step; on CUDA it saves memory, because expandable segments leave fewer holes.
Costs   on CPU, the process keeps its largest size until it ends, and the holes between blocks of
        different sizes (many where parameters are gathered and freed). glibc's caches of small
        blocks are off, so that large blocks fit where small ones were freed (a quarter less memory
        where much is recomputed). `lean` leaves no holes, but fetches every block anew.
When    `tuned` always, `lean` where memory is short. Allocator settings in the user's environment
        always take precedence.
Order   first: it decides how all later memory is allocated.
Source  glibc manual, "Malloc Tunable Parameters" (mallopt, glibc.malloc.hugetlb); PyTorch, "CUDA
        semantics", expandable_segments.

This module changes the settings that a running process can change. Huge pages for all of glibc's
memory, and the absence of caches, must be requested before the process starts; the command line
does so (`engine/launch.py`). Start your own program with the same GLIBC_TUNABLES if it trains
within a memory limit: the predictions for `tuned` assume them.
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
MMAP_THRESHOLD_BYTES = 2**20  # bytes; the lean allocator maps blocks of this size and above individually

# mallopt's parameters, from malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -3, -4, -8


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """tuned: large blocks are fetched and zeroed by the operating system once. lean: every time."""
    return (
        replace(ledger, caches_memory=True)
        if plan.allocator == "tuned"
        else replace(ledger, mmap_threshold=MMAP_THRESHOLD_BYTES)
    )


def enabled(plan: Plan) -> bool:
    return plan.allocator != "default"


def defaults(job: Job, machine: Machine) -> Iterator[Default]:
    yield Default("allocator", "tuned", "freed memory is kept and reused")


def apply(run: Run, plan: Plan) -> Run:
    """Set the allocator of this process. Does nothing where the environment already has settings."""
    if run.device.type == "cuda":
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ and "PYTORCH_ALLOC_CONF" not in os.environ:
            set_allocator_settings("expandable_segments:True")
    elif "GLIBC_TUNABLES" not in os.environ and plan.allocator == "tuned":
        keep_freed_memory()
    elif "GLIBC_TUNABLES" not in os.environ:
        give_back_freed_memory()
    return run


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory and not to map large blocks individually.

    Returns whether all settings were accepted: False where there is no glibc.
    """
    return _set_mallopt((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26))


def give_back_freed_memory() -> bool:
    """Tell glibc to map every large block by itself and to use one heap for all threads.

    A block that is mapped by itself returns to the operating system when it is freed. Returns
    whether all settings were accepted: False where there is no glibc.
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
