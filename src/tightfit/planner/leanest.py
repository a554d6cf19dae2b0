"""Find the leanest plan: the one that needs the least memory, of all plans that the machine and the
job allow.

`search` looks for the fastest plan and skips many plans. Before it refuses a job, it calls
`leanest`, which combines all options that save memory. The bytes of parameters, optimizer states
and gradients are a lower bound on a plan's memory. With this bound, only few of the many
combinations have to be estimated.
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
from tightfit.plan import Plan
from tightfit.planner.candidates import data_parallel_layouts, is_legal
from tightfit.planner.estimate import Estimate, Estimator
from tightfit.runtime.method import SearchFacts, traced_fields
from tightfit.runtime.method import leanest as leanest_values

MAX_ESTIMATED = 32  # the most combinations that are estimated
# plans that need up to this factor more than the least memory are compared again, then with their
# allocators' bytes
CLOSE_FACTOR = 1.1
Options = Callable[[Estimator, Plan], dict[str, list[Any]]]  # returns the values to try, by plan field
MAX_WITH_ALLOCATOR = 6  # the most plans that are compared with their allocators' bytes


def leanest(estimator: Estimator, start: Plan, pins: dict[str, Any], only_fitting: bool = False) -> Estimate | None:
    """Return the estimate of the plan with the smallest ratio of needed to available memory. Return
    None if the model supports none of the plans.

    start         the plan that is varied; all plans that are tried have its tp, pp and cp
    pins          plan fields that the user fixed: they are not varied
    only_fitting  also return None if no plan can fit, because parameters, optimizer states and
                  gradients alone need more than the device's memory
    """
    start = start.replace(float8=pins.get("float8", "none"))  # float8 needs memory for its casts
    plans = list(_combinations(estimator, start, pins))
    bounds = {plan: estimator.memory_lower_bound(plan) for plan in plans}
    if only_fitting and min(bounds.values(), default=0.0) > estimator.limit_bytes:
        return None
    best: Estimate | None = None
    kernels: dict[str, Any] = {}
    for plan in sorted(plans, key=lambda plan: bounds[plan])[:MAX_ESTIMATED]:
        if best is None:  # kernels are chosen only once, because each of their values needs a trace
            best = _least(estimator, plan.replace(recompute=pins.get("recompute", "full")), pins, _kernel_options)
            kernels = {name: getattr(best.plan, name) for name in (*KERNELS, "micro_batch")} if best else {}
        elif bounds[plan] >= best.fullness * estimator.limit_bytes:
            break
        seen = _least(estimator, plan.replace(**kernels), pins, _untraced_options)
        best = min((one for one in (best, seen) if one is not None), key=_fullness, default=None)
    if best is None or estimator.include_allocator(best).fits:
        return best
    pinned = {**pins, "micro_batch": best.plan.micro_batch}
    again = [best, *_estimates(estimator, best.plan, pinned, _kernel_and_compile_options)]
    near = sorted((one for one in again if _fullness(one) <= (CLOSE_FACTOR * best.fullness, math.inf)), key=_fullness)
    return min((estimator.include_allocator(one) for one in near[:MAX_WITH_ALLOCATOR]), key=_fullness)


def _fullness(one: Estimate) -> tuple[float, float]:
    """Return a sort key that puts the plan that needs the smallest share of the available memory
    first. Of plans with equal shares, the one with the smallest peak is first."""
    return one.fullness, one.peak_bytes


STATES = ("precision", "states", "update_in_backward", "rounding")  # dtypes of parameters and states
KERNELS = tuple(field for field in traced_fields(METHODS) if field not in STATES)  # each value needs a trace


def _values(estimator: Estimator, start: Plan) -> dict[str, list[Any]]:
    """Return the values to try for each plan field, by field name: those that the methods propose
    because they may need the least memory."""
    facts = SearchFacts(estimator.profiler.is_complex, lambda: True)
    return leanest_values(METHODS, start, estimator.job, facts)


def _kernel_options(estimator: Estimator, start: Plan) -> dict[str, list[Any]]:
    """Return the values to try, by field name, for the micro-batch and for the plan fields that
    choose kernels (KERNELS), such as attention. Each value of these fields needs a new trace of the
    model."""
    values = _values(estimator, start)
    return {
        **{name: values[name] for name in KERNELS if name in values},
        "micro_batch": [None if start.update_in_backward else 1],
    }


def _kernel_and_compile_options(estimator: Estimator, start: Plan) -> dict[str, list[Any]]:
    """Return the values to try, by field name: those of `_kernel_options` (the micro-batch, and the
    plan fields that choose kernels, such as attention), and those of compile. compile has the
    values "none" and "block" if the machine can compile."""
    compiled = {"compile": ["none", "block"]} if can_compile(estimator.machine) else {}
    return {**_kernel_options(estimator, start), **compiled}


def _untraced_options(estimator: Estimator, start: Plan) -> dict[str, list[Any]]:
    """Return the values to try, by field name, for the fields that set no dtypes and need no new
    trace of the model."""
    known = {*STATES, *KERNELS}
    return {name: values for name, values in _values(estimator, start).items() if name not in known}


def _least(estimator: Estimator, start: Plan, pins: dict[str, Any], options: Options) -> Estimate | None:
    """Return the estimate of the variant of `start` that needs the least memory; None if the model
    supports none.

    options  a function that returns the values to try, by plan field; the variants combine these
             values
    pins     plan fields that the user fixed: they are not varied
    """
    return min(_estimates(estimator, start, pins, options), key=_fullness, default=None)


def _estimates(estimator: Estimator, start: Plan, pins: dict[str, Any], options: Options) -> list[Estimate]:
    """Return the estimates of the variants of `start` that the job permits and the model supports.

    options  a function that returns the values to try, by plan field; each combination of these
             values is a variant
    pins     plan fields that the user fixed: they are not varied
    """
    open_ = {name: values for name, values in options(estimator, start).items() if name not in pins}
    found: list[Estimate] = []
    for values in itertools.product(*open_.values()):
        plan = start.replace(**dict(zip(open_, values, strict=True)))
        # with one sample per device, a micro-batch of 1 is the same as None, which is tried too
        whole = plan.micro_batch == 1 == plan.share_of(estimator.job.train.batch)
        if (whole and "micro_batch" in open_) or not is_legal(plan, estimator.job, estimator.machine.device):
            continue
        if plan.recompute == "none" and any(one.ledger.blocks for one in found):
            continue
        try:
            found.append(estimator.estimate(plan))
        except InputError:  # the model does not support it
            continue
    return found


def _combinations(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> Iterator[Plan]:
    """Yield the permitted plans that differ from `start` in the dtypes of parameters, optimizer
    states and gradients, and in where these are stored (sharded, offloaded). Fields in `pins`
    (field -> value) are not varied."""
    job, machine = estimator.job, estimator.machine
    values = _values(estimator, start)
    options = {name: [getattr(start, name)] if name in pins else values[name] for name in STATES}
    for spread, offload, *chosen in itertools.product(
        data_parallel_layouts(machine, start, pins),
        offloads(estimator, pins),
        *options.values(),
    ):
        plan = start.replace(**spread, **offload, **dict(zip(options, chosen, strict=True)))
        lossy = plan.precision == "bf16-true" and plan.loses_small_updates
        if lossy and "rounding" not in pins and rounding_of(job) != "nearest":
            continue  # rounding to nearest loses small updates: use it only if allowed or pinned
        if is_legal(plan, job, machine.device):
            yield plan


def offloads(estimator: Estimator, pins: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the ways to offload tensors that a search tries, each as plan fields, such as
    {"offload": ("states",), "offload_to": "host"}. The first item is {}: nothing is offloaded.

    On a CPU, tensors are offloaded to disk. Returns [{}] if the job does not allow offload, or if
    the user has fixed the field `offload` (it is in `pins`).
    """
    if "offload" not in estimator.job.allowed or "offload" in pins:
        return [{}]
    on_cpu = estimator.machine.device == "cpu"
    where: dict[str, Any] = {"offload_to": "disk" if on_cpu else "host"}
    if on_cpu and "allocator" not in pins:
        where["allocator"] = "lean"
    return [{}, *({"offload": words, **where} for words in combinations(estimator.machine.device))]
