"""Computes attention on CPUs in blocks of queries, with plain matrix products and a softmax. On a
CPU, this is faster than PyTorch's fused attention kernel.

Saves   time on CPUs, where the fused kernel reaches only a small part of the rate of matrix
        products in training. With a causal mask, each block of queries skips the keys that the mask
        hides.
Costs   the probabilities are saved for backward: batch x heads x length^2 numbers (with a causal
        mask and 4 blocks, 5/8 of them). Scores are rounded to the type of the products before the
        softmax, as in eager attention.
When    on a CPU, for sequences up to about a thousand tokens. Never on CUDA, whose fused kernels
        are faster and save no probabilities.
Order   before anything wraps a block, because it is set in the model's configuration.
Source  the causal blocks of Dao et al. 2022, arXiv:2205.14135, without their tiling of the keys.

It works on models that use transformers' attention interface. Dropout of the probabilities is drawn
as with `dropout: 16-bit`. Attention whose queries and keys differ in number, as between a decoder
and a longer input, still calls sdpa.

Example: 256 tokens with a causal mask make 4 blocks of 64 queries, which see 64, 128, 192 and 256
keys. The blocks compute 64 x 640 = 40,960 probabilities instead of 65,536: 5/8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from tightfit._torch.operations import softmax_backward_
from tightfit.cost.ledger import cost_in_trace
from tightfit.errors import InputError
from tightfit.job import DataSpec, Job
from tightfit.machine import Machine
from tightfit.models import task_of
from tightfit.plan import Plan
from tightfit.runtime.dropout_noise import dropout_noise, rounded
from tightfit.runtime.method import Default, SearchFacts
from tightfit.runtime.run import Run

cost = cost_in_trace
FIELDS = ("attention",)
TRACED_FIELDS = ("attention",)
VARIANTS = ({"attention": "blocked"},)
NAME = "tightfit_blocked"
QUERY_BLOCK = 64  # queries in a block under a causal mask, where small blocks skip more of the pairs
MOST_QUERIES = 512  # the same without a mask: blocks of equal size, as few as possible
MAX_LENGTH = 1024  # tokens; up to this length, blocks are faster than the fused kernel on a CPU


def enabled(plan: Plan) -> bool:
    return plan.attention == "blocked"


def defaults(job: Job, machine: Machine) -> Iterator[Default]:
    """Yield the default attention=blocked if the machine is a CPU and the job trains a causal
    language model of transformers on sequences of at most 1,024 tokens; otherwise yield nothing."""
    sequence = job.data.sequence_length if isinstance(job.data, DataSpec) else 0
    if machine.device == "cpu" and job.of_transformers and task_of(job.model) == "causal-lm" and sequence <= MAX_LENGTH:
        yield Default("attention", "blocked", "on a CPU, plain products are faster than the fused attention kernel")


def leanest(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    return {"attention": list(dict.fromkeys([start.attention, "sdpa"]))}


def apply(run: Run, plan: Plan) -> Run:
    """Make the run's model use blocked attention, and return the run. Raises InputError if the
    model does not use transformers' attention interface with its default, sdpa.
    """
    config: Any = getattr(run.model, "config", None)
    if getattr(config, "_attn_implementation", None) != "sdpa":
        raise InputError(
            "plan: attention=blocked",
            f"{type(run.model).__name__} does not use transformers' attention interface",
            "use attention: sdpa",
        )
    register()
    run.model.set_attn_implementation(NAME)  # type: ignore[operator]
    return run


def register() -> None:
    """Register two functions with transformers under NAME: `attend`, which computes attention, and
    `mask_unless_causal`, which makes the masks for it.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask_unless_causal)


