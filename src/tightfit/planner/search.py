"""Find the fastest plan that fits the device, and say why the other plans were rejected.

The commands `tightfit explain` and `tightfit train` call `search`, which works in this order:

1. Choose the kernels (see `kernels.py`).
2. Estimate the permitted combinations of the options that trade memory for time (`variants.py`).
3. On several devices, estimate tensor, pipeline and context parallelism too (`parallel_plans.py`).
4. Rank the estimates by the time to finish the job.
5. Dry-run the plans, the fastest first, with the engine that would train them, until a plan fits
   (`finalists.py` and `certainty.py`).
6. Run a user's own model. If the chosen plan would train it otherwise than plain PyTorch, search again among
   fewer plans: without micro-batches, recomputation or 16-bit weights (`split_check.py`).
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tightfit._torch.compiler import keeping_compilations
from tightfit.calibration.this_machine import measured_machine_of
from tightfit.capabilities import has_fast_bf16
from tightfit.errors import DoesNotFit, InputError
from tightfit.job import DataSpec, Job
from tightfit.machine import Machine
from tightfit.plan import Plan, checked_pins, read_pins
from tightfit.planner.ahead import tracing_ahead
from tightfit.planner.candidates import is_legal
from tightfit.planner.certainty import dry_run_fastest
from tightfit.planner.defaults import complete
from tightfit.planner.estimate import Estimate
from tightfit.planner.estimator import Estimator, check_possible
from tightfit.planner.finalists import DryRunResults, first_that_nearly_fits
from tightfit.planner.kernels import with_best_kernels
from tightfit.planner.leanest import leanest, offloads
from tightfit.planner.model_convolutions import measure_model
from tightfit.planner.parallel_plans import context_parallelism_may_fit, estimate_parallelism, first_supported
from tightfit.planner.parallelism import balanced_split, limited_to_batch, with_sequence_parallel
from tightfit.planner.refusal import describe_shortages, does_not_fit
from tightfit.planner.split_check import accumulates, changed_state, loss_depends_on_split, model_uses, splits_batch
from tightfit.planner.variants import by_time, estimate_candidates, estimate_candidates_and_leaner_kernels, fitting_s
from tightfit.units import format_bytes, format_seconds

GC_THRESHOLDS = (100_000, 50, 100)  # of Python's cyclic garbage collector, during a search
RETURNED = 12  # number of estimates that `search` returns: the chosen plan and the closest ones
# if a step waits for samples for more than this share of its time, the plan uses loader workers
MAX_INPUT_SHARE = 0.02
MAX_WORKERS = 8  # the most loader workers that a plan gets


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
    machine: Machine | str | None = None,
    pins: dict[str, Any] | None = None,
    estimator: Estimator | None = None,
    choices: list[Plan] | None = None,
) -> list[Estimate]:
    """Search for the fastest plan that fits on the machine and has the plan fields in `pins`.

    job        what to train. The fields that its `plan` sets are pins, too
    machine    the devices, or their name, such as "h100-sxm:8"; None: the machine that runs this
               process. If it is a CPU that was never calibrated, its speed is measured (some seconds)
    pins       plan fields that the user fixed, such as {"precision": "fp32"}. They replace those of
               the job
    estimator  the estimator of an earlier search for the same job and machine, whose traces are
               reused; None: a new one
    choices    the plans to choose from; None: all plans that the job and the machine allow

    Returns at most 12 estimates: the chosen plan first, then the closest alternatives, whose
    `rejected_because` says why they were not chosen.

    Raises DoesNotFit if no plan fits; the error lists the largest uses of memory and the changes
    that would help. Raises InputError if no plan with these pins is possible, or if a pin is not a
    plan field or has a wrong value.
    """
    machine = measured_machine_of(machine)
    pins = {**read_pins(job.plan), **checked_pins(pins)}
    estimator = estimator or Estimator(job, machine)
    # split: None leaves the choice to the search
    pins = {name: value for name, value in pins.items() if name != "split" or value is not None}
    if choices is not None:
        if not choices:
            raise InputError("choices", "is empty", "give at least one plan, or leave choices out")
        return _search(estimator, job, machine, pins, choices)
    measure_model(estimator, complete(job, limited_to_batch(machine, job, pins), pins)[0], pins)
    machine = estimator.machine
    with tracing_ahead(estimator, pins):
        try:
            found = _with_whole_batch(estimator, pins, _search(estimator, job, machine, pins, choices))
        except DoesNotFit:
            if "recompute" in pins or not (why := changed_state(estimator)):
                raise
            found = _search_without_recomputation(estimator, pins, why)  # so that no remedy recomputes blocks
        found = _with_equal_blocks(estimator, pins, found)
        return _with_wide_weights(estimator, pins, found)


def _with_whole_batch(estimator: Estimator, pins: dict[str, Any], estimates: list[Estimate]) -> list[Estimate]:
    """Return the `estimates` of a search, or, if their first plan has micro-batches that change
    the job, those of another search, without micro-batches. The loss of a job may depend on how a batch is
    split, or a model may change in each forward (see `split_check.py`). The first estimate then says so
    in its notes.

    A plan is returned unchanged if the user pinned its micro-batch, or if it only divides the batch
    over devices, which cannot be avoided: its note says that it trains something else.

    Raises DoesNotFit if no plan without micro-batches fits.
    """
    chosen = estimates[0].plan
    if not splits_batch(estimator, chosen):
        return estimates
    why, uses, is_split = "", model_uses(estimator), splits_batch
    if depends := loss_depends_on_split(estimator):
        why = f"the training depends on how a batch is split: {depends}"
    elif uses.changed and accumulates(estimator, chosen):
        why, is_split = (
            f"the forward changes {uses.changed[0]}, which micro-batches do several times a step",
            accumulates,
        )
    elif uses.hooked:
        return _noted(
            estimates,
            f"the hook of {uses.hooked[0]} gets the gradient of each part of a batch, not that of the whole batch",
        )
    if not why:
        return estimates
    if chosen.micro_batch is not None and "micro_batch" not in pins:
        tried = "only plans without micro-batches were tried; pin micro_batch to split it all the same"
        with _says_what_was_tried(why, tried):
            estimates = _search(estimator, estimator.job, estimator.machine, {**pins, "micro_batch": None}, None)
    if is_split(estimator, estimates[0].plan):
        return _noted(
            estimates,
            f"{why}. This plan splits the batch, so it trains another loss than one device with the whole batch",
        )
    return _noted(estimates, f"{why}. So this plan has no micro-batches")


def _with_equal_blocks(estimator: Estimator, pins: dict[str, Any], estimates: list[Estimate]) -> list[Estimate]:
    """Return the `estimates` of a search, or, if their first plan recomputes blocks that would compute
    something else the second time, those of another search, without recomputation. Its first estimate says so
    in its notes. If the user pinned `recompute`, `build` refuses the plan.

    Raises DoesNotFit if no plan without recomputation fits.
    """
    if not estimates[0].plan.recomputes_blocks or "recompute" in pins or not (why := changed_state(estimator)):
        return estimates
    estimates = _search_without_recomputation(estimator, pins, why)
    return _noted(estimates, f"{why}. So this plan recomputes no blocks")


def _search_without_recomputation(estimator: Estimator, pins: dict[str, Any], why: str) -> list[Estimate]:
    """Search among plans that recompute no blocks. Raises DoesNotFit, with the reason `why` there are no others,
    if none fits."""
    pins = {**pins, "recompute": "none"}
    with _says_what_was_tried(why, "only plans without recompute were tried"):
        return _with_whole_batch(estimator, pins, _search(estimator, estimator.job, estimator.machine, pins, None))


def _with_wide_weights(estimator: Estimator, pins: dict[str, Any], estimates: list[Estimate]) -> list[Estimate]:
    """Return the `estimates` of a search, or, if their first plan stores weights in 16 bits and the model's
    forward itself changes some, such as those of a teacher that it averages, those of another search, with 32-bit
    weights: in 16 bits, small changes are lost. Its first estimate says so in its notes. If the user pinned
    `precision`, `build` warns.

    Raises DoesNotFit if no plan with 32-bit weights fits.
    """
    if not estimates[0].plan.has_16_bit_weights or "precision" in pins or not (names := model_uses(estimator).floating):
        return estimates
    why = f"the forward changes {names[0]}, and in 16 bits small changes would be lost"
    mixed = "bf16" in estimator.job.allowed and has_fast_bf16(estimator.machine)
    pins = {**pins, "precision": "bf16-mixed" if mixed else "fp32"}
    with _says_what_was_tried(why, "only plans with 32-bit weights were tried"):
        estimates = _with_whole_batch(estimator, pins, _search(estimator, estimator.job, estimator.machine, pins, None))
        estimates = _with_equal_blocks(estimator, pins, estimates)
    return _noted(estimates, f"{why}. So this plan has 32-bit weights")


@contextmanager
def _says_what_was_tried(why: str, tried: str) -> Iterator[None]:
    """Return a context manager that adds to a DoesNotFit which plans were tried, and why no others."""
    try:
        yield
    except DoesNotFit as error:
        raise DoesNotFit(f"{error}\n{why}. So {tried}", error.content) from error


def _noted(estimates: list[Estimate], note: str) -> list[Estimate]:
    """Return the estimates, of which the first has one more note."""
    return [replace(estimates[0], notes=(*estimates[0].notes, note)), *estimates[1:]]


def _search(
    estimator: Estimator, job: Job, machine: Machine, pins: dict[str, Any], choices: list[Plan] | None
) -> list[Estimate]:
    """Search in this process. Arguments: see `search`."""
    lean: Plan | None = None  # where the search continues if no plan fits
    if choices is None:
        estimates, lean = _estimate_possible_plans(estimator, job, machine, pins)
    else:
        estimates = _estimate_choices(estimator, [plan for plan in choices if is_legal(plan, job, machine.device)])
    finals, any_size = DryRunResults(), choices is None and "micro_batch" not in pins
    estimates += dry_run_fastest(finals, estimator, estimates, any_size)
    if finals.chosen is None and lean is not None:
        more = _fallback_estimates(estimator, lean, pins, estimates, finals)
        estimates += [*more, *dry_run_fastest(finals, estimator, more, any_size)]
    if finals.chosen is None and not finals.unconfirmed:
        finals.add(first_that_nearly_fits(estimator, estimates, finals, estimator.job))
    chosen, estimates = finals.chosen, [finals.latest(estimate) for estimate in estimates]
    if chosen is None and finals.unconfirmed:
        chosen = min(finals.unconfirmed.values(), key=by_time)
    if chosen is None:
        possible = [estimate for estimate in estimates if not estimate.rejected_because]
        if not possible and not finals.refused and choices:
            check_possible(choices[0], job, machine)  # says why the first of them is not legal
        if not possible:
            raise next(iter(finals.refused.values()))
        raise does_not_fit(estimator, possible, finals.refused, None if choices is not None else pins)
    chosen = replace(chosen, untraceable=tuple(f"{option}: {why}" for option, why in estimator.untraceable.items()))
    others = _closest_first([estimate for estimate in estimates if estimate.plan != chosen.plan], chosen)
    return [
        chosen,
        *(replace(other, rejected_because=_rejection_reason(other, chosen)) for other in others[: RETURNED - 1]),
    ]


def _estimate_choices(estimator: Estimator, choices: list[Plan]) -> list[Estimate]:
    """Return the estimates of those plans that the model supports. Raises InputError if there are plans,
    but none is supported."""
    estimates: list[Estimate] = []
    refused: list[InputError] = []
    for plan in choices:
        try:
            estimates.append(estimator.estimate(plan))
        except InputError as error:
            refused.append(error)
    if refused and not estimates:
        raise refused[0]
    return estimates


def search_or_estimate(estimator: Estimator, pins: dict[str, Any]) -> list[Estimate]:
    """Search for the fastest plan, as `search` does, and return the estimates. If `pins` (field ->
    value) sets every plan field, there is nothing to search: return only the estimate of this plan.
    In a pipeline with split: None, its stages are balanced by predicted time.

    Raises DoesNotFit if a search finds no plan that fits, and InputError if the job or the machine does
    not permit the plan, or if it cannot be predicted.
    """
    if set(pins) >= set(Plan.field_names()):
        plan = Plan.parse(pins, "plan")
        if plan.pp > 1 and plan.split is None:
            open_ = {name: value for name, value in pins.items() if name != "split"}
            plan = plan.replace(**balanced_split(estimator, plan.replace(pp=1, virtual_stages=1), open_, plan.pp))
        return [estimator.estimate_given(plan)]
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
    start, leaner = first_supported(
        lambda one: with_best_kernels(estimator, one, pins), with_sequence_parallel(estimator, start, pins)
    )
    start = _with_workers(estimator, start, pins)
    if start.pp > 1:
        start = start.replace(**balanced_split(estimator, start, pins, start.pp))
    lean = start.replace(**leaner)
    estimates = estimate_candidates_and_leaner_kernels(estimator, start, pins, leaner) if supplied is machine else []
    if machine.devices_per_node * machine.nodes > 1:
        estimates += estimate_parallelism(estimator, lean, pins, estimates)
    if not estimates:
        complete(job, machine, pins)  # raises the InputError that says what is wrong
    if not any(estimate.fits for estimate in estimates):
        for where in offloads(estimator, pins)[1:]:
            best_s = fitting_s(estimator, estimates)
            estimates += estimate_candidates(estimator, lean.replace(**where), {**pins, **where}, best_s)
    return estimates, lean


def _fallback_estimates(
    estimator: Estimator, start: Plan, pins: dict[str, Any], estimates: list[Estimate], finals: DryRunResults
) -> list[Estimate]:
    """Return estimates of plans that the search tries only if no other plan fits:

    - plans without compile, if dry runs of compiled plans failed;
    - the plan that needs the least memory of all;
    - variants of that leanest plan, which differ in the options that trade memory for time.

    start      the plan with the kernels that need the least memory
    pins       plan fields that the user fixed: they are not varied
    estimates  all estimates so far
    finals     the results of the dry runs so far
    """
    more: list[Estimate] = []
    if (finals.unconfirmed or finals.refused) and start.compile != "none" and "compile" not in pins:
        more += estimate_candidates(estimator, start.replace(compile="none"), {**pins, "compile": "none"})
    if finals.unconfirmed or any(one.fits for one in more):
        return more
    starts = [start]
    if estimates:
        nearest = min(estimates, key=lambda estimate: estimate.fullness).plan
        sizes = {"tp": nearest.tp, "cp": nearest.cp}
        in_vain = nearest.cp > 1 and not context_parallelism_may_fit(estimator, start, pins, sizes, estimates)
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
    others = list({other.plan: other for other in others}.values())
    rejected = [other for other in others if not other.fits or other.rejected_because]
    fitting = sorted((other for other in others if other.fits and not other.rejected_because), key=by_time)
    faster = sorted(
        (estimate for estimate in rejected if estimate.total_s < chosen.total_s),
        key=lambda estimate: estimate.peak_bytes,
    )
    rest = sorted(
        (estimate for estimate in rejected if estimate.total_s >= chosen.total_s), key=lambda estimate: estimate.total_s
    )
    in_turn = [one for pair in itertools.zip_longest(fitting, faster) for one in pair if one is not None]
    return in_turn + rest


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
    estimate = estimator.estimate(start)
    if estimate.time.input_s < MAX_INPUT_SHARE * estimate.time.step_s:
        return start
    work_s, prepare_s = estimate.time.step_s - estimate.time.input_s, estimate.ledger.host_work_s.get("prepare", 0.0)
    machine = estimator.machine
    # the host of a machine from the device table is unknown
    named = machine.host_memory_bytes.source == "published"
    most = MAX_WORKERS if named else min(MAX_WORKERS, machine.cores // machine.devices_per_node)
    if job.data.streaming:
        most = min(most, 1)  # only one worker can read a stream
    return start.replace(loader_workers=min(math.ceil(2 * prepare_s / work_s), most))


def _rejection_reason(estimate: Estimate, chosen: Estimate) -> str:
    """Return one line of text that says why the plan of `estimate` was not chosen: it failed, does not
    fit, or is slower than `chosen`."""
    if estimate.rejected_because:
        return estimate.rejected_because
    if not estimate.fits:
        return describe_shortages(estimate)
    if estimate.not_confirmed:
        return f"not confirmed, its dry run failed: {estimate.not_confirmed}"
    slower = estimate.total_s / chosen.total_s - 1
    if slower < 0:
        high = format_bytes(estimate.peak_range[1])
        return f"{-slower:.1%} faster, but may not fit: of runs like it, some need up to {high}"
    return f"{slower:.0%} slower: {format_seconds(estimate.time.step_s)} a step"
