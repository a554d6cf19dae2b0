"""Progress: what this process is doing, noted as it goes on, for whoever watches that it does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Progress:
    """The operation that a process does, and since when.

    step       from 0; None before the first
    steps      how many steps it has begun
    since      time.monotonic() when the operation began
    longest_s  the longest operation since the first step ended: what is normal here
    """

    operation: str = "starting"
    step: int | None = None
    steps: int = 0
    since: float = field(default_factory=time.monotonic)
    longest_s: float = 0.0

    def note(self, operation: str, step: int | None) -> None:
        now = time.monotonic()
        if self.steps > 1:
            self.longest_s = max(self.longest_s, now - self.since)
        if step is not None and step != self.step:
            self.step, self.steps = step, self.steps + 1
        self.operation, self.since = operation, now


_progress: ContextVar[Progress | None] = ContextVar("progress", default=None)


def doing(operation: str, step: int | None = None) -> None:
    """Note that this process begins an operation now, of a step or of the same step as before."""
    progress = _progress.get()
    if progress is not None:
        progress.note(operation, step)


@contextmanager
def noted() -> Iterator[Progress]:
    """Within, `doing` notes what this thread does."""
    progress = Progress()
    token = _progress.set(progress)
    try:
        yield progress
    finally:
        _progress.reset(token)


__all__ = ["Progress", "doing", "noted"]
