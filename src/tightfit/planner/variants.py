"""Estimate the variants of a plan that may be the fastest.

The variants differ in the options that trade memory for time, such as recompute and the micro-batch.
Most of them are never estimated, because a bound on their memory or time rules them out.
"""

from __future__ import annotations

import math
from typing import Any

from tightfit.errors import InputError, Untraceable
from tightfit.parallel.pipeline.stages import stage_ranges
from tightfit.plan import Plan
from tightfit.planner.candidates import candidates
from tightfit.planner.estimate import Estimate
from tightfit.planner.estimator import Estimator
from tightfit.planner.kernels import MIN_COMPILE_SAVING, MIN_KERNEL_SAVING, saves
from tightfit.planner.micro_batches import (
    MemoryBounds,
    largest_safe_micro_batch,
    search_micro_batch,
    shrink_micro_batch,
)
from tightfit.planner.parallelism import balanced_split

MAX_REFINED = 2  # plans with recompute: full for which fewer recomputed blocks are tried
MAX_REFINED_MICRO_BATCHES = 3  # for each of them, the largest ones that fit
# for each of these factors on the tensors' bytes, the fewest recomputed blocks that fit are found
SPARE_FACTORS = (1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.07, 1.1, 1.15)
MAX_SHRUNK = 3  # plans without room for the allocator of which smaller micro-batches are tried
# they are tried if the fastest plan with room for the allocator is this many times slower: with half of
# the micro-batch, a step may take twice as long
WORTH_OF_SHRINKING = 2.0
SAVES_NO_MEMORY: dict[str, Any] = {"recompute": "none", "update_in_backward": False}


def estimate_candidates(
    estimator: Estimator, start: Plan, pins: dict[str, Any], best_s: float = math.inf
) -> list[Estimate]:
    """Return estimates of the variants of `start` that may be the fastest. Variants that cannot be
    the fastest are skipped:

    - Without a pipeline, a micro-batch smaller than the largest that fits is not faster.
    - An option that only saves memory is tried only if it permits a larger micro-batch.
    - A value of recompute is tried only with micro-batches that nearly fit with `recompute: full`,
      which saves more memory, and only if the same plan without recomputation would be faster than
      every plan that fits.
    - With `compile: model`, each value of recompute needs a trace of its own, of the whole model.
      So it is compared with the largest micro-batch without recomputation.
    - In a pipeline, ZeRO-2 and ZeRO-3 communicate in every micro-batch. A higher ZeRO stage is
      therefore never faster than a lower stage that fits.
    - Where a much faster plan has no room for the allocator's bytes, smaller micro-batches are tried
      until one has.
    - A plan whose parameters and optimizer states alone exceed the memory is not searched further.
      Of such plans with the same precision and optimizer states, only one is estimated, so that the
      user sees why they were rejected. If no plan fits, the leanest of them is estimated.

    start   the plan from which the variants differ in the options that trade memory for time
    pins    plan fields that the user fixed: the variants keep them
    best_s  seconds of a step that a plan has to beat

    Raises InputError if the model supports none of the plans.
    """
    variants = _Variants(estimator, start, pins, best_s)
    for plans in candidates(estimator, start, pins):
        larger = variants.worth_estimating(plans)
        if larger:
            variants.estimate(plans, larger)
    return variants.finish()


