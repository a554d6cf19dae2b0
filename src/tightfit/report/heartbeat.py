"""Keeps commands from being silent: while they plan or prepare data, a line every few seconds says
what they do."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tightfit.units import format_seconds

SILENT_S = 8.0  # longest silence


@contextmanager
def never_silent(say: Callable[[str], None], what: str, every_s: float = SILENT_S) -> Iterator[None]:
    """Within, say a line every few seconds: `what`, or the package's last log message, and the
    seconds so far."""
    latest, done, began = _Latest(what), threading.Event(), time.monotonic()
    logger = logging.getLogger("tightfit")

    def go_on() -> None:
        while not done.wait(every_s):
            say(f"working  {latest.said} ({format_seconds(time.monotonic() - began)})")

    thread, level = threading.Thread(target=go_on, daemon=True), logger.level
    logger.addHandler(latest)
    logger.setLevel(logging.INFO)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        logger.setLevel(level)
        logger.removeHandler(latest)


class _Latest(logging.Handler):
    """Keeps the last log message."""

    def __init__(self, said: str) -> None:
        super().__init__(logging.INFO)
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said = record.getMessage()
