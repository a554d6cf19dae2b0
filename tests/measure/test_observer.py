"""The observer times the steps whose memory it does not track, and its record contains what it saw."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import tightfit
from tests import tiny
from tightfit.engine.step import Step
from tightfit.machine import Figure
from tightfit.measure.observer import SAMPLED, Observer
from tightfit.runtime.run import Run


def machine() -> tightfit.Machine:
    rate = Figure(value=1e9, source="measured")
    return tightfit.Machine.detect().replace(device="cpu", matrix_flops_per_s={"fp32": rate})


def observed(run: Run, start: int = 0, seconds: float = 0.5) -> Observer:
    """An observer of a whole training, whose steps took twice `seconds`, thrice, ..., and then `seconds`."""
    observer = Observer(run, start)
    for number, step in enumerate(tightfit.train(run, start, take=observer.take)):
        observer.add(replace(step, seconds=seconds * max(SAMPLED + 2 - number, 1)))
    return observer


def test_the_record_of_a_training_is_complete() -> None:
    run = tightfit.build(tiny.job(steps=6))
    record = observed(run).record(machine())
    assert record.step_s == [0.5] * 3  # of six: the first, the second and the sampled one are not timed
    assert record.tokens_per_s == 4 * 16 / 0.5
    assert record.samples_per_s == 4 / 0.5
    assert [step for step, _ in record.loss] == [1, 2, 3, 4, 5, 6]
    assert record.parameters == sum(parameter.numel() for parameter in run.model.parameters())
    assert record.peak_bytes.measured == sum(record.peak_bytes.rows.values()) > 3 * 4 * record.parameters
    assert record.peak_bytes.process is not None
    assert record.peak_bytes.process > record.peak_bytes.measured
    assert record.mfu is None  # a processor has no published peak
    assert record.matrix_utilization is not None
    assert 0 < record.matrix_utilization < 1
    assert record.compile_s is None
    assert record.skipped_steps == record.damaged_samples == 0
    assert tightfit.Record.parse(json.loads(record.to_json())) == record


def test_mfu_counts_every_micro_batch() -> None:
    whole, split = (
        observed(tightfit.build(tiny.job(steps=3), tightfit.Plan(micro_batch=size))).flops_per_step for size in (4, 1)
    )
    assert whole == split
    assert whole


def test_a_resumed_training_is_sampled_at_its_own_third_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from tightfit.measure import observer as module

    honest, sampled = module.MemorySample.take, []

    def take(sample: module.MemorySample, run: Run, micro_batches: list[Any], step: int) -> Any:
        sampled.append(step)
        return honest(sample, run, micro_batches, step)

    monkeypatch.setattr(module.MemorySample, "take", take)
    record = observed(tightfit.build(tiny.job(steps=8)), start=3).record(machine())
    assert sampled == [5]
    assert [step for step, _ in record.loss] == [4, 5, 6, 7, 8]


def test_observation_does_not_change_the_training() -> None:
    plain = [step.loss for step in tightfit.train(tightfit.build(tiny.job(steps=5)))]
    assert [step.loss for step in observed(tightfit.build(tiny.job(steps=5))).steps] == plain


def test_early_speed_is_that_of_the_latest_step() -> None:
    observer = Observer(tightfit.build(tiny.job(steps=5)), 0)
    for seconds, speed in ((2.0, 32.0), (1.0, 64.0), (4.0, 16.0), (0.5, 128.0), (0.25, 192.0)):
        step = Step(0, 1.0, 0.1, None, samples=4, items=60, processed=64, skipped=False, seconds=seconds)
        observer.add(step)
        assert observer.speed(step) == speed
    assert observer.step_s(step) == 0.375  # the median of 0.5 and 0.25


def test_compile_time_is_the_first_step_minus_a_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from tightfit.methods import compile as compile_method

    monkeypatch.setattr(compile_method, "BACKEND", "eager")
    torch.compiler.reset()
    record = observed(tightfit.build(tiny.job(steps=5), tightfit.Plan(compile="block"))).record(machine())
    torch.compiler.reset()
    assert record.compile_s == 4 * 0.5 - 0.5


def test_nan_losses_and_skipped_steps_are_recorded() -> None:
    observer = Observer(tightfit.build(tiny.job(steps=5)), 0)
    for number, loss in enumerate((2.0, float("nan"), float("inf"))):
        observer.add(Step(number, loss, 0.1, None, 4, 60, 64, skipped=number > 0, seconds=1.0))
    record = observer.record(machine())
    assert record.loss == [(1, 2.0), (2, None), (3, None)]
    assert record.skipped_steps == 2
    assert record.step_s == []
    assert (record.tokens_per_s, record.mfu, record.peak_bytes.measured) == (None, None, None)
