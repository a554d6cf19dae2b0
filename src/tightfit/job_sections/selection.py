"""Defines the fields of a job that depend on an evaluation metric: `train.keep_best` keeps the best
checkpoint, and `train.early_stopping` ends the training early. `engine/best.py` applies them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from tightfit.errors import InputError
from tightfit.values import Value

LOSS = "loss"  # the name of the evaluation loss among the metrics


class Criterion(Value):
    """Names an evaluation metric, and says whether smaller or larger values of it are better.

    `mode` may be left out for the loss, of which smaller values are better.
    """

    metric: str = Field(LOSS, min_length=1, description="loss, or the name of a metric of evaluate.metrics")
    mode: Literal["min", "max"] | None = Field(None, description="min: smaller is better; max: larger is better")

    @model_validator(mode="after")
    def _has_a_direction(self) -> Self:
        if self.mode is None and self.metric != LOSS:
            raise InputError(
                "mode", f"is needed for the metric {self.metric}", "add mode: max if larger is better, else mode: min"
            )
        return self

    def is_better(self, value: float, than: float, by: float = 0.0) -> bool:
        """Return whether `value` is better than `than` by more than `by`: larger if `mode` is max,
        else smaller. Returns False if one of the two values is NaN."""
        return value > than + by if self.mode == "max" else value < than - by


class KeepBest(Criterion):
    """Keeps the checkpoint with the best value of an evaluation metric, besides the newest ones."""


class EarlyStopping(Criterion):
    """Ends the training when an evaluation metric has not improved in `patience` evaluations in a
    row.

    A value is an improvement if it is better than the best value so far by more than `min_delta`.
    """

    patience: int = Field(3, gt=0, description="evaluations without an improvement after which training ends")
    min_delta: float = Field(0.0, ge=0, description="smallest change that counts as an improvement")
