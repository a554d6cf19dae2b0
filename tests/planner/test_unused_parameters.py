"""The optimizer keeps no states for parameters that a step does not use, and the prediction has none."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tightfit.machine import Machine
from tightfit.measure.memory import sample_step
from tightfit.planner.dry_run import dry_run
from tightfit.planner.estimator import Estimator

WIDTH = 64


class Backbone(nn.Module):
    """Returns what its second stage computes. The third stage is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("first", "second", "third")})
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages["second"](self.stages["first"](x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Chosen(Backbone):
    """Uses one of two stages, chosen at random."""

    def forward(self, x: Tensor) -> Tensor:
        self.stages["second"], self.stages["third"] = random.sample([self.stages["second"], self.stages["third"]], 2)
        return super().forward(x)


class Read(Backbone):
    """Uses a stage that depends on the values of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (0.0 if x.sum() > 0 else self.stages["third"](x).sum())


def job_of(model: Callable[[], nn.Module]) -> tightfit.Job:
    data = [(torch.randn(WIDTH), number % 4) for number in range(8)]
    return tightfit.Job(model=model, data=data, train=tightfit.Train(batch=8, steps=3), allow=["bf16", "8-bit-states"])


@pytest.mark.parametrize(
    "fields", [{}, {"recompute": "full"}, {"precision": "bf16-mixed"}, {"micro_batch": 2}], ids=str
)
def test_unused_parameters_have_no_predicted_states(fields: dict[str, Any]) -> None:
    job, plan = job_of(Backbone), tightfit.Plan(**fields)
    estimate = Estimator(job, Machine.detect()).estimate(plan)
    run = tightfit.build(job, plan)
    list(tightfit.train(run))
    measured = sum(
        one.nbytes
        for state in run.optimizer.state.values()
        for value in state.values()
        for one in (value.values() if isinstance(value, dict) else [value])
        if isinstance(one, Tensor)
    )
    assert estimate.peak.rows["optimizer"] == measured
    assert all(one not in run.optimizer.state for one in run.model.stages["third"].parameters())  # type: ignore[index, union-attr]
    _, peak = sample_step(run, next(run.data.steps(0, None)), 3)
    assert estimate.peak.total - estimate.peak.rows["runtime"] == pytest.approx(peak.total, rel=0.005)
    assert dry_run(job, plan).total == pytest.approx(peak.total, rel=0.005)


@pytest.mark.parametrize("model", [Chosen, Read])
def test_parameters_that_other_steps_use_have_states(model: type[nn.Module]) -> None:
    job = job_of(model)
    all_states = 8 * sum(one.numel() for one in model().parameters())
    estimate = Estimator(job, Machine.detect()).estimate(tightfit.Plan())
    assert estimate.peak.rows["optimizer"] >= all_states
    assert dry_run(job, tightfit.Plan()).rows["optimizer"] >= all_states
