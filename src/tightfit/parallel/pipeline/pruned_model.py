"""Prune a model to one pipeline rank's stages: stubs replace the blocks and weights of other ranks.

`pipeline` calls `prune` when it builds a run. The rank still runs the model's own forward, so
masks, positions and similar tensors are computed by the model's code. A block of another stage is
replaced by a `StubBlock`, which returns stub tensors of the right shapes. Weights of other ranks
are replaced by stub tensors, too. After the stage's last block, the exception `StageEnd` ends the
forward.

Example: rank 1 of pp: 2 has blocks 4 to 7 of 8. The embedding's weight (50257, 2048) becomes a stub
that takes 4 bytes. Blocks 0 to 3 return stubs (4, 1024, 2048). The wrapper of block 4 replaces the
stub in its argument by the received tensor (4, 1024, 2048), and the forward continues with the real
blocks 4 to 7 and the output head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tightfit._torch.modules import own_parameters
from tightfit._torch.pytree import tree_unflatten
from tightfit._torch.tensors import swap_contents
from tightfit.errors import InputError
from tightfit.models.block_hooks import Hooks
from tightfit.models.dataflow import PP_FIELD, Leaf, OutputStructure, PathTo, blocks_out_of_order, leaf_at


def prune(model: nn.Module, foreign: set[nn.Parameter]) -> None:
    """Replace the parameters of other pipeline ranks in `model` by stubs.

    A stub is a plain tensor with the shape of its parameter, but takes the memory of one element.
    The model's code before the blocks still runs, with the stubs; results that depend on a stub are
    not used. An nn.Embedding whose weight is replaced returns a stub, too.

    foreign  the parameters of other ranks
    """
    for module in model.modules():
        for name, parameter in list(own_parameters(module).items()):
            if parameter is not None and parameter in foreign:
                del own_parameters(module)[name]
                setattr(module, name, stub_tensor(parameter.shape, parameter.dtype, parameter.device))
                if type(module) is nn.Embedding:  # a subclass may have a forward of its own
                    module.forward = _StubEmbedding(module.embedding_dim, parameter.dtype)  # type: ignore[method-assign]


def stub_tensor(
    shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device, in_place: bool = False
) -> Tensor:
    """Return a stub: a tensor of the given shape that replaces a tensor of another stage, whose
    values this rank does not need.

    It is filled with NaN, or with 0 for integers, so that a computation that uses a stub by mistake
    gives NaN.

    in_place  whether the model writes into the tensor. If so, each element gets memory of its own.
              Otherwise the tensor is a single element, expanded to `shape`
    """
    value = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    if in_place:
        return torch.full(tuple(shape), value, dtype=dtype, device=device)
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


@dataclass(frozen=True)
class _StubEmbedding:
    """Replaces the forward of an embedding whose weight is on another rank. Called with token
    numbers of shape (...), it returns a stub tensor of shape (..., width).
    """

    width: int
    dtype: torch.dtype

    def __call__(self, input: Tensor) -> Tensor:
        return stub_tensor((*input.shape, self.width), self.dtype, input.device, in_place=True)


class ForwardState:
    """The state of the forward that runs, which all stubs and wrapped blocks of a rank share.

    block_outputs    for each block, the structure of its output
    boundary_inputs  number of a stage's first block -> the paths of those arguments of this block
                     that the stage before sends. A path leads to a value in (args, kwargs): (0, 2)
                     is args[2]
    shapes           the shapes of one sample's tensors in the batch for which `block_outputs` was
                     recorded
    stage            the range of block numbers of the stage that runs
    receive          a function that is called with those arguments of the stage's first block that
                     the stage before sends (here they are stubs); it returns the received tensors
    samples          the number of samples in the current batch
    batch_shapes     the shapes of one sample's tensors in the current batch
    blocks_called    how many blocks the current forward has called
    """

    def __init__(
        self,
        returns: list[OutputStructure],
        crosses: dict[int, tuple[PathTo, ...]],
        shapes: tuple[tuple[int, ...], ...],
    ) -> None:
        self.block_outputs, self.boundary_inputs, self.shapes = returns, crosses, shapes
        self.stage = range(0)
        self.receive: Callable[[list[Tensor]], list[Tensor]] | None = None
        self.samples = 0
        self.batch_shapes: tuple[tuple[int, ...], ...] = ()
        self.blocks_called = 0

    def begin_stage(
        self,
        blocks: range,
        take: Callable[[list[Tensor]], list[Tensor]],
        samples: int,
        shapes: tuple[tuple[int, ...], ...],
    ) -> None:
        """Set the state for the forward of a stage. Call this before the forward.

        blocks   the range of the stage's block numbers
        take     a function that is called with those arguments of the stage's first block that the
                 stage before sends (here they are stubs); it returns the received tensors
        samples  the number of samples in the batch
        shapes   the shapes of one sample's tensors in the batch
        """
        self.stage, self.receive, self.samples, self.batch_shapes, self.blocks_called = blocks, take, samples, shapes, 0

    def note_call(self, number: int) -> None:
        """Record that the model calls block `number`.

        Raises InputError unless the model calls each block once, in order. Otherwise ranks would
        wait for messages that are never sent.
        """
        if number != self.blocks_called:
            raise blocks_out_of_order()
        self.blocks_called += 1

    def replace_inputs(self, number: int, arguments: tuple[Any, dict[str, Any]]) -> None:
        """Receive the tensors that the stage before sends, and put their values into the arguments
        of the stage's first block, in place of stubs.

        The contents of each argument are replaced in place, so every reference to the tensor sees
        the received values.

        number     the number of the stage's first block
        arguments  (args, kwargs) of the block's call

        Raises InputError if one of these arguments is not a plain tensor, for example of a subclass
        of Tensor.
        """
        assert self.receive is not None
        given = self.sent_tensors(number, arguments)
        for tensor, sent in zip(given, self.receive(given), strict=True):
            if type(tensor) is not type(sent):
                raise InputError(
                    PP_FIELD,
                    f"block {number} takes a {type(tensor).__name__} argument, and only plain tensors can be sent between "
                    "pipeline stages",
                    "use pp: 1",
                )
            swap_contents(tensor, sent)

    def sent_tensors(self, number: int, arguments: tuple[Any, dict[str, Any]]) -> list[Tensor]:
        """Return those arguments of a stage's first block that the stage before has to send.

        number     the number of the stage's first block
        arguments  (args, kwargs) of the block's call

        Raises InputError if one of these arguments is not a tensor.
        """
        tensors = []
        for path in self.boundary_inputs[number]:
            tensor = leaf_at(arguments, path)
            if not isinstance(tensor, Tensor):
                raise InputError(
                    PP_FIELD,
                    f"an argument of block {number} is a {type(tensor).__name__}, and was a tensor in the traced forward",
                    "use pp: 1",
                )
            tensors.append(tensor)
        return tensors

    def end_stage(self) -> None:
        """Raise InputError unless all blocks of the stage, and all blocks before them, have been
        called. Call this at the end of the stage's forward.
        """
        if self.blocks_called != self.stage.stop:
            raise blocks_out_of_order()


class StageEnd(BaseException):
    """The exception that ends the forward of a stage after its last block.

    sent  the tensors that the next stage needs
    """

    def __init__(self, sent: list[Tensor]) -> None:
        super().__init__()
        self.sent = sent


class OwnBlock(nn.Module):
    """Wraps a block of this rank while the block's stage runs.

    The wrapper of the stage's first block receives the stage's inputs before it calls the block.
    All other attributes of the wrapper are those of the block.

    number         the number of the block in the model
    forward_state  the state that all stubs and wrapped blocks of the rank share
    block          the block
    """

    def __init__(self, number: int, forward_state: ForwardState, block: nn.Module) -> None:
        super().__init__()
        self.number, self.forward_state, self.block = number, forward_state, block

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "block" else getattr(self.block, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.forward_state.note_call(self.number)
        if self.number and self.number == self.forward_state.stage.start:
            self.forward_state.replace_inputs(self.number, (args, kwargs))
        return self.block(*args, **kwargs)


class StubBlock(nn.Module):
    """Replaces a block of another rank, or a block of this rank while another stage runs.

    The stub of a block before the running stage returns stub tensors of the right shapes. The stub
    of the first block after the running stage raises `StageEnd`. All other attributes of the stub
    are those of the block, because the model may read them.

    number         the number of the block in the model
    forward_state  the state that all stubs and wrapped blocks of the rank share
    block          the block that is replaced
    given          called with the block's input if the output is shorter than the input (sequence
                   parallelism); returns a stub tensor of the output's shape. None if the shapes are
                   equal. Stored as `output_like`
    hooks          the model's own hooks on the block, which still run
    """

    def __init__(
        self,
        number: int,
        forward_state: ForwardState,
        block: nn.Module,
        given: Callable[[Tensor], Tensor] | None,
        hooks: Hooks,
    ) -> None:
        super().__init__()
        self.number, self.forward_state, self.output_like = number, forward_state, given
        self.hooks = hooks
        self.__dict__["block"] = block  # not registered as a submodule

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward_state, arguments = self.forward_state, (args, kwargs)
        if self.number >= forward_state.stage.stop:
            forward_state.end_stage()
            raise StageEnd(forward_state.sent_tensors(self.number, arguments))
        forward_state.note_call(self.number)
        self.hooks.run_pre_hooks(self.block, args, kwargs)
        returns = forward_state.block_outputs[self.number]
        leaves = [self._stub_leaf(leaf, arguments, returns.in_place) for leaf in returns.leaves]
        output = tree_unflatten(leaves, returns.spec)
        self.hooks.run_post_hooks(self.block, args, kwargs, output)
        return output

    def _stub_leaf(self, leaf: Leaf, arguments: tuple[Any, dict[str, Any]], in_place: bool) -> Any:
        if leaf.same_as is not None:
            return leaf_at(arguments, leaf.same_as)
        if leaf.like is not None:
            like = leaf_at(arguments, leaf.like)
            if self.output_like is not None and like.dim() == 3:  # (samples, length, width)
                like = self.output_like(like)
            return stub_tensor(like.shape, like.dtype, like.device, in_place)
        if leaf.dtype is None:
            return leaf.constant
        forward_state = self.forward_state
        if forward_state.batch_shapes != forward_state.shapes:
            raise InputError(
                PP_FIELD,
                f"block {self.number} returns a tensor whose shape depends on the samples' shape, and samples differ in shape",
                "use samples of one shape, or pp: 1",
            )
        device = next((one.device for one in (*arguments[0], *arguments[1].values()) if isinstance(one, Tensor)), None)
        shape = () if leaf.sample_shape is None else (forward_state.samples, *leaf.sample_shape)
        return stub_tensor(shape, leaf.dtype, device or torch.device("cpu"), in_place)
