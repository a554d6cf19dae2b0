"""Fit four efficiencies of a machine to timed training runs. Nothing else is fitted.

An efficiency is the share of a measured or published rate that entire training steps reach. There
is one for matrix products, one for memory, one for launches and one for links. The fit begins with
1 for each. A penalty keeps each near 1, so that a fit to few runs changes little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.cost.ledger import Ledger
from tightfit.machine import Figure, Machine
from tightfit.planner.estimator import estimated_ledger
from tightfit.planner.time_model import EFFICIENCIES, TimeModel
from tightfit.planner.tracing.profiler import Profiler
from tightfit.record import Record

# weight of the penalty. The fit minimises the runs' mean squared error of log(seconds) plus PRIOR
# times the sum of the squared logarithms of the efficiencies
PRIOR = 0.02
STEP_SIZES = (0.2, 0.05, 0.01)  # changes of an efficiency's logarithm that the search tries
MAX_LOGARITHM = math.log(4.0)  # a larger factor than 4 must come from an error elsewhere
MAX_ROUNDS = 60  # the most changes that the search makes for each step size


@dataclass(frozen=True)
class TimedRun:
    """A training run whose steps were timed.

    ledger   the ledger of the run's plan, from which its time is predicted
    seconds  the measured seconds per step
    machine  the machine, with as many devices as the run used
    """

    ledger: Ledger
    seconds: float
    machine: Machine


def fit_efficiencies(machine: Machine, runs: Sequence[TimedRun]) -> Machine:
    """Return `machine` with the four efficiencies with which the predicted seconds per step are
    closest to the measured ones. An efficiency is the share of one of the machine's rates that
    entire training steps reach.

    runs  the timed runs, at least one

    The efficiencies are found by coordinate descent on their logarithms.
    """
    best = dict.fromkeys(EFFICIENCIES, 0.0)
    error = _objective(runs, best)
    for step in STEP_SIZES:
        for _ in range(MAX_ROUNDS):
            tried = [
                {**best, name: best[name] + sign * step}
                for name in EFFICIENCIES
                for sign in (1, -1)
                if abs(best[name] + sign * step) <= MAX_LOGARITHM
            ]
            found = min(tried, key=lambda one: _objective(runs, one))
            if _objective(runs, found) >= error:
                break
            best, error = found, _objective(runs, found)
    detail = f"of {len(runs)} runs, mean error {math.sqrt(_mean_squared_error(runs, best)):.0%}"
    return _with_efficiencies(machine, best, detail)


def fit_machine(machine: Machine, records: Sequence[Record]) -> Machine:
    """Return `machine` with the efficiencies that fit the recorded runs on this machine best. An
    efficiency is the share of one of the machine's rates that entire training steps reach.

    records  recorded runs. Runs on other machines are ignored, and so are runs with a pipeline,
             whose idle time says nothing about rates. If no run is left, the machine is returned
             unchanged

    Raises InputError if a job cannot be traced.
    """
    from tightfit.job import Job

    runs = []
    for record in records:
        seconds = record.median_step_s
        if seconds is not None and record.machine.name == machine.name and record.plan.pp == 1:
            profiler = Profiler(Job.parse(record.job), machine.device)
            had = machine.per_process(record.machine.devices_per_node, record.machine.nodes)
            runs.append(TimedRun(estimated_ledger(profiler, record.plan, had), seconds, had))
    return fit_efficiencies(machine, runs) if runs else machine


def _with_efficiencies(machine: Machine, logarithms: dict[str, float], detail: str = "") -> Machine:
    figures = {
        name: Figure(value=math.exp(value), source="measured", detail=detail) for name, value in logarithms.items()
    }
    return machine.replace(efficiency=figures)


def _mean_squared_error(runs: Sequence[TimedRun], logarithms: dict[str, float]) -> float:
    clocks = {id(run.machine): TimeModel(_with_efficiencies(run.machine, logarithms)) for run in runs}
    errors = (math.log(clocks[id(run.machine)].step_time(run.ledger).step_s / run.seconds) ** 2 for run in runs)
    return sum(errors) / len(runs)


def _objective(runs: Sequence[TimedRun], logarithms: dict[str, float]) -> float:
    return _mean_squared_error(runs, logarithms) + PRIOR * sum(value**2 for value in logarithms.values())


__all__ = ["TimedRun", "fit_efficiencies", "fit_machine"]
