"""Ring attention: devices pass their keys and values around a ring, so that the queries of each
device attend to the keys of all devices.

`context_parallel` registers `attend` as transformers' attention function. The devices of a ring
process the same samples; each device has two chunks of each sequence (see `shard_batch`).

Example: cp=2 and 8 tokens. Device 0 has positions 0, 1, 6, 7 (chunks 0 and 3). Device 1 has
positions 2, 3, 4, 5 (chunks 1 and 2). On each device, query, key and value have shape (batch,
heads, 4, width).

    step   device 0                               device 1
    0      own keys, causal mask: 10 pairs        own keys, causal mask: 10 pairs
    1      queries 6, 7 with keys 2 to 5: 8       queries 2 to 5 with keys 0, 1: 8

In step 0, each device also sends its keys and values to the other device. In step 1, queries 0 and
1 of device 0 attend to no key of device 1, because all of these keys are later. The queries of
device 1 attend only to the first chunk of device 0. So both devices compute 18 pairs of a query and
a key, and no mask is needed in step 1. Each step gives a partial output, and for each query the
log-sum-exp of its scores, from which the weights of the partial outputs are computed when they are
merged.

Source  Liu et al. 2023, arXiv:2310.01889; balanced chunks under a causal mask: Grattafiori et al.
        2024, arXiv:2407.21783, section 3.3.2; merging by log-sum-exp: Dao et al. 2022,
        arXiv:2205.14135.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tightfit._torch.operations import (
    CPU_FLASH_ATTENTION,
    CPU_FLASH_ATTENTION_BACKWARD,
    EFFICIENT_ATTENTION,
    EFFICIENT_ATTENTION_BACKWARD,
    FLASH_ATTENTION,
    FLASH_ATTENTION_BACKWARD,
)
from tightfit.errors import InputError

NAME = "tightfit_ring"
ALIGNED = 8  # elements: CUDA's kernels need head widths and mask rows of a multiple of this
WIDEST_FLASH = 256  # elements: the widest head of the flash kernel
# arguments that some models pass to attention
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sliding_window")


class Ring:
    """This device's place in a ring of devices. It sends tensors to the next device, and receives
    tensors from the previous device.

    group  the process group of the ring's devices. The device with rank r sends to rank r + 1, and
           the last device sends to rank 0
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def send_to_next(self, tensors: tuple[Tensor, ...]) -> _Transfer:
        """Begin to send `tensors` to the next device, and to receive tensors of the same shapes
        from the previous device.

        All tensors must have the same dtype. Returns a handle, whose `wait` returns the received
        tensors.
        """
        sent = torch.cat([tensor.reshape(-1) for tensor in tensors])
        received = torch.empty_like(sent)
        next_rank, previous_rank = ((self.rank + step) % self.size for step in (1, -1))
        work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=self.group, group_peer=next_rank),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=previous_rank),
            ]
        )
        return _Transfer(work, sent, received, tensors)


class _Transfer:
    """A send to the next device and a receive from the previous device, both in flight.

    work      the handles of the send and the receive
    sent      the flat tensor that is sent
    received  the flat tensor that the data arrive in
    like      tensors that have the shapes of the received tensors
    """

    def __init__(self, work: list[dist.Work], sent: Tensor, received: Tensor, like: tuple[Tensor, ...]) -> None:
        # `sent` must stay alive until the send is complete
        self.work, self.sent, self.received = work, sent, received
        self.shapes = [tensor.shape for tensor in like]

    def wait(self) -> list[Tensor]:
        """Wait for the send and the receive, and return the received tensors."""
        for one in self.work:
            one.wait()
        parts = self.received.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


_rings: WeakKeyDictionary[nn.Module, Ring] = (
    WeakKeyDictionary()
)  # module -> its ring, in place of an attribute of the module


