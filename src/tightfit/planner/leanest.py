"""Leanest: the plan that needs the least memory, of all that a machine and a job admit.

Search chooses the fastest plan and bounds what it looks at; before it refuses, this looks at all that saves memory. What a plan's
weights, states and gradients alone need bounds it from below, so few of the many combinations are estimated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from tightfit.capabilities import can_compile
from tightfit.errors import InputError
from tightfit.methods import METHODS
from tightfit.methods.offload import combinations
from tightfit.methods.precision import rounding_of
from tightfit.methods.protocol import SearchFacts, traced_fields
from tightfit.methods.protocol import leanest as leanest_values
from tightfit.plan import Plan
from tightfit.planner.candidates import is_legal, spreads
from tightfit.planner.estimate import Estimate, Estimator

MOST_LOOKED_AT = 32  # combinations of which estimates are made
NEAR = 1.1  # times what the leanest takes: what an allocator adds to others may be less
Options = Callable[[Estimator, Plan], dict[str, list[Any]]]  # what to try, by plan field
MOST_SETTLED = 6  # plans of which that is found out


def leanest(estimator: Estimator, start: Plan, pins: dict[str, Any], only_fitting: bool = False) -> Estimate | None:
    """The estimate of the plan that takes the smallest share of what is there, of those that keep `pins` and cut the model among
    devices as `start` does; None where the model can have none.

    only_fitting  None, too, where even weights, states and gradients alone do not fit
    """
    start = start.replace(float8=pins.get("float8", "none"))  # its casts take memory
    plans = list(_combinations(estimator, start, pins))
    bounds = {plan: estimator.least_bytes(plan) for plan in plans}
    if only_fitting and min(bounds.values(), default=0.0) > estimator.limit_bytes:
        return None
    best: Estimate | None = None
    kernels: dict[str, Any] = {}
    for plan in sorted(plans, key=lambda plan: bounds[plan])[:MOST_LOOKED_AT]:
        if best is None:  # kernels are chosen once, for each choice takes a trace
            best = _least(estimator, plan.replace(recompute=pins.get("recompute", "full")), pins, _kernels)
            kernels = {name: getattr(best.plan, name) for name in (*KERNELS, "micro_batch")} if best else {}
        elif bounds[plan] >= best.fullness * estimator.limit_bytes:
            break
        seen = _least(estimator, plan.replace(**kernels), pins, _sizes)
        best = min((one for one in (best, seen) if one is not None), key=_taken, default=None)
    if best is None or estimator.settle(best).fits:
        return best
    pinned = {**pins, "micro_batch": best.plan.micro_batch}
    again = [best, *_estimates(estimator, best.plan, pinned, _kernels_and_compiled)]
    near = sorted((one for one in again if _taken(one) <= (NEAR * best.fullness, math.inf)), key=_taken)
    return min((estimator.settle(one) for one in near[:MOST_SETTLED]), key=_taken)


def _taken(one: Estimate) -> tuple[float, float]:
    return one.fullness, one.peak_bytes


STATES = ("precision", "states", "update_in_backward", "rounding")  # fields that decide how wide weights and states are
KERNELS = tuple(field for field in traced_fields(METHODS) if field not in STATES)  # each value of these takes a trace


def _values(estimator: Estimator, start: Plan) -> dict[str, list[Any]]:
    """By plan field, what may take the least memory, as the methods propose it."""
    facts = SearchFacts(estimator.profiler.is_complex, lambda: True)
    return leanest_values(METHODS, start, estimator.job, facts)


def _kernels(estimator: Estimator, start: Plan) -> dict[str, list[Any]]:
    values = _values(estimator, start)
    return {
        **{name: values[name] for name in KERNELS if name in values},
        "micro_batch": [None if start.update_in_backward else 1],
    }


def _kernels_and_compiled(estimator: Estimator, start: Plan) -> dict[str, list[Any]]:
    compiled = {"compile": ["none", "block"]} if can_compile(estimator.machine) else {}
    return {**_kernels(estimator, start), **compiled}


def _sizes(estimator: Estimator, start: Plan) -> dict[str, list[Any]]:
    """Of what neither decides widths nor takes a trace."""
    known = {*STATES, *KERNELS}
    return {name: values for name, values in _values(estimator, start).items() if name not in known}


def _least(estimator: Estimator, start: Plan, pins: dict[str, Any], options: Options) -> Estimate | None:
    """The leanest of the estimates of `start` with such options; None where the model can have none."""
    return min(_estimates(estimator, start, pins, options), key=_taken, default=None)


def _estimates(estimator: Estimator, start: Plan, pins: dict[str, Any], options: Options) -> list[Estimate]:
    """The estimates of `start` with such options that the model can have."""
    open_ = {name: values for name, values in options(estimator, start).items() if name not in pins}
    found: list[Estimate] = []
    for values in itertools.product(*open_.values()):
        plan = start.replace(**dict(zip(open_, values, strict=True)))
        whole = plan.micro_batch == 1 == plan.share_of(estimator.job.train.batch)  # None is tried, which is the same
        if (whole and "micro_batch" in open_) or not is_legal(plan, estimator.job, estimator.machine.device):
            continue
        if plan.recompute == "none" and any(one.ledger.blocks for one in found):
            continue
        try:
            found.append(estimator.estimate(plan))
        except InputError:  # what this model cannot have
            continue
    return found


def _combinations(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> Iterator[Plan]:
    """The plans that differ from `start` in where weights, states and gradients are, and in how wide they are."""
    job, machine = estimator.job, estimator.machine
    values = _values(estimator, start)
    options = {name: [getattr(start, name)] if name in pins else values[name] for name in STATES}
    for spread, offload, *chosen in itertools.product(
        spreads(machine, start, pins),
        offloads(estimator, pins),
        *options.values(),
    ):
        plan = start.replace(**spread, **offload, **dict(zip(options, chosen, strict=True)))
        lossy = plan.precision == "bf16-true" and plan.rounding == "nearest"
        if lossy and "rounding" not in pins and rounding_of(job) != "nearest":
            continue  # search takes it only where the job allows it, or the plan asks for it
        if is_legal(plan, job, machine.device):
            yield plan


def offloads(estimator: Estimator, pins: dict[str, Any]) -> list[dict[str, Any]]:
    """What may be offloaded, as the plan's fields: nothing, or what the job allows."""
    if "offload" not in estimator.job.allowed or "offload" in pins:
        return [{}]
    on_cpu = estimator.machine.device == "cpu"
    where: dict[str, Any] = {"offload_to": "disk" if on_cpu else "host"}
    if on_cpu and "allocator" not in pins:
        where["allocator"] = "lean"
    return [{}, *({"offload": words, **where} for words in combinations(estimator.machine.device))]
