"""Method: what a module in methods/ provides. Everything that the planner and the engine know of a method is read from its module.

A module always has

    FIELDS      the plan fields that are the method's own; each field of a plan belongs to exactly one method
    VARIANTS    plan fields that turn the method on, which the contract tests try alone and in pairs
    wanted      plan -> whether the plan uses the method
    cost        (ledger, plan, machine) -> the ledger with what the method changes
    apply       (run, plan) -> the run with what the method changes
    docstring   with the parts Saves, Costs, When, Order and Source

and where it needs them

    TRACED_FIELDS  those of FIELDS that change which operations a forward and backward run. The profiler applies such a
                   method before it traces the model, and traces again for each of their values.
    defaults       (job, machine) -> the values that need no prediction, each with its reason. They are taken in the order in
                   which they come, as far as the rules and the job admit them.
    candidates     (start, job, facts) -> by field, the values that search tries, `start` being the plan with all defaults
    leanest        the same for the values that may take the least memory: where nothing fits, search combines these
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.plan import Plan


class Default(NamedTuple):
    """A value for a field that nobody pinned, and why it is chosen, as `explain` prints it."""

    field: str
    value: Any
    reason: str


@dataclass(frozen=True)
class SearchFacts:
    """What search knows of a job when it asks a method for candidates.

    is_complex   whether the model has complex parameters, which cannot be kept in fewer bits
    narrow_pays  whether 16-bit weights may win: the plan does not fit without them, or they are estimated to be faster.
                 It takes an estimate, so it is a function.
    """

    is_complex: bool
    narrow_pays: Callable[[], bool]


def name_of(method: ModuleType) -> str:
    return method.__name__.rpartition(".")[2]


def traced_fields(methods: Iterable[ModuleType]) -> tuple[str, ...]:
    """The plan fields that change which operations run, in the order of the methods."""
    return tuple(field for method in methods for field in getattr(method, "TRACED_FIELDS", ()))


def defaults(methods: Iterable[ModuleType], job: Job, machine: Machine) -> Iterator[Default]:
    """What every method chooses where no prediction is needed, in the order of the methods."""
    for method in methods:
        if hasattr(method, "defaults"):
            yield from method.defaults(job, machine)


def candidates(methods: Iterable[ModuleType], start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    """By plan field, the values that search combines."""
    return _proposed(methods, "candidates", start, job, facts)


def leanest(methods: Iterable[ModuleType], start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    """By plan field, the values that may take the least memory."""
    return _proposed(methods, "leanest", start, job, facts)


def _proposed(
    methods: Iterable[ModuleType], what: str, start: Plan, job: Job, facts: SearchFacts
) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for method in methods:
        if hasattr(method, what):
            found |= getattr(method, what)(start, job, facts)
    return found
