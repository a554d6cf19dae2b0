"""The estimate of a micro-batch does not depend on which other sizes were traced before it."""

from __future__ import annotations

import pytest

import tightfit
from tests.planner import cases
from tightfit.machine import Machine
from tightfit.planner.dry_run import dry_run
from tightfit.planner.estimator import Estimator
from tightfit.planner.tracing import profiler

GPU = Machine.named("a100-80gb")
# plans that are estimated before: (recompute, micro-batch)
BEFORE: list[list[tuple[str, int]]] = [
    [],
    [("none", 32), ("none", 16)],
    [("none", 32), ("none", 4)],
    [("none", 32), ("none", 4), ("full", 32)],
    [("none", 4), ("full", 32), ("selective", 8)],
]


@pytest.fixture(autouse=True)
def _traces_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "cached", lambda key, make: make())


@pytest.mark.slow
@pytest.mark.parametrize(
    "recompute", ["full", "selective", *(pytest.param(value, marks=pytest.mark.slow) for value in ("every-2", "sqrt"))]
)
@pytest.mark.parametrize("precision", ["bf16-mixed", pytest.param("fp32", marks=pytest.mark.slow)])
def test_other_sizes_do_not_matter(recompute: str, precision: str) -> None:
    job = cases.job("llama", batch=32)

    def plan(recompute: str, micro_batch: int) -> tightfit.Plan:
        return tightfit.Plan(precision=precision, recompute=recompute, micro_batch=micro_batch)

    found = dry_run(job, plan(recompute, 16), "cuda").total
    for before in BEFORE:
        estimator = Estimator(job, GPU)
        for one in before:
            estimator.estimate(plan(*one))
        peak = estimator.estimate(plan(recompute, 16)).peak
        assert peak.total - peak.rows["runtime"] == pytest.approx(found, rel=1e-3), before


@pytest.mark.slow
def test_an_evaluation_is_interpolated_between_any_two_sizes() -> None:
    """Autocast frees its casts of weights in the order of their addresses; a trace does not show it."""
    known = profiler.Profiler(cases.job("llama", batch=32), "cuda")
    plan = tightfit.Plan(precision="bf16-mixed")
    for size in range(2, 12):
        known.recorded_step(plan, size, training=False, sizes=(size, size))
    for small in range(2, 11):
        assert known.recorded_step(plan, 16, training=False, sizes=(small, 11))[1] == (small, 11)
