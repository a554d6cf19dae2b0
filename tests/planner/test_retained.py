"""Tensors that a module keeps in an attribute live until the next forward replaces them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tightfit.cost.recorded_step import Buffer
from tightfit.machine import Machine
from tightfit.measure.observer import SAMPLED, Observer
from tightfit.planner.tracing.plain_data import from_content, to_content
from tightfit.planner.tracing.profiler import Profiler

WIDTH, LENGTH = 32, 64


class Block(nn.Module):
    """Keeps its attention map, as code does that plots it."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.products(x).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        self.attention = (query @ key.mT / 4).softmax(-1)
        return x + self.output((self.attention @ value).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def job() -> tightfit.Job:
    data = [(torch.randn(LENGTH, WIDTH), torch.randn(LENGTH, WIDTH)) for _ in range(16)]
    train = tightfit.Train(batch=8, steps=SAMPLED + 2, trackers=())
    return tightfit.Job(model=Net, data=data, loss=nn.functional.mse_loss, train=train)


@pytest.mark.parametrize(
    "fields",
    [{}, {"micro_batch": 2}, {"recompute": "full"}, {"recompute": "full", "micro_batch": 2}],
    ids=str,
)
def test_kept_tensors_are_predicted_as_measured(fields: dict[str, Any]) -> None:
    plan = tightfit.Plan(**fields)
    peak = tightfit.estimate(job(), plan).peak
    run = tightfit.build(job(), plan)
    observer = Observer(run, 0)
    for step in tightfit.train(run, take=observer.take):
        observer.add(step)
    measured = observer.record(Machine.detect()).peak_bytes.measured
    assert peak.total - peak.rows["runtime"] - peak.rows["allocator"] == pytest.approx(measured, rel=0.03)


def retained(steps: Any) -> dict[Buffer, None]:
    events = (event for segment in steps.segments for event in segment.timeline.events)
    return {buffer: None for buffer, sign in events if buffer.retained and sign > 0}


def test_a_kept_tensor_is_stored_with_the_trace() -> None:
    steps, _ = Profiler(job(), "cpu").recorded_step(tightfit.Plan(), 4)
    found = retained(steps)
    # of four equal blocks, three are traced
    assert [(one.maker, one.size.at(4)) for one in found] == [("aten._softmax", 4 * 4 * LENGTH**2 * 4.0)] * 3
    again = retained(from_content(to_content(steps)))
    assert [one.size for one in again] == [one.size for one in found]
