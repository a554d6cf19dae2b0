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
from collections.abc import Iterator
from typing import Any

from tightfit.capabilities import can_compile
from tightfit.errors import InputError
from tightfit.methods import METHODS
from tightfit.methods.offload import combinations
from tightfit.methods.precision import rounding_of
from tightfit.plan import Plan
from tightfit.planner.candidates import data_parallel_layouts, is_legal
from tightfit.planner.estimate import MARGIN, Estimate
from tightfit.planner.estimator import Estimator
from tightfit.runtime.method import SearchFacts, traced_fields
from tightfit.runtime.method import leanest as leanest_values

# plans that need up to this factor more than the least memory are compared again, then with their
# allocators' bytes
CLOSE_FACTOR = 1.1
Options = dict[str, list[Any]]  # the values to try, by plan field
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
    # updates in backward need the whole batch as one micro-batch, so these plans come last
    in_order = sorted(plans, key=lambda plan: (plan.update_in_backward, bounds[plan]))
    best: Estimate | None = None
    tried: list[Estimate] = []  # with other kernels than the best ones
    kernels: dict[str, Any] = {}
    needed = _NeededBytes(bounds)
    for plan in in_order:
        if best is None:  # kernels are chosen only once, because each of their values needs a trace
            full = plan.replace(recompute=pins.get("recompute", "full"))
            tried = _estimates_of_kernels(estimator, full, pins)
            estimate = best = min(tried, key=_fullness, default=None)
            kernels = {name: getattr(best.plan, name) for name in KERNELS} if best else {}
        elif _cannot_be_leaner(estimator, plan, needed.at_least(plan), best):
            continue
        else:
            estimate = _least(estimator, plan.replace(**kernels), pins)
            best = best if estimate is None else min(best, estimate, key=_fullness)
        if estimate is not None:
            needed.note(plan, estimate)
    if best is None or estimator.include_allocator(best).fits:
        return best
    again = [best, *tried, *_estimates(estimator, best.plan, pins, _compile_options(estimator, best.plan))]
    near = sorted((one for one in again if _fullness(one) <= (CLOSE_FACTOR * best.fullness, math.inf)), key=_fullness)
    return min((estimator.include_allocator(one) for one in near[:MAX_WITH_ALLOCATOR]), key=_fullness)


class _NeededBytes:
    """Lower bounds on the memory of plans. They rise with each plan that is estimated: plans like it need
    at least as many bytes beside their parameters, states and gradients.

    bounds  plan -> bytes of its parameters, states and gradients
    """

    def __init__(self, bounds: dict[Plan, float]) -> None:
        self.bounds = bounds
        # the fewest bytes that plans of a kind needed beside their bound, by kind with the precision, and
        # by kind without it: of plans with only 16-bit numbers. Wider precisions need at least as many,
        # because their activations and casts are not smaller
        self._same_precision: dict[Any, float] = {}
        self._narrowest: dict[Any, float] = {}
        self._activations: dict[Any, float] = {}  # by kind: the fewest bytes of activations in 16 bits

    def at_least(self, plan: Plan) -> float:
        """Return the bytes that `plan` needs at least."""
        kind = self._kind(plan)
        beside = max(self._same_precision.get((plan.precision, kind), 0.0), self._activations.get(kind, 0.0))
        if not plan.has_16_bit_weights:
            beside = max(beside, self._narrowest.get(kind, 0.0))
        return self.bounds[plan] + beside

    def note(self, plan: Plan, estimate: Estimate) -> None:
        """Note what `plan` needs: `estimate` is that of its leanest variant."""
        kind, beside = self._kind(plan), estimate.peak_bytes - self.bounds[plan]
        _lower(self._same_precision, (plan.precision, kind), beside)
        if plan.has_16_bit_weights and estimate.peak.phase in ("forward", "backward"):  # not the update's temporaries
            _lower(self._narrowest, kind, beside)
        wide = estimate.plan.precision in ("fp32", "tf32")
        _lower(self._activations, kind, _most_bytes(estimate, "activations") / (2 if wide else 1))

    @staticmethod
    def _kind(plan: Plan) -> Any:
        return plan.update_in_backward, plan.offload, plan.zero, plan.shards


def _lower(table: dict[Any, float], key: Any, value: float) -> None:
    """Set the value of `key` to `value`, unless the table has a smaller one."""
    table[key] = min(table.get(key, math.inf), value)


