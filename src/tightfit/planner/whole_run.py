"""Predict what a complete training run takes: its steps, hours, samples or tokens, and its cost.

The hours are those of all steps and of compiling. Evaluations, checkpoints and the preparation of
the data before training are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tightfit.data import Order, SampleStream, open_samples
from tightfit.data.source_files import needs_copies
from tightfit.data.text import Columns, open_text
from tightfit.errors import InputError
from tightfit.job import DataSpec, Job
from tightfit.optim.schedule import total_steps
from tightfit.plan import Plan
from tightfit.planner.estimate import DEFAULT_STEPS
from tightfit.units import format_count, format_seconds

BYTES_PER_TOKEN = 4  # bytes of plain text per token, about, for natural language and code
SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Length:
    """How long a job trains.

    steps  number of optimizer steps
    basis  how the number was found, such as "2 epochs of 45 samples"; "" if it is `train.steps`
    """

    steps: int
    basis: str = ""


def length_of(job: Job) -> Length:
    """Return the number of optimizer steps of the job, and how it was found.

    The number is `train.steps` if the job sets it. Otherwise it follows from `train.epochs` and the
    number of samples in the data. If text is packed into sequences, its tokens are estimated from
    its bytes, because counting them takes long. If the number of samples is unknown, 1,000 steps
    are assumed.
    """
    train = job.train
    if train.steps is not None:
        return Length(train.steps)
    found = _samples_of_an_epoch(job)
    if found is None:
        return Length(DEFAULT_STEPS, "assumed, because train.steps is not set")
    samples, said = found
    steps = total_steps(train, samples)
    assert steps is not None  # because the number of samples is known
    epochs = train.epochs or 1
    return Length(max(steps, 1), f"{epochs:g} epoch{'' if epochs == 1 else 's'} of {said}")


def _samples_of_an_epoch(job: Job) -> tuple[int, str] | None:
    """Return (number of training samples in the data, this number in words, such as "about 320
    samples"). Return None if the data is empty or not on this machine, or if it would have to be
    read completely."""
    spec, about = job.data, ""
    share = spec.held_out if isinstance(spec, DataSpec) else 0.0
    try:
        if isinstance(spec, DataSpec) and spec.synthetic is not None:
            count = spec.samples
        elif isinstance(spec, DataSpec) and spec.streaming:
            return None
        elif isinstance(spec, DataSpec) and all(part.text or part.jsonl for part in spec.parts()):
            if spec.packing == "padded" or any(part.format or needs_copies(part) for part in spec.parts()):
                return None
            sizes = [open_text(part, Columns(part.field)).size_bytes for part in spec.parts()]
            count, about = sum(size // BYTES_PER_TOKEN // spec.sequence_length for size in sizes), "about "
        elif isinstance(spec, DataSpec) and spec.python is None and spec.images is None:
            return None
        else:
            source = open_samples(job)
            if isinstance(source, SampleStream):
                return None
            count = len(source)
    except InputError:  # the data is not on this machine
        return None
    count = Order(count, share, job.train.seed).training_count
    return (count, f"{about}{count:,} samples") if count > 0 else None


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
        said = f"{self.steps:,} steps{basis}, {amount}: {format_seconds(self.seconds)}, {format_hours(self.hours)}"
        if self.device_hours > self.hours:
            said += f", {format_hours(self.device_hours, 'device hours')}"
        if self.cost is not None:
            said += f"; cost {format_cost(self.cost)} at {self.price:g} per device hour"
        return said


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


__all__ = ["Length", "WholeRun", "check_price", "format_cost", "format_hours", "length_of", "whole_run"]
