"""What a training command needs if it is one of several processes, or if a scheduler may end it."""

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
    """Options of a training command that concern its processes; they do not change what is trained.

    timeout_s     seconds to wait for a process that does not answer
    interface     name of the network interface that leads to the other hosts
    requeue_code  exit code if SIGTERM or SIGUSR1 ends the run after a checkpoint is saved; None is
                  128 + the signal's number
    """

    timeout_s: float = 600.0
    interface: str | None = None
    requeue_code: int | None = None

    def code_of(self, number: int) -> int:
        """Return the exit code of a training that signal `number` has ended."""
        return self.requeue_code if self.requeue_code and number != signal.SIGINT else 128 + number


def check_start(nproc: int, world: int, around: LaunchOptions) -> None:
    """Raise InputError for options that contradict how the processes were started.

    nproc  number of processes that --nproc asks for
    world  number of processes that a launcher (torchrun, srun) has started
    """
    if world > 1 and nproc not in (1, world):
        raise InputError(f"--nproc {nproc}", f"{world} processes have been started already", "leave out --nproc")
    if world == 1 and nproc > 1 and around.interface is not None:
        raise InputError(
            f"--interface {around.interface}",
            "--nproc starts processes on one host, which need no network interface",
            "leave out --interface",
        )


@contextmanager
def watched_process(world: int, around: LaunchOptions) -> Iterator[Callable[[str], None]]:
    """Inside this context, the processes of a training watch each other (`engine/watchdog.py`).

    world  number of processes; with 1 there is nothing to watch

    Yields a function that joins the process group for a kind of device (cpu, cuda).
    """
    if world == 1:
        yield lambda device: None
        return
    from datetime import timedelta

    from tightfit.distributed.processes import join, rank
    from tightfit.distributed.rendezvous import choose_interface, join_store
    from tightfit.engine.watchdog import FIRST_TIMEOUT_S, watched

    choose_interface(around.interface)
    store, longest = join_store(), timedelta(seconds=2 * max(around.timeout_s, FIRST_TIMEOUT_S))
    with watched(store, rank(), world, around.timeout_s):
        yield lambda device: join(device, store, longest)


@contextmanager
def errors_printed_once(world: int, around: LaunchOptions) -> Iterator[None]:
    """Inside this context, an error that every process raises on its own is printed by one process
    only. world: number of processes; around: how they were launched."""
    try:
        yield
    except TightfitError as error:
        with watched_process(world, around):
            raise error from None


def on_rank_zero(make: Callable[[], Any], join: Callable[[], None]) -> Any:
    """Call `make` on rank 0 and broadcast its result to all ranks.

    If `make` raises TightfitError, rank 0 raises it, and the other ranks exit with its exit code.

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
    """Wait for all processes of the training, if it has a process group."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def destroy_group() -> None:
    """Destroy the process group, if the training has one. All processes must be done."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
