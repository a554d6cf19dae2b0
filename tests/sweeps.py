"""Sweeps over lists: the quick suite takes a part, spread over both lists; the slow suite takes
all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


def part(cases: Sequence[Any], every: int, named: Callable[[Any], str] = str) -> list[Any]:
    """Parameters: all cases, of which the quick suite takes the first and each `every`-th after it."""
    return [
        pytest.param(case, id=named(case), marks=[] if number % every == 0 else pytest.mark.slow)
        for number, case in enumerate(cases)
    ]


def spread(firsts: Sequence[Any], seconds: Sequence[Any], every: int, named: Callable[[Any], str] = str) -> list[Any]:
    """Parameters (first, second): all of them, of which the quick suite takes each `every`-th, in another place for each first."""
    return [
        pytest.param(
            first,
            second,
            id=f"{named(first)}-{named(second)}",
            marks=[] if (number + place) % every == 0 else pytest.mark.slow,
        )
        for number, first in enumerate(firsts)
        for place, second in enumerate(seconds)
    ]
