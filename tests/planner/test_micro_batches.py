"""The search of a micro-batch finds the largest one that fits, with fewer estimates than sizes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import tightfit
from tests.planner import cases
from tightfit.machine import Machine
from tightfit.planner.estimate import Estimate
from tightfit.planner.estimator import Estimator
from tightfit.planner.micro_batches import MemoryBounds, largest_safe_micro_batch, search_micro_batch

BATCH = 32
SIZES = (32, 16, 8, 4, 2, 1)
RECOMPUTES = ("none", "selective", "every-2", "full", "sqrt")


def plans(recompute: str) -> list[tightfit.Plan]:
    fields: dict[str, Any] = {"recompute": recompute, "precision": "bf16-mixed"}
    return [tightfit.Plan(micro_batch=size, **fields) for size in SIZES]


def make_estimator(memory: float | None = None) -> Estimator:
    """Return an estimator for a GPU with `memory` bytes, on which a process takes no memory by itself."""
    limits = tightfit.Limits() if memory is None else tightfit.Limits(memory=int(memory))
    job = cases.job("llama", batch=BATCH).replace(limits=limits)
    estimator = Estimator(job, Machine.named("a100-80gb"))
    estimator.runtime_bytes = 0
    return estimator


@cache
def peaks() -> dict[tightfit.Plan, float]:
    """Bytes that each plan needs."""
    every = [plan for recompute in RECOMPUTES for plan in plans(recompute)]
    seen = map(make_estimator().estimate, every)
    return {one.plan: one.peak_bytes + one.margin_bytes for one in seen}


def largest(recompute: str, memory: float) -> int:
    return max((plan.micro_batch_of(BATCH) for plan in plans(recompute) if peaks()[plan] <= memory), default=0)


def found_by(seen: list[Estimate]) -> int:
    return max((one.plan.micro_batch_of(BATCH) for one in seen if one.fits), default=0)


@pytest.mark.slow
@pytest.mark.sweep(12)
@pytest.mark.parametrize("fitting", [*SIZES, 0], ids=lambda size: f"none fits {size}")
def test_the_largest_size_that_fits_is_found(fitting: int) -> None:
    """The limit is such that `fitting` samples just fit without recomputation; 0: not even one does."""
    at = peaks()[plans("none")[SIZES.index(fitting or 1)]]
    memory = at + 1 if fitting else at - 1
    estimator = make_estimator(memory)
    bounds = MemoryBounds(estimator)
    for recompute in RECOMPUTES:
        expected = largest(recompute, memory)
        assert found_by(search_micro_batch(estimator, plans(recompute))) == expected, recompute
        assert found_by(search_micro_batch(estimator, plans(recompute), bounds)) == expected, recompute
    assert largest("none", memory) == fitting


def test_a_plan_that_is_far_too_large_is_not_estimated() -> None:
    """Estimates with recompute: full show that the other values need more than twice the memory."""
    memory = 0.4 * peaks()[plans("full")[-1]]
    estimator = make_estimator(memory)
    bounds = MemoryBounds(estimator)
    search_micro_batch(estimator, plans("full"), bounds)
    assert search_micro_batch(estimator, plans("selective"), bounds) == []


def test_no_size_is_tried_if_all_are_too_slow() -> None:
    estimator = make_estimator()
    bounds = MemoryBounds(estimator)
    full = plans("full")
    fastest_s = estimator.estimate(plans("none")[0]).time.step_s
    assert search_micro_batch(estimator, full, bounds, best_s=0.5 * fastest_s) == []
    assert search_micro_batch(estimator, full, bounds, best_s=2 * fastest_s)


def test_a_safe_size_has_room_for_the_allocator() -> None:
    memory = 1.1 * peaks()[plans("none")[2]]
    estimator = make_estimator(memory)
    seen = [estimator.estimate(plan) for plan in plans("none")]
    safe = largest_safe_micro_batch(seen, BATCH)
    assert found_by(seen) > safe > 0
    assert largest_safe_micro_batch([one for one in seen if not one.fits], BATCH) == 0
