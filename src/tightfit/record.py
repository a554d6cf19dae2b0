"""Record: what was measured when a plan ran. `Record.append_to` writes a record as one JSON line.

A record contains the job, the plan, the machine, the code versions and the time of every timed
step.
"""

from __future__ import annotations

import os
import platform
import statistics
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import Field

from tightfit.machine import Machine
from tightfit.plan import Plan
from tightfit.units import format_bytes, format_count
from tightfit.values import Value


class PeakBytes(Value):
    """Peak bytes of one device, predicted and measured. A value of None is not known.

    predicted, measured  bytes of live tensors; on CUDA, allocated bytes
    reserved             CUDA: bytes that torch's allocator has reserved
    process, predicted_process  resident set (RSS) of the process, measured and predicted; predicted
                         only on a CPU
    rows                 measured bytes of each kind of data, such as parameters or activations
    """

    predicted: int | None = None
    measured: int | None = None
    reserved: int | None = None
    process: int | None = None
    predicted_process: int | None = None
    rows: dict[str, int] = Field(default_factory=dict)


class BestCheckpoint(Value):
    """The best evaluation by the criterion train.keep_best, and its checkpoint.

    step        number of training steps before the evaluation
    metric      name of the metric of train.keep_best
    value       the value of this metric
    checkpoint  folder of the checkpoint
    """

    step: int
    metric: str
    value: float
    checkpoint: str


class Record(Value):
    """What was measured when a plan ran.

    code                versions of tightfit, torch, transformers, Python and the system
    step_s              seconds of every timed step; the first steps, which compile and are sampled
                        for memory, are not timed
    tokens_per_s, samples_per_s  medians over the timed steps; tokens only for language models
    mfu                 model FLOP/s (as in PaLM: attention over all pairs, without recomputation),
                        divided by the devices' published dense peak; None if no peak is published
    matrix_utilization  model FLOP/s divided by the rate that large matrix products achieve on the
                        devices
    compile_s           seconds of the first step beyond the median; None without compilation
    loss                (step, value) of every step of the training, counted from 1, including the
                        steps before a resume; the value is None if it is NaN or infinite. All other
                        figures are those since the last start
    evaluations         (step, {metric: value}) of every evaluation of the training, with steps
                        counted as in `loss`
    best                the best evaluation by train.keep_best; None without it
    stopped_early       why train.early_stopping ended the training; None if it did not
    attention           the model's attention kernel: flash, efficient, cudnn or math, as torch
                        chooses on CUDA; cpu-flash; blocked; or the name of an implementation
                        outside torch (eager); None if it is not known
    tokenizer           which tokenizer made the tokens, in words; None for data that is not text
    """

    job: dict[str, Any]
    plan: Plan
    machine: Machine
    code: dict[str, str]
    step_s: list[float]
    tokens_per_s: float | None
    samples_per_s: float | None
    peak_bytes: PeakBytes
    mfu: float | None
    compile_s: float | None
    loss: list[tuple[int, float | None]]
    predicted_step_s: float | None = None
    matrix_utilization: float | None = None
    skipped_steps: int = 0
    damaged_samples: int = 0
    parameters: int = 0
    attention: str | None = None
    evaluations: list[tuple[int, dict[str, float | None]]] = Field(default_factory=list)
    best: BestCheckpoint | None = None
    stopped_early: str | None = None
    tokenizer: str | None = None

    @property
    def median_step_s(self) -> float | None:
        return statistics.median(self.step_s) if self.step_s else None

    def content(self) -> dict[str, Any]:
        """Return all fields as JSON types, also those that are None, because other programs read
        these keys."""
        return self.model_dump(mode="json", by_alias=True)

    def append_to(self, path: str | Path) -> None:
        with Path(path).open("a") as file:
            file.write(self.to_json() + "\n")

    def __repr__(self) -> str:
        speed = (
            f"{format_count(self.tokens_per_s)} tokens/s"
            if self.tokens_per_s
            else f"{self.samples_per_s or 0:.3g} samples/s"
        )
        peak = format_bytes(self.peak_bytes.measured or self.peak_bytes.process or 0)
        last = self.loss[-1][1] if self.loss else None
        loss = "none" if last is None else f"{last:.4g}"
        return f"Record({self.plan}, {speed}, peak {peak}, loss {loss} after {len(self.loss)} steps)"

    __str__ = __repr__


def code_version() -> dict[str, str]:
    """Return the versions that a measurement depends on: a dict with the keys tightfit, torch,
    transformers, python and system."""
    names = ("tightfit", "torch", "transformers")
    return {
        **{name: _version(name) for name in names},
        "python": platform.python_version(),
        "system": " ".join(os.uname()[:3:2]),
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # run from the source tree
        return "not installed"
