"""Models that compare all samples of a micro-batch with each other, whose memory is not linear."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tightfit
from tightfit.machine import Machine
from tightfit.planner.dry_run import dry_run
from tightfit.planner.estimator import Estimator
from tightfit.planner.micro_batches import shrink_micro_batch
from tightfit.planner.tracing.profiler import Profiler
from tightfit.planner.variants import by_time, estimate_candidates, fitting_s

GPU = Machine.named("a100-80gb")
BATCH = 2048
WIDTH = 8


class Pairs(nn.Module):
    """Compares each sample with each other sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        known = self.layer(x)
        return known @ known.T


class Rows(nn.Sequential):
    """Computes each sample by itself."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def diagonal(output: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(output, torch.arange(len(output), device=output.device) % output.shape[1])


def estimator_of(model: Any, memory: float | None = None) -> Estimator:
    samples = [(torch.zeros(WIDTH), 0)] * 8
    job = tightfit.Job(model=model, data=samples, loss=diagonal, train=tightfit.Train(batch=BATCH, steps=4))
    found = Estimator(job, GPU)
    found.runtime_bytes = 0
    if memory is not None:  # a job's own limit is at least 1 MiB
        found.limit_bytes = int(memory)
    return found


def traced_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the sizes whose training is traced from now on."""
    seen: list[int] = []
    trace = Profiler._trace

    def counted(self: Profiler, plan: tightfit.Plan, samples: int, training: bool, *more: bool) -> Any:
        if training:
            seen.append(samples)
        return trace(self, plan, samples, training, *more)

    monkeypatch.setattr(Profiler, "_trace", counted)
    return seen


def test_a_matrix_of_all_pairs_is_not_interpolated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, estimator = traced_sizes(monkeypatch), estimator_of(Pairs)
    for size in (2048, 1024, 256):
        plan = tightfit.Plan(micro_batch=size)
        peak = estimator.estimate(plan).peak
        found = dry_run(estimator.job, plan, "cuda").total
        assert peak.total == pytest.approx(found, rel=0.02), size
    assert seen == [2048, 1024, 256]
    assert estimator.profiler.superlinear


def test_two_traces_serve_all_sizes_of_a_linear_model(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, estimator = traced_sizes(monkeypatch), estimator_of(Rows)
    for size in (2048, 1024, 256, 3, 700):
        estimator.estimate(tightfit.Plan(micro_batch=size))
    assert seen == [2048, 1024]
    assert not estimator.profiler.superlinear


def test_a_large_batch_of_pairs_says_nothing_of_a_small_one() -> None:
    """In proportion to 2,048 samples, 128 would need 16 times the bytes that they need."""
    estimator = estimator_of(Pairs)
    large, half, _ = (estimator.estimate(tightfit.Plan(micro_batch=size)) for size in (2048, 1024, 512))
    estimator.limit_bytes = 1.1 * estimator.estimate(tightfit.Plan(micro_batch=128)).peak_bytes
    fresh = Estimator(estimator.job, GPU, estimator.profiler)
    fresh.runtime_bytes, fresh.limit_bytes = 0, estimator.limit_bytes
    for one in (large, half):
        fresh.estimate(one.plan)
    assert not fresh.is_far_too_large(tightfit.Plan(micro_batch=128))
    assert fresh.is_far_too_large(tightfit.Plan(micro_batch=1024))


@pytest.mark.slow
def test_the_largest_size_with_room_for_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator takes 60 % more than the tensors, so the largest micro-batch of tensors does not fit."""
    monkeypatch.setattr("tightfit.planner.estimator.reserved_bytes", lambda ledger, **_: 1.6 * ledger.peak().total)
    start, pins = tightfit.Plan(), {"precision": "fp32", "states": "fp32"}
    peak = estimator_of(Rows).estimate(start.replace(micro_batch=1024)).peak_bytes
    estimator = estimator_of(Rows, 1.1 * peak)  # room for the tensors of 1,024 samples
    found = estimate_candidates(estimator, start, pins)
    fitting = [one for one in found if one.fits and estimator.include_allocator(one).fits]
    assert max(one.plan.micro_batch_of(BATCH) for one in fitting) == 512
    assert fitting_s(estimator, found) == min(fitting, key=by_time).time.step_s


def test_no_size_is_tried_that_the_allocator_rules_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.planner.estimator.reserved_bytes", lambda ledger, **_: ledger.peak().total + 2**30)
    estimator = estimator_of(Rows, 2**29)
    plans = [tightfit.Plan(micro_batch=BATCH // 2**power) for power in range(12)]
    assert len(shrink_micro_batch(estimator, plans, float("inf"))) == 2


@pytest.mark.slow
def test_a_model_without_blocks_has_no_fewer_to_recompute() -> None:
    peak = estimator_of(Rows).estimate(tightfit.Plan(micro_batch=1024)).peak_bytes
    found = estimate_candidates(estimator_of(Rows, 1.1 * peak), tightfit.Plan(), {})
    assert any(one.fits for one in found)