def mask_unless_causal(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return the attention mask that transformers makes for sdpa. Return None if `attend` needs no
    mask: if the mask would be purely causal, or, in an encoder, if it would hide nothing.

    The arguments are those of transformers' mask functions.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    plain = kwargs.get("mask_function") in (None, causal_mask_function, bidirectional_mask_function)
    whole = kwargs.get("q_length") == kwargs.get("kv_length")
    if plain and whole and kwargs.get("attention_mask") is None and not kwargs.get("q_offset"):
        return None
    return sdpa_mask(*args, **kwargs)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute blocked attention. The arguments and results are those of transformers' attention
    functions.

    query           (batch, heads, length, width)
    key, value      the same shape, but there may be fewer heads (grouped-query attention)
    attention_mask  boolean (False hides a key) or a tensor that is added to the scores; None: only
                    the causal mask applies, if there is one
    scaling         factor of the scores; None: 1 / sqrt(width)
    is_causal       whether a query sees only keys up to its position; None: `module.is_causal`. It
                    is ignored if there is an `attention_mask`

    dropout         share of the probabilities that is dropped
    others          T5's position_bias is added to the scores, and has a gradient

    Returns the output, (batch, length, heads, width), and None in place of the probabilities.

    Calls torch's sdpa instead if query, key and value differ in length or width.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not query.shape[2:] == key.shape[2:] == value.shape[2:]:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **others
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and attention_mask is None
    position_bias = others.get("position_bias")
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    bias = None if attention_mask is None else as_additive_mask(attention_mask, query)
    if position_bias is not None:
        bias = position_bias.to(query.dtype) if bias is None else bias + position_bias.to(query.dtype)
    noise = None
    if dropout:
        size = [math.prod(query.shape[:2]), probability_count(query.shape[2], causal)]
        noise = dropout_noise(query.new_empty(0), size, dropout)
    # Contiguous, so that neither forward nor backward has to copy them, and so that backward keeps no storage that a
    # layer's query, key and value share
    query, key, value = (query * scale).contiguous(), key.contiguous(), value.contiguous()
    output, _ = blocked_attention(query, key, value, bias, causal, noise, kept_factor(dropout, query.dtype))
    if attention_mask is not None and attention_mask.dtype == torch.bool and position_bias is None:
        # as sdpa: a query that sees no key, such as the first ones of a sequence padded on the left
        output = output.masked_fill(~attention_mask.any(-1, keepdim=True), 0.0)
    return output.transpose(1, 2), None


def kept_factor(dropout: float, dtype: torch.dtype) -> float:
    """Return the factor of the probabilities that dropout keeps, rounded to `dtype` as in the result
    of `dropout_noise`. Computed without a tensor, because reading one would split compiled code."""
    kept = 1 - rounded(dropout)
    return _in_dtype(1 / kept, dtype) if kept else 0.0


def _in_dtype(number: float, dtype: torch.dtype) -> float:
    """Return a number of ordinary size rounded to `dtype`, as torch converts an fp64 number: to 16 bits by way of
    fp32, each time to the nearest, of two to the even one."""
    for eps in () if dtype == torch.float64 else (torch.finfo(torch.float32).eps, torch.finfo(dtype).eps):
        digit = eps * 2.0 ** (math.frexp(number)[1] - 1)  # the distance of neighbouring numbers of the type
        number = round(number / digit) * digit
    return number


def as_additive_mask(mask: Tensor, query: Tensor) -> Tensor:
    """Return the mask as a tensor of 4 dimensions that can be added to the attention scores, in the
    type of `query`.

    mask  boolean, or a tensor that is added to the scores. False becomes the type's most negative
          number, and True becomes 0
    """
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    return mask.to(query.dtype)[(None,) * (4 - mask.dim())]


def query_blocks(length: int, causal: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, keys) for each block of queries: the block has the queries `start` to
    `end - 1`, and these see the first `keys` keys.

    length  number of queries, which is also the number of keys
    causal  whether a query sees only the keys up to its own position. Then `keys` is `end`,
            otherwise `length`

    Example: 197 queries without a mask are one block; with a causal mask, 64 + 64 + 64 + 5.
    """
    size = QUERY_BLOCK if causal else math.ceil(length / math.ceil(length / MOST_QUERIES))
    for start in range(0, length, size):
        end = min(start + size, length)
        yield start, end, end if causal else length


def probability_count(length: int, causal: bool) -> int:
    """Return the number of attention probabilities that all blocks of queries compute together, for
    one head of one sample. `length` and `causal` are those of `query_blocks`."""
    return sum((end - start) * keys for start, end, keys in query_blocks(length, causal))


def causal_pairs(queries: int, keys: int) -> int:
    """Return the number of (query, key) pairs that a causal mask permits. Query number i attends to
    the keys 0 to i.

    queries, keys  the numbers of queries and of keys

    With s queries and s keys: s (s + 1) / 2. Example: 4 queries and 4 keys give 10 of 16 pairs.
    """
    square = min(queries, keys)
    return square * (square + 1) // 2 + (queries - square) * keys


def attend_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    causal: bool,
    noise: Tensor | None = None,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute (softmax(query @ key^T + bias) * noise) @ value, one block of queries at a time.

    query   (batch, heads, length, width), already multiplied by the scale
    key     (batch, heads, length, width)
    value   (batch, heads, length, width)
    bias    (batch, heads, length, length), where any of these sizes may be 1; or None
    causal  whether a query sees only the keys up to its own position
    noise   factors of the probabilities, for dropout: 0, or `factor`; (batch x heads,
            probability_count(length, causal)), block after block. None: no dropout
    factor  the factor of a probability that dropout keeps

    Returns the output, (batch, heads, length, width), and the probabilities of all blocks, which
    backward needs: (batch x heads, probability_count(length, causal)). The probabilities that are
    dropped are negative in it.
    """
    batch, heads, length, width = query.shape
    query, key, value = (part.contiguous().view(batch * heads, length, width) for part in (query, key, value))
    output = query.new_empty(batch, length, heads, width).transpose(1, 2)
    all_probabilities = query.new_empty(batch * heads * probability_count(length, causal))
    if bias is not None:
        bias = bias.expand(batch, heads, length, length)
    if noise is not None:
        factors_of_blocks = probability_views(noise.view(-1), batch * heads, length, causal)
    for (start, end, keys), probabilities in zip(
        query_blocks(length, causal), probability_views(all_probabilities, batch * heads, length, causal), strict=True
    ):
        # in place: the softmax of another tensor takes half as long again
        torch.bmm(query[:, start:end], key[:, :keys].transpose(1, 2), out=probabilities)
        if bias is not None:
            probabilities.view(batch, heads, end - start, keys).add_(bias[:, :, start:end, :keys])
        if causal:
            probabilities[:, :, start:] += causal_mask(end - start, probabilities)
        torch.softmax(probabilities, -1, out=probabilities)
        used = probabilities
        if noise is not None:
            factors = next(factors_of_blocks)
            used = probabilities * factors
        output[:, :, start:end] = torch.bmm(used, value[:, :keys]).view(batch, heads, end - start, width)
        if noise is not None:
            probabilities.copysign_(torch.sub(factors, factor / 2, out=used))
            del used  # before the next block allocates its own
    return output, all_probabilities.view(batch * heads, -1)


blocked_attention = torch.library.custom_op("tightfit::blocked_attention", attend_in_blocks, mutates_args=())


def causal_mask(rows: int, like: Tensor) -> Tensor:
    """Return a (rows, rows) matrix with -inf above the diagonal and 0 elsewhere, with the dtype and
    device of `like`.
    """
    return torch.full((rows, rows), float("-inf"), dtype=like.dtype, device=like.device).triu_(1)


def probability_views(saved_probabilities: Tensor, groups: int, length: int, causal: bool) -> Iterator[Tensor]:
    """Yield the probabilities of each block of queries, (groups, queries of the block, keys), as a
    view of a flat tensor.

    saved_probabilities  flat; it holds the probabilities of all blocks, one block after another
    groups               batch size x number of heads
    length, causal       as in `query_blocks`
    """
    offset = 0
    for start, end, keys in query_blocks(length, causal):
        size = groups * (end - start) * keys
        yield saved_probabilities[offset : offset + size].view(groups, end - start, keys)
        offset += size


@blocked_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    causal: bool,
    noise: Tensor | None = None,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = query.shape
    output = query.new_empty(batch, length, heads, width).transpose(1, 2)
    return output, query.new_empty(batch * heads, probability_count(length, causal))


def backward_in_blocks(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    saved_probabilities: Tensor,
    causal: bool,
    bias: list[int] | None = None,
    factor: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and bias, computed from the saved probabilities.

    gradient             gradient of the output, (batch, heads, length, width)
    query, key, value    the inputs of the forward, (batch, heads, length, width); the query is
                         already scaled
    output               the output of the forward, (batch, heads, length, width), for dropout
    saved_probabilities  the probabilities of all blocks of queries, which the forward returned
    causal               whether a query sees only the keys up to its own position
    bias                 the shape of the bias; None if there is no bias, or if its gradient is not
                         needed
    factor               the factor of a probability that dropout kept; None if there was no dropout

    The first three results are (batch, heads, length, width). The fourth has the shape of the bias,
    or is an empty tensor if `bias` is None.
    """
    batch, heads, length, width = query.shape
    query, key, value = (part.contiguous().view(batch * heads, length, width) for part in (query, key, value))
    gradient = gradient.contiguous().view(query.shape)
    # Created by shape: empty_like would copy the strides of the inputs, which are views with
    # another order of dimensions if the batch size is 1.
    grad_query = query.new_empty(query.shape)
    grad_key, grad_value = ((new.new_zeros if causal else new.new_empty)(new.shape) for new in (key, value))
    grad_bias = query.new_zeros([0] if bias is None else bias)
    if factor is not None:
        wide = torch.promote_types(query.dtype, torch.float32)
        output = output.contiguous().view(query.shape)
        mean = (gradient.to(wide) * output.to(wide)).sum(-1, keepdim=True).to(query.dtype)
        gradient = gradient * factor
    parts = zip(
        query_blocks(length, causal),
        probability_views(saved_probabilities.view(-1), batch * heads, length, causal),
        strict=True,
    )
    for (start, end, keys), probabilities in parts:
        rows = gradient[:, start:end]
        used = probabilities if factor is None else probabilities.relu()
        beta = 0 if start == 0 else 1  # the first block begins the sums
        grad_value[:, :keys].baddbmm_(used.transpose(1, 2), rows, beta=beta)
        grad_scores = torch.bmm(rows, value[:, :keys].transpose(1, 2))
        if factor is None:
            softmax_backward_(grad_scores, probabilities)
        else:
            grad_scores.mul_(used).addcmul_(torch.abs(probabilities, out=used), mean[:, start:end], value=-1)
        grad_query[:, start:end] = torch.bmm(grad_scores, key[:, :keys])
        grad_key[:, :keys].baddbmm_(grad_scores.transpose(1, 2), query[:, start:end], beta=beta)
        if bias is not None:
            slice_ = grad_bias[:, :, slice(start, end) if bias[2] > 1 else slice(None), : keys if bias[3] > 1 else 1]
            slice_ += grad_scores.view(batch, heads, end - start, keys).sum_to_size(slice_.shape)
        del used, grad_scores  # before the next block allocates its own
    shape = (batch, heads, length, width)
    return grad_query.view(shape), grad_key.view(shape), grad_value.view(shape), grad_bias


blocked_attention_backward = torch.library.custom_op(
    "tightfit::blocked_attention_backward", backward_in_blocks, mutates_args=()
)


@blocked_attention_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    kept: Tensor,
    causal: bool,
    bias: list[int] | None = None,
    factor: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, length, width = query.shape
    empty = query.new_empty(batch, heads, length, width)
    return empty, torch.empty_like(empty), torch.empty_like(empty), query.new_empty([0] if bias is None else bias)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, bias, ctx.causal, noise, factor = inputs
    ctx.factor = None if noise is None else factor
    ctx.bias = list(bias.shape) if bias is not None and bias.requires_grad else None
    ctx.save_for_backward(query, key, value, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *found, grad_bias = blocked_attention_backward(gradient, *ctx.saved_tensors, ctx.causal, ctx.bias, ctx.factor)
    return *found, None if ctx.bias is None else grad_bias, None, None, None


blocked_attention.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.tightfit.blocked_attention)
def _flops(query: Any, *rest: Any, out_shape: Any = None, **named: Any) -> int:
    """Return the FLOPs of blocked attention: those of two matrix products over all query-key pairs.
    As is usual for attention, pairs that the mask hides are counted, too.

    query  the shape of the query
    """
    batch, heads, length, width = query
    return 4 * batch * heads * length * length * width


@register_flop_formula(torch.ops.tightfit.blocked_attention_backward)
def _backward_flops(gradient: Any, query: Any, *rest: Any, out_shape: Any = None, **named: Any) -> int:
    """Return the FLOPs of the backward of blocked attention: those of four matrix products over all
    query-key pairs. `query` is the shape of the query."""
    batch, heads, length, width = query
    return 8 * batch * heads * length * length * width