def join_ring(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Make `attend` use the ring of the devices in `group` for all modules of `model`."""
    ring = Ring(group)
    _rings.update(dict.fromkeys(model.modules(), ring))


def register() -> None:
    """Register `attend` and its mask function `key_mask` with transformers, under the name NAME."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, key_mask)


def key_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return the mask that `attend` gets as its `attention_mask`. transformers calls this function,
    with keyword arguments, to make a model's mask.

    It is a bool tensor (batch, 1, 1, length), made from the batch's attention mask: False for those
    keys of this device that are padding. It is None if the batch has no attention mask. The mask is
    not causal, because `attend` itself applies the causal mask.
    """
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
    """Compute attention over the keys of the whole ring. transformers calls this as a model's
    attention function.

    query           (batch, heads, length, width), at this device's positions
    key             (batch, key heads, length, width); fewer heads than query in grouped-query
                    attention
    value           (batch, key heads, length, value width)
    attention_mask  bool (batch, 1, 1, length): False for those keys of this device that are
                    padding; None: there is no padding
    dropout         must be 0
    scaling         the factor of the scores; None: width ** -0.5
    is_causal       whether to apply a causal mask; None: as the module's attribute `is_causal`
                    says, else True

    Returns (output, None); the output has shape (batch, length, heads, value width).

    Raises InputError for dropout, for a mask that is not bool, and for other features that ring
    attention does not support, such as a sliding window.
    """
    asked = [name for name in _UNSUPPORTED if others.get(name) is not None] + (["dropout"] if dropout else [])
    if asked:
        raise InputError(
            "plan: cp", f"the model's attention uses {asked[0]}, which ring attention does not support", "use cp: 1"
        )
    if attention_mask is not None and attention_mask.dtype is not torch.bool:
        raise InputError(
            "plan: cp",
            "the model adds a bias of its own to the scores of attention, which ring attention does not add",
            "use cp: 1",
        )
    if attention_mask is not None and attention_mask.shape[1:-1].numel() != 1:
        raise InputError(
            "plan: cp",
            f"the samples have an attention mask of shape {tuple(attention_mask.shape)}, one for each query: ring attention "
            "masks only keys, such as those of padding",
            "give a mask of shape (samples, length), or use cp: 1",
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    narrow, wide = query.shape[-1], value.shape[-1]
    most = max(narrow, wide)
    if _is_on_accelerator(query):
        most += -most % ALIGNED
    # kernels need equal widths; padding with zeros changes no result, because the scale is given
    if not narrow == wide == most:
        query, key = (functional.pad(x, (0, most - narrow)) for x in (query, key))
        value = functional.pad(value, (0, most - wide))
    output = RingAttention.apply(query, key, value, attention_mask, causal, scale, _rings[module])
    return output[..., :wide].transpose(
        1, 2
    ).contiguous(), None  # contiguous, as the output of sdpa is: some models call view


class RingAttention(torch.autograd.Function):
    """Computes softmax(query @ key^T x scale) @ value over the keys of all devices of a ring.

    query   (batch, heads, length, width), at this device's positions
    key     (batch, key heads, length, width); heads is a multiple of key heads
    value   the same shape as key
    mask    bool (batch, 1, 1, length): False for keys that are padding; None: there is no padding
    causal  whether to apply a causal mask. If so, this device's positions must be the two chunks
            that `shard_batch` returns
    scale   the factor of the scores
    ring    the ring of devices

    The output has the shape of query. Partial results are merged in fp32 (fp64 for fp64 inputs).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        ring: Ring,
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        output = torch.zeros(query.shape, dtype=wide, device=query.device)
        total = torch.full(query.shape[:-1], float("-inf"), dtype=wide, device=query.device)
        for step, (keys, values, bias) in enumerate(_ring_steps(ring, key, value, mask)):
            rows, columns = visible_slices(step, ring, causal, query.shape[2])
            part, sums = attention(
                query[:, :, rows],
                keys[:, :, columns],
                values[:, :, columns],
                _mask_columns(bias, columns),
                causal and not step,
                scale,
            )
            before = total[:, :, rows].clone()
            after = torch.logaddexp(before, sums)
            output[:, :, rows] *= (before - after).exp().unsqueeze(-1)
            output[:, :, rows] += part * (sums - after).exp().unsqueeze(-1)
            total[:, :, rows] = after
        if mask is not None:
            # as sdpa: the output of a query that sees no key is 0, and so are its gradients
            sees_none = total < torch.finfo(query.dtype).min / 2
            output = output.masked_fill(sees_none.unsqueeze(-1), 0.0)
            total = total.masked_fill(sees_none, float("inf"))
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, output, total)
        ctx.causal, ctx.scale, ctx.ring = causal, scale, ring
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, output, total = ctx.saved_tensors
        gradient, ring = gradients[0].contiguous(), ctx.ring
        wide = torch.promote_types(query.dtype, torch.float32)
        grad_query = torch.zeros(query.shape, dtype=wide, device=query.device)
        transfer: _Transfer | None = None
        for step, (keys, values, bias) in enumerate(_ring_steps(ring, key, value, mask)):
            rows, columns = visible_slices(step, ring, ctx.causal, query.shape[2])
            parts = attention_backward(
                gradient[:, :, rows], query[:, :, rows], keys[:, :, columns], values[:, :, columns],
                _mask_columns(bias, columns), output[:, :, rows], total[:, :, rows], ctx.causal and not step, ctx.scale,
            )  # fmt: skip
            grad_query[:, :, rows] += parts[0]
            # gradients travel around the ring with their keys and values, back to the device of
            # these keys
            if transfer is None:
                grad_keys, grad_values = (torch.zeros(key.shape, dtype=wide, device=key.device) for _ in range(2))
            else:
                grad_keys, grad_values = transfer.wait()
            grad_keys[:, :, columns] += parts[1]
            grad_values[:, :, columns] += parts[2]
            transfer = ring.send_to_next((grad_keys, grad_values))
        assert transfer is not None
        grad_keys, grad_values = transfer.wait()
        return grad_query.to(query.dtype), grad_keys.to(key.dtype), grad_values.to(value.dtype), None, None, None, None


