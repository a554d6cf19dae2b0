"""An evaluation on several processes has the values of one process: every sample counts once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

import tightfit
from tests import tiny
from tests.pool import together
from tightfit.errors import InputError

HERE = "tests.engine.test_evaluation_several:"
SAMPLES = 7  # on two data ranks in micro-batches of 2: 3 and 4 samples
PLANS: list[dict[str, Any]] = [
    {"dp_replicate": 2},
    {"zero": 1, "dp_shard": 2},
    {"zero": 2, "dp_shard": 2, "micro_batch": 2},
    {"zero": 3, "dp_shard": 2, "micro_batch": 2},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2, "micro_batch": 2},
    {"pp": 2, "micro_batch": 1, "schedule": "interleaved", "virtual_stages": 2},
]
MORE: list[dict[str, Any]] = [
    {"parameter_server": "sync", "dp_replicate": 2},  # three processes
    {"tp": 2, "dp_shard": 2, "zero": 3},
    {"pp": 2, "micro_batch": 2, "dp_replicate": 2},
]


def token_accuracy(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    return (outputs.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]).double().mean()


def place_is_odd(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Scores of positions, and whether a position is odd."""
    first = outputs.logits[:, :, 0].float().sigmoid().flatten()
    return first, torch.arange(len(first)) % 2


def labels_of(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    return batch["labels"].double()


METRICS = {
    "function": token_accuracy,
    "micro": MulticlassAccuracy(300, average="micro"),
    "macro": MulticlassAccuracy(300, average="macro"),
    "lists": (BinaryAUROC(), place_is_odd),  # keeps all predictions
    "sum": (SumMetric(), labels_of),
    "mean": (MeanMetric(), labels_of),
}


def values(fields: dict[str, Any], samples: int = SAMPLES) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics before and after the training."""
    data = {"synthetic": "tokens", "samples": samples}
    job = tightfit.Job.parse(
        {
            **tiny.content(steps=2),
            "model": {**tiny.LLAMA, "num_hidden_layers": 4},
            "evaluate": {"data": data, "metrics": METRICS},
        }
    )
    run = tightfit.build(job, tightfit.Plan(**fields))
    before = tightfit.evaluate_metrics(run)
    for _ in tightfit.train(run):
        pass
    return before, tightfit.evaluate_metrics(run)


def hold(fields: dict[str, Any], samples: int = SAMPLES) -> None:
    alone = values({}, samples)
    everyones = together(tightfit.Plan(**fields).devices, HERE + "values", fields, samples)
    assert all(one == everyones[0] for one in everyones)  # decided once: equal to the last bit
    for found, expected in zip(everyones[0], alone, strict=True):
        assert found == pytest.approx(expected, rel=2e-5)
        for counted in ("function", "micro", "sum", "mean"):
            assert found[counted] == pytest.approx(expected[counted], rel=1e-7)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_values_are_those_of_one_process(fields: dict[str, Any]) -> None:
    hold(fields)


def test_a_rank_without_samples_adds_nothing() -> None:
    hold({"dp_replicate": 2}, 1)


@pytest.mark.slow
@pytest.mark.parametrize("fields", MORE, ids=str)
def test_values_on_more_processes_are_the_same(fields: dict[str, Any]) -> None:
    hold(fields)


class Pairs(SumMetric):
    """A metric with a list state that torchmetrics cannot concatenate."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", default=[], dist_reduce_fx=None)

    def update(self, value: Tensor) -> None:  # type: ignore[override]
        self.seen.append(value)
        super().update(value)


def refused() -> str:
    content = {**tiny.content(), "evaluate": {"data": {"synthetic": "tokens", "samples": 3}}}
    content["evaluate"]["metrics"] = {"pairs": (Pairs(), labels_of)}
    run = tightfit.build(tightfit.Job.parse(content), tightfit.Plan(dp_replicate=2, micro_batch=1))
    try:
        tightfit.evaluate_metrics(run)
    except InputError as error:
        return error.found
    return ""


def test_lists_of_different_lengths_are_refused_on_all() -> None:
    assert together(2, HERE + "refused") == ["Pairs keeps lists of another length on each device"] * 2
