"""Search: the fastest plan that fits, and why the others lost.

What changes the kernels (attention, loss, compiling) is decided first, each by itself, for it costs a trace. Then every
legal combination of what trades memory for time is folded, ranked by the time to finish the job, and the best is
rehearsed through the very engine before it is returned.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from tightfit.capabilities import has_fast_float8, has_fast_tf32
from tightfit.errors import InputError
from tightfit.job import DataSpec, Job
from tightfit.machine import Machine
from tightfit.methods import float8
from tightfit.methods.compile import COMPILE_S
from tightfit.plan import Plan
from tightfit.planner.candidates import candidates, is_legal
from tightfit.planner.complete import complete
from tightfit.planner.cuts import balanced, by_promise, cut_fields, schedules, with_samples, with_sequences
from tightfit.planner.estimate import Estimate, Estimator
from tightfit.planner.finalists import Finals, first_that_fits, first_that_nearly_fits
from tightfit.planner.leanest import leanest, offloads
from tightfit.planner.refusal import does_not_fit, lacking
from tightfit.planner.time import WITHIN
from tightfit.units import format_seconds

COLLECTED = (100_000, 50, 100)  # thresholds of Python's collector
KEPT = 12  # estimates that are returned: the chosen one, and those that came nearest
WORTH = 0.1  # of a step's time that cutting the model must promise to save
WAITS = 0.02  # of a step, for samples, from which on other processes prepare them: so many at most
WORKERS = 8
RESERVED = 1.15  # times its tensors an allocator may take
MAKES_NO_ROOM: dict[str, Any] = {"recompute": "none", "update_in_backward": False}

Found = TypeVar("Found")


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Within, Python looks for cycles less often: a trace makes millions of objects, nearly all of which go by themselves."""
    before = gc.get_threshold()
    gc.set_threshold(*COLLECTED)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@_collecting_seldom()
def search(
    job: Job,
    machine: Machine | None = None,
    pins: dict[str, Any] | None = None,
    estimator: Estimator | None = None,
    among: list[Plan] | None = None,
) -> list[Estimate]:
    """Estimates of the plans that keep `pins`, the fastest that fits first; each other says why it lost.

    among  the plans to choose from, in place of all that this machine and the job allow

    Raises DoesNotFit where no plan fits, with the largest rows and what would help; InputError for pins that cannot
    work.
    """
    machine = machine or Machine.detect()
    estimator = estimator or Estimator(job, machine)
    pins = dict(pins or {})
    if among is None:
        supplied = with_samples(machine, job, pins)
        start, _ = complete(job, supplied, pins)
        start, leaner = _first_possible(
            lambda one: _with_best_kernels(estimator, one, pins), with_sequences(estimator, start, pins)
        )
        start = _with_workers(estimator, start, pins)
        if start.pp > 1:
            start = start.replace(**balanced(estimator, start, pins, start.pp))
        found = _worth_knowing(estimator, start, pins, leaner) if supplied is machine else []
        if machine.devices_per_node * machine.nodes > 1:
            found += _cuts_worth_knowing(estimator, start.replace(**leaner), pins, found)
        if not found:
            complete(job, machine, pins)  # which says what is wrong
        if not any(one.fits for one in found):
            for where in offloads(estimator, pins)[1:]:
                found += worth_knowing(estimator, start.replace(**leaner, **where), {**pins, **where})
    else:
        found = [estimator.estimate(plan) for plan in among if is_legal(plan, job, machine.device)]
    finals = Finals()
    _choose(finals, estimator, found)
    if finals.chosen is None and among is None:
        more = _last_resorts(estimator, start.replace(**leaner), pins, found, finals)
        _choose(finals, estimator, more)
        found += more
    if finals.chosen is None and not finals.unconfirmed:
        finals.add(first_that_nearly_fits(estimator, found, finals, estimator.job))
    chosen, found = finals.chosen, [finals.seen(one) for one in found]
    if chosen is None and finals.unconfirmed:
        chosen = min(finals.unconfirmed.values(), key=_soonest)
    if chosen is None:
        possible = [one for one in found if not one.rejected_because]
        if not possible:
            raise next(iter(finals.refused.values()))
        raise does_not_fit(estimator, possible, finals.refused, None if among is not None else pins)
    others = _nearest([one for one in found if one.plan != chosen.plan], chosen)
    return [chosen, *(replace(one, rejected_because=_why(one, chosen)) for one in others[: KEPT - 1])]


