"""Runs: a target on a number of drawn files, each within a limit of processor time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from tests.fuzz.targets import FOLDER, TARGETS

SECONDS = 20  # of the processor, at most, for a file
EMPTIED = 200  # files after which the folder and the cache are


class Slow(Exception):
    """A file took too long."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Slow(f"more than {seconds} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def fuzz(target: str, count: int, number: int | None = None) -> int:
    """Hold `count` files of a target; returns how many were tried. Raises for the smallest file that fails.

    number  the seed; left out, the same files each time
    """
    make, take, _ = TARGETS[target]
    tried = 0

    def hold(drawn: Any) -> None:
        nonlocal tried
        tried += 1
        if tried % EMPTIED == 0:
            FOLDER.empty()
        with limited(SECONDS):
            take(drawn)

    phases = (Phase.explicit, Phase.generate, Phase.shrink)
    test: Callable[[], None] = settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=number is None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.normal,
    )(given(make())(hold))
    if number is not None:
        test = seed(number)(test)
    with own_cache():
        test()
    return tried


@contextmanager
def own_cache() -> Iterator[None]:
    """What is prepared of drawn files is kept beside them, and goes with them."""
    before = os.environ.get("XDG_CACHE_HOME")
    FOLDER.path.mkdir(exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(Path(FOLDER.path) / "cache")
    try:
        yield
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before
        FOLDER.empty()
