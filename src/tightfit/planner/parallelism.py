"""List the combinations of tensor, pipeline and context parallelism that a search tries. Each has a
lower bound on its seconds per step."""

from __future__ import annotations

import itertools
import math
from typing import Any

from tightfit.cost.pipeline_schedule import split_balanced
from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.methods.pipeline import SCHEDULES
from tightfit.models.unchanged import has_table, is_unchanged
from tightfit.plan import Plan
from tightfit.planner.defaults import data_parallel_degrees
from tightfit.planner.estimator import Estimator

SIMILAR = 1.05  # if lower bounds differ by less than this factor, fewer kinds of parallelism come first
WITHOUT_BUBBLE = ("pipedream", "zero-bubble")  # schedules with hardly any bubble


def limited_to_batch(machine: Machine, job: Job, pins: dict[str, Any]) -> Machine:
    """Return a copy of the machine with only as many devices as data parallelism can use: one for
    each sample of a step, times the degrees of tp, pp and cp that the user fixed in `pins`.

    The machine is returned unchanged if it does not have more devices than that. It is also
    returned unchanged if no degrees of tp, pp and cp are left to try, because only these could use
    the other devices.

    Example: 16 devices and a batch of 8 samples without pins give a machine with 8 devices.
    """
    spread = Plan.parse({**pins, **data_parallel_degrees(machine, pins)}, "plan")
    if spread.data_parallel <= job.train.batch or not parallelism_candidates(machine, pins):
        return machine
    most = job.train.batch * spread.tp * spread.pp * spread.cp + spread.servers
    per_node = min(machine.devices_per_node, most)
    return machine.replace(devices_per_node=per_node, nodes=max(most // per_node, 1))


def parallelism_candidates(machine: Machine, pins: dict[str, Any]) -> list[dict[str, int]]:
    """Return the degrees of tp, pp and cp to try, each as a dict of plan fields such as {"tp": 2,
    "pp": 4}. All degrees are powers of two. Fields that the user pinned (the keys of `pins`) are
    left out.

    tp stays within a node, because its all-reduces do not overlap with computation. Combinations
    with cp come last, because cp is used only if nothing else fits.
    """
    count = machine.devices_per_node * machine.nodes
    left = count // math.prod(pins.get(name, 1) for name in ("dp_replicate", "dp_shard", "tp", "pp", "cp"))

    def sizes(name: str, most: int, of: int) -> list[dict[str, int]]:
        return [{}, *({name: 2**power} for power in range(1, most + 1) if of % 2**power == 0 and name not in pins)]

    tps, pps, cps = sizes("tp", 3, machine.devices_per_node), sizes("pp", 5, count), sizes("cp", 3, count)
    found = [tp | other for others in (pps, cps) for tp, other in itertools.product(tps, others) if tp or other]
    unlike = [one for number, one in enumerate(found) if one not in found[:number]]
    return [one for one in unlike if left % math.prod(one.values()) == 0]


def by_lower_bound(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> list[tuple[float, dict[str, int]]]:
    """Return a list of (lower bound on the seconds of a step, degrees of tp, pp and cp), one for
    each combination of degrees to try. The smallest bound comes first, but combinations with cp
    come last.

    Left out are degrees that may compute something else for a model of the user's own: see
    `_unchecked_degrees`.

    Tensor parallelism is left out for a mixture of experts. Each device would multiply by a part of
    every expert, so its products would be small, and their results would have to be all-reduced.

    start  the plan to which the degrees are added
    pins   plan fields that the user fixed: they are not varied

    The bound is the time of forward and backward for a device's share of the work. In a pipeline,
    the bubble is added, which lasts at least as long as one sample needs to pass all ranks. The
    bound counts neither communication nor recomputation.

    Example: 1 s for 8 samples on one device, so 0.125 s per sample. On 8 devices with pp=4, a
    pipeline has 2 data-parallel replicas of 4 samples each. With 1f1b and one stage per rank, a
    step takes at least 0.125 s x (4 + 3) / 4 = 0.22 s.
    """
    job, machine = estimator.job, estimator.machine
    ledger = estimator.profiler.ledger(start)
    samples = start.micro_batch_of(job.train.batch)
    sample_s = estimator.lower_bound_model.segments_s(ledger.training, samples) / samples
    count = machine.devices_per_node * machine.nodes - start.servers
    bounds = []
    # with fewer samples than devices, data parallelism alone cannot use them
    unchecked = _unchecked_degrees(job) if count <= job.train.batch else set()
    has_experts = any(
        "experts" in parameter.name.split(".") for parameter in estimator.profiler.model.parameters(start)
    )
    for sizes in parallelism_candidates(machine, pins):
        if (has_experts and "tp" in sizes) or unchecked & sizes.keys():
            continue
        plan = start.replace(**sizes)
        devices = plan.tp * plan.pp * plan.cp
        if count // devices > job.train.batch:
            continue
        share = math.ceil(job.train.batch / max(count // devices, 1))
        stages = max(fields.get("virtual_stages", 1) for fields in schedules(pins))
        micro_batch_count = share if plan.schedule in WITHOUT_BUBBLE else max(share + (plan.pp - 1) / stages, plan.pp)
        bounds.append((sample_s * micro_batch_count / devices, sizes))
    return sorted(bounds, key=lambda bound: ("cp" in bound[1], int(math.log(bound[0], SIMILAR)), len(bound[1])))


def _unchecked_degrees(job: Job) -> set[str]:
    """Return the degrees among tp and cp that a search leaves out, unless the user fixes them: those that could
    divide what a model of the user's own computes over all features or positions. Training would then end before
    its first step (see `engine/divided_check.py`). A table of the user's own says how to shard its features."""
    if is_unchanged(job):
        return set()
    return {"cp"} if has_table(job) else {"tp", "cp"}


def schedules(pins: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the pipeline schedules to try, each as a dict of plan fields. If the user pinned the
    schedule, its virtual stages or the split, the only item is {}, which changes nothing."""
    return ({},) if {"schedule", "virtual_stages", "split"} & pins.keys() else SCHEDULES


def parallelism_fields(
    estimator: Estimator, start: Plan, pins: dict[str, Any], sizes: dict[str, int]
) -> dict[str, Any]:
    """Return the plan fields that give `start` these degrees of parallelism, so that the plan uses
    all devices of the machine.

    sizes  the degrees as plan fields, such as {"tp": 2, "pp": 4}
    pins   plan fields that the user fixed: they are kept

    Example on 16 devices: {"tp": 2, "pp": 4} gives these two fields, a balanced split and
    dp_replicate=2. Raises InputError if the model does not support the degrees.
    """
    fields: dict[str, Any] = {name: size for name, size in sizes.items() if name != "pp"}
    if "cp" in sizes and "attention" not in pins:
        fields["attention"] = "sdpa"
    if "compile" not in pins and start.compile == "model":
        fields["compile"] = "block"
    if "pp" in sizes:
        fields |= {"pp": sizes["pp"]} | balanced_split(estimator, start.replace(**fields), pins, sizes["pp"])
    return fields | data_parallel_degrees(estimator.machine, {**pins, **fields})


def with_sequence_parallel(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> list[Plan]:
    """Return the plans to try, in order. These are `start` with sequence parallelism and, for
    models that do not support it, `start` itself.

    Return only [start] if `start` has no tensor parallelism or fits without sequence parallelism,
    or if the user pinned the field `sequence_parallel` (it is in `pins`).
    """
    smallest = start.replace(micro_batch=1) if start.pp > 1 else start
    if start.tp == 1 or "sequence_parallel" in pins or _fits(estimator, smallest):
        return [start]
    return [start.replace(sequence_parallel=True), start]


def _fits(estimator: Estimator, plan: Plan) -> bool:
    """Return whether the estimate of a plan fits. To save a trace, the plan is not estimated if its
    parameters, gradients and optimizer states alone do not fit."""
    return estimator.memory_lower_bound(plan) <= estimator.limit_bytes and estimator.estimate(plan).fits


def balanced_split(estimator: Estimator, start: Plan, pins: dict[str, Any], pp: int) -> dict[str, Any]:
    """Return {"split": number of blocks of each pipeline stage}, chosen so that the slowest stage
    is as fast as possible. Return {} if the user pinned the split (it is in `pins`).

    start  the plan without a pipeline. The stages are balanced for its micro-batch; if it has none,
           for one sample
    pp     number of pipeline ranks

    Example: 10 equal blocks on 4 ranks may give {"split": (3, 3, 3, 1)} if the output head takes
    long. Raises InputError if the model has fewer blocks than stages.
    """
    plan = start.replace(micro_batch=start.micro_batch or 1)
    ledger, stages = estimator.profiler.ledger(plan), pp * pins.get("virtual_stages", 1)
    if ledger.blocks < stages:
        raise InputError(
            f"plan: pp={pp}",
            f"the model has {ledger.blocks} blocks",
            "use a smaller pp or virtual_stages, so that each stage has at least one block",
        )
    if "split" in pins:
        return {}
    seconds = [0.0] * (ledger.blocks + 2)  # before the blocks, of each block, after the blocks
    index = 0
    for segment in ledger.training:
        if segment.block is not None:
            index = segment.block + 1
        elif segment.phase == "forward" and index == ledger.blocks:
            index = ledger.blocks + 1
        elif segment.phase == "backward" and index == 1:
            index = 0
        seconds[index] += estimator.time_model.segments_s([segment], plan.micro_batch_of(estimator.job.train.batch))
    return {"split": split_balanced(seconds[1:-1], seconds[0], seconds[-1], stages)}