class _Variants:
    """The estimates of a plan's variants so far, and what they say about the variants that follow.

    Arguments: see `estimate_candidates`. Many attributes have a plan without its micro-batch and some
    other fields as their key, because all variants with the same rest share the entry.

    found             the estimates
    refused           errors of plans that the model does not support
    untraceable       why values of recompute cannot be predicted -> these values
    ruled_out         (precision, states) -> plans whose parameters and states alone exceed the memory
    lowest_zero       plan without data parallelism -> its lowest ZeRO stage that fits
    largest_useful    plan without options that save memory -> its largest useful micro-batch
    without_saving_s  the same key -> seconds of a step with the largest micro-batch, whether it fits or not
    full              plan with recompute: full -> the plan with each useful micro-batch, the largest first
    sizes             plan with any recompute -> the plan with each micro-batch, the largest first
    """

    def __init__(self, estimator: Estimator, start: Plan, pins: dict[str, Any], best_s: float) -> None:
        self.estimator, self.start, self.pins, self.best_s = estimator, start, pins, best_s
        self.bounds = MemoryBounds(estimator)
        self.found: list[Estimate] = []
        self.refused: list[InputError] = []
        self.untraceable: dict[str, set[str]] = {}
        self.ruled_out: dict[Any, list[Plan]] = {}
        self.lowest_zero: dict[Plan, int] = {}
        self.largest_useful: dict[Plan, int] = {}
        self.without_saving_s: dict[Plan, float] = {}
        self.full: dict[Plan, list[Plan]] = {}
        self.sizes: dict[Plan, list[Plan]] = {}

    def worth_estimating(self, plans: list[Plan]) -> list[Plan]:
        """Return those of `plans` that may be the fastest as far as is known.

        plans  plans that differ only in the micro-batch, the largest one first
        """
        estimator, first, batch = self.estimator, plans[0], self.estimator.job.train.batch
        if estimator.memory_lower_bound(first) > estimator.limit_bytes:
            self.ruled_out.setdefault((first.precision, first.states), []).append(plans[-1])
            return []
        if self.start.pp > 1 and self.lowest_zero.get(_without_data_parallelism(first), first.zero) < first.zero:
            return []
        least = _without_saving(first)
        larger = [plan for plan in plans if plan.micro_batch_of(batch) > self.largest_useful.get(least, 0)]
        if larger and self.start.compile == "model":  # where each value of recompute needs a trace of the whole model
            too_slow = self.without_saving_s.get(least, 0.0) >= fitting_s(estimator, self.found)
            return [] if too_slow else larger
        return larger

    def estimate(self, plans: list[Plan], larger: list[Plan]) -> None:
        """Estimate plans until the largest micro-batch that fits is found, and note what follows for others.

        plans   plans that differ only in the micro-batch, the largest one first
        larger  those of them that are worth estimating
        """
        first = plans[0]
        try:
            if self.start.pp > 1:
                estimates = _grow_micro_batch(self.estimator, larger, self.best_s, self.pins)
            else:
                best_s = min(self.best_s, fitting_s(self.estimator, self.found))
                estimates = search_micro_batch(self.estimator, larger, self.bounds, best_s)
        except InputError as error:  # the model does not support this plan: ZeRO-3 cannot shard a single number
            self.refused.append(error)
            if isinstance(error, Untraceable) and first.recompute != "none":
                why = f"{error.asked.removeprefix('job: ')} {error.found}"
                self.untraceable.setdefault(why, set()).add(first.recompute)
            return
        if not estimates:
            return
        self.found += estimates
        self.sizes[_without_micro_batch(first)] = plans
        if first.recompute == "full":
            self.full[_without_micro_batch(first)] = larger
        if estimates[-1].fits:  # a higher ZeRO stage would only save memory, and not be faster
            key = _without_data_parallelism(first)
            self.lowest_zero[key] = min(first.zero, self.lowest_zero.get(key, first.zero))
        least = _without_saving(first)
        if first.replace(micro_batch=None) == least:
            self.largest_useful[least] = largest_safe_micro_batch(estimates, self.estimator.job.train.batch)
            self.without_saving_s[least] = estimates[0].time.step_s

    def finish(self) -> list[Estimate]:
        """Return all estimates, with those of the plans that recompute as few blocks as necessary, have room
        for the allocator, or show why plans were ruled out.

        Raises InputError if the model supports none of the plans.
        """
        estimator, estimates = self.estimator, self.found
        if not estimates and not self.ruled_out and self.refused:
            raise self.refused[0]
        if estimates:
            for why, values in self.untraceable.items():
                estimator.untraceable[f"recompute: {', '.join(sorted(values))}"] = why
        if "recompute" not in self.pins and self.start.compile != "model":  # each number of blocks would need a trace
            estimates += _with_fewest_recomputed(estimator, estimates, self.full)
        estimates += _with_room_for_allocator(estimator, estimates, self.sizes, self.best_s)
        if not any(estimate.fits for estimate in estimates):
            return estimates + [estimator.estimate(min(plans, key=self._leanness)) for plans in self.ruled_out.values()]
        if self.start.tp * self.start.pp * self.start.cp > 1:  # of many such plans, each would need a trace
            return estimates
        return estimates + [estimator.estimate(plans[0]) for plans in self.ruled_out.values()]

    def _leanness(self, plan: Plan) -> tuple[float, bool, int]:
        batch = self.estimator.job.train.batch
        return self.estimator.memory_lower_bound(plan), plan.recompute != "full", plan.micro_batch_of(batch)


