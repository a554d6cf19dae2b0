"""Cuts: the ways to divide a model, or its sequences, among devices (tp, pp, cp), and what no plan under one can beat."""

from __future__ import annotations

import itertools
import math
from typing import Any

from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.methods.pipeline import SCHEDULES
from tightfit.plan import Plan
from tightfit.planner.complete import over_devices
from tightfit.planner.estimate import Estimator
from tightfit.timetable import split_balanced

ALIKE = 1.05  # promises that differ by less are alike: of such cuts the simpler is tried first
WITHOUT_BUBBLE = ("pipedream", "zero-bubble")  # schedules that hardly wait, whatever the number of micro-batches


def with_samples(machine: Machine, job: Job, pins: dict[str, Any]) -> Machine:
    """As many of the machine's devices as a step has samples for: with more, the model or its sequences must be cut."""
    spread = Plan.parse({**pins, **over_devices(machine, pins)}, "plan")
    if spread.data_parallel <= job.train.batch or not cuts(machine, pins):
        return machine
    most = job.train.batch * spread.tp * spread.pp * spread.cp + spread.servers
    per_node = min(machine.devices_per_node, most)
    return machine.replace(devices_per_node=per_node, nodes=max(most // per_node, 1))


def cuts(machine: Machine, pins: dict[str, Any]) -> list[dict[str, int]]:
    """Sizes of tp, pp and cp that a job may be cut by: tp within a node only, for nothing hides its sums; sequences last, and
    only where nothing else fits."""
    count = machine.devices_per_node * machine.nodes
    left = count // math.prod(pins.get(name, 1) for name in ("dp_replicate", "dp_shard", "tp", "pp", "cp"))

    def sizes(name: str, most: int, of: int) -> list[dict[str, int]]:
        return [{}, *({name: 2**power} for power in range(1, most + 1) if of % 2**power == 0 and name not in pins)]

    tps, pps, cps = sizes("tp", 3, machine.devices_per_node), sizes("pp", 5, count), sizes("cp", 3, count)
    found = [tp | other for others in (pps, cps) for tp, other in itertools.product(tps, others) if tp or other]
    unlike = [one for number, one in enumerate(found) if one not in found[:number]]
    return [one for one in unlike if left % math.prod(one.values()) == 0]


def by_promise(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> list[tuple[float, dict[str, int]]]:
    """The cuts and the seconds of a step that no plan under one can beat: forward and backward of a device's share, and in a
    pipeline the wait at its ends, at least until a sample has been everywhere; nothing sent, nothing recomputed. The least
    first, cuts of sequences last."""
    job, machine = estimator.job, estimator.machine
    ledger = estimator.profiler.ledger(start)
    samples = start.micro_batch_of(job.train.batch)
    sample_s = estimator.clock.passages_s(ledger.training, samples) / samples
    count = machine.devices_per_node * machine.nodes - start.servers
    promised = []
    for sizes in cuts(machine, pins):
        cut = start.replace(**sizes)
        devices = cut.tp * cut.pp * cut.cp
        if count // devices > job.train.batch:
            continue
        share = math.ceil(job.train.batch / max(count // devices, 1))
        pieces = max(fields.get("virtual_stages", 1) for fields in schedules(pins))
        lasts = share if cut.schedule in WITHOUT_BUBBLE else max(share + (cut.pp - 1) / pieces, cut.pp)
        promised.append((sample_s * lasts / devices, sizes))
    return sorted(promised, key=lambda one: ("cp" in one[1], int(math.log(one[0], ALIKE)), len(one[1])))


def schedules(pins: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The schedules of a pipeline that are open."""
    return ({},) if {"schedule", "virtual_stages", "split"} & pins.keys() else SCHEDULES


def cut_fields(estimator: Estimator, start: Plan, pins: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """The plan's fields under such a cut, all of the machine's devices used. Raises InputError for what cannot be cut so."""
    fields: dict[str, Any] = {name: size for name, size in sizes.items() if name != "pp"}
    if "cp" in sizes and "attention" not in pins:
        fields["attention"] = "sdpa"
    if "compile" not in pins and start.compile == "model":
        fields["compile"] = "block"
    if "tp" in sizes and "float8" not in pins:
        fields["float8"] = "none"  # which takes whole layers
    if "pp" in sizes:
        fields |= {"pp": sizes["pp"]} | balanced(estimator, start.replace(**fields), pins, sizes["pp"])
    return fields | over_devices(estimator.machine, {**pins, **fields})


def with_sequences(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> list[Plan]:
    """`start`, where it is under tensor parallelism and does not fit with sequences divided too before it: for models that can
    be."""
    smallest = start.replace(micro_batch=1) if start.pp > 1 else start
    if start.tp == 1 or "sequence_parallel" in pins or _fits(estimator, smallest):
        return [start]
    return [start.replace(sequence_parallel=True), start]


def _fits(estimator: Estimator, plan: Plan) -> bool:
    """Whether a plan fits; not traced where its model and states alone do not."""
    return estimator.least_bytes(plan) <= estimator.limit_bytes and estimator.estimate(plan).fits


def balanced(estimator: Estimator, start: Plan, pins: dict[str, Any], pp: int) -> dict[str, Any]:
    """The split by which the slowest piece is as fast as can be, by the ledger. Raises InputError for a model that has too few
    blocks."""
    plan = start.replace(micro_batch=1)
    ledger, pieces = estimator.profiler.ledger(plan), pp * pins.get("virtual_stages", 1)
    if ledger.blocks < pieces:
        raise InputError(f"plan: pp={pp}", f"the model has {ledger.blocks} blocks", "use fewer")
    if "split" in pins:
        return {}
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
    return {"split": split_balanced(seconds[1:-1], seconds[0], seconds[-1], pieces)}
