"""Keeps only the inputs of some blocks during forward, and recomputes their activations during
backward (activation checkpointing). It trades time for memory.

Saves   the activations inside each recomputed block; only its input is saved. `sqrt` recomputes
        groups of blocks, and saves only the input of each group. `attention` saves everything but
        what lies between queries x keys and probabilities x values. Without a fused attention
        kernel, these are several tensors of batch x heads x length^2 numbers for each block; with a
        fused kernel, only its output and its log-sum-exps.
Costs   full and sqrt: one more forward of each recomputed block, 20 to 30 % of the time. every-2:
        half of that; first-K: K blocks' share of it. selective: only the cheap operations run
        again. selective-2: the cheap operations and every second product with weights (torchtitan's
        default). attention: queries x keys and the softmax run again, or the fused kernel.
When    activations do not fit. Try selective first, then selective-2, every-2 and full; sqrt for a
        model of very many small blocks; attention for a model without a fused attention kernel.
        first-K sets the memory in steps of one block; search tries the smallest K that fits.
Order   wraps blocks; before compile, so that the recomputation is compiled, too.
Source  Chen et al. 2016, arXiv:1604.06174 (sqrt); selective, and attention (Megatron-LM's selective
        recomputation): Korthikanti et al. 2022, arXiv:2205.05198; first-K: Megatron-LM's
        recompute-method block.

Example: 16 blocks of (4, 1024, 1024) inputs in fp32, 16 MiB each. `full` saves 16 inputs (256 MiB)
and recomputes one block at a time. `sqrt` makes 4 groups of 4 blocks: it saves 4 inputs (64 MiB),
but holds the activations of 4 recomputed blocks during the backward of a group. In a pipeline of 2
stages with 8 blocks each, `first-3` recomputes the blocks 0 to 2 and 8 to 10.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tightfit._torch.fake import active_fake_mode
from tightfit.cost.ledger import Ledger
from tightfit.cost.recomputed_step import with_noted_operations, with_recomputation
from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.models import find_blocks
from tightfit.models.batches import Batch, map_tensors
from tightfit.models.replaced_forward import replace_forward
from tightfit.parallel.pipeline.stages import stage_ranges
from tightfit.plan import Plan
from tightfit.runtime.attention_core import Found, no_attention, recompute_attention
from tightfit.runtime.block_groups import ending_groups, recompute_group, refuse_other_uses
from tightfit.runtime.method import SearchFacts
from tightfit.runtime.micro_batches import example_batches
from tightfit.runtime.recomputation import ChangingBuffers, recomputed, restore_buffers
from tightfit.runtime.recomputed_draws import GlobalGenerators
from tightfit.runtime.run import Run, to_device

FIELDS = ("recompute",)
VARIANTS = (
    {"recompute": "full"},
    {"recompute": "selective"},
    {"recompute": "selective-2"},
    {"recompute": "every-2"},
    {"recompute": "first-1"},
    {"recompute": "attention"},
    {"recompute": "sqrt"},
)


def enabled(plan: Plan) -> bool:
    return plan.recompute != "none"


def candidates(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    """Return the values to try. `attention` saves next to nothing if attention is a fused kernel: its
    output is the input of the next product, which saves it, too."""
    core = [] if facts.fuses_attention() else ["attention"]
    return {"recompute": ["none", *core, "selective", "selective-2", "every-2", "full", "sqrt"]}


def leanest(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    return {"recompute": ["full", "sqrt", "none"]}  # "none" is for a model without repeated blocks


def changes_trace(plan: Plan) -> bool:
    """Return whether the plan's recomputation is part of the traced step, so that `cost` does not
    add it. This is so if the whole model is one compiled region, and for recompute: attention, whose
    operations only a trace shows."""
    return plan.recompute == "attention" or (enabled(plan) and plan.compile == "model")


def apply(run: Run, plan: Plan) -> Run:
    """Return the run with a model whose blocks, groups of blocks (sqrt) or attention cores are
    recomputed during backward.

    Raises InputError if the model has no repeated blocks (recompute: attention needs none), if it
    has fewer blocks than first-K recomputes, and with sqrt if the blocks cannot be recomputed in
    groups. With recompute: attention, the first forward raises InputError if there is no attention.
    """
    blocks = [block for _, block in find_blocks(run.model, run.job.blocks_name)]
    if plan.recompute == "attention":
        return _recompute_attention(run, plan, blocks or [run.model])
    if not blocks:
        raise no_blocks(plan, type(run.model).__name__)
    generators = GlobalGenerators()
    if plan.recompute == "sqrt":
        groups = make_block_groups(blocks)
        if active_fake_mode() is None:
            _refuse_other_uses(run, plan, groups)
        ends = [recompute_group(group, generators) for group in groups]

        def loss_sum(batch: Batch) -> Tensor:
            return ending_groups(ends, lambda: run.loss_sum(batch))

        return replace(run, loss_sum=loss_sum)
    for number in recomputed_blocks(plan, len(blocks)):
        block = blocks[number]
        replace_forward(block, recomputed(block.forward, [block], _selective(plan), generators))
    return run


def no_blocks(plan: Plan, model: str) -> InputError:
    """Return the error for a plan that recomputes blocks of a model which has none.

    model  what the message calls the model
    """
    return InputError(
        f"plan: recompute={plan.recompute}",
        f"{model} has no repeated blocks to recompute",
        "name its list of blocks in the job (model: {..., blocks: encoder.layers}), or use recompute: none",
    )


def _recompute_attention(run: Run, plan: Plan, modules: list[nn.Module]) -> Run:
    """Return the run with `modules`, the blocks or the whole model, whose attention cores are
    recomputed. Its loss function raises InputError if the modules compute no attention."""
    found = Found()
    for module in modules:
        replace_forward(module, recompute_attention(module.forward, found))
    if plan.pp > 1:  # a rank's blocks may have none; the trace of the whole model looks for attention
        return run

    @torch.compiler.disable  # compiled code would keep what it read while it was traced: no calls yet
    def check() -> None:
        if found.calls and not found.cores:
            raise no_attention(type(run.model).__name__)

    def loss_sum(batch: Batch) -> Tensor:
        total = run.loss_sum(batch)
        check()
        return total

    return replace(run, loss_sum=loss_sum)


def _block_groups(blocks: int) -> list[range]:
    """Return the groups of blocks that recompute: sqrt recomputes together, each as a range of
    block numbers. There are about as many groups as blocks in a group.

    blocks  number of blocks

    Example: 10 blocks have the groups 0-2, 3-5, 6-8 and 9.
    """
    length = max(round(math.sqrt(blocks)), 1)
    return [range(start, min(start + length, blocks)) for start in range(0, blocks, length)]


def make_block_groups(blocks: list[nn.Module]) -> list[list[nn.Module]]:
    """Divide `blocks` into consecutive groups, which recompute: sqrt recomputes together, and
    return these groups."""
    return [blocks[group.start : group.stop] for group in _block_groups(len(blocks))]


def recomputed_blocks(plan: Plan, blocks: int) -> list[int]:
    """Return the numbers of the blocks that are recomputed, each by itself.

    blocks  number of blocks of the model

    Raises InputError if first-K recomputes more blocks than the largest pipeline stage has, which
    is the whole model without a pipeline.

    Example: of 6 blocks, every-2 recomputes 0, 2 and 4; first-2 recomputes 0 and 1, and with pp: 2
    also 3 and 4; full recomputes all.
    """
    kind, _, count = plan.recompute.partition("-")
    if kind == "every":
        return list(range(0, blocks, int(count)))
    if kind != "first":
        return list(range(blocks))
    stages = stage_ranges(plan, blocks) if plan.pp > 1 else [range(blocks)]
    most = max(map(len, stages))
    if int(count) > most:
        raise InputError(
            f"plan: recompute={plan.recompute}",
            f"the model has {blocks} blocks" + (f", at most {most} of them in a pipeline stage" if plan.pp > 1 else ""),
            "use recompute: full, which recomputes all blocks",
        )
    return [number for stage in stages for number in stage[: int(count)]]


def _selective(plan: Plan) -> int:
    """Return n if, of the matrix products with weights in a recomputed block, the result of one in
    n is saved: 1 for recompute="selective", 2 for "selective-2". Return 0 for the other values,
    which save none.
    """
    if not plan.recompute.startswith("selective"):
        return 0
    return int(plan.recompute.removeprefix("selective").removeprefix("-") or 1)


def treats_blocks_alike(plan: Plan) -> bool:
    """Return whether all blocks are recomputed in the same way, or none."""
    return plan.recompute in ("none", "full", "selective", "selective-2", "attention")


def at_depth(plan: Plan, blocks: int, fewer: int) -> Plan:
    """Return the plan for a model of `fewer` blocks in place of `blocks`: first-K recomputes the same
    share of them, at least one and not all. Other plans are returned unchanged.

    Example: first-9 of 24 blocks is first-2 of 6.
    """
    kind, _, count = plan.recompute.partition("-")
    if kind != "first":
        return plan
    return plan.replace(recompute=f"first-{min(max(round(int(count) * fewer / blocks), 1), fewer - 1)}")


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Return the ledger (the predicted memory and time of a step) with recomputation in its
    recorded step.

    The forward of a recomputed block, or of a group of blocks, saves only its input; with
    selective, it also saves some results. It runs again before the block's backward.

    Raises InputError with recompute: sqrt if the model's blocks cannot be recomputed in groups, and
    with first-K if the model has fewer blocks.
    """
    if plan.recompute == "attention":  # traced
        return ledger if plan.compile != "none" else replace(ledger, training=with_noted_operations(ledger.training))
    if plan.recompute == "sqrt" and ledger.check_block_groups is not None:
        ledger.check_block_groups()
    each = [range(block, block + 1) for block in recomputed_blocks(plan, ledger.blocks)]
    groups = _block_groups(ledger.blocks) if plan.recompute == "sqrt" else each
    compiled = plan.compile != "none"
    training = with_recomputation(ledger.training, ledger.inference(), tuple(groups), _selective(plan), compiled)
    return replace(ledger, training=training)


