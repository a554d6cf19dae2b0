"""A watched process ends even if the shared store or the reader of its output is gone."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tightfit.engine import watchdog
from tightfit.runtime.activity import recording_activity


class Deserted:
    """A store whose server is gone: connecting to it waits and waits."""

    def clone(self) -> Any:
        threading.Event().wait(60)


def refuse(text: str = "") -> None:
    raise BrokenPipeError


class Ended(Exception):
    pass


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []

    def leave(code: int) -> None:
        found.append(code)
        raise Ended

    monkeypatch.setattr(watchdog.os, "_exit", leave)
    return found


def test_a_process_ends_even_if_nobody_reads_its_message(codes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=refuse, flush=refuse))
    with pytest.raises(Ended):
        watchdog.exit_now(1, "tightfit: the process that started this one is gone")
    assert codes == [1]


def test_a_failing_process_does_not_wait_for_a_lost_store() -> None:
    with recording_activity() as progress:
        watching = watchdog.Watch(Deserted(), 0, 2, progress)  # type: ignore[arg-type]
        assert watching.fail(1, wait_s=600.0) is None


def test_a_process_ends_without_its_launcher_and_store(codes: list[int]) -> None:
    with recording_activity() as progress:
        watching = watchdog.Watch(Deserted(), 0, 2, progress, timeout_s=0.1)  # type: ignore[arg-type]
        watching.parent += 1
        with pytest.raises(Ended):
            watching._tell()
    assert codes == [1]
