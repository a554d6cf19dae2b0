"""Find the fastest plan that fits the device, and say why the other plans were rejected.

The commands `tightfit explain` and `tightfit train` call `search`, which works in this order:

1. Choose the kernels (see `kernels.py`).
2. Estimate the permitted combinations of the options that trade memory for time.
3. On several devices, estimate tensor, pipeline and context parallelism too.
4. Rank the estimates by the time to finish the job.
5. Dry-run the plans, the fastest first, with the engine that would train them, until a plan fits.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from tightfit._torch.compiler import keeping_compilations
from tightfit.errors import InputError
from tightfit.job import DataSpec, Job
from tightfit.machine import Machine
from tightfit.parallel.pipeline.stages import stage_ranges
from tightfit.plan import Plan
from tightfit.planner.ahead import tracing_ahead
from tightfit.planner.candidates import candidates, data_parallel_layouts, is_legal
from tightfit.planner.defaults import complete
from tightfit.planner.estimate import Estimate, Estimator
from tightfit.planner.finalists import MAX_OVERESTIMATE, DryRunResults, first_that_fits, first_that_nearly_fits
from tightfit.planner.kernels import MIN_COMPILE_SAVING, MIN_KERNEL_SAVING, saves, with_best_kernels
from tightfit.planner.leanest import leanest, leanest_with_parallelism, offloads, surely_exceeds_memory
from tightfit.planner.micro_batches import MemoryBounds, largest_safe_micro_batch, search_micro_batch
from tightfit.planner.parallelism import (
    balanced_split,
    by_lower_bound,
    limited_to_batch,
    parallelism_fields,
    schedules,
    with_sequence_parallel,
)
from tightfit.planner.refusal import describe_shortages, does_not_fit
from tightfit.planner.time_model import BLOCKING
from tightfit.units import format_bytes, format_seconds

GC_THRESHOLDS = (100_000, 50, 100)  # of Python's cyclic garbage collector, during a search
RETURNED = 12  # number of estimates that `search` returns: the chosen plan and the closest ones
MIN_SAVING = 0.1  # share of a step's time that model or sequence parallelism must be able to save
# if a step waits for samples for more than this share of its time, the plan uses loader workers
MAX_INPUT_SHARE = 0.02
MAX_WORKERS = 8  # the most loader workers that a plan gets
MAX_REFINED = 2  # plans with recompute: full for which fewer recomputed blocks are tried
MAX_REFINED_MICRO_BATCHES = 3  # for each of them, the largest ones that fit
# for each of these factors on the tensors' bytes, the fewest recomputed blocks that fit are found
SPARE_FACTORS = (1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.07, 1.1, 1.15)
# a plan that surely fits is chosen before one whose interval exceeds the memory, if it is at most this much slower
WORTH_OF_CERTAINTY = 0.03
MOST_CERTAIN_TRIED = 2  # such plans that are dry-run
MAX_EAGER_FACTOR = 1.4  # a plan may need this many times the memory without compile
SAVES_NO_MEMORY: dict[str, Any] = {"recompute": "none", "update_in_backward": False}

Result = TypeVar("Result")


@contextmanager
def _infrequent_gc() -> Iterator[None]:
    """Return a context manager inside which Python's cyclic garbage collector runs less often. It
    saves time, because a trace makes millions of objects, and reference counting frees nearly all
    of them."""
    before = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@_infrequent_gc()
@keeping_compilations()
def search(
    job: Job,
    machine: Machine | None = None,
    pins: dict[str, Any] | None = None,
    estimator: Estimator | None = None,
    choices: list[Plan] | None = None,
) -> list[Estimate]:
    """Search for the fastest plan that fits on the machine and has the plan fields in `pins`.

    job        what to train
    machine    the devices; None: the machine that runs this process
    pins       plan fields that the user fixed, such as {"precision": "fp32"}
    estimator  the estimator of an earlier search for the same job and machine, whose traces are
               reused; None: a new one
    choices    the plans to choose from; None: all plans that the job and the machine allow

    Returns at most 12 estimates: the chosen plan first, then the closest alternatives, whose
    `rejected_because` says why they were not chosen.

    Raises DoesNotFit if no plan fits; the error lists the largest uses of memory and the changes
    that would help. Raises InputError if no plan with these pins is possible.
    """
    machine = machine or Machine.detect()
    estimator = estimator or Estimator(job, machine)
    # split: None leaves the choice to the search
    pins = {name: value for name, value in (pins or {}).items() if name != "split" or value is not None}
    if choices is not None:
        return _search(estimator, job, machine, pins, choices)
    with tracing_ahead(estimator, pins, estimate_candidates, _estimate_degrees):
        return _search(estimator, job, machine, pins, choices)


def _search(
    estimator: Estimator, job: Job, machine: Machine, pins: dict[str, Any], choices: list[Plan] | None
) -> list[Estimate]:
    """Search in this process. Arguments: see `search`."""
    lean: Plan | None = None  # where the search continues if no plan fits
    if choices is None:
        found, lean = _estimate_possible_plans(estimator, job, machine, pins)
    else:
        found = [estimator.estimate(plan) for plan in choices if is_legal(plan, job, machine.device)]
    finals, any_size = DryRunResults(), choices is None and "micro_batch" not in pins
    _dry_run_fastest(finals, estimator, found, any_size)
    if finals.chosen is None and lean is not None:
        more = _fallback_estimates(estimator, lean, pins, found, finals)
        _dry_run_fastest(finals, estimator, more, any_size)
        found += more
    if finals.chosen is None and not finals.unconfirmed:
        finals.add(first_that_nearly_fits(estimator, found, finals, estimator.job))
    chosen, found = finals.chosen, [finals.latest(one) for one in found]
    if chosen is None and finals.unconfirmed:
        chosen = min(finals.unconfirmed.values(), key=_by_time)
    if chosen is None:
        possible = [one for one in found if not one.rejected_because]
        if not possible:
            raise next(iter(finals.refused.values()))
        raise does_not_fit(estimator, possible, finals.refused, None if choices is not None else pins)
    chosen = replace(chosen, untraceable=tuple(f"{option}: {why}" for option, why in estimator.untraceable.items()))
    others = _closest_first([one for one in found if one.plan != chosen.plan], chosen)
    return [chosen, *(replace(one, rejected_because=_rejection_reason(one, chosen)) for one in others[: RETURNED - 1])]


def search_or_estimate(estimator: Estimator, pins: dict[str, Any]) -> list[Estimate]:
    """Search for the fastest plan, as `search` does, and return the estimates. If `pins` (field ->
    value) sets every plan field, there is nothing to search: return only the estimate of this plan.
    In a pipeline with split: None, its stages are balanced by predicted time."""
    if set(pins) >= set(Plan.field_names()):
        plan = Plan.parse(pins, "plan")
        if plan.pp > 1 and plan.split is None:
            open_ = {name: value for name, value in pins.items() if name != "split"}
            plan = plan.replace(**balanced_split(estimator, plan.replace(pp=1, virtual_stages=1), open_, plan.pp))
        return [estimator.include_allocator(estimator.estimate(plan))]
    return search(estimator.job, estimator.machine, pins, estimator)


def _estimate_possible_plans(
    estimator: Estimator, job: Job, machine: Machine, pins: dict[str, Any]
) -> tuple[list[Estimate], Plan]:
    """Estimate all plans that the job and the machine allow and that may be the fastest.

    pins  plan fields that the user fixed: they are not varied

    Returns (estimates, lean plan). If none of the estimates fits, the search continues from the
    lean plan: the default plan with the kernels that need the least memory.

    Raises InputError if no plan with these pins is possible.
    """
    supplied = limited_to_batch(machine, job, pins)
    start, _ = complete(job, supplied, pins)
    start, leaner = _first_supported(
        lambda one: with_best_kernels(estimator, one, pins), with_sequence_parallel(estimator, start, pins)
    )
    start = _with_workers(estimator, start, pins)
    if start.pp > 1:
        start = start.replace(**balanced_split(estimator, start, pins, start.pp))
    lean = start.replace(**leaner)
    found = _with_leaner_kernels(estimator, start, pins, leaner) if supplied is machine else []
    if machine.devices_per_node * machine.nodes > 1:
        found += _estimate_parallelism(estimator, lean, pins, found)
    if not found:
        complete(job, machine, pins)  # raises the InputError that says what is wrong
    if not any(one.fits for one in found):
        for where in offloads(estimator, pins)[1:]:
            best_s = _fitting_s(estimator, found)
            found += estimate_candidates(estimator, lean.replace(**where), {**pins, **where}, best_s)
    return found, lean


def _dry_run_fastest(finals: DryRunResults, estimator: Estimator, found: list[Estimate], any_micro_batch: bool) -> None:
    """Dry-run the plans whose estimates fit, the fastest first, until one fits in its dry run too.
    Add the results to `finals`. If it does not surely fit, prefer one that does (`_prefer_certain`).

    found            estimates of all plans so far; those that do not fit are skipped
    any_micro_batch  whether the search may choose the micro-batch
    """
    fitting = sorted((one for one in found if one.fits and one.plan not in finals.refused), key=_by_time)
    if fitting:
        _dry_run_ahead(estimator, fitting, any_micro_batch)
    finals.add(first_that_fits(estimator, fitting, estimator.job))
    if finals.chosen is not None and not finals.chosen.fits_surely:
        found += _prefer_certain(finals, estimator, finals.chosen, fitting, any_micro_batch)


def _dry_run_ahead(estimator: Estimator, fitting: list[Estimate], any_micro_batch: bool) -> None:
    """Let a copy of this process, if the search has copies, make the dry run that will probably be
    needed after that of the fastest plan: that of a plan that surely fits, or of the second fastest.

    fitting          estimates of the plans that fit, the fastest first
    any_micro_batch  whether the search may choose the micro-batch
    """
    work = estimator.profiler.shared_work
    if work is None:
        return

    def dry_run_next() -> None:  # in the copy, so that the estimates here are those of a search alone
        fastest, following = estimator.include_allocator(fitting[0]), fitting[1:]
        if fastest.fits and not fastest.fits_surely:
            smaller = _with_smaller_micro_batches(estimator, fastest, any_micro_batch)
            following = _certain(fastest, [*fitting, *smaller])
        first_that_fits(estimator, following[:1], estimator.job)

    work.restart_copies([dry_run_next])


def _prefer_certain(
    finals: DryRunResults, estimator: Estimator, fastest: Estimate, fitting: list[Estimate], any_micro_batch: bool
) -> list[Estimate]:
    """Make the fastest plan that surely fits the chosen one, if it is at most 3 % slower than the
    fastest plan, whose interval exceeds the memory. Return the estimates of the plans with smaller
    micro-batches than the fastest, which are tried as well.

    finals   the results of the dry runs so far
    fastest  the fastest plan that fits in its dry run
    fitting  estimates of all plans that fit without the allocator's bytes
    any_micro_batch  whether the search may choose the micro-batch
    """
    smaller = _with_smaller_micro_batches(estimator, fastest, any_micro_batch)
    certain = [one for one in _certain(fastest, [*fitting, *smaller]) if one.plan not in finals.too_large]
    for one in certain[:MOST_CERTAIN_TRIED]:
        found = first_that_fits(estimator, [one], estimator.job)
        if found.chosen is not None and found.chosen.fits_surely:
            finals.chosen, finals.uncertain[fastest.plan] = found.chosen, fastest
            break
    return smaller


def _with_smaller_micro_batches(estimator: Estimator, fastest: Estimate, any_micro_batch: bool) -> list[Estimate]:
    """Return estimates of the plan of `fastest` with half of its micro-batch, a quarter and so on,
    until one surely fits or is too slow.

    With `compile: model`, there are none: each would need a trace of the whole model.
    """
    smaller: list[Estimate] = []
    may_shrink = any_micro_batch and fastest.plan.compile != "model"
    size = fastest.plan.micro_batch_of(estimator.job.train.batch) // 2 if may_shrink else 0
    while size:
        plan = fastest.plan.replace(micro_batch=size)
        if not is_legal(plan, estimator.job, estimator.machine.device):
            break
        smaller.append(estimator.estimate(plan))
        if smaller[-1].fits_surely or not _is_worth(smaller[-1], fastest):
            break
        size //= 2
    return smaller


def _certain(fastest: Estimate, others: list[Estimate]) -> list[Estimate]:
    """Return those of `others` that surely fit and are at most 3 % slower than the fastest plan, the
    fastest first."""
    worth = (one for one in others if one.plan != fastest.plan and _is_worth(one, fastest))
    return [one for one in sorted(worth, key=_by_time) if one.fits_surely]


def _is_worth(one: Estimate, fastest: Estimate) -> bool:
    """Return whether the plan of `one` is at most 3 % slower than the fastest plan."""
    return one.total_s <= (1 + WORTH_OF_CERTAINTY) * fastest.total_s


def _fallback_estimates(
    estimator: Estimator, start: Plan, pins: dict[str, Any], found: list[Estimate], finals: DryRunResults
) -> list[Estimate]:
    """Return estimates of plans that the search tries only if no other plan fits:

    - plans without compile, if dry runs of compiled plans failed;
    - the plan that needs the least memory of all;
    - variants of that leanest plan, which differ in the options that trade memory for time.

    start   the plan with the kernels that need the least memory
    pins    plan fields that the user fixed: they are not varied
    found   all estimates so far
    finals  the results of the dry runs so far
    """
    more: list[Estimate] = []
    if (finals.unconfirmed or finals.refused) and start.compile != "none" and "compile" not in pins:
        more += estimate_candidates(estimator, start.replace(compile="none"), {**pins, "compile": "none"})
    if finals.unconfirmed or any(one.fits for one in more):
        return more
    starts = [start]
    if found:
        nearest = min(found, key=lambda one: one.fullness).plan
        sizes = {"tp": nearest.tp, "cp": nearest.cp}
        in_vain = nearest.cp > 1 and not _context_parallelism_may_fit(estimator, start, pins, sizes, found)
        is_other = (nearest.tp, nearest.pp, nearest.cp) != (start.tp, start.pp, start.cp)
        starts += [nearest] if is_other and not in_vain else []
    for one in starts:
        least = leanest(estimator, one, pins)
        if least is not None:
            more.append(least)
        if least is not None and least.fits:
            same = {name: getattr(least.plan, name) for name in ("precision", "rounding", "offload")}
            more += estimate_candidates(estimator, least.plan, {**pins, **same})
    return more


def _closest_first(others: list[Estimate], chosen: Estimate) -> list[Estimate]:
    """Return the estimates of the rejected plans (`others`) sorted so that those closest to the
    chosen plan come first.

    Two kinds of plans alternate: plans that fit but are slower, the fastest first; and plans that
    are faster but do not fit, the one with the smallest peak first. All other plans follow, the
    fastest first.
    """
    others = list({one.plan: one for one in others}.values())
    rejected = [one for one in others if not one.fits or one.rejected_because]
    fitting = sorted((one for one in others if one.fits and not one.rejected_because), key=_by_time)
    faster = sorted((one for one in rejected if one.total_s < chosen.total_s), key=lambda one: one.peak_bytes)
    rest = sorted((one for one in rejected if one.total_s >= chosen.total_s), key=lambda one: one.total_s)
    in_turn = [one for pair in itertools.zip_longest(fitting, faster) for one in pair if one is not None]
    return in_turn + rest


def _with_leaner_kernels(
    estimator: Estimator, start: Plan, pins: dict[str, Any], leaner: dict[str, Any]
) -> list[Estimate]:
    """Return estimates of the variants of `start` that may be the fastest. If the fastest of them
    does not fit, also estimate the variants with other kernels, which need less memory and are
    slower.

    pins    plan fields that the user fixed: the variants keep them
    leaner  the plan fields that select these other kernels, such as {"chunked_loss": 1024}
    """
    found = estimate_candidates(estimator, start, pins)
    fastest = min((one for one in found if one.fits), key=_by_time, default=None)
    if fastest and fastest.plan.precision != start.precision:
        # the kernels were chosen for another precision, in which they may save more
        for fields, least in _kernels_to_reconsider(start, pins, leaner):
            other = estimator.estimate(fastest.plan.replace(**fields))
            if other.fits and not saves(fastest, other, least):
                rest = {name: value for name, value in leaner.items() if name not in fields}
                return _with_leaner_kernels(estimator, start.replace(**fields), pins, rest)
    if leaner and not (found and estimator.include_allocator(min(found, key=_by_time)).fits):
        found += estimate_candidates(estimator, start.replace(**leaner), pins)
    return found


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


def _by_time(one: Estimate) -> tuple[float, float]:
    """Return a sort key that puts the fastest plan first and, of equally fast plans, the one with
    the smallest peak."""
    return one.total_s, one.peak_bytes


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
    - A plan whose parameters and optimizer states alone exceed the memory is not searched further.
      Of such plans with the same precision and optimizer states, only one is estimated, so that the
      user sees why they were rejected. If no plan fits, the leanest of them is estimated.

    start   the plan from which the variants differ in the options that trade memory for time
    pins    plan fields that the user fixed: the variants keep them
    best_s  seconds of a step that a plan has to beat

    Raises InputError if the model supports none of the plans.
    """
    found: list[Estimate] = []
    refused: list[InputError] = []
    ruled_out: dict[Any, list[Plan]] = {}
    # key: a plan without its micro-batch and data-parallel fields; value: its lowest ZeRO stage
    # that fits
    lowest_zero: dict[Plan, int] = {}
    # key: a plan without its micro-batch and memory-saving options; value: its largest useful
    # micro-batch
    largest_useful: dict[Any, int] = {}
    # the same key; value: seconds of a step with the largest micro-batch, whether it fits or not
    without_saving_s: dict[Any, float] = {}
    # key: a plan with recompute: full and without its micro-batch; value: the plan with each useful
    # micro-batch, the largest first
    full: dict[Plan, list[Plan]] = {}
    bounds = MemoryBounds(estimator)
    for plans in candidates(estimator, start, pins):
        if estimator.memory_lower_bound(plans[0]) > estimator.limit_bytes:
            ruled_out.setdefault((plans[0].precision, plans[0].states), []).append(plans[-1])
            continue
        batch, least = estimator.job.train.batch, plans[0].replace(micro_batch=None, **SAVES_NO_MEMORY)
        without_zero = plans[0].replace(micro_batch=None, dp_replicate=1, dp_shard=1, zero=0)
        if start.pp > 1 and lowest_zero.get(without_zero, plans[0].zero) < plans[0].zero:
            continue
        larger = [plan for plan in plans if plan.micro_batch_of(batch) > largest_useful.get(least, 0)]
        if larger and start.compile == "model" and without_saving_s.get(least, 0.0) >= _fitting_s(estimator, found):
            continue
        if larger:
            try:
                seen = (
                    _grow_micro_batch(estimator, larger, best_s, pins)
                    if start.pp > 1
                    else search_micro_batch(estimator, larger, bounds, min(best_s, _fitting_s(estimator, found)))
                )
            except InputError as error:
                # the model does not support this plan: for example, ZeRO-3 cannot shard a parameter
                # with one element
                refused.append(error)
                continue
            found += seen
            if not seen:
                continue
            if plans[0].recompute == "full":
                full[_without_micro_batch(plans[0])] = larger
            if seen[-1].fits:  # a higher ZeRO stage would only save memory, and not be faster
                lowest_zero[without_zero] = min(plans[0].zero, lowest_zero.get(without_zero, plans[0].zero))
            if plans[0].replace(micro_batch=None) == least:
                largest_useful[least] = largest_safe_micro_batch(seen, batch)
                without_saving_s[least] = seen[0].time.step_s
    if not found and not ruled_out and refused:
        raise refused[0]
    if "recompute" not in pins and start.compile != "model":  # there, each number of blocks would need a trace
        found += _with_fewest_recomputed(estimator, found, full)
    if any(one.fits for one in found):
        if start.tp * start.pp * start.cp > 1:  # of many such plans, each would need a trace
            return found
        return found + [estimator.estimate(plans[0]) for plans in ruled_out.values()]

    def how_lean(plan: Plan) -> tuple[float, bool, int]:
        return (
            estimator.memory_lower_bound(plan),
            plan.recompute != "full",
            plan.micro_batch_of(estimator.job.train.batch),
        )

    return found + [estimator.estimate(min(plans, key=how_lean)) for plans in ruled_out.values()]


