"""Compute the cross entropy of logits whose classes are sharded over devices (vocabulary-parallel).

`tensor_parallel` and the loss kernels use this module if the output head is sharded by vocabulary.
No device ever has the logits of all classes of a token.

Example: 50,000 classes and 8,192 tokens on tp=2. Each device has logits of shape (8192, 25000). For
each token, three fp32 numbers are all-reduced, 96 KiB in total. A gather of bf16 logits would send
391 MiB.

Source  Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit._torch.fake import active_fake_mode
from tightfit._torch.operations import assert_async
from tightfit.errors import InputError
from tightfit.models.batches import IGNORED


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
    """Return the cross entropy, summed over the tokens, of logits whose classes are sharded over
    devices.

    logits   (tokens, classes of this device)
    targets  (tokens): the class of each token, or IGNORED for a token that is left out of the loss
    first    the number of the first class of this device's shard
    group    the devices over which the classes are sharded; all must call this function

    For each token, the devices all-reduce the largest logit, the sum of exponentials and the
    target's logit. The result is an fp32 scalar (fp64 for fp64 logits), the same on all devices.
    """
    return _VocabCrossEntropy.apply(logits, targets, first, group)


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        losses, probabilities, local, in_shard = _forward(logits, targets, first, group)
        ctx.save_for_backward(probabilities, local, in_shard, targets != IGNORED)
        ctx.dtype = logits.dtype
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, local, in_shard, counts = ctx.saved_tensors
        gradient = _logits_gradient(probabilities.clone(), local, in_shard)
        gradient *= (counts.to(gradient.dtype) * gradients[0]).unsqueeze(-1)
        return gradient.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy_with_gradient(
    logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return (loss, gradient): the loss of `vocab_parallel_cross_entropy`, and its gradient with
    respect to this device's logits.

    logits   (tokens, classes of this device). 16-bit logits are overwritten by their gradient, so
             that the gradient has the same memory layout, with aligned rows
    targets  (tokens): the class of each token, or IGNORED for a token that is left out of the loss
    first    the number of the first class of this device's shard
    group    the devices over which the classes are sharded; all must call this function

    The gradient has the shape and dtype of `logits`. The rows of tokens whose target is IGNORED are
    meaningless: the caller has to ignore them.
    """
    losses, probabilities, local, in_shard = _forward(logits, targets, first, group)
    gradient = _logits_gradient(probabilities, local, in_shard)
    return losses.sum(), gradient if gradient.dtype == logits.dtype else logits.copy_(gradient)


def in_range(numbers: Tensor, count: int, what: str, ignored: int | None = None) -> Tensor:
    """Return `numbers`, which are class numbers or token ids. Each device looks only for those of its own
    shard, so a number that no device has would be passed over.

    count    how many classes or tokens there are
    what     what a number is, for the message
    ignored  a number that stands for none

    Raises InputError on a CPU if a number is not one of 0 to count - 1. On a GPU, the kernel fails, as
    torch's do.
    """
    if torch.compiler.is_compiling() or active_fake_mode() is not None:
        return numbers
    right = (numbers >= 0) & (numbers < count)
    if ignored is not None:
        right |= numbers == ignored
    if numbers.device.type != "cpu":
        assert_async(right.all(), f"{what} is not one of 0 to {count - 1}")
    elif not bool(right.all()):
        wrong = int(numbers[~right][0])
        raise InputError(
            "data",
            f"contains {what} of {wrong}, and the model has {count} classes or tokens",
            f"use numbers from 0 to {count - 1}",
        )
    return numbers


def _forward(
    logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the loss of each token, and the tensors from which `_logits_gradient` computes the
    gradient.

    logits   (tokens, classes of this device)
    targets  (tokens): the class of each token, or IGNORED
    first    the number of the first class of this device's shard

    Returns four tensors:

    - the loss of each token, (tokens); 0 if its target is IGNORED;
    - the probabilities of this device's classes, (tokens, classes);
    - the index of each token's target among this device's classes, (tokens); 0 if the target is
      IGNORED or on another device;
    - whether this device has the token's target, (tokens).
    """
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = values.amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    exponentials = (values - largest.unsqueeze(-1)).exp_()
    counts = targets != IGNORED
    in_shard = counts & (targets >= first) & (targets < first + logits.shape[-1])
    local = torch.where(in_shard, targets - first, 0)
    chosen = torch.where(in_shard, values.gather(-1, local.unsqueeze(-1)).squeeze(-1), 0.0)
    sums = torch.stack([exponentials.sum(-1), chosen])
    dist.all_reduce(sums, group=group)
    losses = torch.where(counts, sums[0].log() + largest - sums[1], 0.0)
    return losses, exponentials.div_(sums[0].unsqueeze(-1)), local, in_shard


def _logits_gradient(probabilities: Tensor, local: Tensor, in_shard: Tensor) -> Tensor:
    """Return the gradient of each token's loss with respect to this device's logits, softmax -
    onehot. It overwrites `probabilities`.

    probabilities  (tokens, classes of this device)
    local          the index of each token's target among this device's classes
    in_shard       whether this device has the token's target
    """
    return probabilities.scatter_add_(-1, local.unsqueeze(-1), -in_shard.to(probabilities.dtype).unsqueeze(-1))
