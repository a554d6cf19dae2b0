"""Shards optimizer states, gradients and parameters over the data-parallel devices, instead of
replicating them on each device. It is for models whose states do not fit one device.

Saves   model states. In fp32 with Adam, a parameter takes 16 bytes without ZeRO. On N devices,
        stage 1 shards the optimizer states (8 + 8/N bytes per device), stage 2 also the gradients
        (4 + 12/N), and stage 3 also the parameters (16/N). It saves no activations.
        gradient_sync=step keeps full gradients instead: stage 3 then takes 4 + 12/N, and stage 2 is
        the same as stage 1.
Costs   stages 1 and 2 send as much as data parallelism: gradients are reduce-scattered to the
        devices that update them (in stage 2 once per micro-batch), and updated parameters are
        all-gathered while the next forward runs. Stage 3 sends 1.5 times as much: a block's
        parameters are gathered before its forward and its backward, and freed afterwards. The
        current block and the next one are in memory unsharded. In stages 2 and 3, a step of m
        micro-batches reduce-scatters m times; with gradient_sync=step, once.
When    model states do not fit; use the lowest stage with which they fit. dp_replicate x dp_shard
        shards only inside a node, where links are fast, and all-reduces the shards across nodes
        (hybrid sharding). gradient_sync=step if a step has several micro-batches, links are slow,
        and full gradients fit.
Order   after compile and recompute, because it wraps the blocks that they have changed; before the
        optimizer, which gets each device's shards instead of the parameters.
Source  Rajbhandari et al. 2020, arXiv:1910.02054; stage 3 is PyTorch's fully_shard: Zhao et al.
        2023, arXiv:2304.11277.

Example: 1 billion parameters over 8 devices. Each device holds 16 GB of states without ZeRO, 9 GB
in stage 1, 5.5 GB in stage 2 and 2 GB in stage 3.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from tightfit.cost.entries import BucketedReduction, Parameter, Update
from tightfit.cost.ledger import Ledger
from tightfit.cost.remembered import remembered
from tightfit.distributed.links import message
from tightfit.distributed.mesh import Mesh
from tightfit.distributed.replicas import ReplicatedBuffers, broadcast_parameters
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.optim.blockwise_quantization import is_packed
from tightfit.parallel.fsdp.planning import (
    check_shardable,
    gathered_bytes,
    low_precision_names,
    model_blocks,
    sharded_parameters,
)
from tightfit.parallel.gradient_buckets import ReduceScatteredGradients, bucket_bytes
from tightfit.parallel.weight_gathers import WaitForWeights, WeightGathers, gathers_in_place
from tightfit.plan import Plan
from tightfit.runtime.method import SearchFacts
from tightfit.runtime.run import Run
from tightfit.target_device import kind_of

FIELDS = ("dp_shard", "zero", "gradient_sync")
VARIANTS = (
    {"zero": 1, "dp_shard": 2},
    {"zero": 2, "dp_shard": 2},
    {"zero": 3, "dp_shard": 2},
    {"zero": 3, "dp_shard": 2, "gradient_sync": "step"},
)


def enabled(plan: Plan) -> bool:
    return plan.zero > 0


def candidates(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    """Return the values of `gradient_sync` that search tries. A single device has nothing to reduce,
    and one sample per device is one micro-batch."""
    several = start.data_parallel * start.cp > 1 and start.share_of(job.train.batch) > 1 and start.pp == 1
    return {"gradient_sync": ["micro-batch", "step"] if several else [start.gradient_sync]}


def is_redundant(plan: Plan, batch: int) -> bool:
    """Return whether another plan does the same as `plan`, so that search need not try it: with
    gradient_sync=step, ZeRO-2 is ZeRO-1, and a step of one micro-batch reduces once anyway.

    batch  number of samples of a step on all devices together
    """
    one = plan.micro_batch_of(batch) == plan.share_of(batch)
    return plan.gradient_sync == "step" and (plan.zero < 3 or one)


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Return the ledger (the predicted memory and time of a step) with the first device's shards of
    the model states instead of the full states, and with the communication. No device has larger
    shards than the first one.
    """
    size = ledger.gradient_bytes()
    ledger = (_with_full_parameters if plan.zero < 3 else _with_gathered_parameters)(ledger, plan, machine)
    if plan.replicas > 1:
        across = 2 * (plan.replicas - 1) / plan.replicas * (size / plan.shards)
        calls = ledger.blocks + 1 if plan.zero == 3 else 1
        reduced = message("gradients", across, plan, machine, ("dp_replicate",), calls, rounds=2)
        if plan.zero < 3:  # one flat copy of the shards' gradients is reduced after backward
            reduced = replace(reduced, overlaps=False)
            ledger = replace(ledger, replica_sum_bytes=size / plan.shards)
        ledger = replace(ledger, messages=(*ledger.messages, reduced))
    return _with_shards(ledger, plan)


