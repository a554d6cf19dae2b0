"""Functions for training commands that run in several processes, or that a scheduler may end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tightfit.errors import InputError, TightfitError


@dataclass(frozen=True)
class LaunchOptions:
    """Options of a training command that concern its processes and do not change what is trained.

    timeout_s     seconds to wait for a process that does not answer
    interface     name of the network interface that leads to the other hosts
    requeue_code  exit code of a run that SIGTERM or SIGUSR1 ended after a checkpoint was saved;
                  None: 128 + the signal's number
    """

    timeout_s: float = 600.0
    interface: str | None = None
    requeue_code: int | None = None

    def code_of(self, number: int) -> int:
        """Return the exit code of a training that the signal with this number has ended:
        `requeue_code`, or 128 + number if there is none or if the signal is Ctrl-C."""
        return self.requeue_code if self.requeue_code and number != signal.SIGINT else 128 + number


def check_start(nproc: int, world: int, options: LaunchOptions) -> None:
    """Raise InputError for options that contradict how the processes were started.

    nproc   number of processes that --nproc asks for
    world   number of processes that a launcher (torchrun, srun) has started
    options  the options that concern the processes
    """
    if world > 1 and nproc not in (1, world):
        raise InputError(f"--nproc {nproc}", f"{world} processes have been started already", "leave out --nproc")
    if world == 1 and nproc > 1 and options.interface is not None:
        raise InputError(
            f"--interface {options.interface}",
            "--nproc starts processes on one host, which need no network interface",
            "leave out --interface",
        )


@contextmanager
def watched_process(world: int, options: LaunchOptions) -> Iterator[Callable[[str], None]]:
    """A context manager, inside which the processes of a training watch each other: if one of them
    dies or does not answer, the others end, too (`engine/watchdog.py`).

    world   number of processes; with 1 there is nothing to watch
    options  the options that concern the processes, such as the timeout

    Yields a function that joins torch's process group. Its argument is the kind of device, cpu or
    cuda.
    """
    if world == 1:
        yield lambda device: None
        return
    from datetime import timedelta

    from tightfit.distributed.processes import join, rank
    from tightfit.distributed.rendezvous import choose_interface, join_store
    from tightfit.engine.watchdog import FIRST_TIMEOUT_S, watched

    choose_interface(options.interface)
    store, longest = join_store(), timedelta(seconds=2 * max(options.timeout_s, FIRST_TIMEOUT_S))
    with watched(store, rank(), world, options.timeout_s):
        yield lambda device: join(device, store, longest)


@contextmanager
def errors_printed_once(world: int, options: LaunchOptions) -> Iterator[None]:
    """A context manager for code that raises the same TightfitError in every process, such as
    reading a wrong job file. It lets the error be printed by one process only.

    world   number of processes
    options  the options that concern the processes
    """
    try:
        yield
    except TightfitError as error:
        with watched_process(world, options):
            raise error from None


def on_rank_zero(make: Callable[[], Any], join: Callable[[], None]) -> Any:
    """Call `make` on rank 0, broadcast its result to all ranks, and return it.

    If `make` raises TightfitError, rank 0 raises it, and the other ranks exit with the error's exit
    code.

    join  joins the process group; it is called after `make`
    """
    import torch.distributed as dist

    from tightfit.distributed.processes import is_rank_zero
    from tightfit.runtime.activity import note_activity

    answer: list[Any] = [None, None]
    note_activity("planning")
    if is_rank_zero():
        try:
            answer = [make(), None]
        except TightfitError as error:
            answer = [None, error]
    join()
    dist.broadcast_object_list(answer, src=0)
    made, failed = answer
    if failed is not None:
        if not is_rank_zero():
            sys.exit(failed.exit_code)
        raise failed
    return made


def barrier() -> None:
    """Wait until all processes of the training have called this function. Returns at once if there
    is no process group."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def destroy_group() -> None:
    """Destroy torch's process group, if there is one. Call this when all processes are done."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
