"""Shards the weight matrices of attention and MLP across devices, the first matrix by columns and
the second by rows, so that the devices compute each layer together. It is for layers that are too
large for one device.

Saves   parameters, their optimizer states and the activations between the two matrices, all divided
        by the number of devices. In a language model, the embedding and the logits are sharded by
        vocabulary, too.
Costs   for each pair of matrices, one all-reduce of the hidden states in forward and one in
        backward. They do not overlap with anything, so use it only inside a node, where links are
        fast. Norms, dropout and the residual stream are replicated. `sequence_parallel` shards them
        by positions instead: forward sends as many bytes, and backward gathers the inputs of
        column-parallel modules once more.
When    one layer's activations or weights are too large for a device, or more data parallelism
        would leave too few samples for each device. The number of devices must divide the number of
        attention heads.
Order   after attention, which is set in the model's configuration; before the methods that wrap
        blocks.
Source  Shoeybi et al. 2019, arXiv:1909.08053 (Megatron-LM); the tables of transformers' own
        configurations, for the models that have one.

A table maps patterns of module names, in which * matches any part, to a style of sharding: colwise,
rowwise, qkv and gate_up (colwise, for three or two matrices side by side), heads (an embedding whose
columns are attention heads), colwise_gather_output (every device gets the full output),
rowwise_split_input (every device has the full input, and takes its part), whole (not sharded), or
replicated_with_grad_allreduce (not sharded, but used on sharded activations, such as a norm of each
head: the devices' gradients are summed). The experts of a mixture have the style moe_tp_experts, and
their stacked weights packed_colwise (two matrices side by side), colwise or rowwise.

A language model's output head is sharded by vocabulary if the table does not have it, or has it as
colwise; so is its input embedding (embedding_rowwise in the tables of transformers). Every device
creates the full parameters from the same seed and then keeps its shard. Together, the devices thus
train the same values as one device.

Example: an MLP of 1,024 -> 4,096 -> 1,024 features with tp=4. Each device has 1,024 columns of the
first matrix and the corresponding 1,024 rows of the second. Each computes a partial output of 1,024
features; the all-reduce adds the four partial outputs.
"""

from __future__ import annotations

import difflib
import fnmatch
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from tightfit._torch.fake import active_fake_mode
from tightfit.cost.ledger import Ledger
from tightfit.distributed.links import latency, message
from tightfit.errors import InputError
from tightfit.job import Job, ModelSpec
from tightfit.machine import Machine
from tightfit.models import find_blocks, model_factory
from tightfit.models.lora import has_adapters
from tightfit.parallel.tensor.partial_gradients import may_be_partial, partial_parameters
from tightfit.parallel.tensor.sequence_parallel import SequenceParallel
from tightfit.parallel.tensor.sharder import GATHER_OUTPUT, PIECES, SPLIT_INPUT, Sharder
from tightfit.plan import Plan
from tightfit.runtime.method import SearchFacts
from tightfit.runtime.run import Run, refuse_hooks

FIELDS = ("tp", "sequence_parallel")
VARIANTS = ({"tp": 2}, {"tp": 2, "sequence_parallel": True})

TABLES: dict[str, dict[str, str]] = {
    "gpt2": {"*.attn.c_attn": "qkv", "*.attn.c_proj": "rowwise", "*.mlp.c_fc": "colwise", "*.mlp.c_proj": "rowwise"},
    "bert": {
        "*.attention.self.query": "colwise",
        "*.attention.self.key": "colwise",
        "*.attention.self.value": "colwise",
        "*.attention.output.dense": "rowwise",
        "*.intermediate.dense": "colwise",
        "*.layer.*.output.dense": "rowwise",
    },
    "vit": {
        "*.q_proj": "colwise",
        "*.k_proj": "colwise",
        "*.v_proj": "colwise",
        "*.o_proj": "rowwise",
        "*.mlp.fc1": "colwise",
        "*.mlp.fc2": "rowwise",
    },
    "t5": {
        "*Attention.q": "colwise",
        "*Attention.k": "colwise",
        "*Attention.v": "colwise",
        "*Attention.o": "rowwise",
        "*.relative_attention_bias": "heads",
        "*.wi": "colwise",
        "*.wi_0": "colwise",
        "*.wi_1": "colwise",
        "*.wo": "rowwise",
    },
    "phi3": {
        "*.self_attn.qkv_proj": GATHER_OUTPUT,
        "*.self_attn.o_proj": SPLIT_INPUT,
        "*.mlp.gate_up_proj": "gate_up",
        "*.mlp.down_proj": "rowwise",
    },
    "glm4": {
        "*.self_attn.q_proj": "colwise",
        "*.self_attn.k_proj": "colwise",
        "*.self_attn.v_proj": "colwise",
        "*.self_attn.o_proj": "rowwise",
        "*.mlp.gate_up_proj": "gate_up",
        "*.mlp.down_proj": "rowwise",
    },
}
TABLES["glm"] = TABLES["glm4"]
_HEADS = ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads")
REPLICATED = "replicated_with_grad_allreduce"
EXPERTS = "moe_tp_experts"
STYLES = (
    "colwise", "rowwise", *PIECES, "heads", GATHER_OUTPUT, SPLIT_INPUT, "whole", REPLICATED, "embedding_rowwise",
    EXPERTS, "packed_colwise",
)  # fmt: skip
# the sharder gets no modules of these styles; the vocabulary's are sharded together with the head
UNSHARDED = ("whole", REPLICATED, "embedding_rowwise")


