"""Search: the fastest plan that fits, and why the others lost.

What changes the kernels (attention, loss, compiling) is decided first, each by itself, for it costs a trace. Then every
legal combination of what trades memory for time is folded, ranked by the time to finish the job, and the best is
rehearsed through the very engine before it is returned.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tightfit.errors import DoesNotFit, InputError
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.plan import RULES, Plan, needed_permissions
from tightfit.planner.complete import complete, over_devices
from tightfit.planner.estimate import Estimate, Estimator
from tightfit.planner.rehearse import rehearse
from tightfit.timetable import split_balanced
from tightfit.units import format_bytes, format_seconds

KEPT = 12  # estimates that are returned: the chosen one, and those that came nearest
REHEARSED_BLOCKS = 24  # of a model on several devices, at most
OFFLOADED = {  # what is tried where nothing else fits, what costs least first
    "cuda": (("states",), ("states", "activations")),
    "cpu": (("states",), ("states", "gradients", "parameters"), ("states", "gradients", "parameters", "activations")),
}
WAITS = 0.1  # share of a step spent on links from which on a pipeline between nodes is tried
REHEARSED = 3  # of those that an allocator may leave too little room for, at most


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
    if among is None:
        pins = dict(pins or {})
        start, _ = complete(job, machine, pins)
        start = _with_sequences(estimator, start, pins)
        start = _with_best_kernels(estimator, start, pins)
        found = _worth_knowing(estimator, start, pins)
        for sizes in _cuts(machine, pins):
            if not _waits_for_links(found, among_nodes=set(sizes) == {"pp"} and machine.nodes > 1):
                break
            found += _cut(estimator, start, pins, sizes)
        if not any(one.fits for one in found) and "offload" in job.allowed and "offload" not in pins:
            for words in OFFLOADED[machine.device]:
                where: dict[str, Any] = {"offload": words, "offload_to": "disk" if machine.device == "cpu" else "host"}
                if machine.device == "cpu" and "allocator" not in pins:
                    where["allocator"] = "lean"
                found += _worth_knowing(estimator, start.replace(**where), {**pins, **where})
                if any(one.fits for one in found):
                    break
    else:
        found = [estimator.estimate(plan) for plan in among if _is_legal(plan, job, machine.device)]
    fitting = sorted((one for one in found if one.fits), key=lambda one: (one.total_s, one.peak_bytes))
    chosen = _rehearsed(estimator, fitting, job)
    if chosen is None:
        raise does_not_fit(min(found, key=lambda one: one.peak_bytes), found, job)
    others = [one for one in fitting if one.plan != chosen.plan] + sorted(
        (one for one in found if not one.fits), key=lambda one: one.total_s
    )
    return [chosen, *(replace(one, rejected_because=_why(one, chosen)) for one in others[: KEPT - 1])]


def _worth_knowing(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> list[Estimate]:
    """Estimates of the legal plans, but for those that a bound rules out: smaller micro-batches than the largest that
    fits are no faster; and where the model and its states alone do not fit, one plan stands for all."""
    found: list[Estimate] = []
    ruled_out = set()
    for plans in candidates(estimator, start, pins):
        if estimator.least_bytes(plans[0]) > estimator.limit_bytes:
            what = plans[0].precision, plans[0].states
            if what not in ruled_out:
                found.append(estimator.estimate(plans[-1]))
            ruled_out.add(what)
            continue
        for plan in plans:
            found.append(estimator.estimate(plan))
            if found[-1].fits:
                break
    return found


def _waits_for_links(found: list[Estimate], among_nodes: bool) -> bool:
    """Whether cutting the model may help: nothing fits, or the best that does waits for what nodes send each other."""
    fitting = [one for one in found if one.fits]
    if not fitting:
        return True
    best = min(fitting, key=lambda one: one.total_s)
    return among_nodes and best.time.communication_s > WAITS * best.time.step_s


def _cuts(machine: Machine, pins: dict[str, Any]) -> list[dict[str, int]]:
    """Sizes of tp, pp and cp that a job may be cut by, those that cost least first: pipelines, whose nodes send each other
    little; then tp, within a node only, for nothing hides its sums; then sequences; then two of them."""
    count = machine.devices_per_node * machine.nodes
    tps = [{"tp": size} for size in (2, 4, 8) if machine.devices_per_node % size == 0 and "tp" not in pins]
    pps = [{"pp": size} for size in (2, 4, 8, 16, 32) if count % size == 0 and "pp" not in pins]
    cps = [{"cp": size} for size in (2, 4, 8) if count % size == 0 and "cp" not in pins]
    both = [
        tp | other for tp in reversed(tps) for other in (*pps, *cps) if count % math.prod((tp | other).values()) == 0
    ]
    return [*pps, *tps, *cps, *both]


def _cut(estimator: Estimator, start: Plan, pins: dict[str, Any], sizes: dict[str, int]) -> list[Estimate]:
    """Estimates of plans that cut the job so; none where it cannot be."""
    fields: dict[str, Any] = {name: size for name, size in sizes.items() if name != "pp"}
    if "cp" in sizes and "attention" not in pins:
        fields["attention"] = "sdpa"
    if "compile" not in pins and start.compile == "model":
        fields["compile"] = "block"
    try:
        if "pp" in sizes:
            fields |= {"pp": sizes["pp"]} | _balanced(estimator, start.replace(**fields), pins, sizes["pp"])
        pins = {**pins, **{name: fields[name] for name in ("tp", "cp", "pp", "split") if name in fields}}
        spread = over_devices(estimator.machine, pins)
        start = _with_sequences(estimator, start.replace(**{**fields, **spread}), pins)
        return _worth_knowing(estimator, start, pins)
    except InputError:
        return []


def _with_sequences(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> Plan:
    """`start`, under tensor parallelism with sequences divided too where it does not fit without and the model can be."""
    if start.tp == 1 or "sequence_parallel" in pins or estimator.estimate(start).fits:
        return start
    divided = start.replace(sequence_parallel=True)
    try:
        estimator.estimate(divided)
    except InputError:
        return start
    return divided


def _balanced(estimator: Estimator, start: Plan, pins: dict[str, Any], pp: int) -> dict[str, Any]:
    """The split by which the slowest piece is as fast as can be, by the ledger. Raises InputError for a model that has too few
    blocks."""
    plan = start.replace(micro_batch=1)
    ledger, pieces = estimator.profiler.ledger(plan), pp * pins.get("virtual_stages", 1)
    if ledger.blocks < pieces:
        raise InputError(f"plan: pp={pp}", f"the model has {ledger.blocks} blocks", "use fewer")
    seconds = [0.0] * (ledger.blocks + 2)  # before the blocks, of each of them, after them
    here = 0
    for passage in ledger.training:
        if passage.block is not None:
            here = passage.block + 1
        elif passage.phase == "forward" and here == ledger.blocks:
            here = ledger.blocks + 1
        elif passage.phase == "backward" and here == 1:
            here = 0
        seconds[here] += estimator.clock.passages_s([passage], 1)
    if "split" in pins:
        return {}
    return {"split": split_balanced(seconds[1:-1], seconds[0], seconds[-1], pieces)}


def candidates(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> Iterator[list[Plan]]:
    """Every legal plan that differs from `start` in what trades memory for time: lists of equal ones with ever smaller
    micro-batches."""
    job, options = estimator.job, _options(estimator, start)
    options = {name: [getattr(start, name)] if name in pins else values for name, values in options.items()}
    micro_batches = options.pop("micro_batch")
    for spread, *values in itertools.product(_spreads(estimator.machine, start, pins), *options.values()):
        plan = start.replace(**spread, **dict(zip(options, values, strict=True)))
        plan = _with_kernel_of_optimizer(plan, job, pins)
        plans = [plan.replace(micro_batch=size) for size in micro_batches]
        legal = [one for one in plans if _is_legal(one, job, estimator.machine.device)]
        if legal:
            yield legal


def _spreads(machine: Machine, start: Plan, pins: dict[str, Any]) -> list[dict[str, int]]:
    """How the devices may share the work: as replicas, or dividing states by ZeRO over all of them or over those of a node."""
    count = machine.devices_per_node * machine.nodes // (start.tp * start.pp * start.cp) - start.servers
    node = max(machine.devices_per_node // (start.tp * start.cp), 1)
    found = [{"dp_replicate": start.dp_replicate, "dp_shard": start.dp_shard, "zero": start.zero}]
    if count * start.cp > 1:
        groups = [count] if machine.nodes == 1 or node in (1, count) or count % node else [count, node]
        found += [{"dp_replicate": count, "dp_shard": 1, "zero": 0}]
        found += [
            {"dp_replicate": count // group, "dp_shard": group, "zero": zero} for group in groups for zero in (1, 2, 3)
        ]
    kept = [spread for spread in found if all(spread[name] == pins[name] for name in spread if name in pins)]
    return [spread for number, spread in enumerate(kept) if spread not in kept[:number]]


def _options(estimator: Estimator, start: Plan) -> dict[str, list[Any]]:
    job = estimator.job
    batch = job.train.batch
    share = start.share_of(batch)
    micro = sorted({share, *(share // pieces for pieces in (2, 4, 8, 16, 32, 64) if share // pieces)}, reverse=True)
    precisions = [start.precision]  # chosen by what this machine multiplies fastest, of what the job allows
    if start.precision == "bf16-mixed" and _is_worth_narrowing(estimator, start):
        precisions.append("bf16-true")
    widths = [width for width in ("bf16", "8-bit", "4-bit") if f"{width}-states" in job.allowed]
    return {
        "precision": precisions,
        "micro_batch": [None if size == share else size for size in micro],
        "recompute": ["none", "selective", "every-2", "full", "sqrt"],
        "states": ["fp32", *widths],
        "update_in_backward": [False, True],
    }


def _is_worth_narrowing(estimator: Estimator, start: Plan) -> bool:
    """Whether weights in bf16 may win: where the plan as it is does not fit, or where they are faster as written."""
    if not estimator.estimate(start).fits:
        return True
    plain = start.replace(compile="none")
    narrow = plain.replace(precision="bf16-true", rounding="kahan")
    return estimator.estimate(narrow).time.step_s < estimator.estimate(plain).time.step_s


def _with_kernel_of_optimizer(plan: Plan, job: Job, pins: dict[str, Any]) -> Plan:
    """bf16-true carries what rounding would lose of small updates, so that it trains as the others do."""
    if plan.precision == "bf16-true" and "rounding" not in pins:
        plan = plan.replace(rounding="kahan")
    return plan


def _is_legal(plan: Plan, job: Job, device: str) -> bool:
    return needed_permissions(plan) <= job.allowed and all(rule.holds(plan, job, device) for rule in RULES)


def _with_best_kernels(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> Plan:
    """`start` with each of what decides the kernels switched off where the plan is predicted to finish sooner without.

    What makes a model smaller stays, for it only costs time where memory is plenty. Compiling is decided last, and once:
    its traces take longest.
    """
    best = estimator.estimate(start if "compile" in pins else start.replace(compile="none"))
    tried = [{"attention": "sdpa"}] if "attention" not in pins and start.attention != "sdpa" else []
    if best.plan.compile != start.compile:
        tried.append({"compile": start.compile})
    for fields in tried:
        other = estimator.estimate(best.plan.replace(**fields))
        if other.total_s < best.total_s:
            best = other
    return best.plan


def _rehearsed(estimator: Estimator, fitting: list[Estimate], job: Job) -> Estimate | None:
    """The fastest that fits when it is rehearsed, with what the allocator reserves.

    Where one is found not to, those that leave no more room than it did are put off, and of them only the leanest tried.
    """
    reserved, put_off = 0.0, []
    for one in fitting:
        if one.peak_bytes + reserved > one.limit_bytes:
            put_off.append(one)
            continue
        seen = _rehearse(estimator, one, job)
        if seen is not None and seen.fits:
            return seen
        if seen is not None:
            reserved = max(reserved, seen.peak_bytes - one.peak_bytes)
    for one in sorted(put_off, key=lambda one: one.peak_bytes)[:REHEARSED]:
        seen = _rehearse(estimator, one, job)
        if seen is not None and seen.fits:
            return seen
    return None


def _rehearse(estimator: Estimator, one: Estimate, job: Job) -> Estimate | None:
    """`one` with what the allocator reserves and, if it still fits, as rehearsed; None where the engine refuses it."""
    settled = estimator.settle(one)
    if not settled.fits:
        return settled
    if one.plan.devices > 1 and one.ledger.blocks > REHEARSED_BLOCKS:
        return (
            settled  # fully_shard on a hundred blocks takes a minute: the folded figure stands, which tests hold to it
        )
    try:
        peak = rehearse(job, one.plan, one.machine.device, one.ledger.device)
    except InputError:  # a combination that this model cannot have: sqrt where more than one block hands on
        return None
    beside = settled.peak.rows["runtime"] + settled.peak.rows.get("allocator", 0.0)
    return replace(settled, rehearsed=peak.total + beside)


def _why(one: Estimate, chosen: Estimate) -> str:
    if not one.fits:
        return f"needs {format_bytes(one.peak_bytes)}, {format_bytes(one.limit_bytes)} are there"
    slower = one.total_s / chosen.total_s - 1
    return f"{slower:.0%} slower: {format_seconds(one.time.step_s)} a step"


def does_not_fit(least: Estimate, found: list[Estimate], job: Job) -> DoesNotFit:
    """What is said where nothing fits: the leanest plan's largest rows, and what would help."""
    rows = sorted(least.peak.rows.items(), key=lambda row: -row[1])[:3]
    largest = ", ".join(f"{row} {format_bytes(size)}" for row, size in rows if size)
    lines = [
        f"needs {format_bytes(least.peak_bytes)} at least, {format_bytes(least.limit_bytes)} are there",
        f"  leanest plan: {least.plan}",
        f"  largest: {largest} (in {least.peak_phase})",
    ]
    missing = [word for word in ("bf16", "8-bit-states", "4-bit-states", "offload") if word not in job.allowed]
    if missing:
        lines.append(f"  to allow: {', '.join(missing)}")
    fixed = sum(size for row, size in least.peak.rows.items() if row in ("parameters", "optimizer", "runtime"))
    if fixed < least.limit_bytes and job.train.batch > 1:
        lines.append("  or a smaller train.batch, shorter sequences, or a larger machine")
    else:
        lines.append("  or a larger machine, or a smaller model: parameters and their states alone do not fit")
    return DoesNotFit("\n".join(lines))
