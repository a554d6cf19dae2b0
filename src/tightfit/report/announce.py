"""Chooses the plan of a command and prints it with its reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.plan import Plan
from tightfit.report.command_inputs import check_inputs
from tightfit.report.heartbeat import never_silent
from tightfit.rules import needed_permissions


def choose_and_announce(
    job: Job, machine: Machine, pins: dict[str, Any], say: Callable[[str], None]
) -> tuple[dict[str, Any] | None, Plan]:
    """Choose the plan, print it with the reasons, and check that as many processes run as it needs.

    pins  the plan fields that the user has fixed, by name
    say   prints a line

    Returns (the plan's prediction or None, the plan). Errors: see `planner.choose.choose_plan`.
    """
    check_inputs(job)
    say(f"job      {job!r}\nmachine  {machine!r}")
    with never_silent(say, "predicting plans"):
        from tightfit.planner.choose import choose_plan

        choice = choose_plan(job, machine, pins)
    if choice.untraced:
        say(f"predict  not possible: {choice.untraced}")
    announce(say, job, choice.plan, choice.reasons, machine)
    for note in choice.predicted["notes"] if choice.predicted is not None else ():
        say(f"advice   {note}")
    from tightfit.distributed.processes import check_world

    check_world(choice.plan)
    return choice.predicted, choice.plan


def announce(say: Callable[[str], None], job: Job, plan: Plan, reasons: dict[str, str], machine: Machine) -> None:
    """Print the plan, the reason for each field that tightfit chose, the changes of numerics that
    the plan makes, or that would make use of the machine's fp16, and the fields of the job that
    have no effect.

    say      prints a line
    reasons  the reason for each chosen plan field, by name
    """
    from tightfit.methods import precision

    say("plan     " + (", ".join(f"{name}={value}" for name, value in plan.differences().items()) or "reference"))
    for name, reason in reasons.items():
        say(f"           {name}={getattr(plan, name)}: {reason}")
    changed = sorted(needed_permissions(plan))
    if changed:
        why = "the default of `allow`; write allow: [] to keep fp32" if job.allow is None else "as the job allows"
        say(f"         changes numerics: {', '.join(changed)} ({why})")
    for hint in [*precision.advice(plan, job, machine), *job.train.without_effect]:
        say(f"advice   {hint}")


def tensor_bytes_of(predicted: dict[str, Any]) -> float:
    """Return the predicted bytes of tensors at the peak: the sum over all kinds of memory except
    runtime and allocator.

    predicted  a plan's prediction; its "memory" has the bytes of each kind, such as parameters and
               activations
    """
    return sum(size for row, size in predicted["memory"].items() if row not in ("peak", "runtime", "allocator"))