def enabled(plan: Plan) -> bool:
    return plan.tp > 1


def leanest(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    return {"sequence_parallel": list(dict.fromkeys([start.sequence_parallel, start.tp > 1]))}


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Return the ledger (the predicted memory and time of a step) with the communication of tensor
    parallelism: the bytes and calls of all its collectives in a step.

    The ledger already has the memory and operations of one device's shard, because the sharded
    model was traced.
    """
    n, samples, times = plan.tp, ledger.micro_batch, ledger.micro_batches
    # collective -> the share of its accessed bytes that a device sends. The accessed bytes contain
    # a tensor that is modified in place twice, as an argument and as a result.
    ring = {
        "c10d.allreduce_": 2 * (n - 1) / (2 * n),
        "c10d._allgather_base_": (n - 1) / (2 * n + 1),
        "c10d._reduce_scatter_base_": (n - 1) / (n + 2),
        "_c10d_functional.all_reduce": 2 * (n - 1) / (2 * n),  # in compiled blocks
        "_c10d_functional.all_gather_into_tensor": (n - 1) / (n + 1),
        "_c10d_functional.reduce_scatter_tensor": (n - 1) / (n + 1),
    }
    calls = [
        operation for segment in ledger.training for operation in segment.timeline.operations if operation.name in ring
    ]
    sent = sum(ring[call.name] * call.bytes_accessed.at(samples) * call.count.at(samples) for call in calls)
    sums = sum(call.count.at(samples) for call in calls if "allreduce" in call.name or "all_reduce" in call.name)
    others = sum(call.count.at(samples) for call in calls) - sums
    communication = message("activations", times * sent, plan, machine, ("tp",), times * others)
    waits = communication.latency_s + times * sums * latency(plan, machine, ("tp",), 2)
    return replace(ledger, messages=(*ledger.messages, replace(communication, overlaps=False, latency_s=waits)))


def apply(run: Run, plan: Plan) -> Run:
    """Return the run with a model whose modules are sharded according to its table (see
    `sharding_table`).

    Raises InputError if the model has no table, or one that names no module of the model; if tp
    does not divide the number of attention heads; or if the model has adapters (LoRA), or a
    parameter with a hook on its gradient.
    """
    assert run.mesh is not None
    refuse_hooks(run.model, f"plan: tp={plan.tp}")
    if has_adapters(run.model):
        raise InputError(
            f"plan: tp={plan.tp}", "the model has adapters, which are not sharded", "use tp: 1, or zero: 3"
        )
    table = sharding_table(run)
    _check_heads(run.model, plan.tp)
    summed = _partial_parameters(run, table)
    sequences = _sequences(run, plan) if plan.sequence_parallel else None
    sharder = Sharder(run.model, run.mesh, sequences, blocks=None if plan.compile == "none" else _blocks(run))
    head, objective = _vocabulary_head(run, plan, table), run.objective
    found, replicated = 0, list[nn.Module]()
    for name, module in list(run.model.named_modules()):
        style = _style(table, name)
        if style == REPLICATED:
            replicated.append(module)
        if style == EXPERTS:
            own = {key: _style(table, f"{name}.{key}") for key, _ in module.named_parameters(recurse=False)}
            sharder.shard_experts(name, module, {key: one for key, one in own.items() if one is not None})
            found += 1
        elif style is not None and style not in UNSHARDED and module is not head:
            sharder.shard_module(name, module, style)
            found += 1
    if not found:
        raise InputError(
            f"plan: tp={plan.tp}",
            "the table of modules to shard names no module of the model",
            "correct the names in model.tensor_parallel, or use tp: 1",
        )
    if head is not None:
        objective = sharder.shard_vocabulary(run.model, head, objective)
    slices = sharder.shardings()
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    shared = summed | frozenset(names[parameter] for module in replicated for parameter in module.parameters())
    if sequences is not None:
        shared |= sequences.partial_gradients(run.model, set(slices), shared)
    return replace(
        run, objective=objective, loss_sum=partial(objective.total, run.model), tp_shards=slices, tp_replicated=shared
    )


def _partial_parameters(run: Run, table: dict[str, str]) -> frozenset[str]:
    """Return the names of the parameters that the table does not have, and whose gradients have to be
    summed over tp all the same, because they are used on sharded activations."""
    styles = {name: style for name, _ in run.model.named_modules() if (style := _style(table, name)) is not None}
    if active_fake_mode() is not None or not may_be_partial(run.model, styles):
        return frozenset()
    return partial_parameters(model_factory(run.job.model), run.objective.total, run.data.example(), styles)


def _style(table: dict[str, str], name: str) -> str | None:
    return next((style for pattern, style in table.items() if fnmatch.fnmatchcase(name, pattern)), None)


def _vocabulary_head(run: Run, plan: Plan, table: dict[str, str]) -> nn.Linear | None:
    """Return the output head if it is to be sharded by vocabulary, so that no device has the full
    logits.

    Return None if the loss needs the full logits, if the table shards the head in another way, or
    if the model does not say which nn.Linear is its head.

    table  maps patterns of module names to styles of sharding
    """
    get = getattr(run.model, "get_output_embeddings", None)
    head = get() if get is not None else None
    if not isinstance(head, nn.Linear) or run.objective.logits is None or run.job.loss is not None:
        return None
    name = next(name for name, module in run.model.named_modules() if module is head)
    # with a chunked loss, the logits need not be gathered: only the loss reads them
    shardable = (None, "colwise") if plan.chunked_loss is None else (None, "colwise", GATHER_OUTPUT)
    return head if _style(table, name) in shardable else None


def _sequences(run: Run, plan: Plan) -> SequenceParallel:
    if getattr(getattr(run.model, "config", None), "is_encoder_decoder", False):
        raise InputError(
            "plan: sequence_parallel",
            "it does not support encoder-decoder models, which have two different sequences",
            "use sequence_parallel: false",
        )
    assert run.mesh is not None
    return SequenceParallel(_blocks(run), plan, run.mesh.group("tp"))


def _blocks(run: Run) -> list[tuple[str, nn.Module]]:
    return find_blocks(run.model, run.job.blocks_name)


def sharding_table(run: Run) -> dict[str, str]:
    """Return the table that says how modules are sharded: a dict from a pattern of module names to
    a style of sharding, such as {"*.mlp.up": "colwise"}.

    The table is the first of these that exists: the job's model.tensor_parallel, the model's
    attribute tensor_parallel, the entry of TABLES for the model's architecture, and the table in
    the model's transformers configuration (base_model_tp_plan).

    Raises InputError if none of them exists, or if a style is unknown.
    """
    spec = run.job.model
    asked = spec.tensor_parallel if isinstance(spec, ModelSpec) else None
    own = asked or getattr(run.model, "tensor_parallel", None)
    if own:
        wrong = sorted({style for style in own.values() if style not in STYLES})
        if wrong:
            raise InputError(
                f"job: model.tensor_parallel: {wrong[0]}",
                "this is not a known style of sharding",
                f"use one of: {', '.join(STYLES)}",
            )
        if asked:
            _refuse_names_of_nothing(run.model, asked)
        return dict(own)
    config: Any = getattr(run.model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind in TABLES:
        return TABLES[kind]
    given = getattr(config, "base_model_tp_plan", None) or {}
    others = sorted({style for style in given.values() if style not in STYLES})
    if set(given.values()) - set(UNSHARDED) and not others:
        return {f"*{pattern}": style for pattern, style in given.items()}
    found = f"{kind or type(run.model).__name__} has no table of modules to shard"
    if others:
        found = f"{kind} shards modules in a way that is not supported here ({others[0]})"
    raise InputError(
        "plan: tp",
        found,
        "give one in the job (model: {..., tensor_parallel: {blocks.*.up: colwise, blocks.*.down: rowwise}}), or use tp: 1",
    )


def _refuse_names_of_nothing(model: nn.Module, table: dict[str, str]) -> None:
    """Raise InputError if a pattern of the job's own table matches no module of the model, and no parameter of
    experts."""
    names = [name for named in (model.named_modules(), model.named_parameters()) for name, _ in named]
    for pattern in table:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            last = pattern.rpartition(".")[2]
            known = sorted({name.rpartition(".")[2] for name, _ in model.named_modules()} - {""})
            near = difflib.get_close_matches(last, known, 1)
            raise InputError(
                f"job: model.tensor_parallel: {pattern}",
                "names no module of the model",
                f"leave it out, or use {pattern.removesuffix(last)}{near[0]}"
                if near
                else "leave it out, or correct it",
            )


def _check_heads(model: nn.Module, size: int) -> None:
    """Raise InputError if `size`, the tp degree, does not divide the number of attention heads."""
    config: Any = getattr(model, "config", None)
    for name in _HEADS:
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            fitting = max(n for n in range(1, size) if heads % n == 0)
            raise InputError(
                f"plan: tp={size}",
                f"the model's {name} is {heads}, which {size} devices do not divide evenly",
                f"use tp: {fitting}",
            )