def _without_saving(plan: Plan) -> Plan:
    """Return the plan without its micro-batch and without the options that only save memory."""
    return plan.replace(micro_batch=None, **SAVES_NO_MEMORY)


def _without_data_parallelism(plan: Plan) -> Plan:
    """Return the plan without its micro-batch and its data parallelism."""
    return plan.replace(micro_batch=None, dp_replicate=1, dp_shard=1, zero=0)


def fitting_s(estimator: Estimator, estimates: list[Estimate]) -> float:
    """Return the seconds of a step with the fastest plan of the `estimates` that fits with the
    allocator's bytes; infinite if none does."""
    fitting = sorted((estimate for estimate in estimates if estimate.fits), key=by_time)
    return next((estimate.time.step_s for estimate in fitting if estimator.include_allocator(estimate).fits), math.inf)


def by_time(estimate: Estimate) -> tuple[float, float]:
    """Return a sort key that puts the fastest plan first and, of equally fast plans, the one with
    the smallest peak."""
    return estimate.total_s, estimate.peak_bytes


def _with_fewest_recomputed(
    estimator: Estimator, estimates: list[Estimate], full: dict[Plan, list[Plan]]
) -> list[Estimate]:
    """Return estimates of plans that recompute only as many blocks as necessary: `recompute: first-K`
    with the smallest K that fits.

    estimates  estimates; of those that fit with recompute: full, the fastest plans are varied
    full       plan with recompute: full and without micro-batch -> the plan with each useful
               micro-batch, the largest first

    The allocator reserves more than the estimates know, so each plan is also returned with the K
    that fit if the tensors took 1 to 15 % more. The dry run decides among them.

    Example: of 32 blocks, 4 samples fit if 9 blocks are recomputed; if the tensors took 10 % more, 13
    blocks. Bisection estimates 5 plans for the first number, and 2 or 3 more for the second.
    """
    fitting = sorted(
        (estimate for estimate in estimates if estimate.fits and estimate.plan.recompute == "full"), key=by_time
    )
    by_plan: dict[Plan, list[Estimate]] = {}
    for estimate in fitting:
        by_plan.setdefault(_without_micro_batch(estimate.plan), []).append(estimate)
    more: list[Estimate] = []
    for base, same in list(by_plan.items())[:MAX_REFINED]:
        batch, blocks = estimator.job.train.batch, same[0].ledger.blocks
        if blocks < 2:
            continue
        largest = max(one.plan.micro_batch_of(batch) for one in same)
        plans = [plan for plan in full[base] if plan.micro_batch_of(batch) <= largest]
        if base.pp > 1:  # each has a split of its own
            plans = sorted((one.plan for one in same), key=lambda plan: -plan.micro_batch_of(batch))
        for plan in plans[:MAX_REFINED_MICRO_BATCHES]:
            more += _fewest_recomputed(estimator, plan, max(map(len, stage_ranges(plan, blocks))))
    return more


