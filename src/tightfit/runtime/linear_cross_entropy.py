"""Computes a linear layer and its cross entropy together, one chunk of rows at a time (Hsu et al. 2024,
arXiv:2410.10989). Forward computes the gradients, too, so the logits of all rows never exist at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tightfit.models.batches import IGNORED, LabelCount
from tightfit.optim.gradient_dtype import gradient_dtype
from tightfit.runtime.loss_kernels import ROWS_IN_CACHE, LossKernels, add_product, padded
from tightfit.runtime.repeated_iterations import repeated_iterations

# (logits, labels) of a chunk -> its summed loss, and the gradient with respect to the logits
ChunkLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
# unlabelled rows are skipped if fewer than this share of all rows have a label
MAX_LABELLED_SHARE = 0.9


# not compiled: the compiler would unroll the loop, and all chunks would exist at the same time
@torch.compiler.disable
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    chunk: int,
    kernels: LossKernels = LossKernels(),  # noqa: B008
    sharded_loss: ChunkLoss | None = None,
    labelled: LabelCount | None = None,
) -> Tensor:
    """Compute the cross entropy of `hidden @ weight.T + bias`, summed over the labelled tokens,
    `chunk` tokens at a time.

    hidden            (tokens, width)
    weight            (vocabulary, width)
    bias              (vocabulary) or None
    targets           (tokens): the class of each token, or IGNORED for a token without a label
    chunk             number of tokens whose logits exist at the same time
    kernels           the kernels that compute a chunk
    sharded_loss      given if weight and bias are this device's shard of the vocabulary: it computes
                      a chunk's loss from the logits of all devices. The gradient of `hidden` is then
                      partial: its sum over the devices is the gradient
    labelled          how many targets have a label, counted on the host. If more than a tenth do
                      not, no logits are computed for most of those. None: all are computed

    Products run in autocast's type, or without autocast in the type of `hidden`. The softmax and
    the sum run in fp32. Returns an fp32 scalar.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    taken = computed_rows(labelled, len(targets), kernels.row_multiple)
    # is_grad_enabled() is always False inside a Function's forward, so it is read here
    return LinearCrossEntropy.apply(
        hidden, weight, bias, targets, taken, (chunk, kernels), sharded_loss, dtype, torch.is_grad_enabled()
    )


