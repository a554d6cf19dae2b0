"""Cross entropy of logits whose classes are divided among devices, of which none ever has them all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.models.objective import IGNORED


def divided_cross_entropy(logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
    """Summed cross entropy of logits whose classes are divided among devices: (tokens, classes from `first` on) here.

    targets (tokens), IGNORED where nothing counts. Of each token its largest logit, its sum of exponentials and its
    target's logit travel, in fp32. Returns an fp32 scalar, the same everywhere.
    """
    return _DividedCrossEntropy.apply(logits, targets, first, group)


class _DividedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        losses, probabilities, local, here = _over_classes(logits, targets, first, group)
        ctx.save_for_backward(probabilities, local, here, targets != IGNORED)
        ctx.dtype = logits.dtype
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, local, here, counts = ctx.saved_tensors
        gradient = _gradient(probabilities.clone(), local, here)
        gradient *= (counts.to(gradient.dtype) * gradients[0]).unsqueeze(-1)
        return gradient.to(ctx.dtype), None, None, None


def divided_cross_entropy_with_gradient(
    logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """As divided_cross_entropy, and the gradient of each token's logits here, in their type; of targets that are IGNORED it
    means nothing. Of 16-bit logits it is written over them, so rows that were aligned still are."""
    losses, probabilities, local, here = _over_classes(logits, targets, first, group)
    gradient = _gradient(probabilities, local, here)
    return losses.sum(), gradient if gradient.dtype == logits.dtype else logits.copy_(gradient)


def _over_classes(
    logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each token its loss, the probabilities of the classes here, its target's place among them, and whether it is here."""
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = values.amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    exponentials = (values - largest.unsqueeze(-1)).exp_()
    counts = targets != IGNORED
    here = counts & (targets >= first) & (targets < first + logits.shape[-1])
    local = torch.where(here, targets - first, 0)
    chosen = torch.where(here, values.gather(-1, local.unsqueeze(-1)).squeeze(-1), 0.0)
    sums = torch.stack([exponentials.sum(-1), chosen])
    dist.all_reduce(sums, group=group)
    losses = torch.where(counts, sums[0].log() + largest - sums[1], 0.0)
    return losses, exponentials.div_(sums[0].unsqueeze(-1)), local, here


def _gradient(probabilities: Tensor, local: Tensor, here: Tensor) -> Tensor:
    """Less one at each target that is here, in place."""
    return probabilities.scatter_add_(-1, local.unsqueeze(-1), -here.to(probabilities.dtype).unsqueeze(-1))
