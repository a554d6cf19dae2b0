"""Follows the evaluations of a training: which one is the best, and whether to stop early.

The state is a function of the evaluations alone. A resumed run adds the earlier evaluations again,
so it decides as if it had not stopped. All devices have the same metrics, so they decide the same.
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
    """The evaluation with the best value of `metric` so far, made after `step` steps."""

    step: int
    metric: str
    value: float


class Selection:
    """The best evaluation, and whether the training should stop.

    earlier   the evaluations before a resume, as (step, metrics)
    saved     the steps of which a checkpoint exists; an earlier evaluation without one cannot be
              the best
    best      the best evaluation by train.keep_best; None without it, or before the first evaluation
    stops     why train.early_stopping ends the training, in words; None as long as it does not
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
        """Add an evaluation, and return whether it is the best one by train.keep_best.

        step     how many steps were done
        metrics  name -> value; NaN and infinite values are never better
        has_checkpoint  whether the checkpoint of this step exists, or can still be saved

        Raises InputError if the job names a metric that is not among `metrics`.
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
        """The steps whose checkpoints must not be deleted."""
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
    """Return whether `value` is better than `before`. NaN as `before` means that there is no value
    yet."""
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
