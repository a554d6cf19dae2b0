"""Processes the batch in several micro-batches, accumulates their gradients, and updates the
weights once (gradient accumulation). It is for batches that do not fit in memory at once.

Saves   activations and temporaries, in proportion to the micro-batch.
Costs   no extra arithmetic; smaller matrix products, and one gradient addition for each
        micro-batch.
When    the batch does not fit, or a smaller micro-batch fits the cache better.
Order   after the model exists, before the optimizer: it corrects BatchNorm, whose statistics depend
        on the size of a micro-batch.
Source  gradient accumulation; normalised by the items that count over the whole step, as for one
        large batch.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from dataclasses import replace
from typing import Any

from torch import nn

from tightfit._torch.modules import BatchNorm
from tightfit.cost.ledger import Ledger
from tightfit.cost.recorded_step import WEIGHT_PRODUCTS
from tightfit.errors import TightfitWarning
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.plan import Plan
from tightfit.runtime.method import SearchFacts
from tightfit.runtime.run import Run

# transformers' models whose experts' capacity counts over a whole forward
CAPACITY_PER_FORWARD = {"nllb-moe"}
MIN_FLOPS_SHARE = 0.02  # share of the products' FLOPs; narrower layers are not mentioned
FIELDS = ("micro_batch",)
VARIANTS = ({"micro_batch": 3},)


def enabled(plan: Plan) -> bool:
    return plan.micro_batch is not None


def candidates(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    """A device's whole share of the batch, then half of it, a quarter, and so on down to one
    sample.
    """
    share = start.share_of(job.train.batch)
    sizes = sorted({share // 2**power for power in range(share.bit_length())}, reverse=True)
    return {"micro_batch": [None if size == share else size for size in sizes]}


def leanest(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    """One sample, or the whole share at once, which needs no accumulated gradients during its
    forward.
    """
    return {"micro_batch": [None, 1]}


def apply(run: Run, plan: Plan) -> Run:
    """Correct BatchNorm's momentum for the number of micro-batches in a step."""
    pieces = math.ceil(plan.share_of(run.job.train.batch) / plan.micro_batch_of(run.job.train.batch))
    correct_batch_norm(run.model, pieces)
    return run


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Smaller micro-batches, but more of them. From the second on, gradients exist during the
    forward.
    """
    batch = ledger.micro_batch * ledger.micro_batches
    piece = min(plan.micro_batch or batch, batch)
    return replace(ledger, micro_batch=piece, micro_batches=math.ceil(batch / piece))


def correct_batch_norm(model: nn.Module, pieces: int) -> None:
    """Make running statistics decay as fast per step as with one batch.

    The momentum becomes m' with (1 - m')^pieces = 1 - m. With momentum 0.1 and 4 micro-batches, m'
    is 0.026.
    """
    for module in model.modules():
        if isinstance(module, BatchNorm) and module.momentum is not None:
            module.momentum = 1 - (1 - module.momentum) ** (1 / pieces)


def warn_of_dropped_tokens(run: Run) -> None:
    """Warn where a mixture of experts drops different tokens with micro-batches than without.

    Experts of limited capacity drop the tokens beyond it. Some models count that over all samples
    of a forward instead of within each sequence. Micro-batches then drop different tokens than the
    whole batch does.
    """
    model_type = getattr(getattr(run.model, "config", None), "model_type", None)
    batch, micro_batch = run.job.train.batch, run.plan.micro_batch_of(run.job.train.batch)
    if model_type in CAPACITY_PER_FORWARD and micro_batch < batch:
        warnings.warn(
            f"the experts of {model_type} drop tokens beyond expert_capacity={run.model.config.expert_capacity} in each forward: "  # type: ignore[union-attr]
            f"which ones depends on the samples of a micro-batch, here {micro_batch} of {batch}, so this plan trains differently from "
            "one without micro-batches; an expert_capacity of at least the batch's number of tokens drops none",
            TightfitWarning,
            stacklevel=3,
        )


def advice(ledger: Ledger, device: str) -> list[str]:
    """Suggest sizes that let the forward's matrix products fill the hardware's tiles: multiples of
    8, or of 64 on large GPUs.

    device: "cpu" or "cuda". Returns one sentence for each suggestion.
    Source: NVIDIA, Matrix Multiplication Background User's Guide (tensor cores, 16-bit types).
    """
    shares: dict[int, float] = defaultdict(float)  # FLOPs of products, by the width of a layer
    rows: dict[float, float] = defaultdict(float)  # FLOPs of products, by their number of rows
    for phase, _, operation, count in ledger.operations():
        if phase == "forward" and operation.name in WEIGHT_PRODUCTS and operation.sizes:
            _, length, *widths = (size.at(ledger.micro_batch) for size in operation.sizes)
            flops = operation.flops.at(ledger.micro_batch) * count
            rows[length] += flops
            for width in set(widths):
                shares[int(width)] += flops
    total, multiple = sum(rows.values()), 64 if device == "cuda" else 16
    worth = sorted(width for width, share in shares.items() if share >= MIN_FLOPS_SHARE * total and width > 8)
    said = [
        f"layer width {width}: {math.ceil(width / multiple) * multiple} would fill tiles of {multiple}"
        for width in worth
        if width % 8 or (width % multiple and width > multiple)
    ]
    if device == "cuda" and rows and max(rows, key=lambda length: rows[length]) % 8:
        better = math.ceil(ledger.micro_batch / 8) * 8
        said.append(f"micro_batch {ledger.micro_batch}: a multiple of 8, such as {better}, would fill tiles")
    return said
