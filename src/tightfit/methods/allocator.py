"""Allocator: memory that was freed is kept and used again, in pages as large as the system has; or, on a processor, given back
at once (lean), so that the process takes no more than its tensors.

Saves   time: on CPU glibc hands large blocks back to the kernel and fetches (and zeroes) them anew at every step;
        on CUDA it saves memory, as expandable segments leave fewer holes.
Costs   on CPU the process keeps its largest size until it ends, and the holes that other sizes leave (many where
        parameters come and go). Small blocks are kept in no caches, so that large ones fit where they lay (a quarter
        less where much is recomputed). lean leaves no holes, and fetches every block anew.
When    tuned always, lean where memory is what is short; whatever the user's environment says of the allocator wins.
Order   first: it decides how every later byte is allocated.
Source  glibc manual, "Malloc Tunable Parameters" (mallopt, glibc.malloc.hugetlb); PyTorch, "CUDA semantics",
        expandable_segments.

What can be changed in a running process is changed here; huge pages for all of glibc's memory, and no caches, have to be
asked for before the process starts, which the command line does (`engine/launch.py`). A program of your own that trains
within a limit on memory should be started with the same GLIBC_TUNABLES: what is predicted of `tuned` supposes them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from tightfit.job import Job
from tightfit.ledger import Ledger
from tightfit.machine import Machine
from tightfit.methods.protocol import Default
from tightfit.methods.run import Run
from tightfit.plan import Plan

FIELDS = ("allocator",)
VARIANTS = ({"allocator": "tuned"}, {"allocator": "lean"})
MAPPED = 2**20  # bytes from which a lean allocator maps each block by itself

# mallopt's parameters, from malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -3, -4, -8


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """No large block is fetched from the operating system, and zeroed, twice; or every block is."""
    return replace(ledger, keeps_memory=True) if plan.allocator == "tuned" else replace(ledger, mapped_from=MAPPED)


def wanted(plan: Plan) -> bool:
    return plan.allocator != "default"


def defaults(job: Job, machine: Machine) -> Iterator[Default]:
    yield Default("allocator", "tuned", "freed memory is kept and reused")


def apply(run: Run, plan: Plan) -> Run:
    if run.device.type == "cuda":
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ and "PYTORCH_ALLOC_CONF" not in os.environ:
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    elif "GLIBC_TUNABLES" not in os.environ and plan.allocator == "tuned":
        keep_freed_memory()
    elif "GLIBC_TUNABLES" not in os.environ:
        give_back_freed_memory()
    return run


def keep_freed_memory() -> bool:
    """Tell glibc not to give freed memory back nor to map large blocks one by one; False where there is no glibc."""
    return _told((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26))


def give_back_freed_memory() -> bool:
    """Tell glibc to map every large block by itself, so that it goes back when it is freed, and to use one heap for all
    threads; False where there is no glibc."""
    return _told((M_MMAP_MAX, 2**20), (M_MMAP_THRESHOLD, MAPPED), (M_TRIM_THRESHOLD, MAPPED), (M_ARENA_MAX, 1))


def _told(*settings: tuple[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return all(mallopt(name, value) for name, value in settings)
