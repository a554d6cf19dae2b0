"""Ring attention: keys and values pass all devices of a ring, and each device attends from its own queries to all of them.

Source  Liu et al. 2023, arXiv:2310.01889; the even shares under a causal mask: Grattafiori et al. 2024, arXiv:2407.21783,
        section 3.3.2; merging by log-sum-exp: Dao et al. 2022, arXiv:2205.14135.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tightfit.errors import InputError

aten = torch.ops.aten
NAME = "tightfit_ring"
ALIGNED = 8  # numbers: CUDA's kernels take heads, and rows of a mask, of a multiple of so many
WIDEST_FLASH = 256  # numbers in a head, at most
_BEYOND = ("softcap", "s_aux", "position_bias", "sliding_window")  # what some models' attention has besides


class Ring:
    """Where this device stands in its ring, and how it hands on what goes around."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def hand_on(self, tensors: tuple[Tensor, ...]) -> _Arriving:
        """Begin to send tensors to the next device, and to receive the same ones of the device before."""
        sent = torch.cat([tensor.reshape(-1) for tensor in tensors])
        received = torch.empty_like(sent)
        there, before = ((self.rank + step) % self.size for step in (1, -1))
        work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=self.group, group_peer=there),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=before),
            ]
        )
        return _Arriving(work, sent, received, tensors)


class _Arriving:
    def __init__(self, work: list[dist.Work], sent: Tensor, received: Tensor, like: tuple[Tensor, ...]) -> None:
        self.work, self.sent, self.received = work, sent, received  # `sent` until it has left
        self.shapes = [tensor.shape for tensor in like]

    def wait(self) -> list[Tensor]:
        for one in self.work:
            one.wait()
        parts = self.received.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


_rings: WeakKeyDictionary[nn.Module, Ring] = WeakKeyDictionary()  # of models, whose parts hold nothing else of a run


def join_ring(model: nn.Module, group: dist.ProcessGroup) -> None:
    """From now on attention in the model's modules passes the devices of this group."""
    ring = Ring(group)
    _rings.update(dict.fromkeys(model.modules(), ring))


def register() -> None:
    """Make attention in a ring known to transformers, under NAME."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, seen_keys)


def seen_keys(*args: Any, **kwargs: Any) -> Tensor | None:
    """In place of a mask, which of this device's keys are no padding: (batch, 1, 1, length), or None for all of them."""
    mask = kwargs.get("attention_mask")
    return None if mask is None else mask.bool()[:, None, None, :]


