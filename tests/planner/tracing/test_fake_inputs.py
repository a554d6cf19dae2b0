"""The example batch of a trace, and how long a sample takes to prepare."""

from __future__ import annotations

import time
from typing import Any

import torch

import tightfit
from tests import tiny
from tightfit.planner.tracing.fake_inputs import example_batch


class Waiting(torch.utils.data.Dataset[Any]):
    """A dataset that waits for something else than the processor."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.01)
        return torch.zeros(3), torch.tensor(1)


def test_other_processes_do_not_change_the_time_of_a_sample(monkeypatch: Any) -> None:
    job = tiny.job()
    clock = iter(range(10**6))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))  # as on a machine that others use
    assert example_batch(job)[1] < 0.5


def test_the_wait_of_a_dataset_counts() -> None:
    job = tightfit.Job(model=lambda: torch.nn.Linear(3, 2), data=Waiting(), train={"batch": 4, "steps": 1})
    assert example_batch(job)[1] >= 0.01
