"""Leanest: the plan that needs the least memory, of all that a machine and a job admit.

Search chooses the fastest plan and bounds what it looks at; before it refuses, this looks at all that saves memory. What a plan's
weights, states and gradients alone need bounds it from below, so few of the many combinations are estimated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from tightfit.errors import InputError
from tightfit.methods.loss import CHUNK
from tightfit.plan import Plan
from tightfit.planner.candidates import is_legal, rounding_of, spreads
from tightfit.planner.complete import can_compile
from tightfit.planner.estimate import Estimate, Estimator

OFFLOADED: dict[str, tuple[tuple[str, ...], ...]] = {  # what is tried where nothing else fits
    "cuda": (
        ("states",),
        ("states", "activations"),
        ("states", "gradients"),
        ("states", "gradients", "parameters"),
        ("states", "gradients", "parameters", "activations"),
    ),
    "cpu": (("states",), ("states", "gradients", "parameters"), ("states", "gradients", "parameters", "activations")),
}
PRECISIONS = ("fp32", "bf16-mixed", "fp16-mixed", "bf16-true", "fp16-true")
MOST_LOOKED_AT = 32  # combinations of which estimates are made
NEAR = 1.1  # times what the leanest takes: what an allocator adds to others may be less
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
            best = _least(estimator, plan.replace(recompute=pins.get("recompute", "full")), pins, _KERNELS)
            kernels = {name: getattr(best.plan, name) for name in _KERNELS} if best else {}
        elif bounds[plan] >= best.fullness * estimator.limit_bytes:
            break
        seen = _least(estimator, plan.replace(**kernels), pins, _SIZES)
        best = min((one for one in (best, seen) if one is not None), key=_taken, default=None)
    if best is None or estimator.settle(best).fits:
        return best
    compiled = {"compile": lambda plan: ["none", "block"]} if can_compile(estimator.machine) else {}
    pinned = {**pins, "micro_batch": best.plan.micro_batch}
    again = [best, *_estimates(estimator, best.plan, pinned, {**_KERNELS, **compiled})]
    near = sorted((one for one in again if _taken(one) <= (NEAR * best.fullness, math.inf)), key=_taken)
    return min((estimator.settle(one) for one in near[:MOST_SETTLED]), key=_taken)


def _taken(one: Estimate) -> tuple[float, float]:
    return one.fullness, one.peak_bytes


_KERNELS: dict[
    str, Callable[[Plan], list[Any]]
] = {  # what decides which operations run: as it is, or as may take less memory
    "chunked_loss": lambda plan: [None if plan.chunked_loss is None else min(plan.chunked_loss, CHUNK), None],
    "compile": lambda plan: [plan.compile, "none"],
    "attention": lambda plan: [plan.attention, "sdpa"],
    "micro_batch": lambda plan: [None if plan.update_in_backward else 1],
}
_SIZES: dict[str, Callable[[Plan], list[Any]]] = {
    "recompute": lambda plan: ["full", "sqrt", "none"],  # none: for a model without repeated blocks
    "micro_batch": lambda plan: [None, 1],  # one micro-batch alone adds to no gradients
    "sequence_parallel": lambda plan: [plan.sequence_parallel, plan.tp > 1],
}


def _least(
    estimator: Estimator, start: Plan, pins: dict[str, Any], options: dict[str, Callable[[Plan], list[Any]]]
) -> Estimate | None:
    """The leanest of the estimates of `start` with such options; None where the model can have none."""
    return min(_estimates(estimator, start, pins, options), key=_taken, default=None)


def _estimates(
    estimator: Estimator, start: Plan, pins: dict[str, Any], options: dict[str, Callable[[Plan], list[Any]]]
) -> list[Estimate]:
    """The estimates of `start` with such options that the model can have."""
    open_ = {name: list(dict.fromkeys(values(start))) for name, values in options.items() if name not in pins}
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
    widths = [width for width in ("bf16", "8-bit", "4-bit") if f"{width}-states" in job.allowed]
    options: dict[str, list[Any]] = {
        "precision": [start.precision] if estimator.profiler.is_complex else [start.precision, *PRECISIONS],
        "states": ["fp32"] if estimator.profiler.is_complex else ["fp32", *widths],
        "update_in_backward": [False, True],
        "rounding": [start.rounding, rounding_of(job), "kahan", "stochastic"],
    }
    options = {name: [getattr(start, name)] if name in pins else values for name, values in options.items()}
    for spread, offload, *values in itertools.product(
        spreads(machine, start, pins),
        offloads(estimator, pins),
        *(list(dict.fromkeys(values)) for values in options.values()),
    ):
        plan = start.replace(**spread, **offload, **dict(zip(options, values, strict=True)))
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
    return [{}, *({"offload": words, **where} for words in OFFLOADED[estimator.machine.device])]