@torch.compiler.disable
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
    """transformers' attention function: (batch, heads, length, width) in, (batch, length, heads, width) out, where length is
    this device's of the sequence."""
    asked = [name for name in _BEYOND if others.get(name) is not None] + (["dropout"] if dropout else [])
    if asked:
        raise InputError(
            "plan: cp", f"the model's attention wants {asked[0]}, which the ring does not have", "use cp: 1"
        )
    if attention_mask is not None and attention_mask.dtype is not torch.bool:
        raise InputError(
            "plan: cp",
            "the model adds a bias of its own to the scores of attention, which the ring has not",
            "use cp: 1",
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    narrow, wide = query.shape[-1], value.shape[-1]
    most = max(narrow, wide)
    if _is_apart(query):
        most += -most % ALIGNED
    if not narrow == wide == most:  # one kernel for both: columns of zeros change nothing (the scale is known already)
        query, key = (functional.pad(x, (0, most - narrow)) for x in (query, key))
        value = functional.pad(value, (0, most - wide))
    output = RingAttention.apply(query, key, value, attention_mask, causal, scale, _rings[module])
    return output[..., :wide].transpose(1, 2).contiguous(), None  # as sdpa's is: some models take a view of it


class RingAttention(torch.autograd.Function):
    """softmax(query @ key^T x scale) @ value over the keys of all devices of a ring.

    query (batch, heads, length, width); key, value (batch, heads or fewer, length, width), of this device; seen (batch, 1, 1,
    length) or None: which keys count. causal: the chunks are those of `cut`. Sums over devices are in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seen: Tensor | None,
        causal: bool,
        scale: float,
        ring: Ring,
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        output = torch.zeros(query.shape, dtype=wide, device=query.device)
        total = torch.full(query.shape[:-1], float("-inf"), dtype=wide, device=query.device)
        for step, (keys, values, bias) in enumerate(_around(ring, key, value, seen)):
            rows, columns = seen_parts(step, ring, causal, query.shape[2])
            part, sums = attention(
                query[:, :, rows],
                keys[:, :, columns],
                values[:, :, columns],
                _of(bias, columns),
                causal and not step,
                scale,
            )
            before = total[:, :, rows].clone()
            after = torch.logaddexp(before, sums)
            output[:, :, rows] *= (before - after).exp().unsqueeze(-1)
            output[:, :, rows] += part * (sums - after).exp().unsqueeze(-1)
            total[:, :, rows] = after
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, seen, output, total)
        ctx.causal, ctx.scale, ctx.ring = causal, scale, ring
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, seen, output, total = ctx.saved_tensors
        gradient, ring = gradients[0].contiguous(), ctx.ring
        wide = torch.promote_types(query.dtype, torch.float32)
        of_query = torch.zeros(query.shape, dtype=wide, device=query.device)
        arriving: _Arriving | None = None
        for step, (keys, values, bias) in enumerate(_around(ring, key, value, seen)):
            rows, columns = seen_parts(step, ring, ctx.causal, query.shape[2])
            parts = attention_backward(
                gradient[:, :, rows], query[:, :, rows], keys[:, :, columns], values[:, :, columns],
                _of(bias, columns), output[:, :, rows], total[:, :, rows], ctx.causal and not step, ctx.scale,
            )  # fmt: skip
            of_query[:, :, rows] += parts[0]
            # the gradients of these keys and values come behind them, and end where those began
            if arriving is None:
                of_keys, of_values = (torch.zeros(key.shape, dtype=wide, device=key.device) for _ in range(2))
            else:
                of_keys, of_values = arriving.wait()
            of_keys[:, :, columns] += parts[1]
            of_values[:, :, columns] += parts[2]
            arriving = ring.hand_on((of_keys, of_values))
        assert arriving is not None
        of_keys, of_values = arriving.wait()
        return of_query.to(query.dtype), of_keys.to(key.dtype), of_values.to(value.dtype), None, None, None, None


def _around(
    ring: Ring, key: Tensor, value: Tensor, seen: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Keys, values and mask of this device, of the one before it, and so on; the next are on their way meanwhile."""
    held = [key, value, *([] if seen is None else [seen.to(key.dtype)])]
    for step in range(ring.size):
        arriving = ring.hand_on(tuple(held)) if step < ring.size - 1 else None
        yield held[0], held[1], held[2] > 0 if seen is not None else None
        if arriving is not None:
            held = arriving.wait()


def seen_parts(step: int, ring: Ring, causal: bool, length: int) -> tuple[slice, slice]:
    """Which queries of this device see which keys of the device `step` before it. Of two chunks each, under a causal mask:
    all see the first one of a device in front, only the second sees those (both) of a device behind."""
    if not causal or step == 0:
        return slice(None), slice(None)
    if step <= ring.rank:
        return slice(None), slice(0, length // 2)
    return slice(length // 2, None), slice(None)


def _of(seen: Tensor | None, columns: slice) -> Tensor | None:
    return None if seen is None else seen[..., columns]


def _is_apart(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def kernel_of(query: Tensor, seen: Tensor | None) -> str:
    """Which of PyTorch's kernels computes attention here: "cpu", "flash", "efficient", or "plain" products.

    flash takes 16-bit types without a mask, and heads of fewer keys than queries as they are; efficient takes fp32 and masks.
    """
    if query.device.type == "cpu":
        return "cpu"
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return "plain"
    narrow = query.dtype != torch.float32 and seen is None and query.shape[-1] <= WIDEST_FLASH
    if narrow and torch.cuda.get_device_capability(query.device) >= (8, 0):
        return "flash"
    return "efficient"


def attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """PyTorch's fused kernel: (batch, heads, queries, width), and of each query the log of its sum of exponentials in fp32."""
    kernel = kernel_of(query, seen)
    if kernel == "flash":
        output, sums, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
        return output, sums
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    bias = None if seen is None else _as_bias(seen, query, key)
    if kernel == "cpu":
        flash = aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)
    if kernel == "plain":
        scores = _scores(query, key, bias, causal, scale)
        sums = scores.logsumexp(-1)
        return (scores - sums.unsqueeze(-1)).exp() @ value, sums
    output, sums, *_ = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, 0.0, causal, scale=scale
    )
    return output, sums[..., : query.shape[2]]  # it pads them to its tiles


def attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, output: Tensor, sums: Tensor,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value; output and sums are those over all keys, wherever they are."""
    kernel, heads = kernel_of(query, seen), key.shape[1]
    if kernel == "flash":
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of a dropout that is not there
        return aten._scaled_dot_product_flashattention_backward(
            gradient.contiguous(), query, key, value, output.contiguous(), sums.contiguous(), None, None, query.shape[2],
            key.shape[2], 0.0, causal, seed, seed, scale=scale,
        )  # fmt: skip
    groups = query.shape[1] // heads
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    bias = None if seen is None else _as_bias(seen, query, key)
    if kernel == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, output, sums.transpose(1, 2).contiguous().transpose(1, 2), 0.0, causal,
            attn_mask=bias, scale=scale,
        )  # fmt: skip
    elif kernel == "plain":
        shares = (_scores(query, key, bias, causal, scale) - sums.unsqueeze(-1)).exp()
        inner = shares * (gradient @ value.mT - (gradient * output).sum(-1, keepdim=True)) * scale
        found = inner @ key, inner.mT @ query, shares.mT @ gradient
    else:
        padded = functional.pad(sums, (0, -sums.shape[-1] % 32), value=float("inf"))  # as the forward's are
        seed = torch.zeros((), dtype=torch.int64, device=query.device)  # of a dropout that is not there
        found = aten._scaled_dot_product_efficientattention_backward(
            gradient,
            query,
            key,
            value,
            bias,
            output,
            padded,
            seed,
            seed,
            0.0,
            [True, True, True, False],
            causal,
            scale=scale,
        )[:3]
    of_query, of_key, of_value = found
    if groups > 1:
        of_key, of_value = (
            part.unflatten(1, (heads, groups)).to(torch.promote_types(part.dtype, torch.float32)).sum(2)
            for part in (of_key, of_value)
        )
    return of_query, of_key, of_value


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = query @ key.mT * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _as_bias(seen: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """(batch, heads, queries, keys) with 0 for keys that are seen, and the lowest number for others: not -inf, so that a query
    that sees none of a device's keys has a sum that vanishes beside others' and is a number."""
    keys = seen.shape[-1]
    if _is_apart(query):  # CUDA's kernel reads rows that begin at multiples of 16 bytes
        seen = functional.pad(seen, (0, -keys % ALIGNED))
    bias = torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, torch.finfo(query.dtype).min)[..., :keys]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
