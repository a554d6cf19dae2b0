"""Saves only the inputs of some blocks during forward, and recomputes their activations during
backward (activation checkpointing). It trades time for memory.

Saves   the activations inside each recomputed block; only its input is saved. `sqrt` recomputes
        groups of blocks, and saves only the input of each group.
Costs   full and sqrt: one more forward of each recomputed block, 20 to 30 % of the time. every-2:
        half of that. selective: only the cheap operations run again. selective-2: the cheap
        operations and every second product with weights (torchtitan's default).
When    activations do not fit. Try selective first, then selective-2, every-2 and full; sqrt for a
        model of very many small blocks.
Order   wraps blocks; before compile, so that the recomputation is compiled, too.
Source  Chen et al. 2016, arXiv:1604.06174 (sqrt); selective: Korthikanti et al. 2022,
        arXiv:2205.05198.

Example: 16 blocks of (4, 1024, 1024) inputs in fp32, 16 MiB each. `full` saves 16 inputs (256 MiB)
and recomputes one block at a time. `sqrt` makes 4 groups of 4 blocks: it saves 4 inputs (64 MiB),
but holds the activations of 4 recomputed blocks during the backward of a group.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tightfit._torch.fake import active_fake_mode
from tightfit.cost.ledger import Ledger
from tightfit.cost.recomputed_step import with_recomputation
from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.models import find_blocks
from tightfit.models.objective import Batch, map_tensors
from tightfit.plan import Plan
from tightfit.runtime.method import SearchFacts
from tightfit.runtime.recomputation import ChangingBuffers, recomputed, restore_buffers
from tightfit.runtime.recomputed_segments import ending_segments, recompute_segment, refuse_other_uses
from tightfit.runtime.run import Run, to_device

FIELDS = ("recompute",)
VARIANTS = (
    {"recompute": "full"},
    {"recompute": "selective"},
    {"recompute": "selective-2"},
    {"recompute": "every-2"},
    {"recompute": "sqrt"},
)


def enabled(plan: Plan) -> bool:
    return plan.recompute != "none"


def candidates(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    return {"recompute": ["none", "selective", "selective-2", "every-2", "full", "sqrt"]}


def leanest(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    return {"recompute": ["full", "sqrt", "none"]}  # "none" is for a model without repeated blocks


def apply(run: Run, plan: Plan) -> Run:
    """Return the run with a model whose blocks, or with sqrt groups of blocks, are recomputed
    during backward. Raises InputError if the model has no repeated blocks, and with sqrt if the
    blocks cannot be recomputed in groups.
    """
    blocks = [block for _, block in find_blocks(run.model, run.job.blocks_name)]
    if not blocks:
        raise InputError(
            f"plan: recompute={plan.recompute}",
            f"{type(run.model).__name__} has no repeated blocks to recompute",
            "name its list of blocks in the job (model: {..., blocks: encoder.layers}), or use recompute: none",
        )
    if plan.recompute == "sqrt":
        segments = make_segments(blocks)
        if active_fake_mode() is None:
            _refuse_other_uses(run, plan, segments)
        ends = [recompute_segment(segment) for segment in segments]

        def loss_sum(batch: Batch) -> Tensor:
            return ending_segments(ends, lambda: run.loss_sum(batch))

        return replace(run, loss_sum=loss_sum)
    for block in blocks[:: _every(plan)]:
        block.forward = recomputed(block.forward, [block], _selective(plan))
    return run


def _segments(blocks: int) -> list[range]:
    """Return the groups of blocks that recompute: sqrt recomputes together, each as a range of
    block numbers. There are about as many groups as blocks in a group.

    blocks  number of blocks

    Example: 10 blocks have the groups 0-2, 3-5, 6-8 and 9.
    """
    length = max(round(math.sqrt(blocks)), 1)
    return [range(start, min(start + length, blocks)) for start in range(0, blocks, length)]


def make_segments(blocks: list[nn.Module]) -> list[list[nn.Module]]:
    """Divide `blocks` into consecutive groups, which recompute: sqrt recomputes together, and
    return these groups."""
    return [blocks[segment.start : segment.stop] for segment in _segments(len(blocks))]


def _every(plan: Plan) -> int:
    """Return n if every n-th block is recomputed: 2 for recompute="every-2", and 1 for the values
    that recompute each block."""
    return int(plan.recompute.removeprefix("every-")) if plan.recompute.startswith("every-") else 1


def _selective(plan: Plan) -> int:
    """Return n if, of the matrix products with weights in a recomputed block, the result of one in
    n is saved: 1 for recompute="selective", 2 for "selective-2". Return 0 for the other values,
    which save none.
    """
    if not plan.recompute.startswith("selective"):
        return 0
    return int(plan.recompute.removeprefix("selective").removeprefix("-") or 1)


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Return the ledger (the predicted memory and time of a step) with recomputation in its
    recorded step.

    The forward of a recomputed block, or of a group of blocks, saves only its input; with
    selective, it also saves some results. It runs again before the block's backward.

    Raises InputError with recompute: sqrt if the model's blocks cannot be recomputed in groups.
    """
    if plan.recompute == "sqrt" and ledger.check_segments is not None:
        ledger.check_segments()
    every = [range(block, block + 1) for block in range(0, ledger.blocks, _every(plan))]
    segments = _segments(ledger.blocks) if plan.recompute == "sqrt" else every
    compiled = plan.compile != "none"
    training = with_recomputation(ledger.training, ledger.inference(), tuple(segments), _selective(plan), compiled)
    return replace(ledger, training=training)


def _refuse_other_uses(run: Run, plan: Plan, segments: list[list[nn.Module]]) -> None:
    """Run the model on one example batch without gradients, and raise InputError if the blocks of a
    group cannot be recomputed together.

    In a group, each block's output must be used only as the input of the next block, because only
    the output of the group's last block exists after the group's forward.

    segments  the groups of blocks
    """
    buffers = ChangingBuffers([run.model])
    before = buffers.values()
    devices = [run.device] if run.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        batch = to_device(run.data.example(), run)
        if plan.is_true:  # the weights are in 16 bits; cast the batch to their type
            narrow = torch.bfloat16 if plan.precision == "bf16-true" else torch.float16
            batch = map_tensors(lambda tensor: tensor.to(narrow) if tensor.is_floating_point() else tensor, batch)
        try:
            refuse_other_uses(run.model, segments, lambda: run.loss_sum(batch))
        finally:
            restore_buffers(before)