def _choose(finals: Finals, estimator: Estimator, found: list[Estimate]) -> None:
    """Add to `finals` what comes of dry runs of the plans whose estimates fit, the fastest first."""
    fitting = sorted((one for one in found if one.fits and one.plan not in finals.refused), key=_soonest)
    finals.add(first_that_fits(estimator, fitting, estimator.job))


def _last_resorts(
    estimator: Estimator, start: Plan, pins: dict[str, Any], found: list[Estimate], finals: Finals
) -> list[Estimate]:
    """Estimates of plans that a search leaves out while others may fit: without compiling, where dry runs of compiled plans failed;
    the leanest of all; and those that differ from it in what trades memory for time."""
    more: list[Estimate] = []
    if (finals.unconfirmed or finals.refused) and start.compile != "none" and "compile" not in pins:
        more += worth_knowing(estimator, start.replace(compile="none"), {**pins, "compile": "none"})
    if finals.unconfirmed or any(one.fits for one in more):
        return more
    starts = [start]
    if found:
        nearest = min(found, key=lambda one: one.fullness).plan
        starts += [nearest] if (nearest.tp, nearest.pp, nearest.cp) != (start.tp, start.pp, start.cp) else []
    for one in starts:
        least = leanest(estimator, one, pins)
        if least is not None:
            more.append(least)
        if least is not None and least.fits:
            same = {name: getattr(least.plan, name) for name in ("precision", "rounding", "offload")}
            more += worth_knowing(estimator, least.plan, {**pins, **same})
    return more


def _nearest(others: list[Estimate], chosen: Estimate) -> list[Estimate]:
    """The plans that lost, those that came nearest first: in turn the next slower one that fits, and of the faster ones, which do
    not, the one that lacks least; then the rest."""
    others = list({one.plan: one for one in others}.values())
    rejected = [one for one in others if not one.fits or one.rejected_because]
    fitting = sorted((one for one in others if one.fits and not one.rejected_because), key=_soonest)
    faster = sorted((one for one in rejected if one.total_s < chosen.total_s), key=lambda one: one.peak_bytes)
    rest = sorted((one for one in rejected if one.total_s >= chosen.total_s), key=lambda one: one.total_s)
    in_turn = [one for pair in itertools.zip_longest(fitting, faster) for one in pair if one is not None]
    return in_turn + rest


def _worth_knowing(estimator: Estimator, start: Plan, pins: dict[str, Any], leaner: dict[str, Any]) -> list[Estimate]:
    """As `worth_knowing`; with the kernels that make the model smaller and slower, too, where the fastest plan does not fit."""
    found = worth_knowing(estimator, start, pins)
    if leaner and not (found and estimator.settle(min(found, key=_soonest)).fits):
        found += worth_knowing(estimator, start.replace(**leaner), pins)
    return found


def _soonest(one: Estimate) -> tuple[float, float]:
    return one.total_s, one.peak_bytes


