"""ZeRO: the devices that share a model divide what each of them would hold: optimizer states, gradients, parameters.

Saves   of a parameter's states, over N devices in fp32 with Adam: stage 1 the optimizer's (16 bytes become 8 + 8/N),
        stage 2 gradients too (4 + 12/N), stage 3 all (16/N). Nothing of the activations.
Costs   stages 1 and 2 send what data parallelism does: gradients to those who update them, updated parameters back
        (stage 2 once for each micro-batch). Stage 3 half as much again: parameters are gathered before each block's
        forward and backward, and forgotten after. A gathered block, and the next one on its way, are there whole.
When    model states are what does not fit: as low a stage as does. dp_replicate x dp_shard keeps the division inside a
        node, where links are fast, and only sums what is divided across nodes (hybrid sharding).
Order   after compile and recompute, as it wraps the blocks that they have changed; before the optimizer, which gets each
        device's rows in place of the parameters.
Source  Rajbhandari et al. 2020, arXiv:1910.02054; stage 3 is PyTorch's fully_shard: Zhao et al. 2023, arXiv:2304.11277.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from tightfit.job import ModelSpec
from tightfit.ledger import Gathered, Ledger, Parameter, Sent, Update
from tightfit.machine import Machine
from tightfit.methods.buckets import BUCKET_BYTES, Scattered
from tightfit.methods.mesh import DATA, Mesh, Statistics, message, same_everywhere
from tightfit.methods.run import Run
from tightfit.models import find_blocks
from tightfit.plan import Plan

VARIANTS = (
    {"zero": 1, "dp_shard": 2},
    {"zero": 2, "dp_shard": 2},
    {"zero": 3, "dp_shard": 2},
)


def wanted(plan: Plan) -> bool:
    return plan.zero > 0


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Of each row that is divided, the share of the first device, which has the most."""
    shares = {p.name: _share(p.shape, plan.shards) for p in ledger.parameters}
    size, pieces = ledger.gradient_bytes(), plan.shards
    moved = (pieces - 1) / pieces * size
    held = size / pieces
    messages, buckets = [], math.ceil(size / BUCKET_BYTES)
    if plan.zero < 3:
        times = ledger.micro_batches if plan.zero == 2 else 1
        messages.append(message("gradients", moved * times, plan, machine, ("dp_shard",), buckets * times))
        messages.append(replace(message("parameters", moved, plan, machine, ("dp_shard",), buckets), hides=False))
        ledger = replace(ledger, sent=Sent(pieces, min(BUCKET_BYTES, size), always=plan.zero == 2))
    else:
        narrow = _narrow(ledger)
        gathered = sum(_gathered_bytes(p, narrow) for p in ledger.parameters if p.trainable)
        gathers = 2 * ledger.micro_batches * (pieces - 1) / pieces * gathered
        units = (ledger.blocks + 1) * ledger.micro_batches
        messages.append(message("parameters", gathers, plan, machine, ("dp_shard",), 2 * units))
        messages.append(message("gradients", moved * ledger.micro_batches, plan, machine, ("dp_shard",), units))
        ledger = replace(ledger, gathered=_gathered(ledger, pieces, narrow))
    if plan.replicas > 1:
        across = 2 * (plan.replicas - 1) / plan.replicas * held
        calls = ledger.blocks + 1 if plan.zero == 3 else buckets
        messages.append(message("gradients", across, plan, machine, ("dp_replicate",), calls, rounds=2))
    updates = {name: _scaled(update, shares.get(name, 1 / pieces)) for name, update in ledger.updates.items()}
    parameters = ledger.parameters
    if plan.zero == 3:
        parameters = tuple(
            replace(p, bytes=math.ceil(p.bytes * shares[p.name])) if p.trainable else p for p in parameters
        )
    return replace(ledger, updates=updates, parameters=parameters, messages=(*ledger.messages, *messages))


def _share(shape: tuple[int, ...], pieces: int) -> float:
    height = shape[0] if shape else 1
    return math.ceil(height / pieces) / height if height else 0.0


def _scaled(update: Update, share: float) -> Update:
    """Of an update, what falls to a device that holds a share of the parameter."""
    operations = tuple(
        replace(operation, flops=operation.flops.times(share), moved=operation.moved.times(share))
        for operation in update.operations
    )
    return replace(
        update,
        state_bytes=math.ceil(update.state_bytes * share),
        transient_bytes=math.ceil(update.transient_bytes * share),
        foreach_bytes=math.ceil(update.foreach_bytes * share),
        operations=operations,
    )


