"""Launch: what a training process needs to find when it starts, and the processes of one host.

Imports no torch before processes are started, so that starting again is cheap.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

from tightfit.errors import TightfitError
from tightfit.plan import Plan

KEEP_MEMORY = ":".join(
    (
        "glibc.malloc.hugetlb=1",  # madvise huge pages
        "glibc.malloc.trim_threshold=1099511627776",  # give nothing back
        "glibc.malloc.mmap_threshold=1099511627776",  # map nothing on its own
        "glibc.malloc.top_pad=67108864",
        "glibc.malloc.tcache_count=0",  # free small blocks are one with what they touch: large ones fit where such were
        "glibc.malloc.mxfast=0",
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


def take_surroundings(environ: MutableMapping[str, str] = os.environ) -> tuple[int, int]:
    """(processes on this host, processes in all) that train together, as the launcher says: torchrun, `train --nproc` or
    Kubernetes' training operator by the variables that torch reads, Slurm's srun by its own, which are turned into those.

    An operator that starts one process in each pod says nothing of a process' place on its host: it is alone there.
    """
    if "RANK" not in environ and int(environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environ:
        hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "127.0.0.1")
        environ["RANK"], environ["LOCAL_RANK"] = environ["SLURM_PROCID"], environ.get("SLURM_LOCALID", "0")
        environ["WORLD_SIZE"] = environ["SLURM_NTASKS"]
        nodes = int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES", "1"))
        environ["LOCAL_WORLD_SIZE"] = str(max(int(environ["WORLD_SIZE"]) // nodes, 1))
        environ.setdefault("MASTER_ADDR", first_host(hosts))
        environ.setdefault("MASTER_PORT", str(20000 + int(environ.get("SLURM_JOB_ID", "0")) % 20000))
    if "RANK" in environ and "LOCAL_RANK" not in environ and "LOCAL_WORLD_SIZE" not in environ:
        environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"] = "0", "1"
    world = int(environ.get("WORLD_SIZE", "1"))
    return int(environ.get("LOCAL_WORLD_SIZE", world)), world


def first_host(hosts: str) -> str:
    """The first of Slurm's list of hosts: node[03-07,12],other is node03."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?([^,]*)", hosts)
    assert match is not None
    stem, numbers, rest = match.groups()
    return stem + re.split("[,-]", numbers)[0] + rest if numbers else stem


def start_processes(count: int) -> int:
    """Run this very command in `count` processes of this host that train together; the exit code of the first that failed.

    PyTorch's elastic agent starts them, watches them, and ends the others when one fails. Ctrl-C and SIGTERM are passed on to
    them, and their answer waited for: the agent would give them half a minute to save, and end in a traceback.
    """
    import logging

    import psutil
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # which process failed, and how, it says itself
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(cores // count, 1)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGHUP,SIGQUIT",
    )

    def pass_on(number: int, frame: FrameType | None) -> None:
        processes = psutil.Process().children()
        if not processes:
            raise KeyboardInterrupt
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    shown = ["--traceback"] if "--traceback" in sys.orig_argv else []  # which this process has taken out
    arguments = ["-m", "tightfit", *shown, *_without_nproc(sys.argv[1:])]
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        process, failure = error.get_first_failure()
        if failure.exitcode < 0:
            raise _killed(process, -failure.exitcode) from None
        return failure.exitcode
    return 0


def _killed(process: int, number: int) -> TightfitError:
    """What is said where a process was ended from outside, which could not say anything itself."""
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    said = f"process {process} was ended by {name}"
    if number == signal.SIGKILL:
        said += ", as a system does when memory runs out: a smaller plan.micro_batch, plan.recompute, or fewer processes take less"
    return TightfitError(f"{said}\n  what was saved is kept: --resume goes on from there")


def _without_nproc(arguments: list[str]) -> list[str]:
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument != "--nproc" and not argument.startswith("--nproc="):
            kept.append(argument)
        skip = argument == "--nproc"
    return kept
