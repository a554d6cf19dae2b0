"""Tensor parallelism: the products of attention and MLP are divided among devices, by columns, then by rows.

Saves   parameters, their states and the activations between the two products, all by the number of devices; a language
        model's embedding and logits as well, by vocabulary.
Costs   for each pair of products one sum over the devices in forward and one in backward, of the hidden states, which
        nothing hides: inside a node only, where links are fast. Norms, dropout and the residual stream are everyone's,
        or with `sequence_parallel` divided by positions, which sends as much, and once more what backward needs again.
When    one layer's activations or weights are too large for a device, or more data parallelism would leave it too few
        samples. As many devices as divide the number of attention heads.
Order   after attention, which the model's configuration chooses; before what wraps blocks.
Source  Shoeybi et al. 2019, arXiv:1909.08053 (Megatron-LM); the tables of transformers' own configurations where they
        have one.

A table says which module is divided how, by its name with * for any part: colwise, rowwise, qkv (columns of three
matrices side by side), heads (an embedding whose columns are attention heads), colwise_gather_output (every device has all
of what comes out), whole. The head of a language model is divided by vocabulary if it is not in the table, or colwise there.
Parameters are created whole, by the same seed everywhere, and cut: what is trained is what one device trains.
"""

from __future__ import annotations

import fnmatch
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from tightfit.errors import InputError
from tightfit.job import Job, ModelSpec
from tightfit.ledger import Ledger
from tightfit.machine import Machine
from tightfit.methods.cutter import GATHERED, Cutter
from tightfit.methods.mesh import latency, message
from tightfit.methods.protocol import SearchFacts
from tightfit.methods.run import Run, refuse_hooks
from tightfit.methods.sequences import Sequences
from tightfit.models import find_blocks
from tightfit.plan import Plan

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
STYLES = ("colwise", "rowwise", "qkv", "heads", GATHERED, "whole")


def wanted(plan: Plan) -> bool:
    return plan.tp > 1


def leanest(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    return {"sequence_parallel": list(dict.fromkeys([start.sequence_parallel, start.tp > 1]))}


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """The profile traces one device's part of the model, with what it says to the others, which they wait for."""
    n, samples, times = plan.tp, ledger.micro_batch, ledger.micro_batches
    ring = {  # of what an operation touches (what it writes to counts as given and as returned), what a device sends
        "c10d.allreduce_": 2 * (n - 1) / (2 * n),
        "c10d._allgather_base_": (n - 1) / (2 * n + 1),
        "c10d._reduce_scatter_base_": (n - 1) / (n + 2),
        "_c10d_functional.all_reduce": 2 * (n - 1) / (2 * n),  # in compiled blocks
        "_c10d_functional.all_gather_into_tensor": (n - 1) / (n + 1),
        "_c10d_functional.reduce_scatter_tensor": (n - 1) / (n + 1),
    }
    calls = [
        operation for passage in ledger.training for operation in passage.timeline.operations if operation.name in ring
    ]
    sent = sum(ring[one.name] * one.moved.at(samples) * one.count.at(samples) for one in calls)
    sums = sum(one.count.at(samples) for one in calls if "allreduce" in one.name or "all_reduce" in one.name)
    others = sum(one.count.at(samples) for one in calls) - sums
    said = message("activations", times * sent, plan, machine, ("tp",), times * others)
    waits = said.latency_s + times * sums * latency(plan, machine, ("tp",), 2)
    return replace(ledger, messages=(*ledger.messages, replace(said, hides=False, latency_s=waits)))


def apply(run: Run, plan: Plan) -> Run:
    assert run.mesh is not None
    refuse_hooks(run.model, f"plan: tp={plan.tp}")
    table = table_of(run)
    _check_heads(run.model, plan.tp)
    sequences = _sequences(run, plan) if plan.sequence_parallel else None
    cutter = Cutter(run.model, run.mesh, sequences, blocks=None if plan.compile == "none" else _blocks(run))
    head, objective = _divided_by_vocabulary(run, plan, table), run.objective
    found = 0
    for name, module in list(run.model.named_modules()):
        style = _style(table, name)
        if style not in (None, "whole") and module is not head:
            cutter.divide(name, module, style)
            found += 1
    if not found:
        raise InputError(
            f"plan: tp={plan.tp}", "no module of the model is in its table", "mend model.tensor_parallel, or use tp: 1"
        )
    if head is not None:
        objective = cutter.divide_vocabulary(run.model, head, objective)
    slices = cutter.slices()
    shared = sequences.parameters(run.model, set(slices)) if sequences is not None else frozenset()
    return replace(run, objective=objective, loss_sum=partial(objective.total, run.model), slices=slices, shared=shared)


def _style(table: dict[str, str], name: str) -> str | None:
    return next((style for pattern, style in table.items() if fnmatch.fnmatchcase(name, pattern)), None)


def _divided_by_vocabulary(run: Run, plan: Plan, table: dict[str, str]) -> nn.Linear | None:
    """The layer whose logits never are whole; None where the loss needs them, or the table says otherwise."""
    get = getattr(run.model, "get_output_embeddings", None)
    head = get() if get is not None else None
    if not isinstance(head, nn.Linear) or run.objective.logits is None or run.job.loss is not None:
        return None
    name = next(name for name, module in run.model.named_modules() if module is head)
    divided = (
        (None, "colwise") if plan.chunked_loss is None else (None, "colwise", GATHERED)
    )  # whose logits nobody sees
    return head if _style(table, name) in divided else None


def _sequences(run: Run, plan: Plan) -> Sequences:
    if getattr(getattr(run.model, "config", None), "is_encoder_decoder", False):
        raise InputError(
            "plan: sequence_parallel",
            "an encoder and a decoder have sequences of their own",
            "use sequence_parallel: false",
        )
    assert run.mesh is not None
    return Sequences(_blocks(run), plan, run.mesh.group("tp"))


def _blocks(run: Run) -> list[tuple[str, nn.Module]]:
    return find_blocks(run.model, run.job.model.blocks if isinstance(run.job.model, ModelSpec) else None)


def table_of(run: Run) -> dict[str, str]:
    """Which modules are divided how: as the job says, or the model, or its configuration, or TABLES. Raises InputError."""
    spec = run.job.model
    own = spec.tensor_parallel if isinstance(spec, ModelSpec) else None
    own = own or getattr(run.model, "tensor_parallel", None)
    if own:
        wrong = sorted({style for style in own.values() if style not in STYLES})
        if wrong:
            raise InputError(
                f"job: model.tensor_parallel: {wrong[0]}",
                "unknown way to divide a module",
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
    found = f"{kind or type(run.model).__name__} has no table of what can be divided"
    if others:
        found = f"{kind} divides modules in a way that is not known here ({others[0]})"
    raise InputError(
        "plan: tp",
        found,
        "give one in the job (model: {..., tensor_parallel: {blocks.*.up: colwise, blocks.*.down: rowwise}}), or use tp: 1",
    )


def _check_heads(model: nn.Module, size: int) -> None:
    config: Any = getattr(model, "config", None)
    for name in _HEADS:
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            fitting = max(n for n in range(1, size) if heads % n == 0)
            raise InputError(
                f"plan: tp={size}",
                f"the model's {name} is {heads}, which {size} devices cannot share",
                f"use tp: {fitting}",
            )
