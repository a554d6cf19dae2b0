"""List the plans among which a search chooses. All are permitted by the job and by RULES (the table
of combinations of plan fields that cannot work). They differ in the options that trade memory for
time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.methods import METHODS, zero
from tightfit.methods.precision import rounding_of
from tightfit.plan import Plan
from tightfit.planner.estimator import Estimator
from tightfit.planner.operation_kinds import ATTENTION, KIND
from tightfit.rules import RULES, needed_permissions
from tightfit.runtime.method import SearchFacts
from tightfit.runtime.method import candidates as methods_candidates


def candidates(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> Iterator[list[Plan]]:
    """Yield the permitted plans that differ from `start` in options that trade memory for time,
    such as the micro-batch, recompute and sharding.

    The plans come in lists. The plans of one list differ only in the micro-batch, and the one with
    the largest micro-batch is first.

    estimator  estimates plans of the job on the machine; used to find out whether bf16 parameters
               are worth trying
    start      the plan that is varied: its parallelism and kernels stay
    pins       plan fields that the user fixed, with their values: they are not varied
    """
    job, options = estimator.job, _options(estimator, start, pins)
    micro_batches = options.pop("micro_batch")
    for spread, *values in itertools.product(data_parallel_layouts(estimator.machine, start, pins), *options.values()):
        plan = start.replace(**spread, **dict(zip(options, values, strict=True)))
        plan = _with_rounding(plan, job, pins)
        plans = [plan.replace(micro_batch=size) for size in micro_batches]
        plans = [one for one in plans if not zero.is_redundant(one, job.train.batch)]
        legal = [one for one in plans if is_legal(one, job, estimator.machine.device)]
        if legal:
            yield legal


def data_parallel_layouts(machine: Machine, start: Plan, pins: dict[str, Any]) -> list[dict[str, int]]:
    """Return the data-parallel layouts to try, each as a dict of the plan fields dp_replicate,
    dp_shard and zero. A layout uses all devices that tp, pp and cp do not use.

    start  the plan with the tp, pp and cp to use; its own layout is tried, too
    pins   plan fields that the user fixed: layouts with other values are left out

    The other layouts are plain replicas, and each ZeRO stage over all devices or over the devices
    of one node (hybrid sharding). With a pipeline, ZeRO-3 is left out, because it would gather the
    parameters for every micro-batch.

    Example: 2 nodes of 8 devices give 16 replicas; ZeRO-1, -2 and -3 over 16 devices; and ZeRO-1,
    -2 and -3 over 8 devices with 2 replicas.
    """
    count = machine.devices_per_node * machine.nodes // (start.tp * start.pp * start.cp) - start.servers
    node = max(machine.devices_per_node // (start.tp * start.cp), 1)
    layouts = [{"dp_replicate": start.dp_replicate, "dp_shard": start.dp_shard, "zero": start.zero}]
    if count * start.cp > 1:
        groups = [count] if machine.nodes == 1 or node in (1, count) or count % node else [count, node]
        layouts += [{"dp_replicate": count, "dp_shard": 1, "zero": 0}]
        layouts += [
            {"dp_replicate": count // group, "dp_shard": group, "zero": stage}
            for group in groups
            for stage in ((1, 2) if start.pp > 1 else (1, 2, 3))
        ]
    kept = [spread for spread in layouts if all(spread[name] == pins[name] for name in spread if name in pins)]
    return [spread for number, spread in enumerate(kept) if spread not in kept[:number]]


def _options(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> dict[str, list[Any]]:
    """Return plan field -> values to try. They are the values that the methods (techniques such as
    recompute) propose, or only the value of `start` if the user pinned the field.

    start  the plan with all defaults
    pins   plan fields that the user fixed, with their values
    """
    narrow_pays = lambda: "precision" not in pins and _narrow_parameters_pay(estimator, start)  # noqa: E731
    fuses_attention = lambda: "recompute" not in pins and _fuses_attention(estimator, start)  # noqa: E731
    facts = SearchFacts(estimator.profiler.is_complex, narrow_pays, fuses_attention)
    options = methods_candidates(METHODS, start, estimator.job, facts)
    return {name: [getattr(start, name)] if name in pins else values for name, values in options.items()}


def _narrow_parameters_pay(estimator: Estimator, start: Plan) -> bool:
    """Return whether bf16 parameters are worth trying. They are if `start`, whose parameters are in
    fp32, does not fit in memory, or if its step is predicted to be faster with bf16 parameters."""
    if estimator.is_far_too_large(start):
        return True
    wide = estimator.estimate(start)
    if not wide.fits:
        return True
    narrow = start.replace(precision="bf16-true", rounding=rounding_of(estimator.job))
    return estimator.estimate(narrow).time.step_s < wide.time.step_s


def _fuses_attention(estimator: Estimator, start: Plan) -> bool:
    """Return whether a forward with the plan `start` contains a fused attention kernel. The forward is
    that of an evaluation without tensor parallelism, which does not choose the kernel."""
    start = start.replace(compile="none", tp=1, sequence_parallel=False)
    try:
        samples = start.micro_batch_of(estimator.job.train.batch)
        step, _ = estimator.profiler.recorded_step(start, samples, training=False)
    except InputError:
        return False
    return any(
        KIND.get(operation.name) == ATTENTION for segment in step.segments for operation in segment.timeline.operations
    )


def _with_rounding(plan: Plan, job: Job, pins: dict[str, Any]) -> Plan:
    """Return `plan` with the rounding of weight updates that the job allows for bf16 parameters.
    Return it unchanged if the user pinned the rounding (it is in `pins`), if the parameters are not
    in bf16, or if the plan has master weights, which need no rounding but nearest."""
    if plan.precision == "bf16-true" and "rounding" not in pins and not plan.master_weights:
        plan = plan.replace(rounding=rounding_of(job))
    return plan


def is_legal(plan: Plan, job: Job, device: str) -> bool:
    """Return whether the job gives every permission that the plan needs and the plan keeps all
    RULES.

    device  kind of device: "cpu" or "cuda"
    """
    return needed_permissions(plan) <= job.allowed and all(rule.holds(plan, job, device) for rule in RULES)


__all__ = ["candidates", "data_parallel_layouts", "is_legal"]
