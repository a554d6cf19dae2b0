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
from torch.utils.checkpoint import checkpoint

from tightfit._torch.tensors import storage_id
from tightfit.distributed.collectives import all_gather, reduce_scatter
from tightfit.errors import InputError
from tightfit.models.replaced_forward import refuse_copies
from tightfit.plan import Plan

_ATTRIBUTE = "sequences_divided_by"


class SequenceParallel:
    """Shards the hidden states between the tp-sharded modules along the sequence: from (samples,
    length, width) to (samples, ceil(length / tp), width).

    Creating the object makes the model's first block shard its input, and the last block all-gather
    its output.

    blocks  (name, block) of each of the model's blocks
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
        """Make the forward of `module`, a column-parallel child of `parent`, get an input that is
        all-gathered along the sequence.

        If the parent is a block, the input of `module` is gathered, because the block's input is
        also the residual stream, which stays sharded. Otherwise the input of the parent is
        gathered, because the parent's code may use the full shape.
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
        refuse_copies(module)

    def reduce_scatter(self, product: Tensor) -> Tensor:
        """Sum the outputs of a row-parallel module over the tp devices, and return this device's
        shard of the sum along the sequence.

        product  this device's summand, (samples, length, width). The result is (samples,
                 ceil(length / tp), width)
        """
        return _ReduceScatter.apply(product, self.group)

    def partial_gradients(self, model: nn.Module, sharded: set[str], replicated: frozenset[str]) -> frozenset[str]:
        """Return the names of the parameters in blocks whose gradients need an all-reduce over tp.
        These are the parameters that tp does not shard: each device computes their gradients from
        its own positions only.

        sharded     names of the parameters that tp shards
        replicated  names of parameters that tp does not shard either, but whose gradients need the
                    all-reduce even without sequence parallelism

        Raises InputError if a module whose input is all-gathered contains a parameter that tp does
        not shard, other than the bias of a row-parallel module.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        found = {names[id(p)] for _, block in self.blocks for p in block.parameters() if id(p) in names} - sharded
        for region in self.regions:
            inside = {names[id(p)] for p in region.parameters()} & found - _reduced_biases(region, names) - replicated
            if inside:
                raise InputError(
                    "plan: sequence_parallel",
                    f"the parameter {min(inside)} is not sharded, but lies in a module whose other parameters are sharded",
                    "use sequence_parallel: false",
                )
        return frozenset(found)

    def _shard_input(self, hidden: Tensor) -> Tensor:
        """Return this device's shard of the first block's input along the sequence.

        hidden  the full input, (samples, length, width)

        Raises InputError if the input does not have three dimensions.
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
        """Remember the length of the current sequences if tp does not divide it, so that gathers
        can remove the padding.

        Raises InputError if tp does not divide the length and the plan has both a pipeline and
        recompute.
        """
        self.length = length if length % self.size else None
        if self.length is not None and self.plan.pp > 1 and self.plan.recompute not in ("none", "attention"):
            raise InputError(  # a recomputation may come after a forward of another length
                "plan: sequence_parallel with recompute in a pipeline",
                f"sequences of {length} positions, which tp={self.size} devices do not divide evenly",
                f"use lengths that are a multiple of {self.size}, recompute: none, or sequence_parallel: false",
            )

    def stub_input(self, hidden: Tensor) -> Tensor:
        """Return a view of `hidden`, (samples, length, width), with the shape of a shard: (samples,
        ceil(length / tp), width).

        On pipeline ranks without the first block, a stub replaces this block. The stub uses this
        view to make an output of the right shape.
        """
        self._note_length(hidden.shape[1])
        return hidden[:, : -(-hidden.shape[1] // self.size)]

    def _gather_output(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Return the output of the last block, all-gathered along the sequence. This is the block's
        forward hook. If the output is a tuple, only its first element is gathered.
        """
        if isinstance(output, tuple):
            return (_GatherFromSequence.apply(output[0], self.length, self.group), *output[1:])
        return _GatherFromSequence.apply(output, self.length, self.group)

    def _gather(self, hidden: Tensor) -> Tensor:
        """Return the input of column-parallel modules, all-gathered along the sequence. If
        `gathers_again`, only this device's shard is saved for backward, and backward gathers again.
        """
        # the matrix products would cast anyway; a cast before the gather halves the sent bytes
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        if not self.gathers_again or not hidden.requires_grad:
            return self._all_gather(hidden, None)
        if torch.compiler.is_compiling():  # the compiler recomputes what a checkpoint contains, here the gather
            return checkpoint(self._all_gather, hidden, None, use_reentrant=False, preserve_rng_state=False)
        kept = _SavedShard(hidden.detach(), self.length, self.group)
        whole = self._all_gather(hidden, kept)
        whole.kept = kept  # type: ignore[attr-defined]
        kept.storage = storage_id(whole)
        return whole

    def _all_gather(self, hidden: Tensor, kept: _SavedShard | None) -> Tensor:
        """Return `hidden`, all-gathered along the sequence. `kept` saves the shard for backward, and
        its full tensor is freed after backward; None: nothing is saved in addition."""
        whole: Tensor = _AllGather.apply(hidden, self.length, self.group, kept)
        return whole


def sequence_parallel_of(block: nn.Module) -> SequenceParallel | None:
    """Return the SequenceParallel that shards the input of `block`. Return None if `block` is not
    the model's first block, or if the model has no sequence parallelism.
    """
    found: SequenceParallel | None = getattr(block, _ATTRIBUTE, None)
    return found


def regathers_inputs(plan: Plan) -> bool:
    """Return whether column-parallel modules save only this device's shard of their input for
    backward, so that backward has to all-gather the full input again.

    They do not if blocks are recomputed or activations offloaded, where the full input is not kept on the
    device anyway.
    """
    return plan.recompute in ("none", "attention") and "activations" not in plan.offload


def transform_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Make each call of `module` replace the first argument of its forward by `change(argument)`.
    The argument may be passed by position or by name.
    """
    name = next(iter(inspect.signature(module.forward).parameters))

    def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if inputs:
            return (change(inputs[0]), *inputs[1:]), named
        return inputs, {**named, name: change(named[name])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


SUMS_OUTPUT = "_tightfit_sums_output"  # attribute of a row-parallel module, whose output is summed over tp


def _reduced_biases(region: nn.Module, names: dict[int, str]) -> set[str]:
    """Return the names of the biases of the row-parallel modules in `region`. Each is added after
    the reduce-scatter, to this device's positions only.

    names  id of a parameter -> its name in the model
    """
    return {
        names[id(module.bias)]
        for module in region.modules()
        if getattr(module, SUMS_OUTPUT, False) and isinstance(module.bias, nn.Parameter)
    }


class _SavedShard:
    """Saves this device's shard of an all-gathered tensor for backward, in place of the full
    tensor. `pack` and `unpack` are autograd's hooks for saved tensors.

    part     the shard
    length   the length of the full sequence if the shards are padded; else None
    group    the tp devices
    storage  identifies the storage of the full tensor in forward
    whole    the full tensor, from the time when backward gathers it until its last use; else None
    """

    def __init__(self, part: Tensor, length: int | None, group: dist.ProcessGroup) -> None:
        self.part, self.length, self.group = part, length, group
        self.storage = 0
        self.whole: Tensor | None = None

    def pack(self, saved: Tensor) -> Any:
        """Return what autograd saves for backward in place of the tensor `saved`.

        This is (shape, strides, offset) if `saved` is a view of the all-gathered tensor, else
        `saved` itself.
        """
        if storage_id(saved) != self.storage:
            return saved
        return saved.shape, saved.stride(), saved.storage_offset()

    def unpack(self, saved: Any) -> Tensor:
        """Return the tensor that `pack` was given. If it was a view of the all-gathered tensor, the
        first call gathers that tensor again.

        saved  the result of `pack`
        """
        if isinstance(saved, Tensor):
            return saved
        if self.whole is None:  # one gather for all products of the same input
            self.whole = all_gather_sequence(self.part, self.length, self.group)
        return self.whole.as_strided(*saved)


def all_gather_sequence(part: Tensor, length: int | None, group: dist.ProcessGroup) -> Tensor:
    """All-gather shards of the sequence, and return the full tensor, (samples, length, width).

    part    this device's shard, (samples, shard length, width)
    length  the length of the sequence without padding; None: the shards have no padding
    group   the process group; all of its devices must call this function
    """
    size = dist.get_world_size(group)
    parts = part.new_empty(size, *part.shape)
    parts[dist.get_rank(group)] = part
    all_gather(parts, group)
    whole = parts.transpose(0, 1).reshape(part.shape[0], -1, part.shape[2])
    return whole if length is None else whole[:, :length].contiguous()


def reduce_scatter_sequence(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum `whole` over the devices, and return this device's shard of the sum along the sequence:
    (samples, shard length, width).

    The sequence is padded with zeros if the number of devices does not divide its length.

    whole  this device's summand, (samples, length, width)
    group  the process group; all of its devices must call this function
    """
    parts = torch.stack(_padded_chunks(whole, dist.get_world_size(group)))
    mine = torch.empty_like(parts[0])
    reduce_scatter(mine, parts, group)
    return mine


def local_shard(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a copy of this device's shard, along the sequence, of a tensor that all devices have.

    It is copied because with one sample, the shard would be a contiguous view, which would keep the
    memory of the full tensor allocated.

    whole  (samples, length, width). The last shard is padded with zeros
    """
    part = _padded_chunks(whole, dist.get_world_size(group))[dist.get_rank(group)]
    return part.clone(memory_format=torch.contiguous_format)


def _padded_chunks(whole: Tensor, size: int) -> tuple[Tensor, ...]:
    """Pad `whole`, (samples, length, width), with zeros, and split it into `size` equal chunks
    along the sequence.
    """
    missing = -whole.shape[1] % size
    if missing:
        whole = nn.functional.pad(whole, (0, 0, 0, missing))
    return whole.chunk(size, 1)


class _ScatterToSequence(torch.autograd.Function):
    """Forward: return this device's shard, along the sequence, of a tensor that all devices have.
    Backward: all-gather the shards of the gradient.
    """

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
    """Forward: all-gather along the sequence. Backward: return this device's shard of the gradient,
    which is the same on all devices.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, length: int | None, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather_sequence(part, length, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return local_shard(gradients[0], ctx.group), None, None


class _AllGather(torch.autograd.Function):
    """Forward: all-gather along the sequence. Backward: reduce-scatter (sum) the gradient, which
    differs between the devices.
    """

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
    """Forward: reduce-scatter (sum) along the sequence. Backward: all-gather the shards of the
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.length, ctx.group = whole.shape[1], group
        return reduce_scatter_sequence(whole, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return all_gather_sequence(gradients[0], ctx.length, ctx.group), None
