"""Estimate plans with tensor, pipeline and context parallelism.

Each combination of their degrees needs traces of its own. So the combinations are tried in the order
of a lower bound on their time, until no other can be faster than the fastest plan so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from tightfit.errors import InputError
from tightfit.plan import Plan
from tightfit.planner.candidates import data_parallel_layouts, is_legal
from tightfit.planner.estimate import Estimate
from tightfit.planner.estimator import Estimator
from tightfit.planner.finalists import MAX_OVERESTIMATE
from tightfit.planner.leanest import leanest_with_parallelism, surely_exceeds_memory
from tightfit.planner.parallelism import by_lower_bound, parallelism_fields, schedules, with_sequence_parallel
from tightfit.planner.variants import estimate_candidates

MIN_SAVING = 0.1  # share of a step's time that model or sequence parallelism must be able to save
MAX_EAGER_FACTOR = 1.4  # a plan may need this many times the memory without compile
Result = TypeVar("Result")


def estimate_parallelism(
    estimator: Estimator, start: Plan, pins: dict[str, Any], known: list[Estimate]
) -> list[Estimate]:
    """Return estimates of plans with tensor, pipeline or context parallelism.

    The plans are tried in the order of a lower bound on their seconds per step, the smallest first.
    The search stops when no remaining plan can be faster than the best plan so far.

    start  the plan to which the parallelism is added
    pins   plan fields that the user fixed: they are not varied
    known  estimates of plans without this parallelism
    """
    found: list[Estimate] = []
    in_vain: list[dict[str, int]] = []  # degrees whose plans cannot fit
    # from this tp degree on, tensor-parallel communication takes too long, also in a pipeline
    too_many_tp = math.inf
    for bound_s, sizes in by_lower_bound(estimator, start, pins):
        best_s = (1 - MIN_SAVING) * min((one.time.step_s for one in (*known, *found) if one.fits), default=math.inf)
        if bound_s > best_s or ("cp" in sizes and math.isfinite(best_s)):
            break
        if "cp" in sizes and not context_parallelism_may_fit(estimator, start, pins, sizes, [*known, *found]):
            in_vain.append(sizes)
            continue
        if sizes.get("tp", 1) >= too_many_tp:
            continue
        estimates = estimate_degrees(estimator, start, pins, sizes, best_s)
        if not estimates and math.isfinite(best_s) and sizes.keys() == {"tp"}:
            too_many_tp = sizes["tp"]
        found += estimates
    tried = [*known, *found]
    if in_vain and tried and not any(one.fits for one in tried):
        found += _leanest_in_vain(estimator, pins, in_vain, tried)
    return found


def context_parallelism_may_fit(
    estimator: Estimator, start: Plan, pins: dict[str, Any], sizes: dict[str, int], others: list[Estimate]
) -> bool:
    """Return whether plans with context parallelism may fit, so that they are worth their traces.

    Context parallelism divides only activations and temporaries. All other memory is that of the
    same plan without it, over the same devices.

    start   the plan to which the degrees are added
    pins    plan fields that the user fixed
    sizes   the degrees as plan fields, such as {"cp": 4}
    others  all estimates so far. Those without context parallelism tell the other memory
    """
    limit, tp = estimator.limit_bytes, sizes.get("tp", start.tp)
    alike = [
        other
        for other in others
        if (other.plan.tp, other.plan.pp, other.plan.cp) == (tp, 1, 1) and not other.plan.offload
    ]
    kinds = {(other.plan.precision, other.plan.states) for other in others} | {(start.precision, start.states)}
    wide = start.replace(**{name: size for name, size in sizes.items() if name != "cp"})
    for layout in data_parallel_layouts(estimator.machine, wide, pins):
        for precision, states in kinds:
            plan = wide.replace(**layout, precision=precision, states=states)
            try:
                if estimator.memory_lower_bound(plan) > limit:
                    continue
            except InputError:  # the model does not support this tensor parallelism
                return True
            same = [
                one for one in alike if (one.plan.zero, one.plan.precision, one.plan.states) == (3, precision, states)
            ]
            if plan.zero < 3 or not same or min(map(_bytes_beside_activations, same)) <= limit:
                return True
    return False


def _bytes_beside_activations(estimate: Estimate) -> float:
    """Return the most bytes that a step with the plan of `estimate` needs for everything
    except activations and temporaries."""
    rows = (rows for _, _, rows in estimate.ledger.instants())
    return max(sum(sizes.values()) - sizes["activations"] - sizes["temporaries"] for sizes in rows)


def _leanest_in_vain(
    estimator: Estimator, pins: dict[str, Any], in_vain: list[dict[str, int]], others: list[Estimate]
) -> list[Estimate]:
    """Return the estimate of the leanest of the estimates `others`, changed to the largest degree
    of context parallelism, so that a refusal can say how little memory is enough. The list is empty
    if the model does not support it.

    in_vain  the degrees of parallelism that were not tried, because their plans cannot fit
    """
    sizes = max(in_vain, key=lambda one: (one["cp"], -one.get("tp", 1)))
    least = min(others, key=lambda other: other.fullness).plan
    if least.pp > 1 or least.tp != sizes.get("tp", 1):
        return []
    try:
        if "micro_batch" not in pins:
            least = least.replace(micro_batch=1)
        plan = least.replace(**parallelism_fields(estimator, least, {**pins, "zero": 3}, sizes))
        return [estimator.estimate(plan)] if is_legal(plan, estimator.job, estimator.machine.device) else []
    except InputError:
        return []


def estimate_degrees(
    estimator: Estimator, start: Plan, pins: dict[str, Any], sizes: dict[str, int], best_s: float
) -> list[Estimate]:
    """Return estimates of plans with the given degrees of parallelism. A pipeline is tried with
    each schedule.

    start   the plan to which the degrees are added
    pins    plan fields that the user fixed: they are not varied
    sizes   the degrees as plan fields, such as {"tp": 2, "pp": 4}
    best_s  seconds of a step that a plan has to beat

    Returns an empty list if the model does not support the degrees, or if a step would take longer
    than `best_s` even with unlimited memory.
    """
    estimates: list[Estimate] = []
    for schedule in schedules(pins) if "pp" in sizes else ({},):
        best_s = min([best_s, *((1 - MIN_SAVING) * estimate.time.step_s for estimate in estimates if estimate.fits)])
        try:
            estimates += _estimate_degrees_and_schedule(
                estimator, start.replace(**schedule), {**pins, **schedule}, sizes, best_s
            )
        except InputError:
            continue
    return estimates


def _estimate_degrees_and_schedule(
    estimator: Estimator, start: Plan, pins: dict[str, Any], sizes: dict[str, int], best_s: float
) -> list[Estimate]:
    """Return estimates of plans with the given degrees of parallelism and the pipeline schedule of
    `start`. The list is empty if a step would take longer than `best_s` seconds even with unlimited
    memory, or, once a plan has fitted, if none of these surely does.

    pins   plan fields that the user fixed: they are not varied
    sizes  the degrees as plan fields, such as {"tp": 2, "pp": 4}

    Raises InputError if the model does not support the degrees.
    """
    fields = parallelism_fields(estimator, start, pins, sizes)
    start = start.replace(**fields)
    pins = {**pins, **{name: fields[name] for name in ("tp", "cp", "pp") if name in fields}}
    if math.isfinite(best_s):
        if surely_exceeds_memory(estimator, start, pins):
            return []
        share = start.share_of(estimator.job.train.batch)
        if estimator.step_lower_bound_s(start.replace(micro_batch=1 if share > 1 else None)) > best_s:
            return []
    plans = with_sequence_parallel(estimator, start, pins)
    return first_supported(lambda one: _by_precision(estimator, one, pins, best_s), plans)


def _by_precision(estimator: Estimator, start: Plan, pins: dict[str, Any], best_s: float) -> list[Estimate]:
    """Return estimates of plans with the parallelism and the precision of `start`.

    If none of these plans fits, try them with bf16 parameters (bf16-true) as well. With tensor or
    context parallelism, which need traces of their own for that, they are tried only if no plan of
    the search has fitted so far (`best_s` is infinite).

    pins    plan fields that the user fixed: they are not varied
    best_s  seconds of a step that a plan has to beat; infinite if no plan has fitted so far
    """
    if "precision" in pins or estimator.profiler.is_complex:
        return _candidates_that_may_fit(estimator, start, pins, best_s)
    found = _candidates_that_may_fit(estimator, start, {**pins, "precision": start.precision}, best_s)
    worth = math.isinf(best_s) or start.tp * start.cp == 1
    if start.precision == "bf16-mixed" and worth and not any(one.fits for one in found):
        start = start.replace(precision="bf16-true")
        found += _candidates_that_may_fit(estimator, start, {**pins, "precision": "bf16-true"}, best_s)
    return found


def _candidates_that_may_fit(estimator: Estimator, start: Plan, pins: dict[str, Any], best_s: float) -> list[Estimate]:
    """Return what `estimate_candidates` returns, or only the estimate of the leanest plan if even
    this plan is too large by more than 10 %.

    The leanest plan is first estimated without compile, whose trace is faster. Then it has to be too
    large by more than 40 %.
    """
    factors = {"none": MAX_EAGER_FACTOR} if "compile" not in pins else {}
    factors[start.compile] = 1 + MAX_OVERESTIMATE
    tried: list[Estimate] = []
    for mode, factor in factors.items():
        least = leanest_with_parallelism(estimator, start.replace(compile=mode), pins)
        if least is not None:
            tried.append(least)
        if least is not None and least.peak_bytes > factor * least.limit_bytes:
            return tried
    return tried + estimate_candidates(estimator, start, pins, best_s)


def first_supported(find: Callable[[Plan], Result], plans: list[Plan]) -> Result:
    """Call `find` with one plan after the other until a call raises no InputError, and return its
    result. An InputError means that the model does not support the plan. If all calls raise one,
    the last one is raised."""
    for plan in plans[:-1]:
        try:
            return find(plan)
        except InputError:
            continue
    return find(plans[-1])


__all__ = ["context_parallelism_may_fit", "estimate_degrees", "estimate_parallelism", "first_supported"]
