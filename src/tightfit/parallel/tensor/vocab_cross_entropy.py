"""Vocabulary-parallel cross entropy: logits stay sharded by class, and no device has all classes of
a token.

`tensor_parallel` calls it when the head is sharded by vocabulary, and so do the loss kernels.

Example: 50,000 classes and 8,192 tokens on tp=2. Each device has logits of shape (8192, 25000). For
each token three fp32 numbers are all-reduced, 96 KiB in all, where a gather of bf16 logits would
send 391 MiB.

Source  Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.models.objective import IGNORED


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
    """Summed cross entropy of logits that are sharded by class.

    logits   (tokens, classes of this device)
    targets  (tokens), IGNORED for tokens that do not count
    first    the first class of this device's shard
    group    the devices that share the classes

    Each token's largest logit, its sum of exponentials and its target's logit are all-reduced, in
    fp32. Returns an fp32 scalar, the same on all devices.
    """
    return _VocabCrossEntropy.apply(logits, targets, first, group)


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        losses, probabilities, local, here = _forward(logits, targets, first, group)
        ctx.save_for_backward(probabilities, local, here, targets != IGNORED)
        ctx.dtype = logits.dtype
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, local, here, counts = ctx.saved_tensors
        gradient = _logits_gradient(probabilities.clone(), local, here)
        gradient *= (counts.to(gradient.dtype) * gradients[0]).unsqueeze(-1)
        return gradient.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy_with_gradient(
    logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """As vocab_parallel_cross_entropy, with the gradient of this device's logits.

    Returns (loss, gradient). The gradient has the shape and dtype of `logits`; its rows are
    meaningless where the target is IGNORED. For 16-bit logits it overwrites them, so aligned rows
    stay aligned.
    """
    losses, probabilities, local, here = _forward(logits, targets, first, group)
    gradient = _logits_gradient(probabilities, local, here)
    return losses.sum(), gradient if gradient.dtype == logits.dtype else logits.copy_(gradient)


def _forward(
    logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each token: its loss (tokens), the probabilities of this device's classes (tokens,
    classes), its target's index among them (tokens), and whether this device has its target
    (tokens).
    """
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


def _logits_gradient(probabilities: Tensor, local: Tensor, here: Tensor) -> Tensor:
    """Subtract 1 at each target that this device has, in place: the gradient is softmax - onehot."""
    return probabilities.scatter_add_(-1, local.unsqueeze(-1), -here.to(probabilities.dtype).unsqueeze(-1))