def _fitting_s(estimator: Estimator, found: list[Estimate]) -> float:
    """Return the seconds of a step with the fastest plan of the estimates `found` that fits with the
    allocator's bytes; infinite if none does."""
    fitting = sorted((one for one in found if one.fits), key=_by_time)
    return next((one.time.step_s for one in fitting if estimator.include_allocator(one).fits), math.inf)


def _with_fewest_recomputed(
    estimator: Estimator, found: list[Estimate], full: dict[Plan, list[Plan]]
) -> list[Estimate]:
    """Return estimates of plans that recompute only as many blocks as necessary: `recompute: first-K`
    with the smallest K that fits.

    found  estimates; of those that fit with recompute: full, the fastest plans are varied
    full   plan with recompute: full and without micro-batch -> the plan with each useful micro-batch,
           the largest first

    The allocator reserves more than the estimates know, so each plan is also returned with the K
    that fit if the tensors took 1 to 15 % more. The dry run decides among them.

    Example: of 32 blocks, 4 samples fit if 9 blocks are recomputed; if the tensors took 10 % more, 13
    blocks. Bisection estimates 5 plans for the first number, and 2 or 3 more for the second.
    """
    fitting = sorted((one for one in found if one.fits and one.plan.recompute == "full"), key=_by_time)
    by_plan: dict[Plan, list[Estimate]] = {}
    for one in fitting:
        by_plan.setdefault(_without_micro_batch(one.plan), []).append(one)
    more: list[Estimate] = []
    for base, same in list(by_plan.items())[:MAX_REFINED]:
        batch, blocks = estimator.job.train.batch, same[0].ledger.blocks
        largest = max(one.plan.micro_batch_of(batch) for one in same)
        plans = [plan for plan in full[base] if plan.micro_batch_of(batch) <= largest]
        if base.pp > 1:  # each has a split of its own
            plans = sorted((one.plan for one in same), key=lambda plan: -plan.micro_batch_of(batch))
        for plan in plans[:MAX_REFINED_MICRO_BATCHES]:
            more += _fewest_recomputed(estimator, plan, max(map(len, stage_ranges(plan, blocks))))
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


