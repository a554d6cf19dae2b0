"""Launch: what a training process needs to find when it starts. Imports no torch, so that starting again is cheap."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tightfit.plan import Plan

KEEP_MEMORY = ":".join(
    (
        "glibc.malloc.hugetlb=1",  # madvise huge pages
        "glibc.malloc.trim_threshold=1099511627776",  # give nothing back
        "glibc.malloc.mmap_threshold=1099511627776",  # map nothing on its own
        "glibc.malloc.top_pad=67108864",
    )
)


def environment(plan: Plan, device: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables to add for `plan` on `device`. What the user has set stays as it is."""
    added: dict[str, str] = {}
    if plan.allocator == "tuned" and device == "cpu" and sys.platform.startswith("linux"):
        added["GLIBC_TUNABLES"] = KEEP_MEMORY
    if plan.allocator == "tuned" and device == "cuda" and "PYTORCH_CUDA_ALLOC_CONF" not in inherited:
        added["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return {name: value for name, value in added.items() if name not in inherited}


def enter_environment(plan: Plan, device: str) -> None:
    """Start this very command again with the environment the plan wants, if it is not there yet.

    Only a process that is the tightfit command is started again; one that merely calls it goes on as it is.
    """
    added = environment(plan, device, os.environ)
    command = {Path(part).name for part in sys.orig_argv[:3]}
    if added and (command & {"tightfit", "__main__.py"} or sys.orig_argv[1:3] == ["-m", "tightfit"]):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **added})
