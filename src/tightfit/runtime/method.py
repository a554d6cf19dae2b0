"""The interface of a method module: what each module in methods/ provides. A method is one
technique, such as ZeRO or activation recomputation.

The planner and the engine use a method only through this interface. The planner calls `cost`,
`defaults`, `candidates` and `leanest`. The engine calls `apply`.

A module always has

    FIELDS      the plan fields that belong to the method; each plan field belongs to exactly one
                method
    VARIANTS    values of plan fields that turn the method on, such as
                {"zero": 2, "dp_shard": 2}. The contract tests try each variant alone and together
                with those of other methods
    enabled     plan -> whether the plan uses the method
    cost        (ledger, plan, machine) -> the ledger (predicted memory and time) with the method's
                changes
    apply       (run, plan) -> the run with the method's changes
    docstring   a summary paragraph, then the parts Saves, Costs, When, Order and Source

A module may also have

    TRACED_FIELDS  the subset of FIELDS that changes which operations a forward and backward run.
                   The profiler applies such a method before it traces the model, and traces again
                   for each value of these fields.
    defaults       (job, machine) -> values that can be chosen without a prediction, each with its
                   reason. They are applied in the order in which they are yielded, as far as the
                   rules and the job permit them.
    candidates     (start, job, facts) -> for each field, the values that search tries; `start` is
                   the plan with all defaults
    leanest        like `candidates`, but the values that may take the least memory. Search combines
                   these if no plan made of the candidates fits.
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
    """A default value that a method chooses for a plan field which the user has not set.

    field   name of the plan field
    value   the chosen value
    reason  why the value was chosen, as `explain` prints it
    """

    field: str
    value: Any
    reason: str


@dataclass(frozen=True)
class SearchFacts:
    """Facts that the search for a plan passes to a method's `candidates` and `leanest`.

    is_complex       whether the model has complex parameters, which cannot be stored in fewer bits
    narrow_pays      a function that returns whether 16-bit weights are worth trying, because the plan
                     does not fit into memory without them or because they are estimated to be faster
    fuses_attention  a function that returns whether the model's attention is a fused kernel, which
                     does not save the scores of queries and keys for backward
    """

    is_complex: bool
    narrow_pays: Callable[[], bool]
    fuses_attention: Callable[[], bool] = lambda: False


def name_of(method: ModuleType) -> str:
    """Return the name of a method: the last part of its module's name, such as "zero" for
    tightfit.methods.zero."""
    return method.__name__.rpartition(".")[2]


def traced_fields(methods: Iterable[ModuleType]) -> tuple[str, ...]:
    """Return the names of the plan fields that change which operations a forward and backward run:
    the TRACED_FIELDS of all methods, in the order of the methods."""
    return tuple(field for method in methods for field in getattr(method, "TRACED_FIELDS", ()))


def defaults(methods: Iterable[ModuleType], job: Job, machine: Machine) -> Iterator[Default]:
    """Yield a `Default` (field, value, reason) for each plan field for which a method chooses a
    default value, in the order of the methods."""
    for method in methods:
        if hasattr(method, "defaults"):
            yield from method.defaults(job, machine)


def candidates(methods: Iterable[ModuleType], start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    """Return plan field -> the values of this field that search tries, in all combinations with the
    values of other fields. Each method proposes the values of its own fields.

    start  the plan with all defaults
    job    the job to plan for
    facts  what is known about the job's model and about which options are worth trying
    """
    return _proposed(methods, "candidates", start, job, facts)


def leanest(methods: Iterable[ModuleType], start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    """Return plan field -> the values that may take the least memory. Each method proposes the
    values of its own fields. Search combines them if no plan made of the `candidates` fits into
    memory.

    The arguments are the same as those of `candidates`.
    """
    return _proposed(methods, "leanest", start, job, facts)


def _proposed(
    methods: Iterable[ModuleType], what: str, start: Plan, job: Job, facts: SearchFacts
) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for method in methods:
        if hasattr(method, what):
            found |= getattr(method, what)(start, job, facts)
    return found
