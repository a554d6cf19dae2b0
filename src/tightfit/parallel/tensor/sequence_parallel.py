"""Sequence parallelism: shard hidden states along the sequence where tensor parallelism replicates
them (norms, dropout, the residual stream).

The input of a column-parallel module is all-gathered along the sequence, and the output of a
row-parallel module is reduce-scattered. These two collectives together send as many bytes as the
all-reduce that they replace. For backward, a column-parallel module saves only this device's shard
of its input; backward all-gathers the shards again.

Example: hidden states of shape (4, 10, 64) on tp=4. Ten positions are padded to 12, so each
device's shard between the sharded modules has shape (4, 3, 64). Within the sharded modules, each
device has (4, 10, 64): the padding is removed after the all-gather.

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

from tightfit._torch.tensors import storage_id
from tightfit.distributed.collectives import all_gather, reduce_scatter
from tightfit.errors import InputError
from tightfit.plan import Plan

_ATTRIBUTE = "sequences_divided_by"


class SequenceParallel:
    """Shards the hidden states between blocks along the sequence: (samples, length, width) ->
    (samples, ceil(length / tp), width).

    blocks  (name, block) of each of the model's blocks. The input of the first block is sharded,
            and the output of the last block is all-gathered
    plan    the plan
    group   the process group of the tp devices

    Raises InputError if the model has no repeated blocks.
    """

    def __init__(self, blocks: list[tuple[str, nn.Module]], plan: Plan, group: dist.ProcessGroup) -> None:
        self.blocks, self.plan, self.group, self.size = blocks, plan, group, dist.get_world_size(group)
        self.length: int | None = None  # of current sequences; None if tp divides it
        self.gathers_again = regathers_inputs(plan)
        self.regions: set[nn.Module] = set()
        if not blocks:
            raise InputError(
                "plan: sequence_parallel", "the model has no repeated blocks", "use sequence_parallel: false"
            )
        transform_input(blocks[0][1], self._shard_input)
        setattr(blocks[0][1], _ATTRIBUTE, self)
        blocks[-1][1].register_forward_hook(self._gather_output)

    def gather_input(self, parent: nn.Module, module: nn.Module) -> None:
        """All-gather the input of `module`, a column-parallel child of `parent`.

        The input of the parent is gathered, because the parent's code may use the full shape. If
        the parent is a block, only the input of `module` is gathered, because the block's input is
        also the residual stream, which stays sharded.
        """
        inner = parent if all(parent is not block for _, block in self.blocks) else module
        if inner not in self.regions:
            self.regions.add(inner)
            transform_input(inner, self._gather)
        product = module.forward

        def forward(input: Tensor) -> Tensor:
            kept = None if torch.compiler.is_compiling() else getattr(input, "kept", None)
            if kept is None:
                return product(input)
            with saved_tensors_hooks(kept.pack, kept.unpack):
                return product(input)

        module.forward = forward  # type: ignore[method-assign]

    def reduce_scatter(self, product: Tensor) -> Tensor:
        """Reduce-scatter the output of a row-parallel module.

        (samples, length, width) on each device -> this device's positions of the sum over the
        devices.
        """
        return _ReduceScatter.apply(product, self.group)

    def partial_gradients(self, model: nn.Module, sharded: set[str]) -> frozenset[str]:
        """Return the names of the replicated parameters whose gradients need an all-reduce over tp.

        Each device computes the gradients of these parameters from its own positions only.

        sharded  names of the sharded parameters, which are not in the result

        Raises InputError if a sharded module contains a replicated parameter.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        found = {names[id(p)] for _, block in self.blocks for p in block.parameters() if id(p) in names} - sharded
        for region in self.regions:
            inside = {names[id(p)] for p in region.parameters()} & found - _reduced_biases(region, names)
            if inside:
                raise InputError(
                    "plan: sequence_parallel",
                    f"the parameter {min(inside)} is not sharded, but lies in a module whose other parameters are sharded",
                    "use sequence_parallel: false",
                )
        return frozenset(found)

    def _shard_input(self, hidden: Tensor) -> Tensor:
        """Return this device's shard of the first block's input.

        Raises InputError unless the input has three dimensions.
        """
        if hidden.dim() != 3:
            raise InputError(
                "plan: sequence_parallel",
                f"the first block's input has shape {tuple(hidden.shape)}, not (samples, length, width)",
                "use sequence_parallel: false",
            )
        self._note_length(hidden.shape[1])
        return _ScatterToSequence.apply(hidden, self.group)

    def _note_length(self, length: int) -> None:
        """Store the length if tp does not divide it, so that padding can be removed after gathers.

        Raises InputError if this cannot work with the plan's pipeline and recompute.
        """
        self.length = length if length % self.size else None
        if self.length is not None and self.plan.pp > 1 and self.plan.recompute != "none":
            raise InputError(  # a recomputation may come after a forward of another length
                "plan: sequence_parallel with recompute in a pipeline",
                f"sequences of {length} positions, which tp={self.size} devices do not divide evenly",
                f"use lengths that are a multiple of {self.size}, recompute: none, or sequence_parallel: false",
            )

    def stub_input(self, hidden: Tensor) -> Tensor:
        """Return a view of `hidden` with the shape of a shard, for the stub of the first block on
        pipeline ranks without this block.
        """
        self._note_length(hidden.shape[1])
        return hidden[:, : -(-hidden.shape[1] // self.size)]

    def _gather_output(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """All-gather the output of the last block, as its forward hook."""
        if isinstance(output, tuple):
            return (_GatherFromSequence.apply(output[0], self.length, self.group), *output[1:])
        return _GatherFromSequence.apply(output, self.length, self.group)

    def _gather(self, hidden: Tensor) -> Tensor:
        """All-gather the input of column-parallel modules. Save the shard alone if
        `gathers_again`."""
        # the matrix products would cast anyway; a cast before the gather halves the sent bytes
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        if not self.gathers_again or not hidden.requires_grad:
            return _AllGather.apply(hidden, self.length, self.group, None)
        kept = _SavedShard(hidden.detach(), self.length, self.group)
        whole = _AllGather.apply(hidden, self.length, self.group, kept)
        whole.kept = kept
        kept.storage = storage_id(whole)
        return whole


def sequence_parallel_of(block: nn.Module) -> SequenceParallel | None:
    """Return the SequenceParallel that shards the input of `block`; None if `block` is not the
    model's first block or sequences are not sharded.
    """
    found: SequenceParallel | None = getattr(block, _ATTRIBUTE, None)
    return found


def regathers_inputs(plan: Plan) -> bool:
    """Return whether column-parallel modules save only a shard of their input for backward.

    False with recompute or offloaded activations, where the full input is not kept on the device
    anyway, and in compiled blocks.
    """
    return plan.recompute == "none" and "activations" not in plan.offload and plan.compile == "none"


def transform_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Apply `change` to the first argument of a module's forward, in each call.

    The argument may be passed by position or by name.
    """
    name = next(iter(inspect.signature(module.forward).parameters))

    def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if inputs:
            return (change(inputs[0]), *inputs[1:]), named
        return inputs, {**named, name: change(named[name])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _reduced_biases(region: nn.Module, names: dict[int, str]) -> set[str]:
    """Return the names of the biases of row-parallel modules in `region`.

    These biases are added after the reduce-scatter, to this device's positions only.

    names: id of a parameter -> its name in the model.
    """
    return {
        names[id(module.bias)]
        for module in region.modules()
        if getattr(module, "sums", False) and isinstance(module.bias, nn.Parameter)
    }


class _SavedShard:
    """This device's shard of an all-gathered tensor, which is saved for backward in place of the
    full tensor.

    part     the shard
    length   the length of the full sequence, if it was padded for the shards; else None
    group    the tp devices
    storage  identity of the full tensor's storage
    whole    the full tensor, from its gather in backward until its last use
    """

    def __init__(self, part: Tensor, length: int | None, group: dist.ProcessGroup) -> None:
        self.part, self.length, self.group = part, length, group
        self.storage = 0
        self.whole: Tensor | None = None

    def pack(self, saved: Tensor) -> Any:
        """Return what autograd saves for a tensor.

        This is (shape, strides, offset) for a view of the gathered tensor, else the tensor itself.
        """
        if storage_id(saved) != self.storage:
            return saved
        return saved.shape, saved.stride(), saved.storage_offset()

    def unpack(self, saved: Any) -> Tensor:
        """Return the tensor that `pack` was given. All-gathers the full tensor again if needed."""
        if isinstance(saved, Tensor):
            return saved
        if self.whole is None:  # one gather for all products of the same input
            self.whole = all_gather_sequence(self.part, self.length, self.group)
        return self.whole.as_strided(*saved)


def all_gather_sequence(part: Tensor, length: int | None, group: dist.ProcessGroup) -> Tensor:
    """All-gather along the sequence: (samples, shard length, width) of each device -> (samples,
    length, width).

    length  the length without padding; None: the shards have no padding
    """
    size = dist.get_world_size(group)
    parts = part.new_empty(size, *part.shape)
    parts[dist.get_rank(group)] = part
    all_gather(parts, group)
    whole = parts.transpose(0, 1).reshape(part.shape[0], -1, part.shape[2])
    return whole if length is None else whole[:, :length].contiguous()


def reduce_scatter_sequence(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter along the sequence: (samples, length, width) of each device -> this device's
    positions of the sum, (samples, shard length, width).

    Pads the sequence with zeros if the number of devices does not divide the length.
    """
    parts = torch.stack(_padded_chunks(whole, dist.get_world_size(group)))
    mine = torch.empty_like(parts[0])
    reduce_scatter(mine, parts, group)
    return mine


def local_shard(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a copy of this device's shard of a tensor that all devices have.

    It is a copy because with one sample the shard would be a contiguous view, which would keep the
    full tensor's memory allocated.
    """
    part = _padded_chunks(whole, dist.get_world_size(group))[dist.get_rank(group)]
    return part.clone(memory_format=torch.contiguous_format)


def _padded_chunks(whole: Tensor, size: int) -> tuple[Tensor, ...]:
    """Pad `whole` with zeros, and split it into `size` equal chunks along the sequence."""
    missing = -whole.shape[1] % size
    if missing:
        whole = nn.functional.pad(whole, (0, 0, 0, missing))
    return whole.chunk(size, 1)


class _ScatterToSequence(torch.autograd.Function):
    """Forward: return this device's shard. Backward: all-gather the gradient."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.length, ctx.group = whole.shape[1], group
        missing = -whole.shape[1] % dist.get_world_size(group)
        # pad by repeating the last position: for zeros, 1/std of a norm may be infinite in fp16
        if missing:
            whole = torch.cat((whole, whole[:, -1:].expand(-1, missing, -1)), 1)
        return local_shard(whole, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return all_gather_sequence(gradients[0], ctx.length, ctx.group), None


class _GatherFromSequence(torch.autograd.Function):
    """Forward: all-gather. Backward: return this device's shard of the gradient, which is the same
    on all devices.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, length: int | None, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather_sequence(part, length, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return local_shard(gradients[0], ctx.group), None, None


class _AllGather(torch.autograd.Function):
    """Forward: all-gather. Backward: reduce-scatter the gradient."""

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, length: int | None, group: dist.ProcessGroup, kept: _SavedShard | None
    ) -> Tensor:
        ctx.group, ctx.kept = group, kept
        return all_gather_sequence(part, length, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.kept is not None:
            ctx.kept.whole = None  # the backward of all products of this input has run
        return reduce_scatter_sequence(gradients[0], ctx.group), None, None, None


class _ReduceScatter(torch.autograd.Function):
    """Forward: reduce-scatter. Backward: all-gather the gradient."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.length, ctx.group = whole.shape[1], group
        return reduce_scatter_sequence(whole, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return all_gather_sequence(gradients[0], ctx.length, ctx.group), None
