"""Prunes a model to one pipeline rank's stages: stubs replace the blocks and weights of other
ranks.

`pipeline` calls `prune` when it builds a run. The rank still runs the model's own forward, so that
masks, positions and the like are computed as the model does it. A block of another stage is
replaced by a `StubBlock`, which returns stub tensors of the right shapes; foreign weights are
replaced by stub tensors too. Behind the rank's last block, `StageEnd` ends the forward.

Example: rank 1 of pp: 2 has the blocks 4 to 7 of 8. The embedding's weight (50257, 2048) becomes
a stub that uses 4 bytes. The blocks 0 to 3 return stubs (4, 1024, 2048). The wrapper of block 4
replaces its argument by the received tensor (4, 1024, 2048), and the forward continues with the
real blocks 4 to 7 and the head.
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
    """Replace other ranks' parameters in `model` by stub tensors, which are no parameters.

    foreign: those parameters. The stubs have their shapes and take no memory. What comes before the
    blocks runs with them, and its output is not used. nn.Embedding returns a stub as well.
    """
    for module in model.modules():
        for name, parameter in list(own_parameters(module).items()):
            if parameter is not None and parameter in foreign:
                del own_parameters(module)[name]
                setattr(module, name, stub_tensor(parameter.shape, parameter.dtype, parameter.device))
                if type(module) is nn.Embedding:  # subclasses may do more than look up
                    module.forward = _StubEmbedding(module.embedding_dim, parameter.dtype)  # type: ignore[method-assign]


def stub_tensor(
    shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device, in_place: bool = False
) -> Tensor:
    """A stub tensor: NaN where it is floating point, so that any use of its values would be
    noticed.

    It takes memory only where in_place is set, because the model writes into it. Otherwise it is
    one expanded element.
    """
    value = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    if in_place:
        return torch.full(tuple(shape), value, dtype=dtype, device=device)
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


@dataclass(frozen=True)
class _StubEmbedding:
    """The forward of an embedding whose weight is on another rank: returns a stub.

    input (...) of token numbers -> (..., width).
    """

    width: int
    dtype: torch.dtype

    def __call__(self, input: Tensor) -> Tensor:
        return stub_tensor((*input.shape, self.width), self.dtype, input.device, in_place=True)


class ForwardState:
    """The state of the forward that is running: which stage it runs, and what replaces its inputs.

    block_outputs    the structure of what each block returns
    boundary_inputs  by the first block of each stage, the paths of its arguments that are sent
    shapes           of one sample, when `block_outputs` was recorded
    stage            the range of blocks of the stage that runs
    receive          the stage's original inputs -> the received tensors that replace them
    samples          number of samples in the batch
    batch_shapes     the shapes of one sample of the present batch
    blocks_called    number of blocks that were called so far, in order
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
        piece: range,
        take: Callable[[list[Tensor]], list[Tensor]],
        samples: int,
        shapes: tuple[tuple[int, ...], ...],
    ) -> None:
        """Begin the forward of a stage on a batch of `samples` samples."""
        self.stage, self.receive, self.samples, self.batch_shapes, self.blocks_called = piece, take, samples, shapes, 0

    def note_call(self, number: int) -> None:
        """Note that block `number` is called.

        Raises InputError unless each block is called once, in order: else ranks would wait for
        messages that nobody sends.
        """
        if number != self.blocks_called:
            raise blocks_out_of_order()
        self.blocks_called += 1

    def replace_inputs(self, number: int, arguments: tuple[Any, dict[str, Any]]) -> None:
        """The stage's first block is called: replace its inputs by what the stage before sent.

        The tensors are swapped in place, for everybody who holds a reference. Raises InputError.
        """
        assert self.receive is not None
        given = self.sent_tensors(number, arguments)
        for tensor, sent in zip(given, self.receive(given), strict=True):
            if type(tensor) is not type(sent):
                raise InputError(
                    PP_FIELD,
                    f"block {number} is called with a {type(tensor).__name__}, which a received tensor cannot replace",
                    "use pp: 1",
                )
            swap_contents(tensor, sent)

    def sent_tensors(self, number: int, arguments: tuple[Any, dict[str, Any]]) -> list[Tensor]:
        """Those arguments of the stage's first block `number` that are sent. Raises InputError."""
        found = []
        for path in self.boundary_inputs[number]:
            tensor = leaf_at(arguments, path)
            if not isinstance(tensor, Tensor):
                raise InputError(
                    PP_FIELD,
                    f"block {number} is called with {type(tensor).__name__} where it was called with a tensor before",
                    "use pp: 1",
                )
            found.append(tensor)
        return found

    def end_stage(self) -> None:
        """The next stage's first block is called, or the forward has ended: all of this stage's
        blocks must have been called. Raises InputError.
        """
        if self.blocks_called != self.stage.stop:
            raise blocks_out_of_order()


class StageEnd(BaseException):
    """Ends a forward behind a rank's last block. It carries the tensors that the next rank needs."""

    def __init__(self, sent: list[Tensor]) -> None:
        super().__init__()
        self.sent = sent


class OwnBlock(nn.Module):
    """Wraps a block of the stage that runs: at the stage's first block, it receives the inputs.

    Attributes that it does not have are the block's.
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
    """Replaces a block of another rank, or of a stage of this rank that does not run now.

    block        the block it replaces, whose attributes the model may read; its parameters are on
                 another rank
    output_like  a block's input -> a tensor shaped like its output, where their shapes differ
    hooks        the model's own hooks on the block, which still run

    Behind the running stage, it raises `StageEnd` in place of computing.
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
                f"block {self.number} returns a tensor whose shape depends on that of the samples, and samples differ in shape",
                "use samples of one shape, or pp: 1",
            )
        device = next((one.device for one in (*arguments[0], *arguments[1].values()) if isinstance(one, Tensor)), None)
        shape = () if leaf.sample_shape is None else (forward_state.samples, *leaf.sample_shape)
        return stub_tensor(shape, leaf.dtype, device or torch.device("cpu"), in_place)