def _with_full_parameters(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Return the ledger with the communication of ZeRO stages 1 and 2, in which each device has the
    full parameters: the reduce-scatter of gradients and the all-gather of updated parameters.
    """
    size, weights, devices = ledger.gradient_bytes(), ledger.trainable_bytes(), plan.shards
    share, bucket = (devices - 1) / devices, bucket_bytes(devices)
    calls = math.ceil(size / bucket)
    times = ledger.micro_batches if plan.shards_each_micro_batch else 1
    gradients = message("gradients", share * size * times, plan, machine, ("dp_shard",), calls * times)
    gradients = replace(gradients, micro_batches=times)
    parameters = message("parameters", share * weights, plan, machine, ("dp_shard",), math.ceil(weights / bucket))
    overlaps = parameters.overlaps and overlaps_gathers(plan)
    at_start = _at_start(ledger, bucket) / weights if overlaps else 0.0
    buffered = [p.bytes for p in ledger.parameters if p.trainable and not gathers_in_place(p.bytes, devices)]
    # on a GPU, the next bucket reuses the memory of the previous one
    at_once = machine.device == "cpu"
    coming = float(sum(buffered)) if at_once else min(bucket, weights)
    stays = at_once and overlaps_gathers(plan)
    return replace(
        ledger,
        bucketed_reduction=BucketedReduction(devices, min(bucket, size), plan.shards_each_micro_batch, coming, stays),
        messages=(*ledger.messages, gradients, replace(parameters, overlaps=overlaps, at_start=at_start)),
    )


def _with_gathered_parameters(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Return the ledger with the communication of ZeRO stage 3, in which parameters are gathered
    only while they are used: two all-gathers of each block's parameters in each micro-batch, and a
    reduce-scatter of its gradients in each micro-batch or in the last one. Raises InputError if a parameter cannot be sharded.
    """
    # without the buffers, which are replicated
    known = [p for p in ledger.parameters if not p.buffer]
    check_shardable(((p.name, len(p.shape), p.used_by_blocks) for p in known), ledger.blocks, plan)
    narrow, devices = low_precision_names(ledger), plan.shards
    gathered = sum(gathered_bytes(p, narrow) for p in ledger.parameters if not p.buffer)
    gathers = 2 * ledger.micro_batches * (devices - 1) / devices * gathered
    times = ledger.micro_batches if plan.shards_each_micro_batch else 1
    reduced = (devices - 1) / devices * ledger.gradient_bytes() * times
    groups = ledger.blocks + 1
    sums = message("gradients", reduced, plan, machine, ("dp_shard",), groups * times)
    messages = (
        message("parameters", gathers, plan, machine, ("dp_shard",), 2 * groups * ledger.micro_batches),
        replace(sums, micro_batches=times),
    )
    sharded = sharded_parameters(ledger, plan, narrow)
    return replace(ledger, sharded_parameters=sharded, messages=(*ledger.messages, *messages))


def _with_shards(ledger: Ledger, plan: Plan) -> Ledger:
    """Return a copy of the ledger in which the optimizer updates only the first device's shards,
    not the full parameters. In ZeRO stage 3, the parameters themselves are replaced by these
    shards, too."""
    updates, parameters = ledger.updates, ledger.parameters
    sharded = parameters
    if plan.zero == 3:
        sharded = _sharded(parameters, plan.shards, 0.0 if "parameters" in plan.offload else 1.0)
    return replace(ledger, updates=_sharded_updates(updates, parameters, plan.shards, plan.states), parameters=sharded)


@remembered(16)
def _sharded(parameters: tuple[Parameter, ...], shards: int, device_share: float) -> tuple[Parameter, ...]:
    """Return the first device's shards of the parameters, and all buffers.

    device_share  share of the shards' bytes that is in the device's memory
    """
    return tuple(
        p if p.buffer else replace(p, bytes=math.ceil(device_share * p.bytes * _share(p.shape, shards)))
        for p in parameters
    )


@remembered(32)
def _sharded_updates(
    updates: dict[str, Update], parameters: tuple[Parameter, ...], shards: int, states: str
) -> dict[str, Update]:
    """Return the updates of the first device's shards.

    states  the plan's dtype of optimizer states
    """
    shapes = {p.name: p.shape for p in parameters}
    scaled = {}
    for name, update in updates.items():
        shape = shapes.get(name)
        share, unpacked = (
            (1 / shards, False) if shape is None else (_share(shape, shards), _stay_whole(shape, shards, states))
        )
        scaled[name] = _scaled(update, share, unpacked)
    return scaled


def overlaps_gathers(plan: Plan) -> bool:
    """Return whether the all-gathers of updated weights overlap with the next forward.

    They do only in ZeRO stages 1 and 2. They do not overlap with compile: model, because inside a
    compiled region, the code cannot wait for a block's weights. They do not overlap in a pipeline
    either, because its ranks start at different times, and all of them would wait for the latest
    one.
    """
    return plan.zero in (1, 2) and plan.pp == 1 and plan.compile != "model"


def _at_start(ledger: Ledger, bucket: float) -> float:
    """Return the bytes of the updated weights that must be gathered before forward can begin: those
    outside the blocks and those of the first block, and at least one bucket.

    bucket  bytes of a bucket, in which weights are gathered together
    """
    trained = [p for p in ledger.parameters if p.trainable]
    first = sum(
        p.bytes
        for p in trained
        if not p.used_by_blocks or min(p.used_by_blocks) <= 0 or max(p.used_by_blocks) >= ledger.blocks
    )
    return min(max(first, bucket), sum(p.bytes for p in trained))


def _share(shape: tuple[int, ...], pieces: int) -> float:
    """Return which fraction of a parameter's elements the first device has, whose shard is the
    largest.

    shape   the shape of the full parameter, which is sharded along its first dimension
    pieces  number of shards

    Example: a parameter of shape (10, 3) on 4 devices. The first device has ceil(10 / 4) = 3 of 10
    rows: 0.3.
    """
    height = shape[0] if shape else 1
    return math.ceil(height / pieces) / height if height else 0.0


def _stay_whole(shape: tuple[int, ...], shards: int, states: str) -> bool:
    """Return whether the optimizer states of the first device's shard stay in fp32 although the
    plan asks for 8-bit or 4-bit states. They do if the shard is too small, or if its number of
    elements is not a multiple of the quantization block.

    shape   the shape of the full parameter, whose states could be quantized nevertheless
    shards  number of shards of each parameter
    states  the plan's dtype of optimizer states
    """
    if states not in ("8-bit", "4-bit"):
        return False
    height, width = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    return not is_packed(math.ceil(height / shards) * width, 8 if states == "8-bit" else 4)


def _scaled(update: Update, share: float, unpacked: bool) -> Update:
    """Return the update of a shard of a parameter: its bytes and operations are multiplied by
    `share`.

    update    the update of the full parameter
    share     the shard's fraction of the parameter's elements
    unpacked  whether the shard's states stay in fp32 although the parameter's are quantized
    """
    states = update.fp32_state_bytes if unpacked and update.fp32_state_bytes else update.state_bytes
    operations = tuple(
        replace(operation, flops=operation.flops.times(share), bytes_accessed=operation.bytes_accessed.times(share))
        for operation in update.operations
    )
    return replace(
        update,
        state_bytes=math.ceil(states * share),
        transient_bytes=math.ceil(update.transient_bytes * share),
        foreach_bytes=math.ceil(update.foreach_bytes * share),
        held_into_next_bytes=math.ceil(update.held_into_next_bytes * share),
        elements=math.ceil(update.elements * share),
        upload_bytes=math.ceil(update.upload_bytes * share),
        download_bytes=math.ceil(update.download_bytes * share),
        operations=operations,
    )


def apply(run: Run, plan: Plan) -> Run:
    """Return the run with sharded model states. In stages 1 and 2, gradients are reduce-scattered
    and each device updates its shards; in stage 3, the parameters themselves are sharded.
    """
    assert run.mesh is not None
    for parameter in run.model.parameters():  # weights in channels_last have gaps between their rows
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    if plan.zero < 3:
        broadcast_parameters(run.model, run.mesh)
        rows = ShardedReduction(run.model, run.mesh, plan, model_blocks(run) if overlaps_gathers(plan) else [])
        return replace(
            run, reduction=rows, optimizer_weights=rows.weights, loss_sum=rows.gathers.with_waits(run.loss_sum)
        )
    # imported here, because other plans do not need torch's fully_shard
    from tightfit.parallel.fsdp.fully_shard import apply_fully_shard

    return apply_fully_shard(run, plan)


class ShardedReduction:
    """Reduce-scatters the gradients in ZeRO stages 1 and 2, and all-gathers the updated weights.
    Each device has all parameters in full, and updates its shard of each.

    Stage 1 accumulates full gradients and reduce-scatters them in a step's last micro-batch, and so
    does stage 2 with gradient_sync=step. Otherwise stage 2 reduce-scatters the gradients of each
    micro-batch.

    blocks  the model's blocks in forward order. Forward waits for the weights of a block just
            before it calls the block. Empty if the all-gathers do not overlap with forward

    It implements the interface `Reduction` (see `runtime/run.py`).
    """

    shard_axes: tuple[str, ...] = ("dp_shard",)

    def __init__(self, model: nn.Module, mesh: Mesh, plan: Plan, blocks: list[nn.Module]) -> None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        replicas = mesh.group("dp_replicate") if mesh.size("dp_replicate") > 1 else None
        self.mesh, self.every_micro_batch = mesh, plan.shards_each_micro_batch
        self.scatter = ReduceScatteredGradients(parameters, mesh.group("dp_shard"), replicas)
        in_place, group = kind_of(mesh.device) == "cpu", mesh.group("dp_shard")
        # gathers use a separate group: in the same group, other collectives would wait for them
        if in_place and mesh.other_groups["layers"].size() == group.size():
            group = mesh.other_groups["layers"]
        self.gathers = WeightGathers(self.scatter, blocks, group, in_place, mesh.device)
        if blocks:
            model.register_forward_pre_hook(WaitForWeights(self.gathers))
            model.register_state_dict_pre_hook(WaitForWeights(self.gathers))
        self.statistics = ReplicatedBuffers(model, mesh)
        self.weights = dict(self.scatter.shards)
        self.parameter_of = {weight: parameter for parameter, weight in self.weights.items()}

    def begin(self, last: bool) -> None:
        self.scatter.begin(self.every_micro_batch or last)

    def end(self, last: bool) -> None:
        if self.every_micro_batch or last:
            self.scatter.finish()
        if last:
            self.complete()

    def complete(self) -> None:
        """Complete the gradients of the step, after those of all micro-batches were reduced, and
        average BatchNorm's statistics over the devices."""
        self.gathers.wait()  # for blocks that no forward of this step called
        self.scatter.complete()
        self.statistics.average()

    def updated(self) -> None:
        self.gathers.begin()

    def wait(self) -> None:
        self.gathers.wait()

    def states(self) -> list[Tensor]:
        return []

    def unshard(self, weight: Tensor, value: Tensor) -> Tensor:
        parameter = self.parameter_of[weight]  # type: ignore[index]
        whole = DTensor.from_local(
            self.mesh.to_device(value), self.mesh.axes["dp_shard"], [Shard(0)], run_check=False,
            shape=parameter.shape if parameter.dim() else torch.Size([1]),
            stride=parameter.stride() if parameter.dim() else (1,),
        )  # fmt: skip
        return whole.full_tensor().view(parameter.shape)

    def shard(self, weight: Tensor, value: Tensor) -> Tensor:
        first, last = self.scatter.shard_range(value, self.scatter.rank)
        return (value if value.dim() else value.view(1))[first:last]

    def forget(self) -> None:
        self.scatter.forget()
