"""Rates: what one calibration measures, and where it stops."""

from __future__ import annotations

import pytest
import torch

from tightfit.measure import rates


def test_what_would_outlast_patience_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A type without instructions: 1 MFLOP/s, where the largest would take ten seconds."""
    amounts = {64: 1e4, 128: 1e5, 256: 2e5, 512: 1e6, 1024: 1e7}
    run: list[int] = []

    def timed(work: object, device: torch.device, **named: object) -> float:
        assert callable(work)
        work()
        return amounts[run[-1]] / 1e6

    monkeypatch.setattr(rates, "timed", timed)
    cases = ((size, amount, lambda size=size: run.append(size)) for size, amount in amounts.items())
    found = rates._table(cases, torch.device("cpu"))  # type: ignore[arg-type]
    assert run == [64, 128, 256]
    assert found == dict.fromkeys(run, pytest.approx(1e6))


def test_every_size_is_measured_where_they_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "timed", lambda work, device, **named: 1e-3)
    cases = ((size, float(size), lambda: None) for size in (1, 10, 100))
    assert rates._table(cases, torch.device("cpu")) == {1: 1e3, 10: 1e4, 100: 1e5}
