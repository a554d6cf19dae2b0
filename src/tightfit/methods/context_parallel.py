"""Context parallelism: each sample's sequence is divided among devices, and attention goes around them in a ring.

Saves   activations, by the number of devices: the only way to a sequence whose activations no device holds at one sample.
Costs   in each block the keys and values pass all devices in forward, and again in backward with their gradients; beside the
        products, which hide them where sequences are long. Parameters are everyone's, or divided by zero.
When    one sample's activations do not fit with recompute, or tp would leave a node. Long sequences: of many thousand tokens.
Order   after the data, which it cuts; in the place of `attention`; before the loss, whose targets it moves.
Source  Liu et al. 2023, arXiv:2310.01889 (ring attention); the even shares under a causal mask: Grattafiori et al. 2024,
        arXiv:2407.21783, section 3.3.2; merging by log-sum-exp: Dao et al. 2022, arXiv:2205.14135.

A sequence is cut into 2 x cp chunks, and a device has one from the front and its counterpart from the back, so that under a
causal mask all have as much to do. Works on models that take their attention from transformers' interface, and positions.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from functools import partial

from torch import nn

from tightfit.errors import InputError
from tightfit.ledger import Ledger
from tightfit.machine import Machine
from tightfit.methods.mesh import message
from tightfit.methods.ring_attention import NAME, join_ring, register
from tightfit.methods.run import Run
from tightfit.methods.sequence_chunks import SequenceChunks
from tightfit.models import task_of
from tightfit.models.objective import TASKS
from tightfit.plan import Plan

FIELDS = ("cp",)
VARIANTS = ({"cp": 2}, {"cp": 2, "zero": 3})
_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def wanted(plan: Plan) -> bool:
    return plan.cp > 1


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """The profile traces one device's pieces of the sequences, with what it sends around the ring."""
    sends = [
        operation
        for passage in ledger.training
        for operation in passage.timeline.operations
        if operation.name == "c10d.send"
    ]
    samples, times = ledger.micro_batch, ledger.micro_batches
    sent = sum(operation.moved.at(samples) * operation.count.at(samples) for operation in sends)
    calls = sum(operation.count.at(samples) for operation in sends)
    around = message("keys and values", sent * times, plan, machine, ("cp",), calls * times)
    return replace(ledger, messages=(*ledger.messages, around))


def apply(run: Run, plan: Plan) -> Run:
    assert run.mesh is not None
    task = task_of(run.job.model)
    _refuse_what_cannot_be_cut(run.model, task, plan)
    register()
    run.model.set_attn_implementation(NAME)  # type: ignore[operator]
    join_ring(run.model, run.mesh.lines["context"])
    causal = task == "causal-lm"
    objective = TASKS["masked-lm"]  # whose labels stand where they count: `cut` moves the others' there
    data = None if run.data is None else SequenceChunks(run.data, causal, run.mesh.piece, plan.cp, plan.pin_memory)
    return replace(run, objective=objective, loss_sum=partial(objective.total, run.model), data=data or run.data)


def _refuse_what_cannot_be_cut(model: nn.Module, task: str | None, plan: Plan) -> None:
    asked, config = f"plan: cp={plan.cp}", getattr(model, "config", None)
    if task not in ("causal-lm", "masked-lm"):
        raise InputError(asked, f"a job of {task or 'its own'} has no loss of each position", "use cp: 1")
    takes = inspect.signature(model.forward).parameters
    if (
        getattr(config, "_attn_implementation", None) != "sdpa"
        or "position_ids" not in takes
        or not _asks_for_attention(model)
    ):
        raise InputError(
            asked,
            f"{type(model).__name__} does not take its attention from transformers' interface, and position_ids",
            "use cp: 1, and tp or recompute for long sequences",
        )
    if any(map(_counts_its_positions, model.modules())):
        raise InputError(
            asked,
            f"{type(model).__name__} numbers positions by which tokens are padding, over the whole sequence",
            "use cp: 1",
        )
    mixing = next((name for name, module in model.named_modules() if _mixes_positions(module)), None)
    if mixing is not None or getattr(config, "trigram_input", False):
        raise InputError(
            asked, f"the model mixes positions outside of attention ({mixing or 'trigram_input'})", "use cp: 1"
        )
    for name in _DROPOUT:
        share = getattr(config, name, 0.0)
        if share:
            raise InputError(
                asked, f"the model drops attention's probabilities ({name}={share})", f"set model.{name}: 0.0"
            )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds != {"full_attention"} or window is not None:
        raise InputError(asked, "the model's attention sees a window only, which a ring does not cut", "use cp: 1")


def _asks_for_attention(model: nn.Module) -> bool:
    """Whether a model's code asks transformers for an attention function. Falcon, say, calls torch's own, which knows of no ring."""
    names = {kind.__module__ for kind in type(model).__mro__} - {"transformers.modeling_utils"}
    modules = [sys.modules.get(name) for name in names]
    return any(hasattr(module, "ALL_ATTENTION_FUNCTIONS") for module in modules if module is not None)


def _mixes_positions(module: nn.Module) -> bool:
    """Whether a module of a language model looks at neighbours, which another device may have."""
    return isinstance(module, nn.RNNBase) or (isinstance(module, nn.Conv1d) and module.kernel_size != (1,))


def _counts_its_positions(module: nn.Module) -> bool:
    """As RoBERTa and its relatives do: their positions begin behind the padding's number, and 0, 1, 2, ... are none of theirs."""
    positions = getattr(module, "position_embeddings", None)
    return isinstance(positions, nn.Embedding) and positions.padding_idx is not None
