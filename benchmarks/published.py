"""Compare what explain predicts with training runs that others published: memory, speed, and what fitted.

    .venv/bin/python benchmarks/published.py --jobs 2 --out records/published.json
    .venv/bin/python benchmarks/published.py --half a --group vtrain

The runs are facts in benchmarks/published/, one file for each group of sources. Rows of a group alternate between
half a and half b. Only rows of half a are printed: whoever improves a prediction looks at these, and half b says whether
the improvement holds for runs that nobody looked at. Groups that were added later are part c: facts of their
frameworks' loops were looked up after a first comparison, and no prediction of tightfit was changed because of them.
Part d was added after that. Its first comparison showed errors of tightfit. They were corrected from other sources, not
from these runs. Part e has more runs of a source that was there already (nanotron's tuning on H100s); nothing was changed
because of them. `--half c`, `--half d` and `--half e` print their rows.

Nothing is fitted to a row. Speed is compared in two ways: as predicted from the device's published figures, and after
one factor on speed for each (machine, framework), the median of its runs outside of part e: what is known of neither. The
second leaves out pairs of fewer than three runs, where a factor says nothing.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from torch import Tensor, nn
from torch.distributed import ProcessGroup, all_reduce
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tightfit.achieved_rates import CALIBRATED_WIDTH, achieved_by_shape
from tightfit.cost.entries import Message
from tightfit.cost.ledger import Ledger
from tightfit.distributed.links import latency
from tightfit.distributed.nccl import communicator_bytes
from tightfit.errors import InputError
from tightfit.job import Job, Train
from tightfit.machine import Figure, Machine
from tightfit.machines.names import find_named
from tightfit.models.batches import IGNORED
from tightfit.models.objective import Objective
from tightfit.models.task_logits import next_token_targets
from tightfit.parallel.tensor import sharder
from tightfit.plan import Plan
from tightfit.planner.allocators.cuda import reserved_bytes
from tightfit.planner.estimate import Estimate
from tightfit.planner.estimator import Estimator, estimated_ledger
from tightfit.planner.time_model import CONTENTION, TimeModel
from tightfit.planner.tracing.profiler import Profiler
from tightfit.rules import check
from tightfit.units import parse_bytes

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of this file's folder
from benchmarks import harness

FOLDER = Path(__file__).parent / "published"
FRAMEWORKS = "frameworks.yaml"
ALLOW = ["bf16", "fp16", "tf32", "float8", "8-bit-states", "4-bit-states", "bf16-states", "offload"]
ANY_MACHINE = "a100-80gb"  # for rows that state none, whose memory alone is compared
FUSED_SOFTMAX, PACKED, COPIED = "megatron_attention", "nanotron_attention", "torchvision_attention"
# TransformerEngine's tensor parallelism: products begin with the shard that a device has, so that gathers are hidden;
# sums are sent in 4 parts, of which the last is not
TP_HIDDEN = (1 + 3 / 4) / 2
# Bytes that TransformerEngine's casts to float8 move, as a share of torchao's, if a layer has as many inputs, gradients
# and weights. TransformerEngine reads an input or a gradient of 2 bytes twice and writes it once in both layouts, 6 bytes.
# It casts a weight once for all micro-batches, which is not counted. torchao moves 10 bytes for an input, which it casts
# in forward and again in backward, 8 for a gradient and 10 for a weight
TE_CASTS = (6 + 6) / (10 + 8 + 10)
LEAST_RUNS = 3  # of a machine and framework, for a factor on their speed


# --- rows -----------------------------------------------------------------------------------------------------------


def read_rows(group: str = "", half: str = "all") -> list[dict[str, Any]]:
    """The rows of a group (of all, if it is "") that are in a half, with what the file and the framework say under them."""
    frameworks = yaml.safe_load((FOLDER / FRAMEWORKS).read_text())
    rows = []
    for path in sorted(FOLDER.glob(f"{group or '*'}.yaml")):
        if path.name == FRAMEWORKS:
            continue
        content = yaml.safe_load(path.read_text())
        for given in content["rows"]:
            row = {"group": path.stem, **content["defaults"], **given}
            same = frameworks[row["framework"]]
            row["plan"] = plan_of(same, row["plan"])
            row["loop"] = {**same.get("loop", {}), **row.get("loop", {})}
            if row["loop"].get("split_by_cost") and row["plan"].get("pp", 1) > 1:
                row["plan"].setdefault("split", split_by_cost(row["model"], row["plan"]["pp"]))
            if half in ("all", row["half"]):
                rows.append(row)
    return rows


def plan_of(framework: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A row's plan: its own fields over those of its framework."""
    plan = {**framework["plan"], **available(framework.get("once_available", {})), **own}
    if plan.get("master_weights"):
        plan["precision"] = plan["precision"].replace("-mixed", "-true")
    if plan.get("zero", 0) < 2:
        plan.pop("gradient_sync", None)  # gradients are not sharded
    return plan


