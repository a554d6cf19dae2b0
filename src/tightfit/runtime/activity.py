"""Records what this process is doing and since when, so that a watcher can notice that it hangs.

The training loop, checkpointing and reports call `note_activity` when they begin an operation.
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
    """Records which operation a process is running now, and when this operation began.

    operation  name of the operation, such as "forward"; "starting" before the first one
    step       number of the current training step, from 0; None before the first step
    steps      how many steps this process has begun
    since      time.monotonic() when the operation began
    longest_s  seconds of the longest operation since the first step ended. The watcher derives from
               it how long an operation may take
    """

    operation: str = "starting"
    step: int | None = None
    steps: int = 0
    since: float = field(default_factory=time.monotonic)
    longest_s: float = 0.0

    def note(self, operation: str, step: int | None) -> None:
        """Record that `operation` begins now.

        step  number of the step that it belongs to; None: the same step as before
        """
        now = time.monotonic()
        if self.steps > 1:
            self.longest_s = max(self.longest_s, now - self.since)
        if step is not None and step != self.step:
            self.step, self.steps = step, self.steps + 1
        self.operation, self.since = operation, now


_progress: ContextVar[Activity | None] = ContextVar("progress", default=None)


def note_activity(operation: str, step: int | None = None) -> None:
    """Record that this process begins `operation` now. Do nothing outside of the context
    `recording_activity`.

    step  number of the step that the operation belongs to; None: the same step as before
    """
    progress = _progress.get()
    if progress is not None:
        progress.note(operation, step)


@contextmanager
def recording_activity() -> Iterator[Activity]:
    """Context manager that yields an `Activity`. While the context is active, `note_activity`
    records in it what this thread does."""
    progress = Activity()
    token = _progress.set(progress)
    try:
        yield progress
    finally:
        _progress.reset(token)


__all__ = ["Activity", "note_activity", "recording_activity"]
