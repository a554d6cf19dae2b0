"""A fixed part of the fuzzing: files of every kind are accepted, or refused in three parts.
`scripts/test --fuzz N --seed S` draws more."""

from __future__ import annotations

import pytest

from tests.fuzz.runs import fuzz
from tests.fuzz.targets import TARGETS

COUNT = 400  # files, of all kinds


@pytest.mark.sweep(12)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("target", TARGETS)
def test_drawn_files_are_accepted_or_refused(target: str) -> None:
    assert fuzz(target, max(round(COUNT * TARGETS[target][2]), 4)) > 0