def _ring_steps(
    ring: Ring, key: Tensor, value: Tensor, mask: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield (keys, values, mask) of each device of the ring: first of this device, then of the
    previous device, and so on.

    While the caller computes with one device's tensors, the next tensors are received. The yielded
    mask is bool, or None if `mask` is None.

    key, value  this device's keys and values
    mask        bool (batch, 1, 1, length): False for those keys of this device that are padding;
                None: there is no padding
    """
    held = [key, value, *([] if mask is None else [mask.to(key.dtype)])]
    for step in range(ring.size):
        transfer = ring.send_to_next(tuple(held)) if step < ring.size - 1 else None
        yield held[0], held[1], held[2] > 0 if mask is not None else None
        if transfer is not None:
            held = transfer.wait()


def visible_slices(step: int, ring: Ring, causal: bool, length: int) -> tuple[slice, slice]:
    """Return two slices (queries, keys): the queries of this device that attend to keys in this
    step of the ring, and these keys.

    In step s, this device has the keys of the device that is s places before it in the ring. Each
    device has two chunks of the sequence. Without a causal mask, all queries attend to all keys.
    With a causal mask, there are three cases:

    - Step 0, the device's own keys: all queries and all keys. The caller has to apply a causal
      mask.
    - Keys of a device with a lower rank: all queries attend to the first of that device's two
      chunks.
    - Keys of a device with a higher rank: this device's second chunk of queries attends to all of
      them.

    length  the number of positions of a device, in both chunks together
    """
    if not causal or step == 0:
        return slice(None), slice(None)
    if step <= ring.rank:
        return slice(None), slice(0, length // 2)
    return slice(length // 2, None), slice(None)


def _mask_columns(mask: Tensor | None, columns: slice) -> Tensor | None:
    """Return the part of `mask` for the keys in the slice `columns`; None if `mask` is None."""
    return None if mask is None else mask[..., columns]


def _is_on_accelerator(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def select_kernel(query: Tensor, mask: Tensor | None) -> str:
    """Return the name of the kernel that computes attention: "cpu", "flash", "efficient" or
    "plain".

    "cpu", "flash" and "efficient" are fused kernels of PyTorch. "plain" is matrix products and a
    softmax. A GPU uses "flash" for 16-bit dtypes without a mask, if its compute capability is at
    least 8.0 and a head has at most WIDEST_FLASH elements. It uses "plain" for fp64, and
    "efficient" otherwise.

    query  (batch, heads, queries, width)
    mask   the mask of padding; None: there is no padding
    """
    if query.device.type == "cpu":
        return "cpu"
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return "plain"
    narrow = query.dtype != torch.float32 and mask is None and query.shape[-1] <= WIDEST_FLASH
    if narrow and torch.cuda.get_device_capability(query.device) >= (8, 0):
        return "flash"
    return "efficient"


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute attention of queries to the keys of one device, with the kernel of `select_kernel`.

    query       (batch, heads, queries, width)
    key, value  (batch, key heads, keys, width); heads is a multiple of key heads
    mask        bool (batch, 1, 1, keys): False for keys that are padding; None: there is no padding
    causal      whether query i attends to the keys 0 to i only
    scale       the factor of the scores

    Returns (output, log-sum-exp). The output has shape (batch, heads, queries, width). The
    log-sum-exp of each query's scores has shape (batch, heads, queries). It is needed to merge the
    outputs for the keys of several devices.
    """
    kernel = select_kernel(query, mask)
    if kernel == "flash":
        output, sums, *_ = FLASH_ATTENTION(query, key, value, 0.0, causal, False, scale=scale)
        return output, sums
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    bias = None if mask is None else _as_bias(mask, query, key)
    if kernel == "cpu":
        return CPU_FLASH_ATTENTION(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)
    if kernel == "plain":
        scores = _scores(query, key, bias, causal, scale)
        sums = scores.logsumexp(-1)
        return (scores - sums.unsqueeze(-1)).exp() @ value, sums
    output, sums, *_ = EFFICIENT_ATTENTION(query, key, value, bias, True, 0.0, causal, scale=scale)
    return output, sums[..., : query.shape[2]]  # the kernel pads the sums to its tile size


def attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, output: Tensor, sums: Tensor,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of query, key and value for the keys of one device, and return them in
    this order.

    gradient    the gradient of the output, (batch, heads, queries, width)
    query       (batch, heads, queries, width)
    key, value  (batch, key heads, keys, width); heads is a multiple of key heads
    mask        bool (batch, 1, 1, keys): False for keys that are padding; None: there is no padding
    output      the output over the keys of all devices
    sums        each query's log-sum-exp of scores over the keys of all devices: (batch, heads,
                queries)
    causal      whether query i attends to the keys 0 to i only
    scale       the factor of the scores

    The gradients have the shapes of query, key and value. If key has fewer heads than query, its
    gradient is summed over the query heads that share a key head, and so is that of value.
    """
    kernel, heads = select_kernel(query, mask), key.shape[1]
    if kernel == "flash":
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # for dropout, which is 0
        return FLASH_ATTENTION_BACKWARD(
            gradient.contiguous(), query, key, value, output.contiguous(), sums.contiguous(), None, None, query.shape[2],
            key.shape[2], 0.0, causal, seed, seed, scale=scale,
        )  # fmt: skip
    groups = query.shape[1] // heads
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    bias = None if mask is None else _as_bias(mask, query, key)
    if kernel == "cpu":
        gradients = CPU_FLASH_ATTENTION_BACKWARD(
            gradient, query, key, value, output, sums.transpose(1, 2).contiguous().transpose(1, 2), 0.0, causal,
            attn_mask=bias, scale=scale,
        )  # fmt: skip
    elif kernel == "plain":
        shares = (_scores(query, key, bias, causal, scale) - sums.unsqueeze(-1)).exp()
        inner = shares * (gradient @ value.mT - (gradient * output).sum(-1, keepdim=True)) * scale
        gradients = inner @ key, inner.mT @ query, shares.mT @ gradient
    else:
        # the kernel needs the padding that its forward adds
        padded = functional.pad(sums, (0, -sums.shape[-1] % 32), value=float("inf"))
        seed = torch.zeros((), dtype=torch.int64, device=query.device)  # for dropout, which is 0
        gradients = EFFICIENT_ATTENTION_BACKWARD(
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
    grad_query, grad_key, grad_value = gradients
    if groups > 1:
        grad_key, grad_value = (
            part.unflatten(1, (heads, groups)).to(torch.promote_types(part.dtype, torch.float32)).sum(2)
            for part in (grad_key, grad_value)
        )
    return grad_query, grad_key, grad_value


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Return the attention scores, (batch, heads, queries, keys): query @ key^T x scale, plus
    `bias`. If `causal`, the scores of later keys are -inf.
    """
    scores = query @ key.mT * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Turn a mask of padding into a bias that is added to the scores.

    mask  bool (batch, 1, 1, keys): False for keys that are padding

    Returns (batch, heads, queries, keys): 0 for keys that count, and the dtype's lowest number for
    padding. The bias is not -inf, because each log-sum-exp has to be finite, even if all keys of a
    device are padding. In this case the log-sum-exp is so low that the device adds nothing to the
    merged output.
    """
    keys = mask.shape[-1]
    if _is_on_accelerator(query):  # the CUDA kernel needs rows that are aligned to 16 bytes
        mask = functional.pad(mask, (0, -keys % ALIGNED))
    bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)[..., :keys]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
