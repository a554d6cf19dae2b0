"""The kernels of the CTC loss on fake tensors.

Their shapes depend on the lengths of the targets. Without values, each sample is taken to have as many
labels as the others: the width of padded targets, or an equal share of targets that are joined.

Source  Graves et al. 2006, Connectionist Temporal Classification.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tightfit._torch.operations import CTC_LOSS, CTC_LOSS_BACKWARD


def ctc_output(func: Any, args: Any) -> Any:
    """Return the outputs of a kernel of the CTC loss on fake tensors, or None if `func` is another
    operation. torch's kernel for GPUs and that for CPUs keep the same for backward.

    args  the arguments with which the operation is called
    """
    if func in (CTC_LOSS.default, CTC_LOSS.Tensor):
        return _losses_and_alphas(*args[:4])
    if func in (CTC_LOSS_BACKWARD.default, CTC_LOSS_BACKWARD.Tensor):
        return torch.empty_like(args[1])
    return None


def _losses_and_alphas(
    log_probabilities: Tensor, targets: Tensor, lengths: Tensor | Sequence[int], target_lengths: Tensor | Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return (the loss of each sample, (samples,), and the probabilities of the paths, (samples, steps,
    2 x labels + 1), which backward reads).

    log_probabilities  (steps, samples, classes)
    targets            the labels, (samples, most labels) or of all samples in one dimension
    """
    steps, samples = log_probabilities.shape[:2]
    labels = targets.shape[1] if targets.dim() > 1 else -(-targets.numel() // max(samples, 1))
    if not isinstance(target_lengths, Tensor):
        labels = max(target_lengths, default=0)
    return log_probabilities.new_empty(samples), log_probabilities.new_empty(samples, steps, 2 * labels + 1)


__all__ = ["ctc_output"]
