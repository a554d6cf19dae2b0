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
        values = logits.float()
        largest = values.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        exponentials = (values - largest.unsqueeze(-1)).exp_()
        counts = targets != IGNORED
        here = counts & (targets >= first) & (targets < first + logits.shape[-1])
        local = torch.where(here, targets - first, 0)
        chosen = torch.where(here, values.gather(-1, local.unsqueeze(-1)).squeeze(-1), 0.0)
        sums = torch.stack([exponentials.sum(-1), chosen])
        dist.all_reduce(sums, group=group)
        losses = sums[0].log() + largest - sums[1]
        exponentials.div_(sums[0].unsqueeze(-1))
        ctx.save_for_backward(exponentials, local, here, counts)
        ctx.dtype = logits.dtype
        return torch.where(counts, losses, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, local, here, counts = ctx.saved_tensors
        gradient = probabilities.clone()
        gradient.scatter_add_(-1, local.unsqueeze(-1), -here.to(gradient.dtype).unsqueeze(-1))
        gradient *= (counts.to(gradient.dtype) * gradients[0]).unsqueeze(-1)
        return gradient.to(ctx.dtype), None, None, None
