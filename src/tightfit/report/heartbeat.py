"""Prints a line every few seconds while a command plans or prepares data, so that the user sees
that the command works."""

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
    """A context manager, inside which a line is printed every `every_s` seconds. The line has the
    elapsed time and tightfit's latest log message; before the first message, it has the text
    `what`.

    say  prints a line
    """
    latest, done, began = _Latest(what), threading.Event(), time.monotonic()
    logger = logging.getLogger("tightfit")

    def go_on() -> None:
        while not done.wait(every_s):
            say(f"working  {latest.message} ({format_seconds(time.monotonic() - began)})")

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
    """A logging handler that stores the latest log message in `message`.

    message  the text before the first message
    """

    def __init__(self, message: str) -> None:
        super().__init__(logging.INFO)
        self.message = message

    def emit(self, record: logging.LogRecord) -> None:
        self.message = record.getMessage()
