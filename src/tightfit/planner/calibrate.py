"""Calibrate: a machine's few efficiency numbers from runs that were timed. Nothing else is fitted.

Four numbers for a machine: what share of the rates that it is known for its products, its memory, its launches and its links
reach in whole training steps. They start from 1 and leave it only as far as the runs pull them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.ledger import Ledger
from tightfit.machine import Figure, Machine
from tightfit.planner.estimate import fold
from tightfit.planner.profile import Profiler
from tightfit.planner.time import EFFICIENCIES, Clock
from tightfit.record import Record

PRIOR = 0.02  # how much a number's own distance from 1 weighs against the mean error of the runs, both as logarithms
STEPS = (0.2, 0.05, 0.01)  # by which a number is moved, as logarithms, ever finer
MOST = math.log(4.0)  # a number that far from 1 is no efficiency but a mistake
ROUNDS = 60


@dataclass(frozen=True)
class Timed:
    """A run: its ledger, the seconds that its step took, and the machine as each of its processes had it."""

    ledger: Ledger
    seconds: float
    machine: Machine


def refine(machine: Machine, seen: Sequence[Timed]) -> Machine:
    """`machine` with the efficiencies under which the ledgers' steps take the seconds that were measured."""
    best = dict.fromkeys(EFFICIENCIES, 0.0)
    error = _error(seen, best)
    for step in STEPS:
        for _ in range(ROUNDS):
            tried = [
                {**best, name: best[name] + sign * step}
                for name in EFFICIENCIES
                for sign in (1, -1)
                if abs(best[name] + sign * step) <= MOST
            ]
            found = min(tried, key=lambda one: _error(seen, one))
            if _error(seen, found) >= error:
                break
            best, error = found, _error(seen, found)
    detail = f"of {len(seen)} runs, mean error {math.sqrt(_misfit(seen, best)):.0%}"
    return _with(machine, best, detail)


def refine_from_records(machine: Machine, records: Sequence[Record]) -> Machine:
    """As `refine`, of runs on this machine that left their records. Those of pipelines are left out: how long a device waits for
    others says nothing of rates. Raises InputError for a job that cannot be traced."""
    from tightfit.job import Job

    seen = []
    for record in records:
        seconds = record.median_step_s
        if seconds is not None and record.machine.name == machine.name and record.plan.pp == 1:
            profiler = Profiler(Job.parse(record.job), machine.device)
            had = machine.of_processes(record.machine.devices_per_node, record.machine.nodes)
            seen.append(Timed(fold(profiler, record.plan, had), seconds, had))
    return refine(machine, seen) if seen else machine


def _with(machine: Machine, logarithms: dict[str, float], detail: str = "") -> Machine:
    figures = {
        name: Figure(value=math.exp(value), source="measured", detail=detail) for name, value in logarithms.items()
    }
    return machine.replace(efficiency=figures)


def _misfit(seen: Sequence[Timed], logarithms: dict[str, float]) -> float:
    clocks = {id(one.machine): Clock(_with(one.machine, logarithms)) for one in seen}
    errors = (math.log(clocks[id(one.machine)].step_time(one.ledger).step_s / one.seconds) ** 2 for one in seen)
    return sum(errors) / len(seen)


def _error(seen: Sequence[Timed], logarithms: dict[str, float]) -> float:
    return _misfit(seen, logarithms) + PRIOR * sum(value**2 for value in logarithms.values())


__all__ = ["Timed", "refine", "refine_from_records"]