def _narrow(ledger: Ledger) -> set[str]:
    """Names, with * for numbers, of the parameters whose gradients are made in a narrower type than they are kept in: those
    that are gathered in it."""
    kept = {parameter.name: parameter.bytes for parameter in ledger.parameters}
    return {
        _alike(buffer.parameter)
        for passage in ledger.training
        for buffer in passage.timeline.born
        if buffer.row == "gradients" and buffer.size.fixed < kept.get(buffer.parameter, 0)
    }


def _alike(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _gathered_bytes(parameter: Parameter, narrow: set[str]) -> float:
    return parameter.bytes / 2 if _alike(parameter.name) in narrow else parameter.bytes


def _gathered(ledger: Ledger, pieces: int, narrow: set[str]) -> Gathered:
    """Bytes of the largest block and of what is in none: blocks are told by the numbers in parameters' names."""
    blocks: Counter[str] = Counter()
    reduced: Counter[str] = Counter()
    rest = 0.0
    for parameter in ledger.parameters:
        found = re.match(r"(.*?\.\d+)\.", parameter.name)
        if found is None:
            rest += parameter.bytes
        else:
            blocks[found.group(1)] += math.ceil(_gathered_bytes(parameter, narrow))
            reduced[found.group(1)] += parameter.bytes
    return Gathered(pieces, float(max(blocks.values(), default=0)), rest, float(max(reduced.values(), default=0)))


def apply(run: Run, plan: Plan) -> Run:
    assert run.mesh is not None
    if plan.zero < 3:
        same_everywhere(run.model, run.mesh)
        rows = Rows(run.model, run.mesh, plan)
        return replace(run, reduction=rows, weights=rows.weights)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # of logits, which nothing writes to
    name = run.job.model.blocks if isinstance(run.job.model, ModelSpec) else None
    blocks = run.blocks or [block for _, block in find_blocks(run.model, name)]
    shards = Shards(run.model, list(blocks), run.mesh, narrow_type(plan))
    return replace(run, reduction=shards, weights=shards.weights)


class Rows:
    """The `Reduction` of stages 1 and 2: whole parameters, of which each device updates its rows.

    Stage 1 keeps whole gradients until a step's last micro-batch, stage 2 sends each micro-batch's.
    """

    parts: tuple[str, ...] = ("dp_shard",)

    def __init__(self, model: nn.Module, mesh: Mesh, plan: Plan) -> None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        replicas = mesh.group("dp_replicate") if mesh.size("dp_replicate") > 1 else None
        self.mesh, self.always = mesh, plan.zero == 2
        self.rows = Scattered(parameters, mesh.group("dp_shard"), replicas)
        self.statistics = Statistics(model, mesh)
        self.weights = dict(self.rows.shares)
        self.owner = {weight: parameter for parameter, weight in self.weights.items()}

    def begin(self, last: bool) -> None:
        self.rows.begin(self.always or last)

    def end(self, last: bool) -> None:
        if self.always or last:
            self.rows.finish()
        if last:
            self.rows.sum_replicas()
            self.statistics.average()

    def updated(self) -> None:
        self.rows.gather()

    def whole(self, weight: Tensor, value: Tensor) -> Tensor:
        parameter = self.owner[weight]  # type: ignore[index]
        whole = DTensor.from_local(
            value, self.mesh.axes["dp_shard"], [Shard(0)], run_check=False,
            shape=parameter.shape if parameter.dim() else torch.Size([1]),
            stride=parameter.stride() if parameter.dim() else (1,),
        )  # fmt: skip
        return whole.full_tensor().view(parameter.shape)

    def part(self, weight: Tensor, value: Tensor) -> Tensor:
        first, last = self.rows._range(value, self.rows.rank)
        return (value if value.dim() else value.view(1))[first:last]


def narrow_type(plan: Plan) -> torch.dtype | None:
    """The type in which weights of products travel and are held whole: in mixed precision that of the products."""
    return {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(plan.precision)


def products_of(block: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Of a block's modules with parameters of their own, those that autocast gives narrow weights to, and the others."""
    own = [module for module in block.modules() if next(module.parameters(recurse=False), None) is not None]
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    products = [module for module in own if isinstance(module, kinds) or type(module).__name__ == "Conv1D"]
    return products, [module for module in own if module not in products]


def _of_another_type(model: nn.Module) -> list[nn.Module]:
    """Modules whose own parameters are not of the type that most are, for what is gathered together has one type: norms
    that keep fp32 among 16-bit weights."""
    types = Counter(parameter.dtype for parameter in model.parameters())
    most = types.most_common(1)[0][0]
    return [m for m in model.modules() if any(p.dtype != most for p in m.parameters(recurse=False))]


def _fill(model: nn.Module, rows: dict[str, Tensor]) -> None:
    """The values of parameters that were shrunk when they were created, in place of fully_shard's, which have none."""
    filled: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if name in rows:
            spec = parameter._spec  # type: ignore[attr-defined]
            local = rows[name].view(parameter._local_tensor.shape)  # type: ignore[attr-defined]
            filled[id(parameter)] = nn.Parameter(
                DTensor(local, spec, requires_grad=False), requires_grad=parameter.requires_grad
            )
    names = {name: filled[id(p)] for name, p in model.state_dict(keep_vars=True).items() if id(p) in filled}
    model.load_state_dict(names, strict=False, assign=True)
    for state in [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]:
        groups = getattr(state, "_fsdp_param_groups", None) or [
            getattr(state, "_fsdp_param_group", None)
        ]  # until torch 2.12
        for held in [held for group in groups if group is not None for held in group.fsdp_params]:
            held.reset_sharded_param()  # now, so that what the optimizer is given stays where it is


class Shards:
    """The `Reduction` of stage 3: fully_shard holds and gathers the parameters, and sums their gradients."""

    parts: tuple[str, ...] = ("dp_shard",)

    def __init__(self, model: nn.Module, blocks: list[nn.Module], mesh: Mesh, narrow_type: torch.dtype | None) -> None:
        self.mesh, self.model = mesh, model
        devices = mesh.axes[DATA if mesh.size("dp_replicate") > 1 else "dp_shard"]
        narrow = any(parameter.dtype.itemsize < 4 for parameter in model.parameters())
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if narrow else None, cast_forward_inputs=False)
        rows = {name: p.rows for name, p in model.named_parameters() if hasattr(p, "rows")}
        for module in _of_another_type(model):
            fully_shard(module, mesh=devices, reshard_after_forward=True, mp_policy=policy)
        for block in blocks:
            products, others = products_of(block)
            if narrow_type is None or not products or block in others:
                fully_shard(block, mesh=devices, reshard_after_forward=True, mp_policy=policy)
                continue
            if others:  # such as norms: what is gathered together has one type
                fully_shard(others, mesh=devices, reshard_after_forward=True, mp_policy=policy)
            halved = replace(policy, param_dtype=narrow_type, reduce_dtype=torch.float32)
            fully_shard(block, mesh=devices, reshard_after_forward=True, mp_policy=halved)
        fully_shard(model, mesh=devices, mp_policy=policy)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # the step divides by what counts, over all devices
                module.set_force_sum_reduction_for_comms(True)
        self.statistics = Statistics(model, mesh)
        _fill(model, rows)
        self.weights: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                assert isinstance(parameter, DTensor)
                self.weights[parameter] = nn.Parameter(parameter._local_tensor.detach())
        self.owner = {weight: parameter for parameter, weight in self.weights.items()}

    def begin(self, last: bool) -> None:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_all_reduce(last)

    def end(self, last: bool) -> None:
        if last:
            self.statistics.average()
            for parameter, weight in self.weights.items():
                gradient: Any = parameter.grad
                weight.grad = None if gradient is None else gradient._local_tensor
                parameter.grad = None

    def updated(self) -> None:
        pass

    def whole(self, weight: Tensor, value: Tensor) -> Tensor:
        owner: Any = self.owner[weight]  # type: ignore[index]
        return DTensor(value, owner._spec, requires_grad=False).full_tensor()

    def part(self, weight: Tensor, value: Tensor) -> Tensor:
        size, rank = self.mesh.size("dp_shard"), self.mesh.rank("dp_shard")
        rows = value if value.dim() else value.view(1)
        pieces = list(rows.chunk(size))
        return pieces[rank] if rank < len(pieces) else rows[:0]
