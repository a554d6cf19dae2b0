"""Candidates: the legal plans that differ in what trades memory for time, from which a search chooses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal

from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.plan import Plan
from tightfit.planner.estimate import Estimator
from tightfit.rules import RULES, needed_permissions


def candidates(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> Iterator[list[Plan]]:
    """Every legal plan that differs from `start` in what trades memory for time: lists of equal ones with ever smaller
    micro-batches."""
    job, options = estimator.job, _options(estimator, start, pins)
    options = {name: [getattr(start, name)] if name in pins else values for name, values in options.items()}
    micro_batches = options.pop("micro_batch")
    for spread, *values in itertools.product(spreads(estimator.machine, start, pins), *options.values()):
        plan = start.replace(**spread, **dict(zip(options, values, strict=True)))
        plan = _with_kernel_of_optimizer(plan, job, pins)
        plans = [plan.replace(micro_batch=size) for size in micro_batches]
        legal = [one for one in plans if is_legal(one, job, estimator.machine.device)]
        if legal:
            yield legal


def spreads(machine: Machine, start: Plan, pins: dict[str, Any]) -> list[dict[str, int]]:
    """How the devices may share the work: as replicas, or dividing states by ZeRO over all of them or over those of a node. A
    pipeline would gather parameters again for each of its micro-batches: what its replicas divide are states and gradients."""
    count = machine.devices_per_node * machine.nodes // (start.tp * start.pp * start.cp) - start.servers
    node = max(machine.devices_per_node // (start.tp * start.cp), 1)
    found = [{"dp_replicate": start.dp_replicate, "dp_shard": start.dp_shard, "zero": start.zero}]
    if count * start.cp > 1:
        groups = [count] if machine.nodes == 1 or node in (1, count) or count % node else [count, node]
        found += [{"dp_replicate": count, "dp_shard": 1, "zero": 0}]
        found += [
            {"dp_replicate": count // group, "dp_shard": group, "zero": zero}
            for group in groups
            for zero in ((1, 2) if start.pp > 1 else (1, 2, 3))
        ]
    kept = [spread for spread in found if all(spread[name] == pins[name] for name in spread if name in pins)]
    return [spread for number, spread in enumerate(kept) if spread not in kept[:number]]


def _options(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> dict[str, list[Any]]:
    job = estimator.job
    batch = job.train.batch
    share = start.share_of(batch)
    micro = sorted({share // 2**power for power in range(share.bit_length())}, reverse=True)  # down to 1
    precisions = [start.precision]  # chosen by what this machine multiplies fastest, of what the job allows
    real = not estimator.profiler.is_complex
    if real and start.precision == "bf16-mixed" and "precision" not in pins and _is_worth_narrowing(estimator, start):
        precisions.append("bf16-true")
    widths = [width for width in ("bf16", "8-bit", "4-bit") if f"{width}-states" in job.allowed and real]
    return {
        "precision": precisions,
        "float8": list(dict.fromkeys([start.float8, "none"])),  # its casts take memory
        "micro_batch": [None if size == share else size for size in micro],
        "recompute": ["none", "selective", "selective-2", "every-2", "full", "sqrt"],
        "states": ["fp32", *widths],
        "update_in_backward": [False, True],
    }


def _is_worth_narrowing(estimator: Estimator, start: Plan) -> bool:
    """Whether weights in bf16 may win: where the plan as it is does not fit, or where they are faster as written."""
    wide = estimator.estimate(start)
    if not wide.fits:
        return True
    narrow = start.replace(precision="bf16-true", rounding=rounding_of(estimator.job))
    return estimator.estimate(narrow).time.step_s < wide.time.step_s


def rounding_of(job: Job) -> Literal["nearest", "kahan"]:
    """How search rounds updates of bf16 weights: kahan carries what would be lost of small ones, so that the job
    trains as with wider weights. Nearest takes less memory and time, where the job allows to lose them."""
    return "nearest" if "nearest-rounding" in job.allowed else "kahan"


def _with_kernel_of_optimizer(plan: Plan, job: Job, pins: dict[str, Any]) -> Plan:
    """`plan` with the rounding that the job allows for weights held in bf16."""
    if plan.precision == "bf16-true" and "rounding" not in pins:
        plan = plan.replace(rounding=rounding_of(job))
    return plan


def is_legal(plan: Plan, job: Job, device: str) -> bool:
    return needed_permissions(plan) <= job.allowed and all(rule.holds(plan, job, device) for rule in RULES)


__all__ = ["candidates", "is_legal", "rounding_of", "spreads"]
