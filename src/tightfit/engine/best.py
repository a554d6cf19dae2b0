"""Follows the evaluations of a training: which one is the best, and whether to stop early.

Both depend only on the evaluations so far. A resumed run adds the earlier evaluations again, so it
decides like a run that was never stopped. All devices have the same metrics, so they decide the
same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from tightfit.errors import InputError
from tightfit.job import Train
from tightfit.job_sections.selection import Criterion
from tightfit.values import nearest


@dataclass(frozen=True)
class BestEvaluation:
    """The best evaluation of a training so far.

    step    how many training steps had been done
    metric  name of the metric by which evaluations are compared
    value   the value of this metric
    """

    step: int
    metric: str
    value: float


class Selection:
    """Selects the best evaluation so far, and decides whether the training should stop early. Call
    `add` with each evaluation.

    train    the training section of the job; its `keep_best` and `early_stopping` say which metric
             to compare and how
    earlier  evaluations before a resume: (step, metric name -> value)
    saved    the steps of which a checkpoint exists. An earlier evaluation without a checkpoint
             cannot become the best

    best   the best evaluation by train.keep_best; None if keep_best is not set or nothing was added
    stops  the reason in words why train.early_stopping ends the training; None while it goes on
    """

    def __init__(
        self, train: Train, earlier: Iterable[tuple[int, Mapping[str, float]]] = (), saved: Collection[int] = ()
    ) -> None:
        self.keep_best, self.early_stopping = train.keep_best, train.early_stopping
        self.best: BestEvaluation | None = None
        self.stops: str | None = None
        self._since, self._reference = 0, math.nan
        for step, metrics in earlier:
            self.add(step, metrics, step in saved)

    def add(self, step: int, metrics: Mapping[str, float], has_checkpoint: bool = True) -> bool:
        """Add an evaluation. Return whether it is the best one so far by train.keep_best; always
        False if keep_best is not set.

        step            how many training steps had been done
        metrics         metric name -> value. NaN and infinite values are never better
        has_checkpoint  whether the checkpoint of this step exists or can still be saved. Without
                        one, the evaluation cannot be the best

        Raises InputError if the job names a metric that is not in `metrics`.
        """
        self._count(step, metrics)
        if self.keep_best is None or not has_checkpoint:
            return False
        value = _value(self.keep_best, metrics, "keep_best")
        if not _improves(self.keep_best, value, math.nan if self.best is None else self.best.value):
            return False
        self.best = BestEvaluation(step, self.keep_best.metric, value)
        return True

    @property
    def kept_steps(self) -> frozenset[int]:
        """The steps whose checkpoints must not be deleted: the step of the best evaluation, or
        none."""
        return frozenset() if self.best is None else frozenset([self.best.step])

    def _count(self, step: int, metrics: Mapping[str, float]) -> None:
        rule = self.early_stopping
        if rule is None:
            return
        value = _value(rule, metrics, "early_stopping")
        if _improves(rule, value, self._reference, rule.min_delta):
            self._since, self._reference = 0, value
        else:
            self._since += 1
        if self._since >= rule.patience and self.stops is None:
            count = f"{rule.patience} evaluation{'' if rule.patience == 1 else 's'}"
            self.stops = f"{rule.metric} has not improved for {count}, up to step {step}"


def _improves(criterion: Criterion, value: float, before: float, by: float = 0.0) -> bool:
    """Return whether `value` is better than `before` by more than `by`. A value that is not finite
    is never better. `before` is NaN if there is no earlier value; then any finite value is better.
    """
    return math.isfinite(value) and (math.isnan(before) or criterion.is_better(value, before, by))


def _value(criterion: Criterion, metrics: Mapping[str, float], field: str) -> float:
    if criterion.metric not in metrics:
        raise InputError(
            f"job: train.{field}.metric={criterion.metric}",
            f"evaluations have the metrics {', '.join(metrics)}",
            nearest(criterion.metric, list(metrics)),
        )
    return metrics[criterion.metric]


__all__ = ["BestEvaluation", "Selection"]
