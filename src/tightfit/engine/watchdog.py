"""Detect ranks that hang or fail, so that a distributed training ends instead of waiting forever.

The training itself may be blocked inside a collective, so two threads run beside it. One thread
writes this process's heartbeat to the store that all ranks share, and reads from the store whether
another process has failed. The other thread checks the time: if the training has been in one
operation for too long, it reads all heartbeats, reports which rank does not answer, and ends this
process.

The first process that fails prints the reason. All other processes, whose connections to it break,
exit silently with the same exit code.
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
    """A process's heartbeat.

    beat       number of the heartbeat; it increases while the process runs
    step       number of the step under way, from 0; None before the first step
    operation  what the training does now, such as "reading data"
    seconds    time since this operation began
    where      the place in tightfit's code: see `code_location`
    """

    beat: int
    step: int | None
    operation: str
    seconds: float
    where: str


class Watch:
    """Watches the other ranks through the store that all of them share.

    store      the store
    rank       rank of this process
    world      number of processes
    progress   the step and operation of this process's training
    timeout_s  how long one operation may take after the first step, in seconds. Before, it may take
               longer
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
        """Report to the store that this process fails. Return None if it is the first process that
        fails, or if the store does not answer; else the exit code of the process that failed first.

        code    exit code of this process
        wait_s  how long to wait for another process's report before this process reports
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
        """Write heartbeats to the store. End this process if another process has failed and this
        process does not end by itself within GRACE_S, or if its parent process is gone."""
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
        """End this process if the training has been in one operation for too long."""
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
        """Return the error message: which rank does not answer or is behind, and in which operation
        this process waits for it. Takes at least the time of a few heartbeats.

        seconds  how long this process has been in its operation
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
            there = notes[late[0]]
            why = f"still in {_step(there)}, {there.operation}{there.where}"
            return _said(f"{_ranks(late)} {_have(late)} not made progress", seconds, mine, self.rank, why)
        return _said("no rank has made progress", seconds, mine, self.rank, "all ranks wait for each other")

    def _notes(self, store: dist.Store) -> dict[int, ProgressNote | None]:
        """Return the last heartbeat of each rank; None for a rank that has written no heartbeat."""
        there = [rank for rank in range(self.world) if store.check([_key(rank)])]
        found = [json.loads(text) for text in store.multi_get([_key(rank) for rank in there])]
        notes = {rank: ProgressNote(**note) for rank, note in zip(there, found, strict=True)}
        return {rank: notes.get(rank) for rank in range(self.world)}


def _another(store: Any) -> dist.Store:
    """Open a new connection to the same store. A call that waits for an answer blocks its
    connection for all threads.
    """
    clone: dist.Store = store.clone()
    return clone


def _ask(what: Callable[[], Any], within_s: float = 5.0) -> Any:
    """Call `what`, which asks the store, and return its result. Return None if it fails or does not
    return within `within_s` seconds, for example because the process that hosts the store has
    failed."""
    found: list[Any] = []

    def ask() -> None:
        with suppress(Exception):  # torch raises errors of several classes for a broken connection
            found.append(what())

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(within_s)
    return found[0] if found else None


def _failed(store: dist.Store) -> int | None:
    """Return the exit code of the process that failed first; None if no process has failed."""
    found = _ask(lambda: store.get(FAILED) if store.check([FAILED]) else None)
    return None if found is None else _code(found)


def _code(said: bytes) -> int:
    return int(said.decode().partition(":")[2])


def ranks_behind(notes: dict[int, ProgressNote]) -> list[int]:
    """Return the ranks for which the other ranks wait: the ranks in an earlier step than the
    others. If all are in the same step, return the ranks in another operation than most. Empty if
    all are in the same operation.

    notes  the last heartbeat of each rank"""
    steps = {rank: -1 if note.step is None else note.step for rank, note in notes.items()}
    late = [rank for rank, step in steps.items() if step < max(steps.values())]
    if late:
        return late
    operations = [note.operation for note in notes.values()]
    counts = {operation: operations.count(operation) for operation in set(operations)}
    most = max(counts, key=lambda operation: counts[operation])
    return [rank for rank, note in notes.items() if note.operation != most]


def code_location(thread: int | None) -> str:
    """Return where in tightfit's code a thread is, and which function of torch.distributed it is
    in, such as " (all_reduce, engine/step.py:180)". Empty if the thread is not in tightfit.

    thread  the thread's identifier"""
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
    """Print `message` and exit at once, whatever other threads wait for. Exit even if the message
    cannot be printed."""
    with suppress(OSError):
        if message:
            print(message, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


@contextmanager
def watched(store: dist.Store, rank: int, world: int, timeout_s: float) -> Iterator[Watch]:
    """Inside this context, this process watches the other ranks, and they watch this process.

    Only the first process that fails raises its error. All other processes exit with the exit code
    of the first. If a connection breaks and no process reports why, TightfitError is raised.

    store, rank, world, timeout_s  see `Watch`
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
    """Whether an error is only the consequence of another process's end: a broken connection."""
    if isinstance(error, TightfitError) or not isinstance(error, RuntimeError):
        return False
    said = str(error).lower()
    return isinstance(error, dist.DistError) or any(
        words in said
        for words in ("connection closed", "connection reset", "connection refused", "broken pipe", "/gloo/")
    )


__all__ = ["TIMEOUT_S", "Watch", "watched"]
