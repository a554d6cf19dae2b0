"""Shards the weight matrices of attention and MLP across devices, by columns and then by rows, so
that the devices compute each layer together. It is for layers that are too large for one device.

Saves   parameters, their optimizer states and the activations between the two products, all divided
        by the number of devices; a language model's embedding and logits as well, by vocabulary.
Costs   for each pair of products, one all-reduce of the hidden states in forward and one in
        backward, which nothing overlaps: use it only inside a node, where links are fast. Norms,
        dropout and the residual stream are replicated. With `sequence_parallel` they are sharded by
        positions, which sends as many bytes, and gathers once more what backward needs again.
When    one layer's activations or weights are too large for a device, or more data parallelism
        would leave it too few samples. The number of devices must divide the number of attention
        heads.
Order   after attention, which is set in the model's configuration; before the methods that wrap
        blocks.
Source  Shoeybi et al. 2019, arXiv:1909.08053 (Megatron-LM); the tables of transformers' own
        configurations where they have one.

A table maps names of modules (with * for any part) to how each is sharded: colwise, rowwise, qkv
(columns of three matrices side by side), heads (an embedding whose columns are attention heads),
colwise_gather_output (every device gets the full output), or whole (not sharded). A language
model's head is sharded by vocabulary if it is not in the table, or colwise there. Every device
creates the full parameters from the same seed and then keeps its shard: together, the devices train
the same values as one device.

Example: an MLP of 1,024 -> 4,096 -> 1,024 features with tp=4. Each device has 1,024 columns of the
first matrix and the matching 1,024 rows of the second. Each computes a partial output of 1,024
features; the all-reduce adds the four.
"""

from __future__ import annotations

import fnmatch
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from tightfit.cost.ledger import Ledger
from tightfit.distributed.links import latency, message
from tightfit.errors import InputError
from tightfit.job import Job, ModelSpec
from tightfit.machine import Machine
from tightfit.models import find_blocks
from tightfit.parallel.tensor.sequence_parallel import SequenceParallel
from tightfit.parallel.tensor.sharder import GATHER_OUTPUT, Sharder
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
}
_HEADS = ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads")
STYLES = ("colwise", "rowwise", "qkv", "heads", GATHER_OUTPUT, "whole")


def enabled(plan: Plan) -> bool:
    return plan.tp > 1


def leanest(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    return {"sequence_parallel": list(dict.fromkeys([start.sequence_parallel, start.tp > 1]))}


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """The profile traces one device's shard of the model; this adds the collectives that the shards
    wait for.
    """
    n, samples, times = plan.tp, ledger.micro_batch, ledger.micro_batches
    # the share of an operation's accessed bytes that a device sends; a tensor that is written in
    # place counts twice, as argument and as result
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
    sent = sum(ring[one.name] * one.bytes_accessed.at(samples) * one.count.at(samples) for one in calls)
    sums = sum(one.count.at(samples) for one in calls if "allreduce" in one.name or "all_reduce" in one.name)
    others = sum(one.count.at(samples) for one in calls) - sums
    communication = message("activations", times * sent, plan, machine, ("tp",), times * others)
    waits = communication.latency_s + times * sums * latency(plan, machine, ("tp",), 2)
    return replace(ledger, messages=(*ledger.messages, replace(communication, overlaps=False, latency_s=waits)))


def apply(run: Run, plan: Plan) -> Run:
    """Shard the model's modules as its table says. Raises InputError where the table or the number
    of heads does not fit.
    """
    assert run.mesh is not None
    refuse_hooks(run.model, f"plan: tp={plan.tp}")
    table = sharding_table(run)
    _check_heads(run.model, plan.tp)
    sequences = _sequences(run, plan) if plan.sequence_parallel else None
    sharder = Sharder(run.model, run.mesh, sequences, blocks=None if plan.compile == "none" else _blocks(run))
    head, objective = _vocabulary_head(run, plan, table), run.objective
    found = 0
    for name, module in list(run.model.named_modules()):
        style = _style(table, name)
        if style not in (None, "whole") and module is not head:
            sharder.shard_module(name, module, style)
            found += 1
    if not found:
        raise InputError(
            f"plan: tp={plan.tp}",
            "no module of the model is in its table",
            "correct model.tensor_parallel, or use tp: 1",
        )
    if head is not None:
        objective = sharder.shard_vocabulary(run.model, head, objective)
    slices = sharder.shardings()
    shared = sequences.partial_gradients(run.model, set(slices)) if sequences is not None else frozenset()
    return replace(
        run, objective=objective, loss_sum=partial(objective.total, run.model), tp_shards=slices, tp_replicated=shared
    )


def _style(table: dict[str, str], name: str) -> str | None:
    return next((style for pattern, style in table.items() if fnmatch.fnmatchcase(name, pattern)), None)


def _vocabulary_head(run: Run, plan: Plan, table: dict[str, str]) -> nn.Linear | None:
    """The head to shard by vocabulary, so that no device has the full logits.

    None where the loss needs full logits, or where the table shards the head in another way.
    """
    get = getattr(run.model, "get_output_embeddings", None)
    head = get() if get is not None else None
    if not isinstance(head, nn.Linear) or run.objective.logits is None or run.job.loss is not None:
        return None
    name = next(name for name, module in run.model.named_modules() if module is head)
    # with a chunked loss, nothing else reads the gathered logits
    shardable = (None, "colwise") if plan.chunked_loss is None else (None, "colwise", GATHER_OUTPUT)
    return head if _style(table, name) in shardable else None


def _sequences(run: Run, plan: Plan) -> SequenceParallel:
    if getattr(getattr(run.model, "config", None), "is_encoder_decoder", False):
        raise InputError(
            "plan: sequence_parallel",
            "an encoder-decoder model has two different sequences",
            "use sequence_parallel: false",
        )
    assert run.mesh is not None
    return SequenceParallel(_blocks(run), plan, run.mesh.group("tp"))


def _blocks(run: Run) -> list[tuple[str, nn.Module]]:
    return find_blocks(run.model, run.job.blocks_name)


def sharding_table(run: Run) -> dict[str, str]:
    """How each module is sharded, by pattern of its name: from the job, else the model, its
    configuration, or TABLES. Raises InputError where there is no usable table.
    """
    spec = run.job.model
    own = spec.tensor_parallel if isinstance(spec, ModelSpec) else None
    own = own or getattr(run.model, "tensor_parallel", None)
    if own:
        wrong = sorted({style for style in own.values() if style not in STYLES})
        if wrong:
            raise InputError(
                f"job: model.tensor_parallel: {wrong[0]}",
                "unknown way to shard a module",
                f"use one of: {', '.join(STYLES)}",
            )
        return dict(own)
    config: Any = getattr(run.model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind in TABLES:
        return TABLES[kind]
    given = getattr(config, "base_model_tp_plan", None) or {}
    others = sorted({style for style in given.values() if style not in STYLES})
    if given and not others:
        return {f"*{pattern}": style for pattern, style in given.items()}
    found = f"{kind or type(run.model).__name__} has no table of modules to shard"
    if others:
        found = f"{kind} shards modules in a way that is not supported here ({others[0]})"
    raise InputError(
        "plan: tp",
        found,
        "give one in the job (model: {..., tensor_parallel: {blocks.*.up: colwise, blocks.*.down: rowwise}}), or use tp: 1",
    )


def _check_heads(model: nn.Module, size: int) -> None:
    """Raise InputError where `size` does not divide the model's number of attention heads."""
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
