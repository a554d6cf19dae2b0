"""What a whole training takes: its steps, hours, tokens or samples, and its cost.

The hours are those of the steps and of compiling. Evaluations, checkpoints and the preparation of
data are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tightfit.data import Order, UserStream, open_samples
from tightfit.data.text import Columns, open_text
from tightfit.errors import InputError
from tightfit.job import DataSpec, Job
from tightfit.optim.schedule import total_steps
from tightfit.plan import Plan
from tightfit.planner.estimate import DEFAULT_STEPS
from tightfit.units import format_count, format_seconds

BYTES_PER_TOKEN = 4  # of plain text, about: what tokenizers of natural language and code reach
SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Length:
    """How long a job trains.

    steps  optimizer steps
    basis  what the steps follow from; empty for `train.steps`
    """

    steps: int
    basis: str = ""


def length_of(job: Job) -> Length:
    """The steps of the job's training.

    They are `train.steps`, or follow from `train.epochs` and the samples of the data. The tokens of
    text that is packed into sequences are estimated from its size, because counting them takes
    long. Where the data does not say, the steps are those that a search assumes.
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
    """(training samples of the data, the same in words); None if only reading all data would
    tell."""
    spec, about = job.data, ""
    share = spec.held_out if isinstance(spec, DataSpec) else 0.0
    try:
        if isinstance(spec, DataSpec) and spec.synthetic is not None:
            count = spec.samples
        elif isinstance(spec, DataSpec) and (spec.text or spec.jsonl):
            if spec.packing == "padded":
                return None
            size = open_text(spec, Columns(spec.field)).size_bytes
            count, about = size // BYTES_PER_TOKEN // spec.sequence_length, "about "
        elif isinstance(spec, DataSpec) and spec.python is None and spec.images is None:
            return None
        else:
            source = open_samples(job)
            if isinstance(source, UserStream):
                return None
            count = len(source)
    except InputError:  # the data is not here
        return None
    count = Order(count, share, job.train.seed).training_count
    return (count, f"{about}{count:,} samples") if count > 0 else None


@dataclass(frozen=True)
class WholeRun:
    """What a training takes with a plan, from its first step to its last.

    steps, steps_basis  as in Length
    seconds, hours      of the steps and of compiling
    device_hours        hours of all devices together
    samples, tokens     that are trained on; tokens only for language models
    price               of an hour of one device, in any currency; None if it was not given
    cost                price times device hours
    """

    steps: int
    steps_basis: str
    seconds: float
    hours: float
    device_hours: float
    samples: int
    tokens: float | None
    price: float | None
    cost: float | None

    def content(self) -> dict[str, Any]:
        """As `--json` prints it."""
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
    """The whole training of `job` with a predicted plan.

    predicted  the content of an Estimate: its `plan`, `time` and rates
    price      of an hour of one device
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
        tokens=None if tokens_per_s is None else tokens_per_s * step_s * length.steps,
        price=price,
        cost=None if price is None else price * device_hours,
    )


def check_price(option: str, price: float | None) -> None:
    """Raise InputError for a price that is no finite number of at least 0."""
    if price is not None and not 0 <= price < math.inf:
        raise InputError(f"{option} {price}", "is not a price", "give a number, of an hour of one device: 2.5")


def format_hours(hours: float, unit: str = "hours") -> str:
    return f"{hours:,.0f} {unit}" if hours >= 100 else f"{hours:.3g} {unit}"


def format_cost(cost: float) -> str:
    """A cost without a currency: with cents if it is small."""
    return f"{cost:,.0f}" if cost >= 1000 else f"{cost:.2f}" if cost >= 0.1 else f"{cost:.2g}"


__all__ = ["Length", "WholeRun", "check_price", "format_cost", "format_hours", "length_of", "whole_run"]