def _refuse_other_uses(run: Run, plan: Plan, groups: list[list[nn.Module]]) -> None:
    """Run the model on an example batch without gradients, and raise InputError if the blocks of a
    group cannot be recomputed together. If the model fails on few samples, it runs on a whole
    micro-batch.

    In a group, each block's output must be used only as the input of the next block, because only
    the output of the group's last block exists after the group's forward.

    groups  the groups of blocks
    """
    examples = example_batches(run.data, plan.micro_batch_of(run.job.train.batch))
    few = next(examples)
    try:
        _run_example(run, plan, groups, few)
    except InputError:
        raise
    except Exception:
        whole = next(examples, None)
        if whole is None:
            raise
        _run_example(run, plan, groups, whole)


def _run_example(run: Run, plan: Plan, groups: list[list[nn.Module]], batch: Batch) -> None:
    buffers = ChangingBuffers([run.model])
    before = buffers.values()
    devices = [run.device] if run.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        batch = to_device(batch, run)
        if plan.has_16_bit_weights:  # the weights are in 16 bits; cast the batch to their type
            narrow = torch.bfloat16 if plan.precision == "bf16-true" else torch.float16
            batch = map_tensors(lambda tensor: tensor.to(narrow) if tensor.is_floating_point() else tensor, batch)
        try:
            refuse_other_uses(run.model, groups, lambda: run.loss_sum(batch))
        finally:
            restore_buffers(before)
