"""Sequence parallelism: of what tensor parallelism leaves whole (norms, dropout, residual stream), each of its devices does a
part of every sequence.

What enters a divided module is gathered, what leaves it is summed and scattered: as many bytes as the sum alone would send.
What a product by columns keeps for backward is this device's part of its input, gathered again there.

Source  Korthikanti et al. 2022, arXiv:2205.05198, sections 4.2 and 4.3.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tightfit.errors import InputError
from tightfit.methods.collectives import gather_rows, scatter_rows
from tightfit.plan import Plan

_DIVIDED_BY = "sequences_divided_by"


class Sequences:
    """Divides what goes from block to block along its sequence: (samples, length, width) -> (samples, length / tp, width)."""

    def __init__(self, blocks: list[tuple[str, nn.Module]], plan: Plan, group: dist.ProcessGroup) -> None:
        self.blocks, self.plan, self.group, self.size = blocks, plan, group, dist.get_world_size(group)
        self.length: int | None = None  # of the sequences that are under way, where it does not divide
        self.again = gathers_again(plan)
        self.regions: set[nn.Module] = set()
        if not blocks:
            raise InputError(
                "plan: sequence_parallel", "the model has no repeated blocks", "use sequence_parallel: false"
            )
        before(blocks[0][1], self._divide)
        setattr(blocks[0][1], _DIVIDED_BY, self)
        blocks[-1][1].register_forward_hook(self._join)

    def enter(self, parent: nn.Module, module: nn.Module) -> None:
        """`module`, a child of `parent`, is a product by columns: what it is given is to be whole.

        Its parent's input is made so, as that may look at its shape; of a block its own input, as that goes past it too.
        """
        inner = parent if all(parent is not block for _, block in self.blocks) else module
        if inner not in self.regions:
            self.regions.add(inner)
            before(inner, self._gather)
        product = module.forward

        def forward(input: Tensor) -> Tensor:
            kept = None if torch.compiler.is_compiling() else getattr(input, "kept", None)
            if kept is None:
                return product(input)
            with saved_tensors_hooks(kept.put_away, kept.fetch):
                return product(input)

        module.forward = forward  # type: ignore[method-assign]

    def leave(self, product: Tensor) -> Tensor:
        """The sum over devices of a product by rows: this device's part of the sequence."""
        return _Scattered.apply(product, self.group)

    def parameters(self, model: nn.Module, cut: set[str]) -> frozenset[str]:
        """Names of those whose gradients each device has of its part of the sequences only. Raises InputError."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        found = {names[id(p)] for _, block in self.blocks for p in block.parameters() if id(p) in names} - cut
        for region in self.regions:
            inside = {names[id(p)] for p in region.parameters()} & found - _biases(region, names)
            if inside:
                raise InputError(
                    "plan: sequence_parallel",
                    f"{min(inside)} is whole within a module that is divided",
                    "use sequence_parallel: false",
                )
        return frozenset(found)

    def _divide(self, hidden: Tensor) -> Tensor:
        if hidden.dim() != 3:
            raise InputError(
                "plan: sequence_parallel",
                f"the first block's input is of shape {tuple(hidden.shape)}, not (samples, length, width)",
                "use sequence_parallel: false",
            )
        self._note(hidden.shape[1])
        return _Divided.apply(hidden, self.group)

    def _note(self, length: int) -> None:
        self.length = length if length % self.size else None
        if self.length is not None and self.plan.pp > 1 and self.plan.recompute != "none":
            raise InputError(  # a forward that is repeated may come after others, of another length
                "plan: sequence_parallel with recompute in a pipeline",
                f"sequences of {length} positions, which tp={self.size} devices do not divide evenly",
                f"use lengths that are a multiple of {self.size}, recompute: none, or sequence_parallel: false",
            )

    def elsewhere(self, hidden: Tensor) -> Tensor:
        """What the first block is given, where another device of a pipeline has it: of the shape of a part, a view."""
        self._note(hidden.shape[1])
        return hidden[:, : -(-hidden.shape[1] // self.size)]

    def _join(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (_Joined.apply(output[0], self.length, self.group), *output[1:])
        return _Joined.apply(output, self.length, self.group)

    def _gather(self, hidden: Tensor) -> Tensor:
        if torch.is_autocast_enabled(hidden.device.type):  # as the products would, and half as much travels
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        if not self.again or not hidden.requires_grad:
            return _Gathered.apply(hidden, self.length, self.group, None)
        kept = _Kept(hidden.detach(), self.length, self.group)
        whole = _Gathered.apply(hidden, self.length, self.group, kept)
        whole.kept = kept
        kept.storage = whole.untyped_storage()._cdata
        return whole


def dividing(block: nn.Module) -> Sequences | None:
    """What divides sequences before a block: the model's first, where they are divided."""
    found: Sequences | None = getattr(block, _DIVIDED_BY, None)
    return found


