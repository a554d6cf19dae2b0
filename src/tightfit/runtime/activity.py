"""Records what this process is doing and since when, so that a watcher can notice a run that hangs.

The training loop, checkpointing and reports call `note_activity` as they begin an operation.
`engine/watchdog.py` reads the `Activity` from another thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Activity:
    """The operation that a process is executing, and since when.

    operation  its name, such as "forward"; "starting" before the first one
    step       number of the optimizer step, from 0; None before the first step
    steps      how many steps this process has begun
    since      time.monotonic() when the operation began
    longest_s  seconds of the longest operation since the first step ended. The watcher lets an
               operation take a multiple of this
    """

    operation: str = "starting"
    step: int | None = None
    steps: int = 0
    since: float = field(default_factory=time.monotonic)
    longest_s: float = 0.0

    def note(self, operation: str, step: int | None) -> None:
        """Record that `operation` begins now. step: the number of its step; None if the step is the
        same as before."""
        now = time.monotonic()
        if self.steps > 1:
            self.longest_s = max(self.longest_s, now - self.since)
        if step is not None and step != self.step:
            self.step, self.steps = step, self.steps + 1
        self.operation, self.since = operation, now


_progress: ContextVar[Activity | None] = ContextVar("progress", default=None)


def note_activity(operation: str, step: int | None = None) -> None:
    """Record that this process begins `operation` now. step: the number of its step; None if the
    step is the same as before.

    Does nothing outside of `recording_activity`.
    """
    progress = _progress.get()
    if progress is not None:
        progress.note(operation, step)


@contextmanager
def recording_activity() -> Iterator[Activity]:
    """Yield an Activity, in which `note_activity` records what this thread does within the
    context."""
    progress = Activity()
    token = _progress.set(progress)
    try:
        yield progress
    finally:
        _progress.reset(token)


__all__ = ["Activity", "note_activity", "recording_activity"]
