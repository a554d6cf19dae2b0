"""Learning-rate schedules: pure functions of the step, so a resumed run has no scheduler state to
restore."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tightfit.errors import InputError
from tightfit.job import Train
from tightfit.optim.functions import rate_by_function


def total_steps(train: Train, samples: int | None) -> int | None:
    """Return the number of optimizer steps of the training, or None if the training is endless.

    samples  number of samples in one epoch; None for a stream of unknown length

    A job with neither steps nor epochs runs one epoch.
    """
    if train.steps is not None or samples is None:
        return train.steps
    return math.ceil((train.epochs or 1) * samples / train.batch)


def learning_rate(
    train: Train, total_steps: int | None, full: float | None = None, groups: Sequence[float] = ()
) -> Callable[[int], float]:
    """Return a function from the step (counted from 0) to the learning rate.

    total_steps  number of steps of the training; None if it is endless
    full         the full learning rate of an optimizer that the user's own function creates; None:
                 the job's `train.learning_rate`. Both are scaled by `scale_learning_rate`
    groups       the full learning rates of the parameter groups that such a function makes, scaled, too

    The rate warms up linearly, then follows constant | linear | cosine | warmup-stable-decay. Step
    `warmup - 1` is the first at the full rate. The rate reaches `final_learning_rate` (a share of
    the full rate) at step `total_steps`, one step after the last, so that no step is taken at a
    rate of zero.

    If the job's schedule is a function of the user's own, it determines all rates instead: see
    `functions.py`.

    Raises InputError if the schedule needs `total_steps` and it is None, or if the warm-up is
    longer than the training. Source: cosine, Loshchilov & Hutter 2017, arXiv:1608.03983;
    warmup-stable-decay, Hu et al. 2024, arXiv:2404.06395.
    """
    base, warmup = train.scaled_learning_rate if full is None else full * train.rate_scale, train.warmup
    if train.uses_function("schedule"):
        return rate_by_function(train.schedule, base, [rate * train.rate_scale for rate in groups])
    _check(train, total_steps)

    def rate(step: int) -> float:
        if step < warmup:
            return base * (step + 1) / warmup
        remaining = _remaining_share(train, step, total_steps)
        return base * (train.final_learning_rate + (1 - train.final_learning_rate) * remaining)

    return rate


def _remaining_share(train: Train, step: int, total_steps: int | None) -> float:
    """Return how much of the decay from the full to the final learning rate is still to come at
    `step`: 1.0 before the decay begins, 0.0 at the end of the training and after it."""
    if train.schedule == "constant" or total_steps is None:
        return 1.0
    start = train.warmup
    if train.schedule == "warmup-stable-decay":
        start = max(start, total_steps - max(1, round(train.decay * total_steps)))
    progress = min(max((step - start) / max(total_steps - start, 1), 0.0), 1.0)
    return 0.5 * (1 + math.cos(math.pi * progress)) if train.schedule == "cosine" else 1 - progress


def _check(train: Train, total_steps: int | None) -> None:
    if total_steps is None:
        if train.schedule != "constant":
            raise InputError(
                f"job: train.schedule={train.schedule}",
                "the data is endless and the job sets no number of steps",
                "add train.steps, or use schedule: constant",
            )
    elif train.warmup > total_steps:
        raise InputError(
            "job: train.warmup",
            f"{train.warmup} steps of warm-up in a training of {total_steps}",
            f"use a warmup of at most {total_steps}, or train for longer",
        )
