"""Record: what was seen when a plan ran, one JSON line each. A measurement is plan + machine + code + every timed step."""

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
    """Peak bytes of one device: predicted and measured. On CPU `measured` is of live tensors and `process` the RSS beside it,
    which is predicted, too."""

    predicted: int | None = None
    measured: int | None = None
    reserved: int | None = None
    process: int | None = None
    predicted_process: int | None = None
    rows: dict[str, int] = Field(default_factory=dict)


class Record(Value):
    """What was seen when a plan ran.

    step_s  seconds of every timed step; the first steps, which compile and are looked into, are not timed
    mfu     model FLOPs (of PaLM: attention counts all pairs, recomputation nothing) in a second, over the devices' published
            dense peak; None where none is published. matrix_utilization: the same, over the rate that their large
            matrix products achieve
    loss    pairs of step (from 1) and value, None where it was no number; of the whole training, also of what a resumed
            run found done. The other figures are of the last stretch.
    attention  the kernel of the model's attention: flash, efficient, cudnn or math, as torch chooses them on CUDA, cpu-flash,
               blocked, or the name of an implementation that is not torch's (eager); None where it is not known
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

    @property
    def median_step_s(self) -> float | None:
        return statistics.median(self.step_s) if self.step_s else None

    def content(self) -> dict[str, Any]:
        """As `model_dump`, with nothing left out: outsiders read these keys."""
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
    """The versions that a measurement depends on."""
    names = ("tightfit", "torch", "transformers")
    return {
        **{name: _version(name) for name in names},
        "python": platform.python_version(),
        "system": " ".join(os.uname()[:3:2]),
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # run from its source
        return "not installed"
