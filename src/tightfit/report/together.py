"""Together: what a training command does because it is one of several processes, and because a scheduler may end it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tightfit.errors import InputError, TightfitError


@dataclass(frozen=True)
class Surroundings:
    """How a training deals with what is around it; nothing of what is trained.

    timeout_s     how long it waits for a process that does not answer
    interface     the network interface that leads to the other hosts
    requeue_code  its exit code once SIGTERM or SIGUSR1 has ended it and it is saved; left out, 128 and the signal's number
    """

    timeout_s: float = 600.0
    interface: str | None = None
    requeue_code: int | None = None

    def code_of(self, number: int) -> int:
        """The exit code of a training that a signal has ended."""
        return self.requeue_code if self.requeue_code and number != signal.SIGINT else 128 + number


def check_start(nproc: int, world: int, around: Surroundings) -> None:
    """Refuse what a command that starts processes, or is one of `world`, can not do."""
    if world > 1 and nproc not in (1, world):
        raise InputError(f"--nproc {nproc}", f"{world} processes have been started already", "leave it out")
    if world == 1 and nproc > 1 and around.interface is not None:
        raise InputError(
            f"--interface {around.interface}", "--nproc starts processes of one host, which need none", "leave it out"
        )


@contextmanager
def among(world: int, around: Surroundings) -> Iterator[Callable[[str], None]]:
    """Within, this process watches those that it trains with, and they watch it. Yields what joins them, with its kind of
    device."""
    if world == 1:
        yield lambda device: None
        return
    from datetime import timedelta

    from tightfit.engine.watch import FIRST_TIMEOUT_S, watched
    from tightfit.methods.mesh import join, rank
    from tightfit.methods.rendezvous import choose_interface, meet

    choose_interface(around.interface)
    store, longest = meet(), timedelta(seconds=2 * max(around.timeout_s, FIRST_TIMEOUT_S))
    with watched(store, rank(), world, around.timeout_s):
        yield lambda device: join(device, store, longest)


@contextmanager
def said_once(world: int, around: Surroundings) -> Iterator[None]:
    """Within, what every process refuses by itself is said by one of them."""
    try:
        yield
    except TightfitError as error:
        with among(world, around):
            raise error from None


def by_the_first(make: Callable[[], Any], join: Callable[[], None]) -> Any:
    """What `make` gives in the first of the processes that train together, in all of them; or its error, said by the
    first alone."""
    import torch.distributed as dist

    from tightfit.methods.mesh import leads
    from tightfit.methods.progress import doing

    answer: list[Any] = [None, None]
    doing("planning")
    if leads():
        try:
            answer = [make(), None]
        except TightfitError as error:
            answer = [None, error]
    join()
    dist.broadcast_object_list(answer, src=0)
    made, failed = answer
    if failed is not None:
        if not leads():
            sys.exit(failed.exit_code)
        raise failed
    return made


def wait_for_all() -> None:
    """Wait until all processes that train together, where there are any, are here."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def leave() -> None:
    """Part from the other processes, all of them done, where there are any."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
