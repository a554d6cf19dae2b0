"""Micro-batches: the batch in pieces, their gradients summed, one update.

Saves   activations and temporaries, in proportion to the piece.
Costs   no arithmetic; smaller matrix products and one gradient addition for each piece.
When    the batch does not fit, or a smaller piece fits the cache better.
Order   after the model exists, before the optimizer: it corrects BatchNorm, whose statistics a piece does change.
Source  gradient accumulation; normalised by the items that count over the whole step, as one large batch is.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from dataclasses import replace
from typing import Any

from torch import nn

from tightfit.errors import TightfitWarning
from tightfit.job import Job
from tightfit.ledger import Ledger
from tightfit.machine import Machine
from tightfit.methods.protocol import SearchFacts
from tightfit.methods.run import Run
from tightfit.plan import Plan
from tightfit.program import LINEAR

CAPACITY_OF_ALL = {"nllb-moe"}  # transformers' models whose experts drop tokens that are too many in a whole forward
WORTH = 0.02  # of products' FLOPs, from which on a layer's width is spoken of
FIELDS = ("micro_batch",)
VARIANTS = ({"micro_batch": 3},)


def wanted(plan: Plan) -> bool:
    return plan.micro_batch is not None


def candidates(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    """A device's whole share of the batch, then half of it, a quarter, and so on down to one sample."""
    share = start.share_of(job.train.batch)
    sizes = sorted({share // 2**power for power in range(share.bit_length())}, reverse=True)
    return {"micro_batch": [None if size == share else size for size in sizes]}


def leanest(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    """One sample; or the whole share at once, which adds to no gradients of an earlier micro-batch."""
    return {"micro_batch": [None, 1]}


def apply(run: Run, plan: Plan) -> Run:
    pieces = math.ceil(plan.share_of(run.job.train.batch) / plan.micro_batch_of(run.job.train.batch))
    correct_batch_norm(run.model, pieces)
    return run


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Smaller pieces, more of them; from the second on, gradients are there while the forward runs."""
    batch = ledger.micro_batch * ledger.micro_batches
    piece = min(plan.micro_batch or batch, batch)
    return replace(ledger, micro_batch=piece, micro_batches=math.ceil(batch / piece))


def correct_batch_norm(model: nn.Module, pieces: int) -> None:
    """Momentum m' with (1 - m')^pieces = 1 - m: running statistics forget as fast per step as with one batch."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is not None:
            module.momentum = 1 - (1 - module.momentum) ** (1 / pieces)


def warn_of_dropped_tokens(run: Run) -> None:
    """Experts of limited capacity drop the tokens that are too many. Where that is counted over the samples of a forward, and not in
    each sequence, pieces of the batch drop others than the whole does."""
    model_type = getattr(getattr(run.model, "config", None), "model_type", None)
    batch, micro_batch = run.job.train.batch, run.plan.micro_batch_of(run.job.train.batch)
    if model_type in CAPACITY_OF_ALL and micro_batch < batch:
        warnings.warn(
            f"the experts of {model_type} drop tokens beyond expert_capacity={run.model.config.expert_capacity} in each forward: "  # type: ignore[union-attr]
            f"which ones depends on the samples of a micro-batch, here {micro_batch} of {batch}, so this plan does not train as one "
            "that leaves the batch whole; an expert_capacity of as many tokens as the batch has drops none",
            TightfitWarning,
            stacklevel=3,
        )


def advice(ledger: Ledger, device: str) -> list[str]:
    """What to change so that the products of a forward fill the hardware's tiles: sizes in multiples of 8, or 64 on big GPUs.

    Source: NVIDIA, Matrix Multiplication Background User's Guide (tensor cores, 16-bit types).
    """
    shares: dict[int, float] = defaultdict(float)  # of products' FLOPs, by the width of a layer
    rows: dict[float, float] = defaultdict(float)  # by the rows that a micro-batch gives them
    for phase, _, operation, count in ledger.operations():
        if phase == "forward" and operation.name in LINEAR and operation.sizes:
            _, length, *widths = (size.at(ledger.micro_batch) for size in operation.sizes)
            flops = operation.flops.at(ledger.micro_batch) * count
            rows[length] += flops
            for width in set(widths):
                shares[int(width)] += flops
    total, multiple = sum(rows.values()), 64 if device == "cuda" else 16
    worth = sorted(width for width, share in shares.items() if share >= WORTH * total and width > 8)
    said = [
        f"layer width {width}: {math.ceil(width / multiple) * multiple} would fill tiles of {multiple}"
        for width in worth
        if width % 8 or (width % multiple and width > multiple)
    ]
    if device == "cuda" and rows and max(rows, key=lambda length: rows[length]) % 8:
        better = math.ceil(ledger.micro_batch / 8) * 8
        said.append(f"micro_batch {ledger.micro_batch}: a multiple of 8, such as {better}, would fill tiles")
    return said