def _with_room_for_allocator(
    estimator: Estimator, estimates: list[Estimate], sizes: dict[Plan, list[Plan]], best_s: float
) -> list[Estimate]:
    """Return estimates of plans with smaller micro-batches than those of `estimates` that fit only without
    the allocator's bytes. There are none if a plan with room for the allocator is hardly slower.

    estimates  estimates of the candidates
    sizes      plan without micro-batch -> the plan with each micro-batch, the largest first
    best_s     seconds of a step that a plan has to beat

    There are none for a pipeline, whose micro-batch grows from the smallest. If each micro-batch needs a
    trace of its own that takes seconds, smaller ones are tried only where nothing else fits.

    Example: 4,096 samples take 0.7 GiB, and 1.2 GiB with the allocator. 1 GiB is available, and of the
    other candidates only a micro-batch of one sample fits, 30 times slower. Then 2,048 samples are tried.
    """
    more: list[Estimate] = []
    best_s, shrunk = min(best_s, fitting_s(estimator, estimates)), 0
    for estimate in sorted((estimate for estimate in estimates if estimate.fits), key=by_time):
        plan, batch = estimate.plan, estimate.job.train.batch
        if plan.pp > 1 or WORTH_OF_SHRINKING * estimate.time.step_s >= best_s or shrunk == MAX_SHRUNK:
            break
        if best_s < math.inf and (plan.tp * plan.cp > 1 or plan.compile == "model"):
            break
        size = plan.micro_batch_of(batch)
        smaller = [each for each in sizes.get(_without_micro_batch(plan), ()) if each.micro_batch_of(batch) < size]
        if not smaller or estimator.include_allocator(estimate).fits:
            continue
        shrunk += 1
        more += shrink_micro_batch(estimator, smaller, best_s)
        best_s = min(best_s, fitting_s(estimator, more))
    return more


def _without_micro_batch(plan: Plan) -> Plan:
    """Return the plan without its micro-batch, and without the split that was balanced for it."""
    return plan.replace(micro_batch=None, split=None)


def _fewest_recomputed(estimator: Estimator, plan: Plan, blocks: int) -> list[Estimate]:
    """Return the estimates of `plan` with the smallest numbers of recomputed blocks that fit, with and
    without spare memory for the allocator. All have fewer recomputed blocks than `blocks`, the number
    of blocks of a pipeline stage or of the model.
    """
    known: dict[int, Estimate] = {}

    def needs_more(count: int, factor: float) -> bool:
        """Return whether more than `count` recomputed blocks are needed to fit."""
        if count not in known:
            known[count] = estimator.estimate(plan.replace(recompute=f"first-{count}"))
        one = known[count]
        spare = (factor - 1) * (one.peak_bytes - one.peak.rows["runtime"])
        return not one.fits or one.peak_bytes + one.margin_bytes + spare > one.limit_bytes

    chosen: set[int] = set()
    for factor in SPARE_FACTORS:
        least, most = 1, blocks  # the smallest number is one of these
        while least < most:
            middle = (least + most) // 2
            least, most = (middle + 1, most) if needs_more(middle, factor) else (least, middle)
        chosen.add(least)
    return [known[count] for count in sorted(chosen) if count < blocks]


def _grow_micro_batch(estimator: Estimator, plans: list[Plan], best_s: float, pins: dict[str, Any]) -> list[Estimate]:
    """Return estimates of pipeline plans that differ only in the micro-batch, the smallest first.
    The stages of each are balanced for its micro-batch, unless the user pinned the split (it is in
    `pins`). The estimates end with the first plan that

    - does not fit,
    - is slower than the plan before it,
    - or after which no larger micro-batch can be faster than both this plan and `best_s` seconds
      per step.

    plans  sorted from the largest micro-batch to the smallest
    """
    estimates: list[Estimate] = []
    for plan in reversed(plans):
        alone = plan.replace(pp=1, virtual_stages=1)
        split = balanced_split(estimator, alone, {**pins, "virtual_stages": plan.virtual_stages}, plan.pp)
        estimates.append(estimator.estimate(plan.replace(**split)))
        slower = len(estimates) > 1 and estimates[-1].total_s >= estimates[-2].total_s
        grown_s = _doubled_lower_bound_s(estimator, estimates[-1])
        if slower or not estimates[-1].fits or grown_s >= min(best_s, estimates[-1].time.step_s):
            break
    return estimates


