"""Trace in several processes at once.

A search makes one trace of the model after the other, and most of its time is spent there. While it
runs, copies of this process (fork) run pieces of the same search on processors that would be idle.
A trace or dry run that a copy has made is read from the disk cache, where the search finds it. The
result of a search does not depend on the copies.

The processes claim each trace before they make it, so that no trace is made twice. A process that
would wait for a trace makes others in the meantime, which the search will probably need next.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist

from tightfit.errors import InputError
from tightfit.machine import host_memory

MAX_COPIES = 3
COPY_BYTES = 2 * 2**30  # memory that must be free for each copy of the process
MAX_WAIT_S = 60.0  # a process that needs longer for a trace is taken to hang
POLL_S = 0.005

Result = TypeVar("Result")


class MadeElsewhere(Exception):
    """Raised in a copy of the process that needs a trace which another process is making, so that
    it goes on with another piece of work."""


class SharedWork:
    """The traces and dry runs that processes have claimed and finished, as small files in a folder.

    folder           has the files
    any_micro_batch  whether the search may choose the micro-batch
    """

    def __init__(self, folder: Path, any_micro_batch: bool = False) -> None:
        self.folder = folder
        self.any_micro_batch = any_micro_batch
        self._copies: set[int] = set()  # process ids of the copies that this process has started
        self._count = 0  # of copies that were started first
        self._original = os.getpid()

    @property
    def is_copy(self) -> bool:
        return os.getpid() != self._original

    def claim(self, name: str) -> bool:
        """Return whether this process is the first to claim `name`, or the folder is not writable."""
        try:
            with (self.folder / f"{name}.claim").open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return False
        except OSError:
            pass
        return True

    def once(
        self,
        name: str,
        is_slow: bool,
        make: Callable[[], Result],
        ahead: Iterable[tuple[str | None, Callable[[], object]]] = (),
    ) -> Result:
        """Return `make()`, which stores its result in a cache. If another process is already making
        it, make other results `ahead` that nobody has claimed, until it is done.

        name     identifies the result
        is_slow  whether it takes long. A copy of the process with nothing more to make ahead then
                 raises MadeElsewhere, and the first process waits
        ahead    results that will probably be needed next, as (name, function)

        A copy ends here if the process that started it has ended.
        """
        if self.is_copy and os.getppid() != self._original:
            os._exit(0)
        if self.claim(name):
            return self._make(name, make)
        for other, make_other in ahead if is_slow else ():
            if self._is_done(name):
                break
            if other is not None and self.claim(other):
                with suppress(InputError):  # raised again where the result is needed
                    self._make(other, make_other)
        if self.is_copy and is_slow and not self._is_done(name):
            raise MadeElsewhere
        self._wait(name)
        return make()

    def _make(self, name: str, make: Callable[[], Result]) -> Result:
        try:
            return make()
        finally:
            with suppress(OSError):
                (self.folder / f"{name}.done").touch()

    def _is_done(self, name: str) -> bool:
        return (self.folder / f"{name}.done").exists()

    def _wait(self, name: str) -> None:
        """Wait until `name` is done, its process has ended, or a minute has passed."""
        until = time.monotonic() + MAX_WAIT_S
        while not self._is_done(name) and time.monotonic() < until and self._runs(name):
            time.sleep(POLL_S)

    def _runs(self, name: str) -> bool:
        """Return whether the process that claimed `name` still runs."""
        text = (self.folder / f"{name}.claim").read_text()
        if not text:  # not written yet
            return True
        if self.is_copy:
            return os.getppid() == self._original
        self._reap()
        return int(text) in self._copies

    def _reap(self) -> None:
        self._copies = {copy for copy in self._copies if not _has_ended(copy)}

    def start_copies(self, count: int, pieces: Sequence[Callable[[], object]]) -> None:
        """Start `count` copies of this process, which run the pieces. There are fewer if the system
        permits no more processes."""
        self._count = self._count or count
        gc.freeze()  # collecting garbage in a copy would copy the memory of this process
        try:
            for _ in range(count):
                self._start_copy(pieces)
        except OSError:
            pass
        finally:
            gc.unfreeze()

    def restart_copies(self, pieces: Sequence[Callable[[], object]]) -> None:
        """End all copies, whose work is no longer needed, and start copies with other pieces: as many as
        before, but at most one for each piece. What the ended copies had begun can be claimed again."""
        self.stop()
        for path in self.folder.glob("*.claim"):
            if not self._is_done(path.stem):
                path.unlink()
        self.start_copies(min(self._count, len(pieces)), pieces)

    def _start_copy(self, pieces: Sequence[Callable[[], object]]) -> None:
        """Start a copy of this process that runs those of the pieces that no other copy has claimed,
        one after the other. Errors end a piece."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the copy uses none of the other threads
            process = os.fork()
        if process:
            self._copies.add(process)
            return
        try:
            _be_quiet()
            torch.set_num_threads(1)
            for number, piece in enumerate(pieces):
                if os.getppid() == self._original and self.claim(f"piece-{number}"):
                    with suppress(Exception):
                        piece()
        finally:
            os._exit(0)

    def stop(self) -> None:
        """End all copies."""
        for copy in self._copies:
            with suppress(ProcessLookupError):
                os.kill(copy, signal.SIGKILL)
        for copy in self._copies:
            _has_ended(copy, wait=True)
        self._copies = set()


def _has_ended(process: int, wait: bool = False) -> bool:
    """Return whether a child process has ended, and forget it if so. wait: until it has ended."""
    try:
        return os.waitpid(process, 0 if wait else os.WNOHANG) != (0, 0)
    except ChildProcessError:  # somebody else waited for it
        return True


def _be_quiet() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)


def copy_count(pieces: int) -> int:
    """Return how many copies of this process may help a search: one for each idle processor and
    each piece of work, at most 3, as far as memory is free.

    There are none for a process that may use only one thread, because its user shares the processors
    among several processes. There are none either for a process that has begun to use a GPU or to
    communicate with other ranks: the libraries for that do not work in a copy."""
    in_use = torch.cuda.is_initialized() or (dist.is_available() and dist.is_initialized())
    if sys.platform != "linux" or in_use:
        return 0
    idle = min(torch.get_num_threads(), len(os.sched_getaffinity(0))) - 1
    free = min(psutil.virtual_memory().available, host_memory() - psutil.Process().memory_info().rss)
    return max(min(idle, pieces, free // COPY_BYTES, MAX_COPIES), 0)


@contextmanager
def shared_work(any_micro_batch: bool = False) -> Iterator[SharedWork]:
    """Return a context manager that gives work which this process can share with copies of itself.
    At the end, it ends the copies.

    any_micro_batch  whether the search may choose the micro-batch
    """
    folder = Path(tempfile.mkdtemp(prefix="tightfit-"))
    work = SharedWork(folder, any_micro_batch)
    try:
        yield work
    finally:
        work.stop()
        shutil.rmtree(folder, ignore_errors=True)


__all__ = ["MadeElsewhere", "SharedWork", "copy_count", "shared_work"]
