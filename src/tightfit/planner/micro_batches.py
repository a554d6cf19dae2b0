"""Find the largest micro-batch that fits, of plans that differ in nothing else.

Each size of the micro-batch that is traced takes a tenth of a second or more. So sizes are ruled out
first: those that do not fit with `recompute: full`, and those with which no plan is fast enough.
"""

from __future__ import annotations

from tightfit.errors import InputError
from tightfit.plan import Plan
from tightfit.planner.estimate import Estimate
from tightfit.planner.estimator import Estimator
from tightfit.planner.finalists import MAX_OVERESTIMATE

ALLOCATOR_FACTOR = 1.15  # an allocator may reserve up to this many times the bytes of the tensors
# a plan is tried if a lower bound on its time is below this many times that of the fastest plan that
# fits, because the dry run may still reject that plan
TIME_TOLERANCE = 1.05
# the memory that depends on the micro-batch grows at least by this share of the micro-batch's growth
MIN_GROWTH = 0.8
# recompute -> values of recompute that need less memory
LEANER = {
    "none": ("full",),
    "attention": ("full", "selective"),
    "selective": ("full",),
    "selective-2": ("full",),
    "every-2": ("full",),
}


class MemoryBounds:
    """Finds the largest micro-batch with which a plan may fit, from estimates of leaner plans."""

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._known: dict[Plan, int] = {}

    def largest_micro_batch(self, plans: list[Plan]) -> int:
        """Return the largest of the micro-batches of `plans` that a leaner value of recompute would
        fit, if its estimate were 10 % too large; 0 if none.

        plans  plans that differ only in the micro-batch, from the largest to the smallest

        Returns the largest micro-batch of all if there is no bound: with offloaded activations,
        other values of recompute need less memory, and a model that is compiled as a whole would
        need a trace for each value.
        """
        first, batch = plans[0], self._estimator.job.train.batch
        bounded = "activations" not in first.offload and first.compile != "model"
        leaner = LEANER.get(first.recompute, ()) if bounded else ()
        return min(
            [first.micro_batch_of(batch), *(self._nearly_fitting(plans, recompute) for recompute in leaner)],
        )

    def _nearly_fitting(self, plans: list[Plan], recompute: str) -> int:
        batch, key = self._estimator.job.train.batch, plans[0].replace(recompute=recompute)
        if key not in self._known:
            try:
                estimates = search_micro_batch(self._estimator, [plan.replace(recompute=recompute) for plan in plans])
            except InputError:  # the model does not support it
                self._known[key] = plans[0].micro_batch_of(batch)
            else:
                near = [
                    estimate
                    for estimate in estimates
                    if estimate.peak_bytes <= (1 + MAX_OVERESTIMATE) * estimate.limit_bytes
                ]
                self._known[key] = max((one.plan.micro_batch_of(batch) for one in near), default=0)
        return self._known[key]


def search_micro_batch(
    estimator: Estimator, plans: list[Plan], bounds: MemoryBounds | None = None, best_s: float = float("inf")
) -> list[Estimate]:
    """Find the largest micro-batch that fits by bisection. Return all estimates that the bisection
    made. They are none if `bounds` or `best_s` rule out all plans.

    plans   plans that differ only in the micro-batch, from the largest to the smallest
    bounds  tells the micro-batches that may fit; None: all may
    best_s  seconds of a step of the fastest plan that fits: slower plans are not tried

    The first size after the largest is the one that is expected to fit, because other sizes are
    interpolated from two that were traced. A micro-batch of one sample needs a trace of its own. So it
    is estimated only if the larger ones let expect that it nearly fits.
    """
    estimates, plans = _try_largest(estimator, plans, bounds, best_s)
    return _bisect(estimator, plans, estimates) if plans else estimates