def _with_workers(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> Plan:
    """Return `start` with enough loader workers (processes that prepare samples) to prepare a
    step's samples in half of the step's time. If the step hardly waits for samples, `start` is
    returned unchanged.

    The plan gets no workers on a CPU, where they would compete with the model for the cores. A
    dataset of the user's own gets no workers either, because it may not be picklable. If the user
    pinned the number of workers (it is in `pins`), it is kept.
    """
    job = estimator.job
    if estimator.machine.device == "cpu" or "loader_workers" in pins or not isinstance(job.data, DataSpec):
        return start
    one = estimator.estimate(start)
    if one.time.input_s < MAX_INPUT_SHARE * one.time.step_s:
        return start
    work_s, prepare_s = one.time.step_s - one.time.input_s, one.ledger.seconds.get("prepare", 0.0)
    machine = estimator.machine
    named = machine.host_memory_bytes.source == "published"  # the host of a catalogue machine is unknown
    most = MAX_WORKERS if named else min(MAX_WORKERS, machine.cores // machine.devices_per_node)
    if job.data.streaming:
        most = min(most, 1)  # only one worker can read a stream
    return start.replace(loader_workers=min(math.ceil(2 * prepare_s / work_s), most))


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
    found: list[Estimate] = []
    for plan in reversed(plans):
        alone = plan.replace(pp=1, virtual_stages=1)
        split = balanced_split(estimator, alone, {**pins, "virtual_stages": plan.virtual_stages}, plan.pp)
        found.append(estimator.estimate(plan.replace(**split)))
        slower = len(found) > 1 and found[-1].total_s >= found[-2].total_s
        grown_s = _doubled_lower_bound_s(estimator, found[-1])
        if slower or not found[-1].fits or grown_s >= min(best_s, found[-1].time.step_s):
            break
    return found


def _doubled_lower_bound_s(estimator: Estimator, one: Estimate) -> float:
    """Return a lower bound on the seconds of a step that the pipeline plan of the estimate `one`
    would take with micro-batches twice as large.

    The bubble grows by the factor by which each micro-batch takes longer. Larger micro-batches save
    at most

    - all launches,
    - half of the latency of the messages that forward and backward wait for,
    - half of the time of all other messages,
    - the time by which matrix products exceed that of the best shape, because larger products may be
      faster. If the machine's rates were measured, it is the time of all products.
    """
    time = one.time
    within = [message.latency_s for message in one.ledger.messages if message.name == BLOCKING]
    others = [
        message.bytes / message.bytes_per_s + message.latency_s
        for message in one.ledger.messages
        if message.name != BLOCKING
    ]
    best = 0.0 if one.machine.rates else estimator.bound_model.arithmetic_s(one.ledger)
    products = time.compute_s - best
    busy = time.compute_s + time.memory_s
    longer = max(2 * busy, busy + time.launch_s) / (busy + time.launch_s) - 1
    return time.step_s + longer * time.bubble_s - time.launch_s - (sum(within) + sum(others)) / 2 - products


def _estimate_parallelism(
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
        if "cp" in sizes and not _context_parallelism_may_fit(estimator, start, pins, sizes, [*known, *found]):
            in_vain.append(sizes)
            continue
        if sizes.get("tp", 1) >= too_many_tp:
            continue
        seen = _estimate_degrees(estimator, start, pins, sizes, best_s)
        if not seen and math.isfinite(best_s) and sizes.keys() == {"tp"}:
            too_many_tp = sizes["tp"]
        found += seen
    tried = [*known, *found]
    if in_vain and tried and not any(one.fits for one in tried):
        found += _leanest_in_vain(estimator, pins, in_vain, tried)
    return found


def _context_parallelism_may_fit(
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
    alike = [one for one in others if (one.plan.tp, one.plan.pp, one.plan.cp) == (tp, 1, 1) and not one.plan.offload]
    kinds = {(one.plan.precision, one.plan.states) for one in others} | {(start.precision, start.states)}
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


def _bytes_beside_activations(one: Estimate) -> float:
    """Return the most bytes that a step with the plan of the estimate `one` needs for everything
    except activations and temporaries."""
    rows = (rows for _, _, rows in one.ledger.instants())
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
    least = min(others, key=lambda one: one.fullness).plan
    if least.pp > 1 or least.tp != sizes.get("tp", 1):
        return []
    try:
        if "micro_batch" not in pins:
            least = least.replace(micro_batch=1)
        plan = least.replace(**parallelism_fields(estimator, least, {**pins, "zero": 3}, sizes))
        return [estimator.estimate(plan)] if is_legal(plan, estimator.job, estimator.machine.device) else []
    except InputError:
        return []


def _estimate_degrees(
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
    found: list[Estimate] = []
    for schedule in schedules(pins) if "pp" in sizes else ({},):
        best_s = min([best_s, *((1 - MIN_SAVING) * one.time.step_s for one in found if one.fits)])
        try:
            found += _estimate_degrees_and_schedule(
                estimator, start.replace(**schedule), {**pins, **schedule}, sizes, best_s
            )
        except InputError:
            continue
    return found


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
    return _first_supported(lambda one: _by_precision(estimator, one, pins, best_s), plans)


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


def _first_supported(find: Callable[[Plan], Result], plans: list[Plan]) -> Result:
    """Call `find` with one plan after the other until a call raises no InputError, and return its
    result. An InputError means that the model does not support the plan. If all calls raise one,
    the last one is raised."""
    for plan in plans[:-1]:
        try:
            return find(plan)
        except InputError:
            continue
    return find(plans[-1])


def _rejection_reason(one: Estimate, chosen: Estimate) -> str:
    """Return one line of text that says why the plan of `one` was not chosen: it failed, does not
    fit, or is slower than `chosen`."""
    if one.rejected_because:
        return one.rejected_because
    if not one.fits:
        return describe_shortages(one)
    if one.not_confirmed:
        return f"not confirmed, its dry run failed: {one.not_confirmed}"
    slower = one.total_s / chosen.total_s - 1
    if slower < 0 and chosen.fits_surely:
        high = format_bytes(one.peak_range[1])
        return f"{-slower:.1%} faster, but may not fit: of runs like it, some need up to {high}"
    return f"{slower:.0%} slower: {format_seconds(one.time.step_s)} a step"
