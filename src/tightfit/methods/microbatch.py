"""Processes the batch in several micro-batches, accumulates their gradients, and updates the
weights once (gradient accumulation). It is for batches that do not fit in memory at once.

Saves   activations and temporaries, in proportion to the size of a micro-batch.
Costs   no extra arithmetic; smaller matrix products, and one gradient addition for each
        micro-batch.
When    the batch does not fit, or a smaller micro-batch fits the cache better.
Order   after the model is created, and before the optimizer. It corrects BatchNorm's momentum,
        because the running statistics are updated once per micro-batch.
Source  gradient accumulation. The loss is divided by the number of labelled items of the whole
        step, as for one large batch.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Container
from dataclasses import replace
from typing import Any

from torch import nn

from tightfit._torch.modules import RunningNorm
from tightfit.cost.ledger import Ledger
from tightfit.cost.recorded_step import WEIGHT_PRODUCTS
from tightfit.errors import TightfitWarning
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.plan import Plan
from tightfit.runtime.method import SearchFacts
from tightfit.runtime.run import Run

# transformers' models whose experts have a capacity for all samples of a forward together
CAPACITY_PER_FORWARD = {"nllb-moe"}
MIN_FLOPS_SHARE = 0.02  # layers with a smaller share of the products' FLOPs get no advice
FIELDS = ("micro_batch",)
VARIANTS = ({"micro_batch": 3},)


def enabled(plan: Plan) -> bool:
    return plan.micro_batch is not None


def candidates(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    return {"micro_batch": sizes(start, job.train.batch)}


def sizes(plan: Plan, batch: int) -> list[int | None]:
    """Return the values of `micro_batch` that search tries: this device's full share of the batch
    (None), half of it, a quarter, and so on down to one sample.

    batch  samples in a step of all devices
    """
    share = plan.share_of(batch)
    halves = sorted({share // 2**power for power in range(share.bit_length())}, reverse=True)
    return [None if size == share else size for size in halves]


def leanest(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    """Return the two values of `micro_batch` that can need the least memory: one sample, whose
    activations are the smallest, and the device's full share of the batch (None). With the full
    share there is one micro-batch, so no gradients of an earlier one exist during its forward.
    """
    return {"micro_batch": [None, 1]}


def apply(run: Run, plan: Plan) -> Run:
    """Correct the momentum of norms with running statistics for the number of micro-batches in a step, and
    return the run."""
    pieces = math.ceil(plan.share_of(run.job.train.batch) / plan.micro_batch_of(run.job.train.batch))
    correct_running_norms(run.model, pieces)
    return run


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Return the ledger (the predicted memory and time of a step) with the size and the number of
    the micro-batches in a step.

    Example: a batch of 8 with micro_batch: 3 has 3 micro-batches.
    """
    batch = ledger.micro_batch * ledger.micro_batches
    piece = min(plan.micro_batch or batch, batch)
    return replace(ledger, micro_batch=piece, micro_batches=math.ceil(batch / piece))


def correct_running_norms(model: nn.Module, pieces: int) -> None:
    """Change the momentum of norms with running statistics, such as BatchNorm, so that `pieces` micro-batches change
    these as much as one batch.

    The momentum m becomes m' with (1 - m')^pieces = 1 - m. Example: 0.1 with 4 micro-batches
    becomes 0.026.
    """
    for module in model.modules():
        if isinstance(module, RunningNorm) and module.momentum is not None:
            module.momentum = 1 - (1 - module.momentum) ** (1 / pieces)


def warn_of_dropped_tokens(run: Run) -> None:
    """Warn (TightfitWarning) if the model's experts may drop other tokens with micro-batches than
    with the full batch.

    An expert of limited capacity drops the tokens that exceed its capacity. In some models, the
    capacity is for all samples of a forward together, not for each sequence. Which tokens are
    dropped then depends on which samples are in the micro-batch.
    """
    model_type = getattr(getattr(run.model, "config", None), "model_type", None)
    batch, micro_batch = run.job.train.batch, run.plan.micro_batch_of(run.job.train.batch)
    if model_type in CAPACITY_PER_FORWARD and micro_batch < batch:
        warnings.warn(
            f"in each forward, an expert of {model_type} takes at most expert_capacity="
            f"{run.model.config.expert_capacity} "  # type: ignore[union-attr]
            "tokens and drops the others. Which tokens are dropped depends on the samples of "
            f"a micro-batch, here {micro_batch} of {batch}, so this plan trains differently from a "
            "plan without micro-batches. No token is dropped if expert_capacity is at least the "
            "batch's number of tokens",
            TightfitWarning,
            stacklevel=3,
        )


def _is_weight_gradient(product: tuple[float, ...], products: Container[tuple[float, ...]]) -> bool:
    """Return whether `products` has the layer whose weight gradient `product` is, as in a loss that
    computes its gradients in forward. Both are (rows, columns, inner size); the inner size of a
    weight gradient is the layer's number of rows."""
    rows, columns, inner = product
    layer = (inner, rows, columns)
    return layer != product and layer in products


def advice(ledger: Ledger, device: str) -> list[str]:
    """Return suggestions of layer widths, and on a GPU of a micro-batch size, with which the matrix
    products of forward fill the hardware's tiles: one sentence for each. If the model has BatchNorm and
    the plan micro-batches, also say that they are normalised apart.

    ledger  its recorded operations give the sizes of the products. Layers with few FLOPs get no
            suggestion
    device  "cpu" (tiles of 16) or "cuda" (tiles of 64)

    Example: "layer width 100: 128 would fill tiles of 64".

    Source: NVIDIA, Matrix Multiplication Background User's Guide (tensor cores, 16-bit types).
    """
    shares: dict[int, float] = defaultdict(float)  # layer width -> FLOPs of its products
    rows: dict[float, float] = defaultdict(float)  # number of rows of a product -> FLOPs
    products: dict[tuple[float, ...], float] = defaultdict(float)  # (rows, columns, inner size) -> FLOPs
    for phase, _, operation, count in ledger.operations():
        if phase == "forward" and operation.name in WEIGHT_PRODUCTS and operation.sizes:
            _, *sizes = (size.at(ledger.micro_batch) for size in operation.sizes)
            products[tuple(sizes)] += operation.flops.at(ledger.micro_batch) * count
    for (length, *widths), flops in products.items():
        if _is_weight_gradient((length, *widths), products):
            continue
        rows[length] += flops
        for width in set(widths):
            shares[int(width)] += flops
    norms = any("batch_norm" in operation.name for _, _, operation, _ in ledger.operations())
    total, multiple = sum(rows.values()), 64 if device == "cuda" else 16
    worth = sorted(width for width, share in shares.items() if share >= MIN_FLOPS_SHARE * total and width > 8)
    suggestions = [
        f"layer width {width}: {math.ceil(width / multiple) * multiple} would fill tiles of {multiple}"
        for width in worth
        if width % 8 or (width % multiple and width > multiple)
    ]
    if norms and ledger.micro_batches > 1:
        suggestions.append(
            f"micro_batch {ledger.micro_batch}: BatchNorm normalises each micro-batch by itself, so a plan with whole "
            "batches trains differently; pin micro_batch to choose"
        )
    if device == "cuda" and rows and max(rows, key=lambda length: rows[length]) % 8:
        better = math.ceil(ledger.micro_batch / 8) * 8
        suggestions.append(f"micro_batch {ledger.micro_batch}: a multiple of 8, such as {better}, would fill tiles")
    return suggestions
