"""Context parallelism: each sample's sequence is divided among devices, and attention goes around them in a ring.

Saves   activations, by the number of devices: the only way to a sequence whose activations no device holds at one sample.
Costs   in each block the keys and values pass all devices in forward, and again in backward with their gradients; beside the
        products, which hide them where sequences are long. Parameters are everyone's, or divided by zero.
When    one sample's activations do not fit with recompute, or tp would leave a node. Long sequences: of many thousand tokens.
Order   after the data, which it cuts; in the place of `attention`; before the loss, whose targets it moves.
Source  Liu et al. 2023, arXiv:2310.01889 (ring attention); the even shares under a causal mask: Grattafiori et al. 2024,
        arXiv:2407.21783, section 3.3.2; merging by log-sum-exp: Dao et al. 2022, arXiv:2205.14135.

A sequence is cut into 2 x cp chunks, and a device has one from the front and its counterpart from the back, so that under a
causal mask all have as much to do. Works on models that take their attention from transformers' interface, and positions.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tightfit.errors import InputError
from tightfit.ledger import Ledger
from tightfit.machine import Machine
from tightfit.methods.mesh import message
from tightfit.methods.run import Data, Filler, Run
from tightfit.models import task_of
from tightfit.models.objective import IGNORED, TASKS, Batch, map_tensors, next_token_targets
from tightfit.plan import Plan

aten = torch.ops.aten
FIELDS = ("cp",)
VARIANTS = ({"cp": 2}, {"cp": 2, "zero": 3})
NAME = "tightfit_ring"
ALIGNED = 8  # numbers: CUDA's kernels take heads, and rows of a mask, of a multiple of so many
WIDEST_FLASH = 256  # numbers in a head, at most
_BEYOND = ("softcap", "s_aux", "position_bias", "sliding_window")  # what some models' attention has besides
_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def wanted(plan: Plan) -> bool:
    return plan.cp > 1


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """The profile traces one device's pieces of the sequences, with what it sends around the ring."""
    sends = [
        operation
        for passage in ledger.training
        for operation in passage.timeline.operations
        if operation.name == "c10d.send"
    ]
    samples, times = ledger.micro_batch, ledger.micro_batches
    sent = sum(operation.moved.at(samples) * operation.count.at(samples) for operation in sends)
    calls = sum(operation.count.at(samples) for operation in sends)
    around = message("keys and values", sent * times, plan, machine, ("cp",), calls * times)
    return replace(ledger, messages=(*ledger.messages, around))


def apply(run: Run, plan: Plan) -> Run:
    assert run.mesh is not None
    task = task_of(run.job.model)
    _refuse_what_cannot_be_cut(run.model, task, plan)
    ring = _Place(run.mesh.lines["context"])
    _register()
    run.model.set_attn_implementation(NAME)  # type: ignore[operator]
    _rings.update(dict.fromkeys(run.model.modules(), ring))
    causal = task == "causal-lm"
    objective = TASKS["masked-lm"]  # whose labels stand where they count: `cut` moves the others' there
    data = None if run.data is None else Pieces(run.data, causal, run.mesh.piece, plan.cp, plan.pin_memory)
    return replace(run, objective=objective, loss_sum=partial(objective.total, run.model), data=data or run.data)


def _refuse_what_cannot_be_cut(model: nn.Module, task: str | None, plan: Plan) -> None:
    asked, config = f"plan: cp={plan.cp}", getattr(model, "config", None)
    if task not in ("causal-lm", "masked-lm"):
        raise InputError(asked, f"a job of {task or 'its own'} has no loss of each position", "use cp: 1")
    takes = inspect.signature(model.forward).parameters
    if (
        getattr(config, "_attn_implementation", None) != "sdpa"
        or "position_ids" not in takes
        or not _asks_for_attention(model)
    ):
        raise InputError(
            asked,
            f"{type(model).__name__} does not take its attention from transformers' interface, and position_ids",
            "use cp: 1, and tp or recompute for long sequences",
        )
    if any(map(_counts_its_positions, model.modules())):
        raise InputError(
            asked,
            f"{type(model).__name__} numbers positions by which tokens are padding, over the whole sequence",
            "use cp: 1",
        )
    mixing = next((name for name, module in model.named_modules() if _mixes_positions(module)), None)
    if mixing is not None or getattr(config, "trigram_input", False):
        raise InputError(
            asked, f"the model mixes positions outside of attention ({mixing or 'trigram_input'})", "use cp: 1"
        )
    for name in _DROPOUT:
        share = getattr(config, name, 0.0)
        if share:
            raise InputError(
                asked, f"the model drops attention's probabilities ({name}={share})", f"set model.{name}: 0.0"
            )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds != {"full_attention"} or window is not None:
        raise InputError(asked, "the model's attention sees a window only, which a ring does not cut", "use cp: 1")


def _asks_for_attention(model: nn.Module) -> bool:
    """Whether a model's code asks transformers for an attention function. Falcon, say, calls torch's own, which knows of no ring."""
    names = {kind.__module__ for kind in type(model).__mro__} - {"transformers.modeling_utils"}
    modules = [sys.modules.get(name) for name in names]
    return any(hasattr(module, "ALL_ATTENTION_FUNCTIONS") for module in modules if module is not None)


