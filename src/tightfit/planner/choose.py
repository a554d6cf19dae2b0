"""Choose the plan with which a job is trained, for the commands that train."""

from __future__ import annotations

from typing import Any, NamedTuple

from tightfit.errors import InputError, Untraceable
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.plan import Plan
from tightfit.planner.defaults import complete
from tightfit.planner.estimator import Estimator
from tightfit.planner.search import search_or_estimate


class Choice(NamedTuple):
    """A chosen plan.

    plan       the plan
    predicted  its prediction, as the content of an `Estimate`; None if no plan can be predicted
    reasons    plan field -> why it has its value, for each field that was not pinned
    untraced   why no plan can be predicted, if it is because the model cannot be traced; else ""
    """

    plan: Plan
    predicted: dict[str, Any] | None
    reasons: dict[str, str]
    untraced: str = ""


def choose_plan(job: Job, machine: Machine, pins: dict[str, Any]) -> Choice:
    """Choose the fastest plan that fits the machine and has the pinned values.

    pins  the plan fields that the user has fixed, by name

    If no plan can be predicted, for example because the model cannot be traced, the fields that are
    not pinned get their defaults. Raises DoesNotFit if no plan fits, and InputError if the pins break
    a rule or cannot be combined.
    """
    start, reasons = complete(job, machine, pins)
    try:
        found = search_or_estimate(Estimator(job, machine), pins)[0]
        content = found.content()
    except InputError as error:  # errors of the job or plan are raised by build
        return Choice(start, None, reasons, error.found if isinstance(error, Untraceable) else "")
    kept = {name: why for name, why in reasons.items() if getattr(found.plan, name) == getattr(start, name)}
    for name in Plan.field_names():
        if name not in pins and getattr(found.plan, name) != getattr(start, name):
            kept[name] = "predicted to be the fastest plan that fits"
    return Choice(found.plan, content, kept)


__all__ = ["Choice", "choose_plan"]
