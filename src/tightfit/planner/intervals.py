"""How far predictions were from measurements, and the intervals that follow from it.

An interval holds 9 of 10 measurements of the runs with which predictions were compared: its ends are
the 5 % and 95 % quantiles of measured / predicted. Each source of runs counts the same, because errors
within a source are alike. Runs are divided into classes, because the error depends on what is known
of the machine, on the number of devices and on the model. `intervals.json` holds the quantiles of each
class; `python -m benchmarks.intervals` derives them from the records of the benchmarks.

Example: of predicted step times on a measured CPU, 90 % of the measurements were between 0.86 and
1.51 times the prediction. A predicted step of 14.6 ms has the interval 12.6 to 22.0 ms.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

from tightfit.machine import Machine
from tightfit.plan import Plan

Quantity = Literal["time", "memory"]
FEWEST_RUNS = 15  # a class with fewer runs has no quantiles of its own


@dataclass(frozen=True)
class Interval:
    """Quantiles of measured / predicted of a class of runs.

    low, high  the 5 % and the 95 % quantile
    runs       number of runs of the class; 0 if no run was compared
    name       the class, such as "known machine, several devices"
    """

    low: float
    high: float
    runs: int
    name: str

    def around(self, predicted: float) -> tuple[float, float]:
        """Return the ends of the interval around a predicted figure. The prediction itself is
        always inside."""
        return min(self.low, 1.0) * predicted, max(self.high, 1.0) * predicted


def classes(quantity: Quantity, machine: Machine, plan: Plan, tokens: bool) -> list[str]:
    """Return the names of the classes of a prediction, the most special first.

    quantity  "time": the machine is measured (calibrated here), known (its products were measured
              or its peak is published) or guessed. "memory": the device is a cpu or a gpu
    tokens    whether samples are counted in tokens; otherwise they are images or the like
    """
    device = "cpu" if machine.device == "cpu" else "gpu"
    known = device if quantity == "memory" else f"{knowledge_of(machine)} machine"
    axis = "pipeline" if plan.pp > 1 else "several devices" if plan.devices > 1 else "one device"
    family = "tokens" if tokens else "no tokens"
    broader = [f"{known}, several devices"] if axis == "pipeline" else []
    return [f"{known}, {axis}, {family}", f"{known}, {axis}", *broader, known]


def knowledge_of(machine: Machine) -> Literal["measured", "known", "guessed"]:
    """Return how the machine's rates are known."""
    sources = {figure.source for figure in machine.matrix_flops_per_s.values()}
    if not sources or sources & {"estimated", "quick"}:
        return "guessed"
    return "measured" if "measured" in sources else "known"


def interval_of(quantity: Quantity, machine: Machine, plan: Plan, tokens: bool) -> Interval:
    """Return the interval of the most special class of a prediction for which there are enough
    runs. Arguments: see `classes`."""
    known = _table()[quantity]
    for name in classes(quantity, machine, plan, tokens):
        if name in known:
            row = known[name]
            return Interval(row["low"], row["high"], int(row["runs"]), name)
    return Interval(1.0, 1.0, 0, "no runs")


@cache
def _table() -> dict[str, dict[str, dict[str, float]]]:
    text = resources.files(__package__).joinpath("intervals.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, dict[str, float]]] = json.loads(text)
    return found
