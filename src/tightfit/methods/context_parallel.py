"""Splits each sample's sequence across devices. The devices exchange the keys and values of
attention in a ring, so that a sequence can be longer than one device could hold.

Saves   activations, divided by the number of devices. It is the only method for sequences so long
        that the activations of a single sample do not fit a device.
Costs   in each block, the keys and values pass through all devices in forward, and again in
        backward with their gradients. This overlaps with the matrix products, which hide it for
        long sequences. Parameters are replicated, or sharded by ZeRO.
When    sequences of many thousand tokens, if one sample's activations do not fit with recompute, or
        if tp would need devices on several nodes.
Order   after the data, which it shards by positions; it replaces `attention`; before the loss,
        whose targets it moves.
Source  Liu et al. 2023, arXiv:2310.01889 (ring attention); the even shares under a causal mask:
        Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2; merging by log-sum-exp: Dao et al.
        2022, arXiv:2205.14135.

A sequence is split into 2 x cp chunks. Each device has a chunk from the front and the corresponding
chunk from the back, so that all devices do the same amount of work under a causal mask. Example:
with cp=2, a sequence of 4,096 tokens has 4 chunks of 1,024. Device 0 has chunks 0 and 3, device 1
has chunks 1 and 2. It works on models that take position_ids and use transformers' attention
interface.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from functools import partial

from torch import nn

from tightfit.cost.ledger import Ledger
from tightfit.distributed.links import message
from tightfit.errors import InputError
from tightfit.machine import Machine
from tightfit.models import task_of
from tightfit.models.objective import TASKS
from tightfit.parallel.context.ring_attention import NAME, join_ring, register
from tightfit.parallel.context.sequence_chunks import SequenceChunks
from tightfit.plan import Plan
from tightfit.runtime.run import Run

FIELDS = ("cp",)
VARIANTS = ({"cp": 2}, {"cp": 2, "zero": 3})
_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def enabled(plan: Plan) -> bool:
    return plan.cp > 1


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Return the ledger (the predicted memory and time of a step) with the communication of the
    ring: the bytes and the number of all `send` operations of a step.

    The ledger already has the memory and operations of one device's chunks of the sequences,
    because the model was traced with ring attention.
    """
    sends = [
        operation
        for segment in ledger.training
        for operation in segment.timeline.operations
        if operation.name == "c10d.send"
    ]
    samples, times = ledger.micro_batch, ledger.micro_batches
    sent = sum(operation.bytes_accessed.at(samples) * operation.count.at(samples) for operation in sends)
    calls = sum(operation.count.at(samples) for operation in sends)
    around = message("keys and values", sent * times, plan, machine, ("cp",), calls * times)
    return replace(ledger, messages=(*ledger.messages, around))


def apply(run: Run, plan: Plan) -> Run:
    """Return the run with ring attention in its model, and with data that gives each device its own
    chunks of every sequence.

    Raises InputError if the model mixes positions outside of attention, or if the ring does not
    support its kind of attention. Also raises it if the job has no loss for each position.
    """
    assert run.mesh is not None
    task = task_of(run.job.model)
    _check_model(run.model, task, plan)
    _check_padding(run, plan)
    register()
    run.model.set_attn_implementation(NAME)  # type: ignore[operator]
    join_ring(run.model, run.mesh.other_groups["context"])
    causal = task == "causal-lm"
    # This objective expects each label at the position that predicts it. SequenceChunks moves the
    # labels of a causal model to these positions.
    objective = TASKS["masked-lm"]
    data = None if run.data is None else SequenceChunks(run.data, causal, run.mesh.cp_rank, plan.cp, plan.pin_memory)
    return replace(run, objective=objective, loss_sum=partial(objective.total, run.model), data=data or run.data)


def _check_model(model: nn.Module, task: str | None, plan: Plan) -> None:
    """Raise InputError if the model or the loss needs the positions of other devices outside of
    attention, or if the model uses attention that the ring does not support.

    task  the job's task, such as "causal-lm"; None for a model or loss of the user's own
    """
    asked, config = f"plan: cp={plan.cp}", getattr(model, "config", None)
    if task not in ("causal-lm", "masked-lm"):
        raise InputError(
            asked, f"a {task or 'custom'} job has no loss for each position, and cp shards the positions", "use cp: 1"
        )
    takes = inspect.signature(model.forward).parameters
    if (
        getattr(config, "_attn_implementation", None) != "sdpa"
        or "position_ids" not in takes
        or not _uses_attention_interface(model)
    ):
        raise InputError(
            asked,
            f"{type(model).__name__} does not use transformers' attention interface, or takes no position_ids",
            "use cp: 1, and tp or recompute for long sequences",
        )
    if any(map(_positions_depend_on_padding, model.modules())):
        raise InputError(
            asked,
            f"{type(model).__name__} computes positions from the padding of the full sequence",
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
                asked,
                f"context parallelism does not support dropout on attention probabilities (model.{name}={share})",
                f"set model.{name}: 0.0, or use cp: 1",
            )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds != {"full_attention"} or window is not None:
        raise InputError(asked, "the model uses sliding-window attention, which a ring does not support", "use cp: 1")


def _check_padding(run: Run, plan: Plan) -> None:
    """Raise InputError if the model counts its positions by the attention mask, as OPT does, and the
    samples have one: a device has the mask of its own positions only."""
    batch = None if run.data is None else run.data.example()
    if not isinstance(batch, dict) or "attention_mask" not in batch:
        return
    counting = [name for name, module in run.model.named_modules() if _counts_by_mask(module)]
    if counting:
        raise InputError(
            f"plan: cp={plan.cp}",
            f"{counting[0]} counts positions by the attention mask of the full sequence",
            "use cp: 1, or samples without attention_mask (packing: packed)",
        )


def _counts_by_mask(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) and "attention_mask" in inspect.signature(module.forward).parameters


def _uses_attention_interface(model: nn.Module) -> bool:
    """Return whether a model's code uses transformers' attention interface, through which ring
    attention replaces the model's own. Falcon, for example, calls torch's attention directly.
    """
    names = {kind.__module__ for kind in type(model).__mro__} - {"transformers.modeling_utils"}
    modules = [sys.modules.get(name) for name in names]
    return any(hasattr(module, "ALL_ATTENTION_FUNCTIONS") for module in modules if module is not None)


def _mixes_positions(module: nn.Module) -> bool:
    """Return whether a module combines different positions of a sequence, as an RNN or a
    convolution does. These positions may be on different devices.
    """
    return isinstance(module, nn.RNNBase) or (isinstance(module, nn.Conv1d) and module.kernel_size != (1,))


def _positions_depend_on_padding(module: nn.Module) -> bool:
    """Return whether a module computes position numbers from the padding of the sequence, as in
    RoBERTa and similar models. Their positions begin after the padding index instead of at 0.
    """
    positions = getattr(module, "position_embeddings", None)
    return isinstance(positions, nn.Embedding) and positions.padding_idx is not None