def _mixes_positions(module: nn.Module) -> bool:
    """Whether a module of a language model looks at neighbours, which another device may have."""
    return isinstance(module, nn.RNNBase) or (isinstance(module, nn.Conv1d) and module.kernel_size != (1,))


def _counts_its_positions(module: nn.Module) -> bool:
    """As RoBERTa and its relatives do: their positions begin behind the padding's number, and 0, 1, 2, ... are none of theirs."""
    positions = getattr(module, "position_embeddings", None)
    return isinstance(positions, nn.Embedding) and positions.padding_idx is not None


def cut(batch: Batch, causal: bool, piece: int, pieces: int) -> Batch:
    """Of a batch, the chunks `piece` and 2 x pieces - 1 - piece of each sequence, of 2 x pieces; padded where those are uneven.

    (samples, length) becomes (samples, 2 x chunk); labels are moved first so that each stands where it is predicted, and
    position_ids say where each token is in its sequence. Raises InputError.
    """
    if not isinstance(batch, dict) or "input_ids" not in batch or "position_ids" in batch:
        raise InputError(
            f"plan: cp={pieces}",
            "batches with position_ids of their own"
            if isinstance(batch, dict) and "position_ids" in batch
            else "batches without input_ids",
            "give input_ids and labels, one sequence in a row, or use cp: 1",
        )
    tokens = batch["input_ids"]
    samples, length = tokens.shape
    missing = -length % (2 * pieces)
    fields = dict(batch)
    if causal:
        fields["labels"] = next_token_targets(batch)
    elif missing and "attention_mask" not in fields:
        fields["attention_mask"] = torch.ones_like(tokens)  # what is padded here must not be seen
    positions = torch.arange(length + missing, device=tokens.device).expand(samples, -1)
    found = {}
    for name, value in fields.items():
        if isinstance(value, Tensor) and value.shape[:2] == tokens.shape:
            fill = IGNORED if name == "labels" else 0
            value = _chunks(functional.pad(value, (0, missing), value=fill), piece, pieces)
        found[name] = value
    return {**found, "position_ids": _chunks(positions, piece, pieces)}


def _chunks(value: Tensor, piece: int, pieces: int) -> Tensor:
    chunks = value.chunk(2 * pieces, 1)
    return torch.cat([chunks[piece], chunks[2 * pieces - 1 - piece]], 1)


@dataclass(frozen=True)
class Pieces:
    """The `Data` of one device: of each sequence, its piece. The others of its ring read the same samples."""

    data: Data
    causal: bool
    piece: int
    pieces: int
    pinned: bool

    @property
    def samples(self) -> int | None:
        return self.data.samples

    @property
    def sample_items(self) -> int:
        return self.data.sample_items

    @property
    def ragged(self) -> bool:
        return self.data.ragged

    @property
    def damaged(self) -> int:
        return self.data.damaged

    @property
    def tokenizer(self) -> Any:
        return self.data.tokenizer

    def steps(self, consumed: int, until: int | None) -> Iterator[list[Batch]]:
        for micro_batches in self.data.steps(consumed, until):
            yield [self.cut(batch) for batch in micro_batches]

    def held_out(self, samples: int) -> Iterator[Batch]:
        return map(self.cut, self.data.held_out(samples))

    def example(self) -> Batch:
        return self.data.example()

    def cut(self, batch: Batch) -> Batch:
        if isinstance(batch, Filler):
            return Filler(self.cut(batch.batch))
        mine = cut(batch, self.causal, self.piece, self.pieces)
        return map_tensors(lambda tensor: tensor.pin_memory(), mine) if self.pinned else mine


class _Place:
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


_rings: WeakKeyDictionary[nn.Module, _Place] = WeakKeyDictionary()  # of models, whose parts hold nothing else of a run


def _register() -> None:
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
        ring: _Place,
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        output = torch.zeros(query.shape, dtype=wide, device=query.device)
        total = torch.full(query.shape[:-1], float("-inf"), dtype=wide, device=query.device)
        for step, (keys, values, bias) in enumerate(_around(ring, key, value, seen)):
            rows, columns = _parts(step, ring, causal, query.shape[2])
            part, sums = _attention(
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
            rows, columns = _parts(step, ring, ctx.causal, query.shape[2])
            parts = _attention_backward(
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
    ring: _Place, key: Tensor, value: Tensor, seen: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Keys, values and mask of this device, of the one before it, and so on; the next are on their way meanwhile."""
    held = [key, value, *([] if seen is None else [seen.to(key.dtype)])]
    for step in range(ring.size):
        arriving = ring.hand_on(tuple(held)) if step < ring.size - 1 else None
        yield held[0], held[1], held[2] > 0 if seen is not None else None
        if arriving is not None:
            held = arriving.wait()


def _parts(step: int, ring: _Place, causal: bool, length: int) -> tuple[slice, slice]:
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


def _attention(
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


def _attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, output: Tensor, sums: Tensor,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value; output and sums are those over all keys, wherever they are."""
    kernel, heads = kernel_of(query, seen), key.shape[1]
    if kernel == "flash":
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of a dropout that is not there
        return aten._scaled_dot_product_flash_attention_backward(
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
        found = aten._scaled_dot_product_efficient_attention_backward(
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
