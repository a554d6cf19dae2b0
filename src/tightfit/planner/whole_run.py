"""Predict what a complete training run takes: its steps, hours, samples or tokens, and its cost.

The hours are those of all steps and of compiling. Evaluations, checkpoints and the preparation of
the data before training are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.plan import Plan
from tightfit.runtime.run_length import Length
from tightfit.units import format_count, format_seconds

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class WholeRun:
    """What a training run takes with a plan, from its first step to its last.

    steps, steps_basis  number of optimizer steps, and how it was found, such as "2 epochs of 45
                        samples"; "" if the job sets `train.steps`
    seconds, hours      duration of all steps and of compiling, in two units
    device_hours        hours times the number of devices
    samples, tokens     how many samples and tokens the model is trained on; tokens is None if it is
                        no language model
    price               price of one device per hour, in any currency; None if it was not given
    cost                price times device hours; None without a price
    """

    steps: int
    steps_basis: str
    seconds: float
    hours: float
    device_hours: float
    samples: int
    tokens: int | None
    price: float | None
    cost: float | None

    def content(self) -> dict[str, Any]:
        """Return the dict that `--json` prints: each field by its name."""
        return asdict(self)

    def __str__(self) -> str:
        amount = f"{self.samples:,} samples" if self.tokens is None else f"{format_count(self.tokens)} tokens"
        basis = f" ({self.steps_basis})" if self.steps_basis else ""
        text = f"{self.steps:,} steps{basis}, {amount}: {format_seconds(self.seconds)}, {format_hours(self.hours)}"
        if self.device_hours > self.hours:
            text += f", {format_hours(self.device_hours, 'device hours')}"
        if self.cost is not None:
            text += f"; cost {format_cost(self.cost)} at {self.price:g} per device hour"
        return text


def whole_run(job: Job, predicted: Mapping[str, Any], length: Length, price: float | None = None) -> WholeRun:
    """Return how long the complete training of `job` takes with a plan, and what it costs.

    predicted  the plan's estimate, as `Estimate.content` returns it; only `plan`, `time` and
               `tokens_per_s` are read
    length     how many steps the job trains: see `length_of`
    price      price of one device per hour; None: no cost is computed
    """
    step_s, compile_s = predicted["time"]["step_s"], predicted["time"]["compile_s"]
    seconds = compile_s + length.steps * step_s
    hours = seconds / SECONDS_PER_HOUR
    device_hours = hours * Plan.parse(predicted["plan"]).devices
    tokens_per_s = predicted["tokens_per_s"]
    return WholeRun(
        steps=length.steps,
        steps_basis=length.basis,
        seconds=seconds,
        hours=hours,
        device_hours=device_hours,
        samples=length.steps * job.train.batch,
        tokens=None if tokens_per_s is None else round(tokens_per_s * step_s * length.steps),
        price=price,
        cost=None if price is None else price * device_hours,
    )


def check_price(option: str, price: float | None) -> None:
    """Raise InputError if `price`, the price of one device per hour, is negative, infinite or not a
    number. None is accepted.

    option  the command line option that gave the price, for the message
    """
    if price is not None and not 0 <= price < math.inf:
        raise InputError(
            f"{option} {price}", "is not a price", "give the price of one device per hour as a number, such as 2.5"
        )


def format_hours(hours: float, unit: str = "hours") -> str:
    """Return hours as text with three significant digits and the unit, such as "0.0319 hours"; from
    100 hours on, without decimals."""
    return f"{hours:,.0f} {unit}" if hours >= 100 else f"{hours:.3g} {unit}"


def format_cost(cost: float) -> str:
    """Return a cost as text without a currency, such as "0.64" or "1,250". Costs of 1,000 or more
    have no decimals, costs below 0.1 have two significant digits."""
    return f"{cost:,.0f}" if cost >= 1000 else f"{cost:.2f}" if cost >= 0.1 else f"{cost:.2g}"


__all__ = ["WholeRun", "check_price", "format_cost", "format_hours", "whole_run"]