def split_by_cost(model: dict[str, Any], stages: int) -> list[int]:
    """The blocks of each pipeline stage as nanotron splits a Llama: in order, a stage takes blocks until the parameters
    of the blocks and the head so far exceed its share. A stage without a block takes one of the stage before it, because
    a plan cannot say that."""
    width = model["hidden_size"]
    block, count = 4 * width**2 + 3 * width * model["intermediate_size"], model["num_hidden_layers"]
    share = (count * block + width * model["vocab_size"]) / stages
    split, stage = [0] * stages, 0
    for number in range(1, count + 1):
        split[stage] += 1
        stage += number * block > share * (stage + 1)
    for stage in range(stages - 1, 0, -1):
        missing = max(1 - split[stage], 0)
        split[stage], split[stage - 1] = split[stage] + missing, split[stage - 1] - missing
    return split


def available(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, if Plan has all of them and takes their values; else none of them."""
    try:
        Plan(**fields)
    except InputError:
        return {}
    return fields


def job_of(row: dict[str, Any]) -> Job:
    given = {name: row[name] for name in ("momentum", "clip") if name in row}
    train = Train(optimizer=row["optimizer"], batch=row["batch"], steps=1000, **given)
    loss = NARROW_LOSS if row["loop"].get("narrow_loss") else None
    model = row["model"]
    if row["loop"].get("megatron_blocks") and model.get("attn_implementation") == "eager":
        register_attentions()
        model = {**model, "attn_implementation": FUSED_SOFTMAX}
    for flag, attention in (("nanotron_blocks", PACKED), ("copied_attention", COPIED)):
        if row["loop"].get(flag) and "attn_implementation" not in model:
            register_attentions()
            model = {**model, "attn_implementation": attention}
    return Job(model=model, data=row["data"], loss=loss, allow=ALLOW, train=train)


@cache
def register_attentions() -> None:
    """Make the attention of other frameworks one of transformers, by the names FUSED_SOFTMAX, PACKED and COPIED."""
    known = {FUSED_SOFTMAX: fused_softmax_attention, PACKED: packed_attention, COPIED: copied_attention}
    for name, attention in known.items():
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, lambda *_, **__: None)


def fused_softmax_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention with the kernels of Megatron's, for a trace: the product scales the scores, and one kernel masks them
    and takes their softmax. Here they are not masked, which takes the same bytes."""
    scores = torch.matmul(query * (scaling or query.shape[-1] ** -0.5), key.transpose(-1, -2))
    weights = functional.dropout(functional.softmax(scores, dim=-1), dropout, module.training)
    return torch.matmul(weights, value).transpose(1, 2), None


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    scaling: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """nanotron's attention of as many key heads as query heads, for a trace. The query is a part of one tensor with the
    keys and values, so all of that tensor stays in memory. Copies of the keys, the values and the output are saved, too."""
    first = torch.stack((query, key, value))[0]
    pairs = torch.stack((key, value))
    output = functional.scaled_dot_product_attention(first, pairs[0], pairs[1], is_causal=True, scale=scaling)
    return output.transpose(1, 2), None


def copied_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    scaling: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of torch.nn.MultiheadAttention, for a trace: it copies the output, to put the sequence first."""
    output = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return output.transpose(1, 2).clone(memory_format=torch.contiguous_format), None


@contextmanager
def their_blocks(row: dict[str, Any]) -> Iterator[None]:
    """Inside it, traces are of blocks as the row's framework writes them. nanotron's norms are one kernel, which saves its
    input. Megatron's tensor parallelism reduces in place; tightfit's reduces a copy."""

    def norm(module: LlamaRMSNorm, hidden_states: Tensor) -> Tensor:
        return functional.rms_norm(hidden_states, module.weight.shape, module.weight, module.variance_epsilon)

    def reduced(tensor: Tensor, group: ProcessGroup) -> Tensor:
        total = tensor.contiguous()
        all_reduce(total.detach(), group=group)
        return total.view_as(total)

    with ExitStack() as patches:
        if row["loop"].get("nanotron_blocks"):
            patches.enter_context(patch.object(LlamaRMSNorm, "forward", norm))
        if row["loop"].get("megatron_blocks"):
            patches.enter_context(patch.object(sharder, "all_reduced", reduced))
        yield


class Kept(torch.autograd.Function):
    """Returns its input, which stays in memory until backward has computed the gradient of it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def narrow_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The sum of a language model's cross entropy in the type of its logits, which tightfit computes in fp32. The logits are
    a variable of the training loop, so they are in memory during backward."""
    logits = Kept.apply(model(input_ids=batch["input_ids"]).logits.flatten(0, -2))
    return functional.cross_entropy(logits, next_token_targets(batch).flatten(), reduction="sum")


NARROW_LOSS = Objective(narrow_loss, lambda batch: int((next_token_targets(batch) != IGNORED).sum()), "tokens")


def machine_of(row: dict[str, Any]) -> Machine:
    """The row's machine, with the figures of its devices that differ from the table's, and the rates of another
    framework's attention kernels, where they are known."""
    plan = Plan(**row["plan"])
    name = row.get("machine") or (f"{ANY_MACHINE}:{plan.devices}" if plan.devices > 1 else ANY_MACHINE)
    machine, table = Machine.named(name), find_named(name).row
    given = row.get("device", {})
    changed: dict[str, Any] = {}

    def scaled(figure: Figure | None, times: float) -> Figure | None:
        return figure and figure.replace(value=figure.value * times)

    for figure, field in (
        ("memory", "memory_bytes"),
        ("bandwidth", "memory_bytes_per_s"),
        ("network", "network_bytes_per_s"),
    ):
        if figure in given:
            changed[field] = scaled(getattr(machine, field), given[figure] / table[figure])
    if "arithmetic" in given:
        for field in ("matrix_peak_flops_per_s", "matrix_flops_per_s"):
            changed[field] = {kind: scaled(one, given["arithmetic"]) for kind, one in getattr(machine, field).items()}
    machine = machine.replace(**changed, attention_kernel=row["loop"].get("attention", ""))
    age = row["loop"].get("products", {}).get(machine.architecture)
    if age is None:
        return machine
    rates = {kind: one.replace(value=age * one.value) for kind, one in machine.matrix_flops_per_s.items()}
    return machine.replace(matrix_flops_per_s=rates, rates=attention_rates(machine))


def attention_rates(machine: Machine) -> dict[str, dict[int, float]]:
    """The rates of the machine's attention kernels by size, as a calibration would measure them: of a machine whose
    products are slower, attention stays as fast."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for length in (2**power for power in range(6, 18)):
        sizes = (64.0, length, length, CALIBRATED_WIDTH)
        for kind in ("attention", "attention backward"):
            for causal in (False, True):
                name = f"{'causal ' if causal else ''}{kind}/bfloat16"
                size = round((length * length * CALIBRATED_WIDTH) ** (1 / 3))
                found[name][size] = achieved_by_shape(machine, kind, "bfloat16", sizes, causal)
    return dict(found)


# --- one row --------------------------------------------------------------------------------------------------------


def compare(row: dict[str, Any], profilers: dict[str, Profiler]) -> dict[str, Any]:
    """Published and predicted figures of one run. profilers: of earlier rows, by model, whose traces are shared."""
    begun = time.process_time()
    found = {name: row.get(name) for name in ("id", "group", "half", "framework", "machine")} | {"ran": row.get("fits")}
    try:
        with their_blocks(row):
            found |= predict(row, profilers)
    except Exception as error:  # whatever it is, it is reported in the place of the row
        found["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return {**found, "cpu_s": time.process_time() - begun}


def predict(row: dict[str, Any], profilers: dict[str, Profiler]) -> dict[str, Any]:
    plan, job, machine = Plan(**row["plan"]), job_of(row), machine_of(row)
    check(plan, job, machine.device)
    traces = profilers.setdefault(model_of(row), Profiler(job, machine.device))
    fused = plan.replace(compile="block") if row["loop"].get("fused_kernels") else plan
    estimator = estimator_of(job, machine, traces)
    estimate, wider = estimator.estimate(fused), estimator.estimate(fused.replace(float8="none"))
    settled = settled_of(job, machine, traces, plan)
    found: dict[str, Any] = {"devices": plan.devices, **features(row, plan)}
    if "memory" in row:
        logged = on_first_rank(settled, traces) if row["loop"].get("logs_first_rank") and plan.pp > 1 else settled
        found |= compare_memory(row, logged)
    if "speed" in row:
        found |= compare_speed(row, estimate, wider)
    needed = their_peak(row, settled) + blocks_of_gathers(row, settled) + settled.margin_bytes
    found["predicted_fits"] = needed <= settled.limit_bytes and not settled.shortages().keys() - {"memory"}
    found["peak_of_limit"] = needed / settled.limit_bytes
    return found


def model_of(row: dict[str, Any]) -> str:
    """What rows have in common that share traces: all of the job but the number of samples of a step."""
    return json.dumps([row.get(name) for name in ("model", "data", "optimizer", "momentum", "clip")])


def estimator_of(job: Job, machine: Machine, traces: Profiler) -> Estimator:
    """An estimator that uses the traces of another batch: a trace is of a micro-batch."""
    profiler = copy.copy(traces)
    profiler.job = job
    return Estimator(job, machine, profiler)


def settled_of(job: Job, machine: Machine, traces: Profiler, plan: Plan) -> Estimate:
    """The estimate with what the allocator reserves. Of a pipeline's micro-batches only so many are simulated that it
    fills, stays full and drains: as many as a step with more has in memory at once."""
    most = plan.data_parallel * plan.micro_batch_of(job.train.batch) * 4 * plan.stages
    if plan.pp > 1 and job.train.batch > most:
        job = job.replace(train=job.train.replace(batch=most))
    estimator = estimator_of(job, machine, traces)
    return estimator.include_allocator(estimator.estimate(plan))


def on_first_rank(settled: Estimate, traces: Profiler) -> Estimate:
    """A pipeline's estimate with the tensors of its first rank in the place of those of its busiest."""
    ledger = estimated_ledger(traces, settled.plan, settled.machine, 0)
    ledger = replace(ledger, fixed={**ledger.fixed, "runtime": settled.ledger.fixed["runtime"]})
    return replace(settled, ledger=ledger, peak=ledger.peak())


def features(row: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """What errors are grouped by."""
    model = row["model"]
    hidden, heads = model.get("hidden_size", model.get("n_embd")), model.get("num_attention_heads", model.get("n_head"))
    return {
        **{
            name: getattr(plan, name)
            for name in ("precision", "tp", "pp", "cp", "zero", "recompute", "compile", "float8")
        },
        "tokens_of_sequence": row["data"].get("sequence_length"),
        "micro_batch": plan.micro_batch_of(row["batch"]),
        "hidden_size": hidden,
        "head_size": hidden // heads if hidden and heads else None,
    }


def compare_speed(row: dict[str, Any], estimate: Estimate, wider: Estimate) -> dict[str, Any]:
    """Published and predicted speed of all devices, in tokens or samples a second, and the predicted step's parts. wider:
    the estimate without float8."""
    ((unit, value),) = row["speed"].items()
    tokens = row["batch"] * row["data"].get("sequence_length", 1)
    amount = row["batch"] if unit == "samples_per_s" else tokens
    published = {
        "step_s": lambda: amount / value,
        "tokens_per_s": lambda: value,
        "samples_per_s": lambda: value,
        "tokens_per_s_per_device": lambda: value * estimate.plan.devices,
    }[unit]()
    time = estimate.time
    saved_s = saved_by_their_loop(estimate, wider, row["loop"], TimeModel(machine_of(row)))
    parts = ("compute_s", "memory_s", "launch_s", "optimizer_s", "communication_s", "bubble_s")
    return {
        "published_speed": published,
        "predicted_speed": amount / (time.step_s - saved_s),
        "unit": "samples/s" if unit == "samples_per_s" else "tokens/s",
        "parts": {name: round(getattr(time, name) / time.step_s, 3) for name in parts},
    }


def saved_by_their_loop(estimate: Estimate, wider: Estimate, loop: dict[str, Any], model: TimeModel) -> float:
    """Seconds of a step that a framework's loop does not take, and tightfit's does. wider: the same without float8."""
    saved = model.gradient_sums_s(estimate.ledger) if loop.get("fused_sums") else 0.0
    if loop.keys() & {"late_reduction", "narrow_reduction", "overlapped_gathers", "broadcasts"}:
        ledger, around_s = estimate.ledger, latency(estimate.plan, model.machine, ("dp_shard",), 1)
        by_each_s = estimate.plan.shards * around_s if loop.get("broadcasts") else 0.0
        theirs = replace(ledger, messages=tuple(as_they_send(one, loop, by_each_s) for one in ledger.messages))
        shown, whole = (model.exposed_communication_s(one, estimate.time) for one in (ledger, theirs))
        saved -= whole - shown
    if loop.get("inputs_on_device"):
        saved += estimate.time.input_s
    if loop.get("skips_on_host"):
        saved += min(choices_of_update_s(estimate.ledger, model), estimate.time.optimizer_s)
    if loop.get("te_float8") and estimate.plan.float8 != "none":
        saved += (1 - TE_CASTS) * (estimate.time.memory_s - wider.time.memory_s)
    if loop.get("tp_overlap"):
        sent = (one for one in estimate.ledger.messages if one.has_activations and not one.overlaps)
        hidden = TP_HIDDEN * sum(one.bytes / (one.bytes_per_s * model.link_share) for one in sent)
        saved += (1 - CONTENTION) * min(hidden, estimate.time.communication_s)
    if loop.get("fused_low_bit") and estimate.plan.states in ("8-bit", "4-bit"):
        state_bytes = 2 * int(estimate.plan.states[0]) / 8  # of both moments of an element
        weight_bytes = 2 if estimate.plan.has_16_bit_weights else 4
        count = sum(one.count for one in estimate.ledger.parameters)
        least = count * (2 * weight_bytes + weight_bytes + 2 * state_bytes)
        moved = sum(
            operation.bytes_accessed.at(1) * operation.count.at(1)
            for update in estimate.ledger.updates.values()
            for operation in update.operations
        )
        saved += estimate.time.optimizer_s * max(1 - least / moved, 0.0)
    return saved


def choices_of_update_s(ledger: Ledger, model: TimeModel) -> float:
    """Return the seconds that an update in fp16 takes for copies. It copies weights and states first, and then chooses
    between the copy and the new value, because the loss scale may have been too large."""
    parts = {"aten.clone": 1, "aten.where": 2}
    operations = (operation for update in ledger.updates.values() for operation in update.operations)
    return sum(parts.get(one.name, 0) * one.count.at(1) * model.operation_s(one, 1) for one in operations)


def as_they_send(message: Message, loop: dict[str, Any], by_each_s: float = 0.0) -> Message:
    """The message as a framework's loop sends it: without overlap with computation, gradients in 16 bits in place of 32, or
    with overlap. ZeRO-3's gathers and copies to the host keep the overlap that they have.

    by_each_s: of a loop in which one rank after the other broadcasts its updated weights, the latency of all broadcasts"""
    if message.name == "gradients" and loop.get("narrow_reduction"):
        message = replace(message, bytes=message.bytes / 2)
    if message.name == "parameters" and loop.get("overlapped_gathers"):
        return replace(message, overlaps=True)
    if by_each_s and message.at_start:
        return replace(message, overlaps=False, latency_s=by_each_s)
    is_gather = message.name == "parameters" and not message.at_start
    if message.during or is_gather or not loop.get("late_reduction"):
        return message
    return replace(message, overlaps=False)


def compare_memory(row: dict[str, Any], settled: Estimate) -> dict[str, Any]:
    """Published and predicted bytes of a device, by the source's own metric: allocated (tensors), reserved (by torch's
    allocator) or device (all of the process). settled: the estimate with what the allocator reserves."""
    ((metric, size),) = row["memory"].items()
    late = row["loop"].get("zeroes_before_backward", False)
    outside = 0.0  # of torch's allocator
    if metric == "device":
        outside = parse_bytes(row["context"]) + communicators_of(row, settled.plan)
    if settled.plan.devices > 1:
        beside = ("runtime", "allocator") if metric == "allocated" else ("runtime",)
        predicted = their_peak(row, settled) - sum(settled.peak.rows[name] for name in beside)
        if metric != "allocated":
            predicted += blocks_of_update(row, settled) + blocks_of_gathers(row, settled)
    else:
        ledger = as_their_loop(settled.ledger, row["loop"])
        peak = max(
            sum(rows.values()) + late * (phase == "forward") * max(ledger.gradient_bytes() - rows["gradients"], 0)
            for phase, _, rows in ledger.instants()
        )
        predicted = peak - ledger.fixed["runtime"]
        if metric != "allocated":
            predicted = max(reserved_bytes(ledger, expandable=False, zero_grad_late=late), predicted)
    return {
        "metric": metric,
        "published_bytes": parse_bytes(size),
        "predicted_bytes": round(predicted + settled.workspace_bytes + outside),
    }


def communicators_of(row: dict[str, Any], plan: Plan) -> int:
    """Bytes of NCCL's communicators: those of the plan, and of more groups of the tp devices that their loop has."""
    machine = machine_of(row)
    of_tp = communicator_bytes(Plan(tp=plan.tp), machine) // 2  # a plan has a group of all processes, too
    return communicator_bytes(plan, machine) + row["loop"].get("groups", 0) * of_tp


def their_peak(row: dict[str, Any], settled: Estimate) -> float:
    """The peak of a device, with the bytes of their loop's gradients where they are known: while activations are saved,
    or in the update. tightfit predicts 4 bytes for each parameter, beside master weights and after the first backward."""
    plan, rows, peak = settled.plan, settled.peak.rows, settled.peak_bytes
    given = row["loop"].get("gradients", {}).get(plan.precision)
    if not plan.master_weights or given is None:
        return peak
    # from ZeRO-2 on, the gradients' row has the bytes of a shard
    before, copies = given["before_update"], given["copies_in_update"] / (plan.shards if plan.zero == 1 else 1)
    if row["loop"].get("ddp_buckets") and plan.data_parallel > 1 and not plan.zero:
        before += 2
    for_each = rows["gradients"] / 4
    if row["loop"].get("keeps_gradients"):
        for_each = rows["parameters"] / 2
        peak += 4 * for_each - rows["gradients"]
    peak += gathered_inputs(row, settled) - (largest_cast(settled.ledger) if before == 2 else 0.0)
    copies *= min(row["loop"].get("sub_group", math.inf) / max(for_each, 1.0), 1.0) if plan.zero == 3 else 1.0
    in_update = rows["parameters"] + rows["optimizer"] + rows["runtime"] + (before + copies) * for_each
    return max(peak + (before - 4) * for_each, in_update)


def largest_cast(ledger: Ledger) -> float:
    """Bytes by which the peak falls if gradients are summed in 16 bits. tightfit makes an fp32 copy of each, and that of an
    embedding is large."""
    copied = 4 * max(one.count for one in ledger.parameters)
    peaks = [
        (sum(rows.values()), phase == "backward" and rows["temporaries"] >= 1.4 * copied)
        for phase, _, rows in ledger.instants()
    ]
    return max(total for total, _ in peaks) - max(total - copied * has_copy for total, has_copy in peaks)


def gathered_inputs(row: dict[str, Any], settled: Estimate) -> float:
    """Bytes of the gathered inputs of attention and of the feed-forward layer, if their loop keeps them for backward. They
    count for all blocks and micro-batches whose activations are in memory at once. tightfit gathers them again."""
    plan = settled.plan
    if not row["loop"].get("keeps_gathered_inputs") or not plan.sequence_parallel or settled.peak.phase == "optimizer":
        return 0.0
    model, stage = row["model"], 0 if settled.ledger.rank_program is None else settled.ledger.rank_program.pipeline_rank
    blocks = plan.split[stage] if plan.split else model["num_hidden_layers"] / plan.pp
    tokens = plan.micro_batch_of(row["batch"]) * row["data"]["sequence_length"]
    return 2 * 2 * tokens * model["hidden_size"] * (1 - 1 / plan.tp) * blocks * (plan.pp - stage)


def blocks_of_gathers(row: dict[str, Any], settled: Estimate) -> float:
    """Bytes that torch's allocator reserves in addition if ZeRO-3 does not limit its gathers.

    Then the host starts the gathers, products and reductions of all blocks before the device has done the first. The
    allocator hands out memory when the host asks for it, so that no block takes over what another has freed in another
    stream: the weights that are gathered for forward, those for backward, and the gradients, all of them whole.
    """
    if not row["loop"].get("unlimited_gathers") or settled.plan.zero != 3:
        return 0.0
    width = 4 if settled.plan.precision == "fp32" else 2
    return 3.0 * width * sum(one.count for one in settled.ledger.parameters)


def blocks_of_update(row: dict[str, Any], settled: Estimate) -> float:
    """Bytes that torch's allocator reserves in addition for DeepSpeed's buckets.

    DeepSpeed reduces gradients and gathers updated weights in buckets. Freed activations are smaller, so without
    expandable segments their memory cannot serve a bucket. The flat fp32 gradients of its update need none: their
    memory was allocated before the first activations.
    """
    plan, bucket = settled.plan, row["loop"].get("bucket", 0)
    if not bucket or not plan.master_weights or plan.data_parallel == 1 or plan.allocator == "tuned":
        return 0.0
    count = settled.peak.rows["parameters"] / 2
    gathered = 2 * count / max(count // bucket, 1) if plan.zero else 0.0
    if plan.precision == "fp16-true":
        # such buffers have the size of a bucket, however few gradients there are
        whole = row["loop"].get("reduce_buffers", 0)
        return (2 * bucket * whole or 2 * min(bucket, count)) + gathered
    return max(4 * min(bucket, count), gathered)  # gradients in fp32, whose bucket is free again before the weights'


def as_their_loop(ledger: Ledger, loop: dict[str, Any]) -> Ledger:
    """The ledger of another framework's loop, with the bytes of its optimizer's kernels where they are known."""
    times = loop.get("temporaries_of_update", 1)
    updates = {
        name: replace(update, foreach_bytes=times * update.foreach_bytes) for name, update in ledger.updates.items()
    }
    return replace(ledger, updates=updates, foreach=ledger.foreach and not loop.get("one_by_one", False))


def compare_all(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The comparisons of rows of the same model, which share their traces."""
    profilers: dict[str, Profiler] = {}
    return [compare(row, profilers) for row in rows]


def by_model(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows in lists of the same model and optimizer, the longest first."""
    found = defaultdict(list)
    for row in rows:
        found[model_of(row)].append(row)
    return sorted(found.values(), key=len, reverse=True)


def predicted_rows(rows: list[dict[str, Any]], jobs: int) -> Iterator[dict[str, Any]]:
    parts = by_model(rows)
    if jobs == 1:
        for part in parts:
            yield from compare_all(part)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(compare_all, part) for part in parts]):
            yield from done.result()


# --- all rows -------------------------------------------------------------------------------------------------------


def add_calibrated(rows: list[dict[str, Any]]) -> dict[str, float]:
    """One factor on the predicted speed for each (machine, framework), the median of its runs, without those of part
    e if there are others; rows of those with enough runs are given their calibrated speed."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row.get("predicted_speed"):
            groups[row["machine"].partition(":")[0], row["framework"]].append(row)
    factors = {}
    for (device, framework), same in groups.items():
        those = [row for row in same if row["half"] != "e"] or same
        factor = math.exp(-statistics.median(log_ratio(row, "speed") for row in those))
        factors[f"{framework} on {device}"] = factor
        for row in same:
            if len(those) >= LEAST_RUNS:
                row["calibrated_speed"] = row["predicted_speed"] * factor
    return factors


def log_ratio(row: dict[str, Any], what: str, predicted: str = "predicted") -> float:
    return math.log(row[f"{predicted}_{what}"] / row[f"published_{what}"])


def errors_of(rows: list[dict[str, Any]], what: str, predicted: str = "predicted") -> list[float]:
    """The signed errors of the rows that have both figures. what: bytes or speed."""
    names = f"{predicted}_{what}", f"published_{what}"
    return [row[names[0]] / row[names[1]] - 1 for row in rows if all(row.get(name) for name in names)]


def summed_up(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of memory and speed, their bias (the signed median), and the shares of rightly predicted fits."""
    found: dict[str, Any] = {"rows": len(rows), "errors": sum("error" in row for row in rows)}
    of = {
        "memory": errors_of(rows, "bytes"),
        "speed": errors_of(rows, "speed"),
        "speed, calibrated": errors_of(rows, "speed", "calibrated"),
    }
    for name, errors in of.items():
        if errors:
            found[name] = {"rows": len(errors), **harness.error_summary(errors), "bias": statistics.median(errors)}
    for name, ran in (("ran, predicted to fit", True), ("out of memory, predicted not to fit", False)):
        those = [row["predicted_fits"] is ran for row in rows if row["ran"] is ran and "predicted_fits" in row]
        if those:
            found[name] = {"rows": len(those), "right": sum(those)}
    return found


def summaries(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """half -> group (or "all") -> summary."""
    found: dict[str, dict[str, Any]] = {}
    for half in sorted({row["half"] for row in rows}):
        those = [row for row in rows if row["half"] == half]
        groups = sorted({row["group"] for row in those})
        found[half] = {group: summed_up([row for row in those if row["group"] == group]) for group in groups}
        found[half]["all"] = summed_up(those)
    return found


def line_of(row: dict[str, Any]) -> str:
    line = f"{row['id']:48s}"
    if "error" in row:
        return f"{line} {row['error']}"
    if "metric" in row:
        predicted, published = row["predicted_bytes"], row["published_bytes"]
        line += f" {predicted / 1e9:7.2f} GB of {published / 1e9:7.2f} GB {predicted / published - 1:+6.1%} {row['metric']:9s}"
    if row.get("published_speed"):
        predicted, published = row["predicted_speed"], row["published_speed"]
        line += f" {predicted:9.4g}/s of {published:9.4g}/s {predicted / published - 1:+6.1%}"
    if row["ran"] is not None and row["ran"] is not row["predicted_fits"]:
        line += f"  {'ran' if row['ran'] else 'ran out of memory'}, predicted {row['peak_of_limit']:.0%} of the memory"
    return line


def line_of_summary(group: str, one: dict[str, Any]) -> str:
    line = f"{group:14s} {one['rows']:3d} rows"
    if one["errors"]:
        line += f", {one['errors']} failed"
    for name in ("memory", "speed", "speed, calibrated"):
        if name in one:
            of = one[name]
            line += f" | {name} {of['rows']}: {of['median']:.1%}, worst {of['worst']:.1%}, bias {of['bias']:+.1%}"
    for name, short in (("ran, predicted to fit", "ran"), ("out of memory, predicted not to fit", "out of memory")):
        if name in one:
            line += f" | {short}: {one[name]['right']}/{one[name]['rows']} right"
    return line


def main() -> None:
    parser = harness.make_parser(__doc__, only="rows whose id begins so")
    parser.add_argument(
        "--half", choices=("a", "b", "c", "d", "e", "all"), default="all", help="which rows of each group"
    )
    parser.add_argument("--group", default="", help="a file of benchmarks/published, without .yaml")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    arguments = parser.parse_args()
    given = [row for row in read_rows(arguments.group, arguments.half) if row["id"].startswith(arguments.only)]
    order = {row["id"]: place for place, row in enumerate(given)}
    rows = []
    for row in predicted_rows(given, arguments.jobs):
        rows.append(row)
        if row["half"] == "a" or arguments.half in ("c", "d", "e"):
            print(line_of(row), flush=True)
    rows.sort(key=lambda row: order[row["id"]])
    factors = add_calibrated(rows)
    summary = summaries(rows)
    for half, groups in summary.items():
        print(f"half {half}")
        for group, one in groups.items():
            print(f"  {line_of_summary(group, one)}")
    for name, factor in factors.items():
        print(f"{name}: {factor:.2f} x the predicted speed")
    print(
        f"{sum(row['cpu_s'] for row in rows):.0f} s of CPU time, at most {max(row['cpu_s'] for row in rows):.1f} s for a row"
    )
    harness.write_record(arguments.out, {"summary": summary, "factors": factors, "rows": rows})


if __name__ == "__main__":
    main()
