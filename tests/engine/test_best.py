"""Which evaluation is the best, and when a training stops early."""

from __future__ import annotations

import math
from typing import Any

import pytest

import tightfit
from tests import tiny
from tightfit.engine.best import Selection
from tightfit.errors import InputError
from tightfit.job import Train

LOSSES = [3.0, 2.0, 2.5, 1.99, math.nan, math.inf, 1.98]


def selection(**train: Any) -> Selection:
    return Selection(Train(evaluate_every=1, **train))


def test_the_best_evaluation_has_the_best_value() -> None:
    smallest = selection(keep_best={})
    largest = selection(keep_best={"metric": "accuracy", "mode": "max"})
    for step, loss in enumerate(LOSSES):
        improved = smallest.add(step, {"loss": loss, "accuracy": -loss})
        assert improved == (step in (0, 1, 3, 6))
        assert largest.add(step, {"loss": 0.0, "accuracy": -loss}) == improved
    assert smallest.best is not None
    assert (smallest.best.step, smallest.best.value, smallest.kept_steps) == (6, 1.98, {6})
    assert largest.best is not None
    assert (largest.best.metric, largest.best.value) == ("accuracy", -1.98)


def test_training_stops_when_a_metric_stops_improving() -> None:
    rule = selection(early_stopping={"patience": 2, "min_delta": 0.1})
    stopped = []
    for step, loss in enumerate([3.0, 2.0, 1.95, 1.8, 1.75, 1.71, 1.0]):
        rule.add(step, {"loss": loss})
        stopped.append(rule.stops is not None)
    assert stopped == [False, False, False, False, False, True, True]
    assert rule.stops == "loss has not improved for 2 evaluations, up to step 5"


def test_earlier_evaluations_are_counted_after_a_resume() -> None:
    train = Train(evaluate_every=1, keep_best={}, early_stopping={"patience": 3})
    evaluations = [(step, {"loss": loss}) for step, loss in enumerate(LOSSES)]
    whole = Selection(train, evaluations, range(7))
    for place in range(len(LOSSES)):
        resumed = Selection(train, evaluations[:place], range(7))
        for step, metrics in evaluations[place:]:
            resumed.add(step, metrics)
        assert (resumed.best, resumed.stops) == (whole.best, whole.stops)
    best = Selection(train, evaluations, [0, 2]).best  # of those whose checkpoints exist
    assert best is not None
    assert (best.step, best.value) == (2, 2.5)


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"keep_best": {"metric": "loss"}}, r"train.keep_best: the job never evaluates(.|\n)*evaluate_every"),
        ({"evaluate_every": 2, "keep_best": {"metric": "f1"}}, r"mode: is needed for the metric f1"),
        ({"evaluate_every": 2, "keep_best": {"metric": "f1", "mode": "max"}}, "is not a metric of the job"),
        ({"evaluate_every": 2, "early_stopping": {"patience": 0}}, "patience"),
        ({"evaluate_every": 2, "early_stopping": {"patince": 2}}, "did you mean 'patience'"),
        ({"evaluate_every": 2, "keep_best": {}, "checkpoint_every": "never"}, "no checkpoint is saved"),
    ],
    ids=["no evaluation", "no mode", "unknown metric", "no patience", "misspelt", "no checkpoint"],
)
def test_rules_that_cannot_be_followed_are_refused(train: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        tiny.job(**train)


def test_a_metric_that_evaluations_lack_is_named() -> None:
    rule = selection(keep_best={"metric": "f1.macro", "mode": "max"})
    with pytest.raises(InputError, match=r"have the metrics loss, f1\.micro(.|\n)*f1\.micro"):
        rule.add(1, {"loss": 1.0, "f1.micro": 0.5})


def test_pipedream_and_keep_best_are_refused_together() -> None:
    from tightfit.rules import check

    job = tightfit.Job.parse(
        {**tiny.content(evaluate_every=2, keep_best={}), "allow": ["asynchronous"], "model": tiny.LLAMA}
    )
    with pytest.raises(InputError, match="cannot name a step"):
        check(tightfit.Plan(pp=2, schedule="pipedream"), job, "cpu")