def _try_largest(
    estimator: Estimator, plans: list[Plan], bounds: MemoryBounds | None, best_s: float
) -> tuple[list[Estimate], list[Plan]]:
    """Estimate the largest micro-batch, unless it is far too large. Return (estimates, plans that remain
    to be searched). None remain if the largest one fits, or if no other can be chosen.

    Arguments: see `search_micro_batch`
    """
    estimates: list[Estimate] = []
    is_far_too_large = estimator.is_far_too_large(plans[0])
    if not is_far_too_large and (plans[0].recompute == "none" or bounds is None):
        estimates.append(estimator.estimate(plans[0]))
        if estimates[0].fits or len(plans) == 1:
            return estimates, []
    if bounds is not None:
        most = bounds.largest_micro_batch(plans)
        plans = [plan for plan in plans if plan.micro_batch_of(estimator.job.train.batch) <= most]
        if not plans or _is_too_slow(estimator, plans[0], best_s):
            return estimates, []
        is_far_too_large = estimator.is_far_too_large(plans[0])
    if len(plans) == 1 and is_far_too_large and plans[0].recompute != "full":
        return estimates, []
    if len(plans) == 1 or not is_far_too_large:
        if not estimates or estimates[0].plan != plans[0]:
            estimates.append(estimator.estimate(plans[0]))
        if estimates[-1].fits or len(plans) == 1:
            return estimates, []
    return estimates, plans


def _bisect(estimator: Estimator, plans: list[Plan], estimates: list[Estimate]) -> list[Estimate]:
    """Return `estimates` with those that find the largest micro-batch of `plans` that fits. The first
    of `plans` does not fit, or is far too large.

    estimates  the estimates so far; the last one is that of the first plan, if it was estimated
    """
    too_large, fitting = 0, len(plans)  # fitting: index of the largest that fits; len(plans): none does
    index = _first_index(estimator, plans, estimates)
    while fitting - too_large > 1:
        if fitting == len(plans) and not _may_fit_by_extrapolation(estimates[-2:], plans[index]):
            break
        if fitting < len(plans) and _is_surely_too_large(estimator, plans[index], estimates[-1]):
            too_large, index = index, (index + fitting) // 2
            continue
        if plans[index].recompute != "full" and estimator.is_far_too_large(plans[index]):
            break
        estimates.append(estimator.estimate(plans[index]))
        too_large, fitting = (too_large, index) if estimates[-1].fits else (index, fitting)
        index = (too_large + fitting) // 2
    return estimates


def _first_index(estimator: Estimator, plans: list[Plan], estimates: list[Estimate]) -> int:
    """Return the index of the largest micro-batch of `plans` that is expected to fit, from 1 on.

    estimates  the estimate of the first plan, which does not fit. The memory beside parameters,
               gradients and optimizer states is then assumed to be in proportion to the
               micro-batch. If it is empty, the other plans' bytes of a sample are used
    """
    batch, fixed = estimator.job.train.batch, estimator.memory_lower_bound(plans[0])
    sizes = [plan.micro_batch_of(batch) for plan in plans]
    per_sample = (estimates[-1].peak_bytes - fixed) / sizes[0] if estimates else estimator.bytes_per_sample(plans[0])
    limit, indices = estimator.limit_bytes, range(1, len(plans))
    fitting = [index for index in indices if fixed + sizes[index] * per_sample <= limit]
    several = [index for index in indices if sizes[index] > 1]
    if estimates and several and fixed + MIN_GROWTH * sizes[several[-1]] * per_sample <= limit:
        return min([*fitting[:1], several[-1]])  # the guess may be too small
    return (fitting or [len(plans) - 1])[0]


