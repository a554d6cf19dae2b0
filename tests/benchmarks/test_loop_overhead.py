"""The two loops of the benchmark do the same work."""

from __future__ import annotations

import pytest

from benchmarks import loop_overhead


def test_both_loops_have_the_same_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_overhead, "STEPS", 12)
    monkeypatch.setattr(loop_overhead, "WARMUP", 5)
    ours = list(loop_overhead.losses_of_tightfit(loop_overhead.make_run()))
    plain = list(loop_overhead.losses_of_plain_loop(loop_overhead.make_run()))
    assert len(ours) == 12
    assert ours == pytest.approx(plain, rel=1e-6)
    assert ours[0] != ours[-1]