def gathers_again(plan: Plan) -> bool:
    """Whether a device keeps its part of the inputs of products, and gathers them again in backward: not where that has them
    anyway, nor in compiled blocks."""
    return plan.recompute == "none" and "activations" not in plan.offload and plan.compile == "none"


def before(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change the first argument of a module's forward, however it is given."""
    name = next(iter(inspect.signature(module.forward).parameters))

    def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if inputs:
            return (change(inputs[0]), *inputs[1:]), named
        return inputs, {**named, name: change(named[name])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _biases(region: nn.Module, names: dict[int, str]) -> set[str]:
    """Of the modules whose products are summed: added after that, to a part of each sequence."""
    return {
        names[id(module.bias)]
        for module in region.modules()
        if getattr(module, "sums", False) and isinstance(module.bias, nn.Parameter)
    }


class _Kept:
    """This device's part of a gathered tensor, in whose place it is kept for backward."""

    def __init__(self, part: Tensor, length: int | None, group: dist.ProcessGroup) -> None:
        self.part, self.length, self.group = part, length, group
        self.storage = 0
        self.whole: Tensor | None = None

    def put_away(self, saved: Tensor) -> Any:
        if saved.untyped_storage()._cdata != self.storage:
            return saved
        return saved.shape, saved.stride(), saved.storage_offset()

    def fetch(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if self.whole is None:  # for the first of several products of it
            self.whole = gathered(self.part, self.length, self.group)
        return self.whole.as_strided(*saved)


def gathered(part: Tensor, length: int | None, group: dist.ProcessGroup) -> Tensor:
    """(samples, part, width) of each device -> (samples, length, width), without what padded the last part."""
    size = dist.get_world_size(group)
    parts = part.new_empty(size, *part.shape)
    parts[dist.get_rank(group)] = part
    gather_rows(parts, group)
    whole = parts.transpose(0, 1).reshape(part.shape[0], -1, part.shape[2])
    return whole if length is None else whole[:, :length].contiguous()


def scattered(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(samples, length, width) of each device -> of the sum over devices this one's part."""
    parts = torch.stack(_parts(whole, dist.get_world_size(group)))
    mine = torch.empty_like(parts[0])
    scatter_rows(mine, parts, group)
    return mine


def own(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This device's part of what all of them have, which does not keep the whole: of one sample a part is contiguous as it is."""
    part = _parts(whole, dist.get_world_size(group))[dist.get_rank(group)]
    return part.clone(memory_format=torch.contiguous_format)


def _parts(whole: Tensor, size: int) -> tuple[Tensor, ...]:
    missing = -whole.shape[1] % size
    if missing:
        whole = nn.functional.pad(whole, (0, 0, 0, missing))
    return whole.chunk(size, 1)


class _Divided(torch.autograd.Function):
    """Forward this device's part, backward the gradients of all parts."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.length, ctx.group = whole.shape[1], group
        missing = -whole.shape[1] % dist.get_world_size(group)
        if missing:  # with the last position: of zeros a norm's inverse deviation may be infinite in fp16
            whole = torch.cat((whole, whole[:, -1:].expand(-1, missing, -1)), 1)
        return own(whole, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gathered(gradients[0], ctx.length, ctx.group), None


class _Joined(torch.autograd.Function):
    """Forward all parts; backward this device's part of a gradient that is the same everywhere."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, length: int | None, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(part, length, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return own(gradients[0], ctx.group), None, None


class _Gathered(torch.autograd.Function):
    """Forward all parts; backward the sum over devices of this part's gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, length: int | None, group: dist.ProcessGroup, kept: _Kept | None) -> Tensor:
        ctx.group, ctx.kept = group, kept
        return gathered(part, length, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.kept is not None:
            ctx.kept.whole = None  # its products have had it
        return scattered(gradients[0], ctx.group), None, None, None


class _Scattered(torch.autograd.Function):
    """Forward this device's part of the sum over devices; backward the gradients of all parts."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.length, ctx.group = whole.shape[1], group
        return scattered(whole, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gathered(gradients[0], ctx.length, ctx.group), None