def _is_too_slow(estimator: Estimator, plan: Plan, best_s: float) -> bool:
    """Return whether `plan` and the same plan with smaller micro-batches take longer than `best_s`
    seconds a step, because `plan` would take longer even without recomputation.

    With tensor or context parallelism, each micro-batch would need a trace that takes seconds. So a
    lower bound for all micro-batches is computed from one sample. If `plan` itself has one sample,
    its own trace is there, and another one would not pay.
    """
    if best_s == float("inf") or plan.compile == "model":
        return False
    fastest = plan.replace(recompute="none", update_in_backward=False)
    if plan.tp * plan.cp > 1:
        one = fastest.replace(micro_batch=1 if plan.share_of(estimator.job.train.batch) > 1 else None)
        several = plan.micro_batch_of(estimator.job.train.batch) > 1
        return several and estimator.step_lower_bound_s(one) >= TIME_TOLERANCE * best_s
    return estimator.estimate(fastest).time.step_s >= TIME_TOLERANCE * best_s


def _may_fit_by_extrapolation(larger: list[Estimate], plan: Plan) -> bool:
    """Return whether `plan` fits if its bytes are as expected from those of two larger
    micro-batches, or 10 % fewer. With one estimate in `larger`, return True.

    larger  estimates of the same plan with larger micro-batches, the larger one first
    """
    if len(larger) < 2:
        return True
    large, small = larger
    if plan.micro_batch_of(small.job.train.batch) > 1:  # interpolated, and takes no trace
        return True
    batch = small.job.train.batch
    sizes = [one.micro_batch_of(batch) for one in (large.plan, small.plan, plan)]
    per_sample = (large.peak_bytes - small.peak_bytes) / (sizes[0] - sizes[1])
    return small.peak_bytes - (sizes[1] - sizes[2]) * per_sample <= (1 + MAX_OVERESTIMATE) * small.limit_bytes


def _is_surely_too_large(estimator: Estimator, plan: Plan, smaller: Estimate) -> bool:
    """Return whether `plan` does not fit even if its activations need only 80 % of what is expected
    from those of a smaller micro-batch.

    smaller  the estimate of the same plan with a smaller micro-batch
    """
    if smaller.peak.phase not in ("forward", "backward"):  # the peak is not that of activations
        return False
    batch, fixed = estimator.job.train.batch, estimator.memory_lower_bound(plan)
    times = plan.micro_batch_of(batch) / smaller.plan.micro_batch_of(batch)
    return fixed + MIN_GROWTH * times * (smaller.peak_bytes - fixed) > estimator.limit_bytes


def shrink_micro_batch(estimator: Estimator, plans: list[Plan], best_s: float) -> list[Estimate]:
    """Return estimates of `plans`, the largest micro-batch first, until one fits with the allocator's
    bytes, is not faster than `best_s` seconds a step, or lets expect that no smaller one fits.

    plans   plans that differ only in the micro-batch, from the largest to the smallest. The largest one
            fits without the allocator's bytes
    """
    estimates: list[Estimate] = []
    settled: list[Estimate] = []
    for plan in plans:
        if not _may_fit_by_extrapolation(settled[-2:], plans[-1]):
            break
        estimates.append(estimator.estimate(plan))
        settled.append(estimator.include_allocator(estimates[-1]))
        if settled[-1].fits or estimates[-1].time.step_s >= best_s:
            break
    return estimates


def largest_safe_micro_batch(estimates: list[Estimate], batch: int) -> int:
    """Return the largest micro-batch that fits even if the allocator reserves 15 % more than the
    tensors need; 0 if none does. Options that only save memory are then tried only with larger
    micro-batches.

    If a smaller micro-batch that fits is faster, larger micro-batches do not help. Return the job's
    full batch in this case.

    estimates  estimates of plans without such options. They differ only in the micro-batch
    batch      the job's samples per step
    """
    fitting = [estimate for estimate in estimates if estimate.peak_bytes * ALLOCATOR_FACTOR <= estimate.limit_bytes]
    if not fitting:
        return 0
    last = max(fitting, key=lambda estimate: estimate.plan.micro_batch_of(batch))
    return last.plan.micro_batch_of(batch) if last is min(fitting, key=lambda estimate: estimate.total_s) else batch


__all__ = ["MemoryBounds", "largest_safe_micro_batch", "search_micro_batch", "shrink_micro_batch"]
