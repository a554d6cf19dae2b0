"""Detect ranks that hang or fail, so that a distributed training ends instead of waiting forever.

The training itself may be blocked inside a collective, so two threads run beside it. One thread
writes this process's heartbeats to the key-value store that all ranks share, and reads from the
store whether another process has failed. The other thread checks how long the training has been in
one operation. If that is too long, it reads the heartbeats of all ranks, reports which rank does
not answer, and ends this process.

Only the first process that fails prints the reason. The failure breaks the connections of the other
processes. They exit without a message and with the same exit code.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from tightfit.distributed.rendezvous import hosts_store
from tightfit.errors import TightfitError
from tightfit.runtime.activity import Activity, recording_activity

TIMEOUT_S = 600.0
FIRST_TIMEOUT_S = 3600.0  # until the first step is done: planning, loading, compiling
NORMAL = 5  # an operation may take this many times as long as the longest operation so far
BEAT_S = 5.0  # time between two heartbeats
GRACE_S = 20.0  # how long a process may take to end by itself after another has failed
LOST_S = 10.0  # how long to wait for another process to report why a connection broke
LINGER_S = 3.0  # how long the host of the store stays alive after it has failed
FAILED = "failed"


@dataclass(frozen=True)
class ProgressNote:
    """A heartbeat: what a process was doing when it wrote the heartbeat to the store.

    beat       number of the heartbeat. It increases as long as the process runs
    step       number of the current training step, from 0; None before the first step
    operation  what the training is doing, such as "reading data"
    seconds    how long this operation has been running
    where      the line of tightfit's code that is running, as `code_location` returns it
    """

    beat: int
    step: int | None
    operation: str
    seconds: float
    where: str


class Watch:
    """Watches the other ranks, and tells them about this process, through the key-value store that
    all ranks share.

    store      the store
    rank       rank of this process
    world      number of processes
    progress   the current step and operation of this process's training
    timeout_s  how many seconds one operation may take once training steps are running; five times
               the longest operation so far, if that is more. The first operations, such as loading
               and compiling, may take longer
    """

    def __init__(
        self, store: dist.Store, rank: int, world: int, progress: Activity, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.store, self.rank, self.world, self.progress, self.timeout_s = store, rank, world, progress, timeout_s
        self.beat_s = min(BEAT_S, timeout_s / 10)
        self.ended = threading.Event()
        self.main = threading.main_thread().ident
        self.parent = os.getppid()
        self.threads = [threading.Thread(target=run, daemon=True) for run in (self._tell, self._look)]
        self.beats = 0

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join(2 * self.beat_s)

    def fail(self, code: int, wait_s: float = 0.0) -> int | None:
        """Write to the store that this process fails. Return None if it is the first process that
        fails, or if the store does not answer. Otherwise return the exit code of the process that
        failed first.

        code    exit code of this process
        wait_s  how many seconds to wait first for a report of another process, whose failure may be
                the cause of this one
        """
        store = _ask(lambda: _another(self.store))
        if store is None:  # the process that hosts the store is gone
            return None
        until = time.monotonic() + wait_s
        while time.monotonic() < until and _failed(store) is None:
            time.sleep(0.1)
        mine = f"{self.rank}:{code}"
        first = _ask(lambda: store.compare_set(FAILED, "", mine))
        return None if first is None or first.decode() == mine else _code(first)

    def _tell(self) -> None:
        """Run in a thread: write a heartbeat to the store every `beat_s` seconds.

        End this process if its parent process is gone, or if another process has failed and this
        process has not ended by itself within GRACE_S seconds.
        """
        store = None
        while not self.ended.wait(self.beat_s):
            store = store or _ask(lambda: _another(self.store))
            if store is not None:
                self.beats += 1
                _ask(partial(store.set, _key(self.rank), json.dumps(vars(self._note()))))
                code = _failed(store)
                if code is not None and not self.ended.wait(GRACE_S):
                    exit_now(code)
            if os.getppid() != self.parent and self.parent != 1:
                exit_now(1, "tightfit: the process that started this one is gone")

    def _look(self) -> None:
        """Run in a thread: end this process, with an error message, if the training has been in one
        operation for too long."""
        while not self.ended.wait(self.beat_s):
            seconds = time.monotonic() - self.progress.since
            if seconds > self._limit_s():
                message = self._verdict(seconds)
                if self.ended.is_set() or time.monotonic() - self.progress.since < seconds:
                    continue  # the training has made progress meanwhile
                code = self.fail(1)
                if code is None:
                    exit_now(1, f"tightfit: {TightfitError.__name__}: {message}")
                exit_now(1 if code is None else code)

    def _limit_s(self) -> float:
        if self.progress.steps < 2:
            return max(FIRST_TIMEOUT_S, 6 * self.timeout_s)
        return max(self.timeout_s, NORMAL * self.progress.longest_s)

    def _note(self) -> ProgressNote:
        progress = self.progress
        seconds = time.monotonic() - progress.since
        return ProgressNote(self.beats, progress.step, progress.operation, round(seconds, 1), code_location(self.main))

    def _verdict(self, seconds: float) -> str:
        """Return the error message for a training that hangs. It says which rank does not answer or
        is behind the others, and in which operation this process waits.

        The function reads all heartbeats twice, a few heartbeats apart: a rank whose heartbeat did
        not change does not answer.

        seconds  how long this process has been in its current operation
        """
        before = _ask(lambda: self._notes(_another(self.store)), 30.0)
        time.sleep(max(3 * self.beat_s, BEAT_S))
        after = _ask(lambda: self._notes(_another(self.store)), 30.0)
        if after is None or before is None:
            return _said(
                f"the process that hosts the store of all ranks (on {os.environ.get('MASTER_ADDR')}) has not answered",
                seconds,
                self._note(),
                self.rank,
                "it was stopped, or its host cannot be reached",
            )
        silent = [rank for rank in after if rank != self.rank and _beat(after[rank]) == _beat(before[rank])]
        mine = self._note()
        if silent:
            why = "stopped, or on a host that cannot be reached"
            return _said(f"{_ranks(silent)} {_have(silent)} not answered", seconds, mine, self.rank, why)
        notes = {rank: note for rank, note in after.items() if note is not None}
        late = ranks_behind(notes)
        if late:
            last_note = notes[late[0]]
            why = f"still in {_step(last_note)}, {last_note.operation}{last_note.where}"
            return _said(f"{_ranks(late)} {_have(late)} not made progress", seconds, mine, self.rank, why)
        return _said("no rank has made progress", seconds, mine, self.rank, "all ranks wait for each other")

    def _notes(self, store: dist.Store) -> dict[int, ProgressNote | None]:
        """Read the heartbeats from `store`. Return rank -> its latest heartbeat; None for a rank
        that has written no heartbeat."""
        ranks = [rank for rank in range(self.world) if store.check([_key(rank)])]
        found = [json.loads(text) for text in store.multi_get([_key(rank) for rank in ranks])]
        notes = {rank: ProgressNote(**note) for rank, note in zip(ranks, found, strict=True)}
        return {rank: notes.get(rank) for rank in range(self.world)}


def _another(store: Any) -> dist.Store:
    """Open and return a new connection to the same store. A call that waits for the store's answer
    blocks its connection for all threads, so each thread needs a connection of its own."""
    clone: dist.Store = store.clone()
    return clone


def _ask(what: Callable[[], Any], within_s: float = 5.0) -> Any:
    """Call `what`, a function that queries the store, and return its result. Return None if it
    raises an exception or does not return within `within_s` seconds, for example because the
    process that hosts the store has ended."""
    found: list[Any] = []

    def ask() -> None:
        with suppress(Exception):  # torch raises errors of several classes for a broken connection
            found.append(what())

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(within_s)
    return found[0] if found else None


def _failed(store: dist.Store) -> int | None:
    """Return the exit code of the process that failed first, as the store has it. Return None if no
    process has failed or if the store does not answer."""
    found = _ask(lambda: store.get(FAILED) if store.check([FAILED]) else None)
    return None if found is None else _code(found)


def _code(answer: bytes) -> int:
    return int(answer.decode().partition(":")[2])


def ranks_behind(notes: dict[int, ProgressNote]) -> list[int]:
    """Return the ranks for which the other ranks probably wait.

    These are the ranks whose step is earlier than the latest step of all. If all ranks are in the
    same step, they are the ranks that run another operation than most ranks. The list is empty if
    all ranks run the same operation of the same step.

    notes  rank -> its latest heartbeat
    """
    steps = {rank: -1 if note.step is None else note.step for rank, note in notes.items()}
    late = [rank for rank, step in steps.items() if step < max(steps.values())]
    if late:
        return late
    operations = [note.operation for note in notes.values()]
    counts = {operation: operations.count(operation) for operation in set(operations)}
    most = max(counts, key=lambda operation: counts[operation])
    return [rank for rank, note in notes.items() if note.operation != most]


def code_location(thread: int | None) -> str:
    """Return which line of tightfit's code a thread is running and, if this line has called
    torch.distributed, the called function. Example: " (all_reduce, engine/step.py:180)". Return ""
    if the thread is not running tightfit's code.

    thread  the thread's identifier, as `threading.Thread.ident` has it
    """
    frame = sys._current_frames().get(thread or 0)
    called = ""
    while frame is not None:
        module, name = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        if module.startswith("torch.distributed") and not name.startswith(("_", "wrapper")):
            called = f"{name}, "
        if module.startswith("tightfit."):
            return f" ({called}{module.removeprefix('tightfit.').replace('.', '/')}.py:{frame.f_lineno})"
        frame = frame.f_back
    return ""


def _said(who: str, seconds: float, mine: ProgressNote, rank: int, why: str) -> str:
    return (
        f"{who} for {_minutes(seconds)}: {why}; rank {rank} waits in {_step(mine)}, {mine.operation}{mine.where}\n"
        "  fix: remove the cause, then continue from the newest checkpoint with --resume; if the operation only needs more "
        "time, set --timeout MINUTES"
    )


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _step(note: ProgressNote) -> str:
    return "the preparations" if note.step is None else f"step {note.step + 1}"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _have(ranks: list[int]) -> str:
    return "have" if len(ranks) > 1 else "has"


def _beat(note: ProgressNote | None) -> int:
    return -1 if note is None else note.beat


def _key(rank: int) -> str:
    return f"progress/{rank}"


def exit_now(code: int, message: str = "") -> None:
    """Print `message` to stderr and end this process at once with exit code `code`, even if other
    threads are waiting and even if the message cannot be printed."""
    with suppress(OSError):
        if message:
            print(message, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


@contextmanager
def watched(store: dist.Store, rank: int, world: int, timeout_s: float) -> Iterator[Watch]:
    """Context manager in which this process watches the other ranks and is watched by them. It
    yields the `Watch`, whose arguments are the same as here.

    If the code inside raises an exception and this process is the first that fails, the exception
    is raised as usual. If another process has failed before, this process exits with that process's
    exit code (SystemExit). Raises TightfitError if a connection to another rank broke and no rank
    has reported a failure.
    """
    with recording_activity() as progress:
        watch = Watch(store, rank, world, progress, timeout_s)
        watch.start()
        try:
            yield watch
        except Exception as error:
            code = watch.fail(getattr(error, "exit_code", 1), LOST_S if is_lost_connection(error) else 0.0)
            if code is not None:
                raise SystemExit(code) from None
            if hosts_store():
                time.sleep(LINGER_S)  # the others read from the store that this process has failed
            if is_lost_connection(error):
                mine = watch._note()
                raise TightfitError(
                    f"rank {rank} lost its connection to a rank that ended without a report, in {_step(mine)}, {mine.operation} "
                    f"({' '.join(str(error).split())[-200:]})\n  the saved checkpoints are kept: --resume continues from the newest"
                ) from error
            raise
        finally:
            watch.stop()


def is_lost_connection(error: Exception) -> bool:
    """Return whether `error` says that a connection to another process broke. Such an error is
    usually the consequence of that process's end, not of a fault in this process."""
    if isinstance(error, TightfitError) or not isinstance(error, RuntimeError):
        return False
    said = str(error).lower()
    return isinstance(error, dist.DistError) or any(
        words in said
        for words in ("connection closed", "connection reset", "connection refused", "broken pipe", "/gloo/")
    )


__all__ = ["TIMEOUT_S", "Watch", "watched"]