def worth_knowing(estimator: Estimator, start: Plan, pins: dict[str, Any], best_s: float = math.inf) -> list[Estimate]:
    """Estimates of the legal plans, but for those that a bound rules out: smaller micro-batches than the largest that
    fits are no faster, but in a pipeline; what makes room is of use where it allows larger ones; a pipeline's micro-batches each
    send what ZeRO divides beyond its first stage, so no higher one is faster than one that makes room enough; and where the
    model and its states alone do not fit, one plan stands for all, the leanest where nothing else fits either.

    best_s  seconds of a step that are to be beaten

    Raises InputError where the model can have none of them.
    """
    found: list[Estimate] = []
    refused: list[InputError] = []
    ruled_out: dict[Any, list[Plan]] = {}
    divided: dict[Plan, int] = {}  # the lowest stage of ZeRO that makes enough room, with everything else as in a plan
    reached: dict[Any, int] = {}  # the largest micro-batch that fits, or is of use, with nothing that makes room
    for plans in candidates(estimator, start, pins):
        if estimator.least_bytes(plans[0]) > estimator.limit_bytes:
            ruled_out.setdefault((plans[0].precision, plans[0].states), []).append(plans[-1])
            continue
        batch, least = estimator.job.train.batch, plans[0].replace(micro_batch=None, **MAKES_NO_ROOM)
        undivided = plans[0].replace(micro_batch=None, dp_replicate=1, dp_shard=1, zero=0)
        if start.pp > 1 and divided.get(undivided, plans[0].zero) < plans[0].zero:
            continue
        larger = [plan for plan in plans if plan.micro_batch_of(batch) > reached.get(least, 0)]
        if larger:
            try:
                seen = _growing(estimator, larger, best_s) if start.pp > 1 else _largest(estimator, larger)
            except (
                InputError
            ) as error:  # what this model cannot have, such as rows of a parameter that is a single number
                refused.append(error)
                continue
            found += seen
            if seen[-1].fits:  # so that room for larger micro-batches is of no use
                divided[undivided] = min(plans[0].zero, divided.get(undivided, plans[0].zero))
            if plans[0].replace(micro_batch=None) == least:
                reached[least] = _reached(seen, batch)
    if not found and not ruled_out and refused:
        raise refused[0]
    if any(one.fits for one in found):
        if start.tp * start.pp * start.cp > 1:  # of which many are looked at, and each would be traced
            return found
        return found + [estimator.estimate(plans[0]) for plans in ruled_out.values()]

    def how_lean(plan: Plan) -> tuple[float, bool, int]:
        return estimator.least_bytes(plan), plan.recompute != "full", plan.micro_batch_of(estimator.job.train.batch)

    return found + [estimator.estimate(min(plans, key=how_lean)) for plans in ruled_out.values()]