def leanest_with_parallelism(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> Estimate | None:
    """Return the estimate of a plan that needs about the least memory of all variants of `start` with
    its parallelism and kernels, and whose update is not in backward. Return None if there is none.

    It has the precision, the states and the ZeRO stage with the smallest lower bound on its memory,
    recompute: full, and micro-batches of one sample, as far as `pins` (fields that the user fixed)
    permit. Raises InputError if the model does not support it.
    """
    fixed = {**pins, "offload": start.offload, "update_in_backward": start.update_in_backward}
    plans = list(_combinations(estimator, start, fixed))
    if not plans:
        return None
    plan = min(plans, key=estimator.memory_lower_bound)
    size = 1 if _may_split(estimator, plan) else None
    plan = plan.replace(**{"recompute": "full", "micro_batch": size, **pins})
    return estimator.estimate(plan) if is_legal(plan, estimator.job, estimator.machine.device) else None


def surely_exceeds_memory(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> bool:
    """Return whether no variant of `start` with its parallelism fits, because parameters, gradients
    and optimizer states alone exceed the memory.

    Raises InputError if the model does not support the parallelism.
    """
    bounds = (estimator.memory_lower_bound(plan) for plan in _combinations(estimator, start, pins))
    return all(bound > estimator.limit_bytes for bound in bounds)


def _cannot_be_leaner(estimator: Estimator, plan: Plan, least_bytes: float, best: Estimate) -> bool:
    """Return whether `plan`, which needs at least `least_bytes`, cannot be leaner than that of the
    estimate `best`.

    An update in backward saves gradients, but needs the whole batch as one micro-batch.
    """
    if plan.update_in_backward and _may_split(estimator, best.plan) and not _whole_batch_may_be_leaner(best):
        return True
    needed = least_bytes + MARGIN * (least_bytes - estimator.runtime_bytes_of(plan))
    return needed >= best.fullness * estimator.limit_bytes


def _fullness(estimate: Estimate) -> tuple[float, float]:
    """Return a sort key that puts the plan that needs the smallest share of the available memory
    first. Of plans with equal shares, the one with the smallest peak is first."""
    return estimate.fullness, estimate.peak_bytes


STATES = ("precision", "states", "update_in_backward", "rounding")  # dtypes of parameters and states
KERNELS = tuple(field for field in traced_fields(METHODS) if field not in STATES)  # each value needs a trace


def _values(estimator: Estimator, start: Plan) -> dict[str, list[Any]]:
    """Return the values to try for each plan field, by field name: those that the methods propose
    because they may need the least memory."""
    facts = SearchFacts(estimator.profiler.is_complex, lambda: True)
    return leanest_values(METHODS, start, estimator.job, facts)


def _estimates_of_kernels(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> list[Estimate]:
    """Return the estimates of variants of `start` with other kernels (attention, loss, compile), of
    which each needs a new trace of the model. All have micro-batches of one sample, if possible.

    Traces with compile take longest. So the leanest of the other kernels are found without it.
    """
    values = _values(estimator, start)
    options = {name: values[name] for name in KERNELS if name in values and name != "compile"}
    options["micro_batch"] = [1] if _may_split(estimator, start) else [None]
    plain = start if "compile" in pins else start.replace(compile="none")
    found = _estimates(estimator, plain, pins, options)
    if found and "compile" not in pins and start.compile != "none":
        best = min(found, key=_fullness).plan
        found += _estimates(estimator, best, pins, {"compile": [start.compile]})
    return found


def _may_split(estimator: Estimator, plan: Plan) -> bool:
    """Return whether the samples of one device can be split into micro-batches."""
    return not plan.update_in_backward and plan.share_of(estimator.job.train.batch) > 1


def _compile_options(estimator: Estimator, start: Plan) -> dict[str, list[Any]]:
    """Return the values of compile to try, by field name, other than that of `start`. They are "none"
    and "block" if the machine can compile."""
    both = ["none", "block"] if can_compile(estimator.machine) else []
    return {"compile": [value for value in both if value != start.compile]}


def _least(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> Estimate | None:
    """Return the estimate of the variant of `start` that needs the least memory, of those that need
    no new trace of the model. Return None if the model supports none.

    pins  plan fields that the user fixed: they are not varied

    A step with one micro-batch (micro_batch: None) has no gradients yet during its forward. It is
    tried only if these gradients may need more memory than the activations of the other samples.
    """
    known = {*STATES, *KERNELS, "micro_batch"}
    options = {name: values for name, values in _values(estimator, start).items() if name not in known}
    if "micro_batch" in pins or not _may_split(estimator, start):
        size = pins.get("micro_batch")
        return min(_estimates(estimator, start.replace(micro_batch=size), pins, options), key=_fullness, default=None)
    found = _estimates(estimator, start, pins, {**options, "micro_batch": [1]})
    best = min(found, key=_fullness, default=None)
    if best is not None and _whole_batch_may_be_leaner(best):
        found += _estimates(estimator, start, pins, {**options, "micro_batch": [None]})
    return min(found, key=_fullness, default=None)


def _whole_batch_may_be_leaner(estimate: Estimate) -> bool:
    """Return whether a single micro-batch may need less memory than micro-batches of one sample, as
    the plan of `estimate` has."""
    others = estimate.plan.share_of(estimate.job.train.batch) - 1
    return _most_bytes(estimate, "activations") * others < _most_bytes(estimate, "gradients")


def _most_bytes(estimate: Estimate, row: str) -> float:
    """Return the most bytes that a row, such as "activations", has in a step."""
    return max(rows[row] for _, _, rows in estimate.ledger.instants())


def _estimates(estimator: Estimator, start: Plan, pins: dict[str, Any], options: Options) -> list[Estimate]:
    """Return the estimates of the variants of `start` that the job permits and the model supports.

    options  the values to try, by plan field; each combination of these values is a variant
    pins     plan fields that the user fixed: they are not varied
    """
    open_ = {name: values for name, values in options.items() if name not in pins}
    estimates: list[Estimate] = []
    for values in itertools.product(*open_.values()):
        plan = start.replace(**dict(zip(open_, values, strict=True)))
        if not is_legal(plan, estimator.job, estimator.machine.device):
            continue
        if plan.recompute == "none" and any(estimate.ledger.blocks for estimate in estimates):
            continue
        try:
            estimates.append(estimator.estimate(plan))
        except InputError:  # the model does not support it
            continue
    return estimates


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