def computed_rows(labelled: LabelCount | None, rows: int, multiple: int) -> int | None:
    """Return for how many rows (tokens) the chunked loss computes logits; None means all rows.

    The result is the number of labelled rows, rounded up to a multiple of `multiple`. It is None if
    the number of labels is unknown, or if the result would be 90 % of the rows or more.

    labelled  the number of labels; None if it is unknown
    rows      the number of all rows

    Example: 150 of 1,000 rows have a label, and `multiple` is 128: 256 rows are computed.
    """
    if labelled is None:
        return None
    taken = -(-max(labelled.scaled_to(rows), 1) // multiple) * multiple
    return taken if taken < MAX_LABELLED_SHARE * rows else None


class LinearCrossEntropy(torch.autograd.Function):
    """The autograd function of the chunked loss (see `linear_cross_entropy`). Forward computes the
    loss and also its gradients, while a chunk's logits are in memory. Backward multiplies these by
    the incoming gradient of the loss.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        taken: int | None,
        how: tuple[int, LossKernels],
        sharded_loss: ChunkLoss | None,
        dtype: torch.dtype,
        learning: bool,
    ) -> Tensor:
        needed = [learning and needs for needs in ctx.needs_input_grad[:3]]
        chosen_rows = None if taken is None else _labelled_rows_first(targets)[:taken]
        with torch.autocast(hidden.device.type, enabled=False):
            loss, gradients = _sum_and_gradients(
                hidden, weight, bias, targets, chosen_rows, how, sharded_loss, dtype, needed
            )
        # a leaf may have fp32 gradients although it is stored in 16 bits (master_weights)
        own = [None if one is None else gradient_dtype(one) if one.is_leaf else one.dtype for one in (weight, bias)]
        ctx.types = (hidden.dtype, *own)
        ctx.shape = hidden.shape
        ctx.save_for_backward(*gradients, chosen_rows if needed[0] else None)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *made, chosen_rows = ctx.saved_tensors
        # in place: autograd notices the change, so a second backward through this graph raises
        scaled = [
            None if gradient is None else gradient.mul_(gradients[0]).to(dtype)
            for gradient, dtype in zip(made, ctx.types, strict=True)
        ]
        if chosen_rows is not None and scaled[0] is not None:
            scaled[0] = scaled[0].new_zeros(ctx.shape).index_copy_(0, chosen_rows, scaled[0])
        return *scaled, None, None, None, None, None, None


def _labelled_rows_first(targets: Tensor) -> Tensor:
    """Return the indices of all rows of `targets`: first the rows with a label, then the others,
    both in their original order. The host does not wait for the device.
    """
    return (targets == IGNORED).to(torch.uint8).argsort(stable=True)


def _sum_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    chosen_rows: Tensor | None,
    how: tuple[int, LossKernels],
    sharded_loss: ChunkLoss | None,
    dtype: torch.dtype,
    needed: list[bool],
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Return the summed loss, and a tuple with its gradients with respect to hidden, weight and
    bias. A gradient that is not needed is None.

    The gradient of hidden is in `dtype`, the other two are in fp32. Exception: with a single chunk
    and a weight of type `dtype`, the gradient of the weight is in `dtype`, too.

    hidden, weight, bias, targets  as in `linear_cross_entropy`
    chosen_rows  indices of the rows to compute; None for all. The gradient of hidden has these rows
                 only
    how          (tokens in a chunk, kernels)
    sharded_loss  as in `linear_cross_entropy`
    dtype        the type of the products
    needed       for each of hidden, weight and bias, whether its gradient is needed
    """
    chunk, kernels = how
    classes = len(weight)
    narrow_weight = padded(weight, dtype, kernels.pads)
    narrow_bias = None if bias is None else padded(bias, dtype, kernels.pads)
    count = len(hidden) if chosen_rows is None else len(chosen_rows)
    for_hidden = hidden.new_empty((count, hidden.shape[1]), dtype=dtype) if needed[0] else None
    single_product = count <= chunk and weight.dtype == dtype  # already in the weight's type
    wide = torch.promote_types(dtype, torch.float32)
    sums_in_fp32 = kernels.accumulates_fp32 and dtype != wide and count > 0
    allocate = torch.empty_like if sums_in_fp32 else torch.zeros_like
    for_weight = allocate(weight, dtype=wide) if needed[1] and not single_product else None
    for_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None
    loss = torch.zeros((), dtype=wide, device=hidden.device)

    # a function, so that a chunk's tensors are freed before the next chunk's logits
    def compute_chunk(span: slice) -> None:
        nonlocal for_weight
        if chosen_rows is None:
            rows, labels = hidden[span].to(dtype), targets[span]
        else:
            row_indices = chosen_rows[span]
            rows, labels = hidden.index_select(0, row_indices).to(dtype), targets.index_select(0, row_indices)
        padded_logits = functional.linear(rows, narrow_weight, narrow_bias)
        logits = padded_logits[:, :classes]
        part, gradient = _chunk_loss(logits, labels, kernels, sharded_loss, any(needed))  # may write it over the logits
        loss.add_(part)
        counts = (labels != IGNORED).to(dtype).unsqueeze(1)
        if for_hidden is not None:
            # where the gradient was written over the logits, it has the zeros of padded classes beside it
            overwritten = gradient is logits
            factors = (padded_logits, narrow_weight) if overwritten else (gradient, narrow_weight[:classes])
            torch.mm(*factors, out=for_hidden[span]).mul_(counts)
        if needed[1]:
            rows = rows * counts
            if for_weight is None or single_product:
                for_weight = gradient.t() @ rows
            else:
                _add_weight_gradient(for_weight, gradient.t(), rows, sums_in_fp32, span.start == 0)
        if for_bias is not None:
            for_bias.add_((gradient.t() @ counts).squeeze(1))

    for start in repeated_iterations(range(0, count, chunk)):
        compute_chunk(slice(start, start + chunk))
    return loss, (for_hidden, for_weight, for_bias)


def _chunk_loss(
    logits: Tensor, labels: Tensor, kernels: LossKernels, sharded_loss: ChunkLoss | None, learning: bool
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of one chunk of tokens, and its gradient with respect to the logits.
    The gradient may be written over the logits.

    logits    (tokens, classes)
    labels    (tokens)
    sharded_loss  as in `linear_cross_entropy`
    learning  whether the gradient is needed
    """
    if sharded_loss is not None:
        return sharded_loss(logits, labels)
    if kernels.fused is not None and learning:
        return kernels.fused(logits, labels), logits
    return cross_entropy_with_gradient(logits, labels, kernels.rows)


def _add_weight_gradient(total: Tensor, left: Tensor, right: Tensor, fused: bool, first: bool) -> None:
    """Add `left @ right`, the product of one chunk, to `total`, the fp32 gradient of the weight, in
    place.

    fused  whether one kernel multiplies in 16 bits and adds in fp32
    first  whether this is the first chunk. With `fused`, its product overwrites `total`
    """
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, out=total)
    elif fused:
        add_product(left, right, total, first)
    else:
        total += left @ right


def cross_entropy_with_gradient(logits: Tensor, labels: Tensor, rows: int = ROWS_IN_CACHE) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy in fp32, and its gradient with respect to the logits, which
    is written over the logits.

    logits  (tokens, classes)
    labels  (tokens): a class, or IGNORED
    rows    number of tokens that are computed in fp32 at a time

    The gradient is the softmax, minus one at the label. For a token whose label is IGNORED, it has
    no meaning.
    """
    loss = torch.zeros((), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    for start in repeated_iterations(range(0, len(logits), rows)):
        span = slice(start, start + rows)
        loss += _loss_and_gradient_within(logits[span], labels[span])
    return loss, logits


def _loss_and_gradient_within(logits: Tensor, labels: Tensor) -> Tensor:
    counts = labels != IGNORED
    safe = labels.where(counts, 0).unsqueeze(1)
    wide = torch.promote_types(logits.dtype, torch.float32)
    chosen, largest = logits.gather(1, safe).to(wide), logits.amax(-1, keepdim=True).to(wide)
    probability = functional.softmax(logits, -1, dtype=wide)
    log_sum = largest - probability.amax(-1, keepdim=True).log()
    gradient_there = probability.gather(1, safe).sub_(1).to(logits.dtype)
    logits.copy_(probability).scatter_(1, safe, gradient_there)
    return ((log_sum - chosen) * counts.unsqueeze(1)).sum()