def _with_workers(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> Plan:
    """`start`, on a GPU with as many workers as it takes to prepare samples in half of a step. On a processor they would take
    the cores that the model works on; a dataset of the user's own may be one that no other process can be given."""
    job = estimator.job
    if estimator.machine.device == "cpu" or "loader_workers" in pins or not isinstance(job.data, DataSpec):
        return start
    one = estimator.estimate(start)
    if one.time.input_s < WAITS * one.time.step_s:
        return start
    work_s, prepare_s = one.time.step_s - one.time.input_s, one.ledger.seconds.get("prepare", 0.0)
    machine = estimator.machine
    named = machine.host_memory_bytes.source == "published"  # whose host is not known
    most = WORKERS if named else min(WORKERS, machine.cores // machine.devices_per_node)
    return start.replace(loader_workers=min(math.ceil(2 * prepare_s / work_s), most))


def _reached(seen: list[Estimate], batch: int) -> int:
    """The largest micro-batch that fits for sure; all of the batch where larger ones fit and are slower."""
    fitting = [one for one in seen if one.peak_bytes * RESERVED <= one.limit_bytes]
    if not fitting:
        return 0
    last = max(fitting, key=lambda one: one.plan.micro_batch_of(batch))
    return last.plan.micro_batch_of(batch) if last is min(fitting, key=lambda one: one.total_s) else batch


def _largest(estimator: Estimator, plans: list[Plan]) -> list[Estimate]:
    """Estimates of equal plans with ever smaller micro-batches, as many as it takes to find the largest that fits."""
    found = [estimator.estimate(plans[0])]
    if found[0].fits or len(plans) == 1:
        return found
    found.append(estimator.estimate(plans[-1]))
    too_large, fitting = 0, len(plans) - 1
    while found[1].fits and fitting - too_large > 1:
        middle = (too_large + fitting) // 2
        found.append(estimator.estimate(plans[middle]))
        too_large, fitting = (too_large, middle) if found[-1].fits else (middle, fitting)
    return found


def _growing(estimator: Estimator, plans: list[Plan], best_s: float) -> list[Estimate]:
    """Estimates of equal plans of a pipeline from the smallest micro-batch on, while larger ones fit and are faster, and may take
    less than `best_s` a step."""
    found: list[Estimate] = []
    for plan in reversed(plans):
        found.append(estimator.estimate(plan))
        slower = len(found) > 1 and found[-1].total_s >= found[-2].total_s
        grown_s = _least_of_twice_s(found[-1])
        if slower or not found[-1].fits or grown_s >= min(best_s, found[-1].time.step_s):
            break
    return found


def _least_of_twice_s(one: Estimate) -> float:
    """Seconds of a step that a pipeline's micro-batches of twice the size take at least: they wait at its ends for as much longer
    as each takes, and save launches, half of the replicas' messages and of the beginnings of others, and where larger products are
    known to be faster, some of their time."""
    time = one.time
    within = [message.latency_s for message in one.ledger.messages if message.name == WITHIN]
    others = [
        message.bytes / message.bytes_per_s + message.latency_s
        for message in one.ledger.messages
        if message.name != WITHIN
    ]
    products = time.compute_s if one.machine.rates else 0.0
    busy = time.compute_s + time.memory_s
    longer = max(2 * busy, busy + time.launch_s) / (busy + time.launch_s) - 1
    return time.step_s + longer * time.bubble_s - time.launch_s - (sum(within) + sum(others)) / 2 - products


def _cuts_worth_knowing(
    estimator: Estimator, start: Plan, pins: dict[str, Any], known: list[Estimate]
) -> list[Estimate]:
    """Estimates of plans that cut the model, those that promise most first, while one may be faster than what is known."""
    found: list[Estimate] = []
    hopeless = math.inf  # devices of tp from which on what they say to each other takes too long, in a pipeline or not
    for promised_s, sizes in by_promise(estimator, start, pins):
        best_s = (1 - WORTH) * min((one.time.step_s for one in (*known, *found) if one.fits), default=math.inf)
        if promised_s > best_s or ("cp" in sizes and math.isfinite(best_s)):
            break
        if sizes.get("tp", 1) >= hopeless:
            continue
        seen = _cut(estimator, start, pins, sizes, best_s)
        if not seen and math.isfinite(best_s) and sizes.keys() == {"tp"}:
            hopeless = sizes["tp"]
        found += seen
    return found


def _cut(
    estimator: Estimator, start: Plan, pins: dict[str, Any], sizes: dict[str, int], best_s: float
) -> list[Estimate]:
    """Estimates of plans that cut the job so, a pipeline by each of the schedules; none where it cannot be, or where not even
    one with room for everything would take less than `best_s` a step."""
    found: list[Estimate] = []
    for schedule in schedules(pins) if "pp" in sizes else ({},):
        best_s = min([best_s, *((1 - WORTH) * one.time.step_s for one in found if one.fits)])
        try:
            found += _cut_by(estimator, start.replace(**schedule), {**pins, **schedule}, sizes, best_s)
        except InputError:
            continue
    return found


def _cut_by(
    estimator: Estimator, start: Plan, pins: dict[str, Any], sizes: dict[str, int], best_s: float
) -> list[Estimate]:
    fields = cut_fields(estimator, start, pins, sizes)
    start = start.replace(**fields)
    pins = {**pins, **{name: fields[name] for name in ("tp", "cp", "pp", "split") if name in fields}}
    if math.isfinite(best_s):
        share = start.share_of(estimator.job.train.batch)
        if estimator.least_step_s(start.replace(micro_batch=1 if share > 1 else None)) > best_s:
            return []
    plans = with_sequences(estimator, start, pins)
    return _first_possible(lambda one: _by_precision(estimator, one, pins, best_s), plans)


def _by_precision(estimator: Estimator, start: Plan, pins: dict[str, Any], best_s: float) -> list[Estimate]:
    """Estimates of plans that cut the job as `start` does, in a narrower precision where none fits in its own, nor was found to."""
    if "precision" in pins or estimator.profiler.is_complex:
        return worth_knowing(estimator, start, pins, best_s)
    found = worth_knowing(estimator, start, {**pins, "precision": start.precision}, best_s)
    if start.precision == "bf16-mixed" and math.isinf(best_s) and not any(one.fits for one in found):
        start = start.replace(precision="bf16-true")
        found += worth_knowing(estimator, start, {**pins, "precision": "bf16-true"}, best_s)
    return found


def _first_possible(find: Callable[[Plan], Found], plans: list[Plan]) -> Found:
    """What is found for the first of these plans that the model can have. Raises InputError where that is none."""
    for plan in plans[:-1]:
        try:
            return find(plan)
        except InputError:
            continue
    return find(plans[-1])


def _with_best_kernels(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """`start` with each of what decides the kernels switched off where the plan is predicted to finish sooner without; and of
    that, what makes a model smaller, for where memory is short.

    Compiling is decided late, and once: its traces take longest. None is made where the run is so short that compiling
    costs more than it could ever save.
    """
    cut = start.tp * start.pp * start.cp > 1
    best = estimator.estimate(start if "compile" in pins else start.replace(compile="none"))
    tried: list[dict[str, Any]] = []
    if "attention" not in pins and start.attention != "sdpa":
        tried.append({"attention": "sdpa"})
    if "chunked_loss" not in pins and start.chunked_loss is not None and not cut:
        tried.append({"chunked_loss": None})
    if best.plan.compile != start.compile and COMPILE_S[estimator.machine.device] < _most_saved_s(best):
        tried.append({"compile": start.compile})
    for fields in tried:
        try:
            other = estimator.estimate(best.plan.replace(**fields))
        except InputError:  # what this model cannot have
            continue
        if other.total_s < best.total_s:
            best = other
    wider = "tf32" if has_fast_tf32(estimator.machine) else "fp32"
    if "precision" not in pins and not cut and _may_be_faster(estimator, best, wider):
        other = estimator.estimate(best.plan.replace(precision=wider))
        if other.total_s < best.total_s:
            best = other
    for plan in _in_float8(estimator, best.plan, pins):
        other = estimator.estimate(plan)
        if other.total_s < best.total_s:
            best = other
    names = [name for name in ("chunked_loss", "precision") if getattr(best.plan, name) != getattr(start, name)]
    return best.plan, {name: getattr(start, name) for name in names}


def _in_float8(estimator: Estimator, plan: Plan, pins: dict[str, Any]) -> list[Plan]:
    """`plan` with float8 products in each way that the job allows and the machine multiplies faster; none without torchao."""
    if "float8" in pins or "float8" not in estimator.job.allowed or not float8.is_installed():
        return []
    machine = estimator.machine
    recipes = [recipe for recipe in ("tensorwise", "rowwise") if has_fast_float8(machine, recipe)]
    plans = [plan.replace(float8=recipe) for recipe in recipes]
    return [one for one in plans if is_legal(one, estimator.job, machine.device)]


def _may_be_faster(estimator: Estimator, one: Estimate, wider: str) -> bool:
    """Whether the plan may be faster in a wider type, without autocast's casts: where they take longer than it saves in products."""
    narrow_rate, rate = estimator.machine.rate(one.plan.precision), estimator.machine.rate(wider)
    if not one.plan.precision.endswith("mixed") or narrow_rate is None or rate is None:
        return False
    launch_s = estimator.clock.launch_s
    casts_s = sum(seconds + count * launch_s for _, kind, seconds, count in one.time.rows if kind == "cast")
    return casts_s > (narrow_rate / rate - 1) * one.time.compute_s


def _most_saved_s(one: Estimate) -> float:
    """What compiling could at best save a job: all that is not products, the update, samples, or messages."""
    time = one.time
    return (time.memory_s + time.launch_s + time.allocation_s) * (one.total_s - one.compile_s) / time.step_s


def _why(one: Estimate, chosen: Estimate) -> str:
    if one.rejected_because:
        return one.rejected_because
    if not one.fits:
        return lacking(one)
    if one.not_confirmed:
        return f"not confirmed, its dry run failed: {one.not_confirmed}"
    slower = one.total_s / chosen.total_s - 1
    return f"{slower:.0%} slower: {format_seconds(one.time.step_s)} a step"
