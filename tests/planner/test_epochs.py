"""A dry run does not know how many steps a job's epochs have, so their warm-up may seem longer."""

from __future__ import annotations

import pytest

import tightfit
from tests.planner import cases
from tightfit.planner.dry_run import dry_run


@pytest.mark.sweep(3)
@pytest.mark.parametrize("schedule", ["constant", "cosine", "warmup-stable-decay"])
def test_a_warmup_of_many_steps_is_no_reason_to_refuse_epochs(schedule: str) -> None:
    job = cases.job("llama")
    train = job.train.replace(steps=None, epochs=3, warmup=100, schedule=schedule)
    assert dry_run(job.replace(train=train), tightfit.Plan()).total == dry_run(job, tightfit.Plan()).total
