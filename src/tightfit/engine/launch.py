"""Start training processes: set the environment variables that a plan needs, read the variables
that a launcher has set, and start several processes on one host.

This module does not import torch, so that the command can restart itself quickly.
"""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

from tightfit.errors import TightfitError
from tightfit.plan import Plan

GLIBC_TUNABLES = ":".join(
    (
        "glibc.malloc.hugetlb=1",  # madvise huge pages
        "glibc.malloc.trim_threshold=1099511627776",  # return no freed memory to the system
        "glibc.malloc.mmap_threshold=1099511627776",  # give no allocation an mmap of its own
        "glibc.malloc.top_pad=67108864",
        # coalesce small freed memory blocks with their neighbours, so that large blocks fit
        "glibc.malloc.tcache_count=0",
        "glibc.malloc.mxfast=0",
    )
)

PASSED_ON = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]
GRACE_S = 30.0  # how long processes may take to end by themselves after one has failed
POLL_S = 0.1


def environment(plan: Plan, device: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables (name -> value) that `plan` needs and that are not set yet.
    They configure the memory allocator.

    device     the kind of device: "cpu" or "cuda"
    inherited  the environment variables of this process. A variable in it is never overridden
    """
    added: dict[str, str] = {}
    if plan.allocator == "tuned" and device == "cpu" and sys.platform.startswith("linux"):
        added["GLIBC_TUNABLES"] = GLIBC_TUNABLES
    if plan.allocator == "tuned" and device == "cuda" and "PYTORCH_CUDA_ALLOC_CONF" not in inherited:
        added["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return {name: value for name, value in added.items() if name not in inherited}


def enter_environment(plan: Plan, device: str) -> None:
    """Restart this command, in the same process, with the environment variables that the plan
    needs. Do nothing if they are set already.

    Only the tightfit command is restarted. A program that calls tightfit as a library keeps the
    environment that it has.

    device  the kind of device: "cpu" or "cuda"
    """
    added = environment(plan, device, os.environ)
    command = {Path(part).name for part in sys.orig_argv[:3]}
    if added and (command & {"tightfit", "__main__.py"} or sys.orig_argv[1:3] == ["-m", "tightfit"]):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **added})


def read_launcher(environ: MutableMapping[str, str] = os.environ) -> tuple[int, int]:
    """Return (number of training processes on this host, number on all hosts), as the launcher's
    environment variables say. Both are 1 without a launcher.

    torchrun, `tightfit train --nproc` and the training operator of Kubernetes set the variables
    that torch reads, such as RANK. Slurm's srun sets other variables; from these, this function
    sets torch's variables in `environ`. If RANK is set but no local rank, it also sets the
    variables of a process that is alone on its host, as in a Kubernetes pod.
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
    """Return the first host of a Slurm host list: "node[03-07,12],other" gives "node03"."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?([^,]*)", hosts)
    assert match is not None
    stem, numbers, rest = match.groups()
    return stem + re.split("[,-]", numbers)[0] + rest if numbers else stem


def start_processes(count: int) -> int:
    """Run this command in `count` processes on this host, which train together. Return when all
    have ended.

    The result is an exit code: 0 if all processes succeeded, else that of the first process that
    failed. It is 128 + n if signal n ended that process and this function had forwarded the signal.

    This process hosts the key-value store through which the others find each other, and forwards
    signals to them. If one process fails, the other processes get GRACE_S seconds to end by
    themselves, and are then killed. Processes that were paused by SIGSTOP are killed at once.

    Raises TightfitError if a process was killed by a signal that this function had not forwarded.
    """
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environ = {
        "OMP_NUM_THREADS": str(max(cores // count, 1)),
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listening.getsockname()[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the launcher hosts the store
    }
    shown = ["--traceback"] if "--traceback" in sys.orig_argv else []  # main() removed it from argv
    command = [sys.executable, "-m", "tightfit", *shown, *_without_nproc(sys.argv[1:])]
    children: list[subprocess.Popen[bytes]] = []
    asked: set[int] = set()

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.add(number)
        for child in children:
            child.send_signal(number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    try:
        for rank in range(count):
            rank_environ = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            if not asked:  # in a new session, so that Ctrl-C reaches it only through pass_on
                children.append(subprocess.Popen(command, env={**environ, **rank_environ}, start_new_session=True))
        return _wait_for(children, asked, listening) if len(children) == count else 128 + min(asked)
    finally:
        for child in children:
            _kill(child)


def _wait_for(children: list[subprocess.Popen[bytes]], asked: set[int], listening: socket.socket) -> int:
    from tightfit.distributed.rendezvous import host_store, with_restart_prefix

    store = with_restart_prefix(host_store("127.0.0.1", listening=listening))
    first: int | None = None
    until = math.inf
    while running := [child for child in children if child.poll() is None]:
        failed = next((rank for rank, child in enumerate(children) if child.returncode), None)
        if first is None and failed is not None:
            first, until = failed, time.monotonic() + GRACE_S
            if children[failed].returncode < 0:  # killed, so it reported no failure
                store.compare_set("failed", "", f"{failed}:1")
        for child in running if first is not None else ():
            if time.monotonic() > until or _is_stopped(child):
                _kill(child)
        time.sleep(POLL_S)
    if first is None:
        first = next((rank for rank, child in enumerate(children) if child.returncode), 0)
    code = children[first].returncode
    if code >= 0:
        return code
    if -code in asked:
        return 128 - code
    raise _killed(first, -code)


def _is_stopped(child: subprocess.Popen[bytes]) -> bool:
    import psutil

    with suppress(psutil.Error):
        return bool(psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
    return False


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a process and the processes that it has started, and wait for its end. Do nothing if it
    has ended already."""
    if child.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _killed(process: int, number: int) -> TightfitError:
    """Return the error to raise for a process that was killed by a signal. Such a process cannot
    report an error itself.

    process  rank of the process
    number   number of the signal
    """
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    said = f"process {process} was ended by {name}"
    if number == signal.SIGKILL:
        said += ", as the system does when memory runs out: a smaller plan.micro_batch, plan.recompute or fewer processes need less"
    return TightfitError(f"{said}\n  the saved checkpoints are kept: --resume continues from the newest")


def _without_nproc(arguments: list[str]) -> list[str]:
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument != "--nproc" and not argument.startswith("--nproc="):
            kept.append(argument)
        skip = argument == "--nproc"
    return kept