def _doubled_lower_bound_s(estimator: Estimator, estimate: Estimate) -> float:
    """Return a lower bound on the seconds of a step that the pipeline plan of `estimate`
    would take with micro-batches twice as large.

    The bubble grows by the factor by which each micro-batch takes longer. Larger micro-batches save
    at most

    - all launches,
    - half of the latency of the messages that forward and backward wait for,
    - half of the time of all other messages,
    - the time by which matrix products exceed that of the best shape, because larger products may be
      faster. If the machine's rates were measured, it is the time of all products.
    """
    time = estimate.time
    within = [message.latency_s for message in estimate.ledger.messages if message.has_activations]
    others = [
        message.bytes / message.bytes_per_s + message.latency_s
        for message in estimate.ledger.messages
        if not message.has_activations
    ]
    best = 0.0 if estimate.machine.rates else estimator.lower_bound_model.arithmetic_s(estimate.ledger)
    products = time.compute_s - best
    busy = time.compute_s + time.memory_s
    longer = max(2 * busy, busy + time.launch_s) / (busy + time.launch_s) - 1
    return time.step_s + longer * time.bubble_s - time.launch_s - (sum(within) + sum(others)) / 2 - products


def estimate_candidates_and_leaner_kernels(
    estimator: Estimator, start: Plan, pins: dict[str, Any], leaner: dict[str, Any]
) -> list[Estimate]:
    """Return estimates of the variants of `start` that may be the fastest. If the fastest of them
    does not fit, also estimate the variants with other kernels, which need less memory and are
    slower.

    pins    plan fields that the user fixed: the variants keep them
    leaner  the plan fields that select these other kernels, such as {"chunked_loss": 1024}
    """
    estimates = estimate_candidates(estimator, start, pins)
    fastest = min((estimate for estimate in estimates if estimate.fits), key=by_time, default=None)
    if fastest and fastest.plan.precision != start.precision:
        # the kernels were chosen for another precision, in which they may save more
        for fields, least in _kernels_to_reconsider(start, pins, leaner):
            other = estimator.estimate(fastest.plan.replace(**fields))
            if other.fits and not saves(fastest, other, least):
                rest = {name: value for name, value in leaner.items() if name not in fields}
                return estimate_candidates_and_leaner_kernels(estimator, start.replace(**fields), pins, rest)
    if leaner and not (estimates and estimator.include_allocator(min(estimates, key=by_time)).fits):
        estimates += estimate_candidates(estimator, start.replace(**leaner), pins)
    return estimates


def _kernels_to_reconsider(
    start: Plan, pins: dict[str, Any], leaner: dict[str, Any]
) -> list[tuple[dict[str, Any], float]]:
    """Return pairs (plan fields, share) for the kernels of `start` that take memory or compile time.
    The plan fields select other kernels. Those of `start` have to save this share of a step's time."""
    found: list[tuple[dict[str, Any], float]] = []
    if start.compile != "none" and "compile" not in pins:
        found.append(({"compile": "none"}, MIN_COMPILE_SAVING))
    if "chunked_loss" in leaner:
        found.append(({"chunked_loss": leaner["chunked_loss"]}, MIN_KERNEL_SAVING))
    return found


__all__ = ["by_time", "estimate_candidates", "estimate_candidates_and_leaner_kernels", "fitting_s"]
