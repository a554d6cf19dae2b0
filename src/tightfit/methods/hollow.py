"""Hollow: a model of which this device of a pipeline has a piece, and runs the forward of all: stubs stand for what others have."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from tightfit.errors import InputError
from tightfit.models.dataflow import ASKED, Leaf, PathTo, Returns, at, not_in_a_row
from tightfit.models.hooks import Hooks


def hollow(model: nn.Module, foreign: set[nn.Parameter]) -> None:
    """In the place of other devices' parameters, tensors of their shape that take no memory and are no parameters: what lies
    before the blocks runs with them, and its output is not used."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter in foreign:
                del module._parameters[name]
                setattr(module, name, stand_in(parameter.shape, parameter.dtype, parameter.device))
                if type(module) is nn.Embedding:  # others may do more than look up
                    module.forward = _NoEmbedding(module.embedding_dim, parameter.dtype)  # type: ignore[method-assign]


def stand_in(
    shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device, in_place: bool = False
) -> Tensor:
    """A tensor without meaning: NaN, so that it would be seen if it were used after all. It takes memory where it is written to."""
    value = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    if in_place:
        return torch.full(tuple(shape), value, dtype=dtype, device=device)
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


@dataclass(frozen=True)
class _NoEmbedding:
    """An embedding's forward on a device that does not have it."""

    width: int
    dtype: torch.dtype

    def __call__(self, input: Tensor) -> Tensor:
        return stand_in((*input.shape, self.width), self.dtype, input.device, in_place=True)


class Passage:
    """The forward under way: which blocks run, and what takes the place of what the first one is called with.

    returns  what each block returns, in shape; crosses: by the first block of each stage, the arguments that are sent
    shapes   of one sample, as `returns` saw them
    """

    def __init__(
        self,
        returns: list[Returns],
        crosses: dict[int, tuple[PathTo, ...]],
        shapes: tuple[tuple[int, ...], ...],
    ) -> None:
        self.returns, self.crosses, self.shapes = returns, crosses, shapes
        self.piece = range(0)
        self.take: Callable[[list[Tensor]], list[Tensor]] | None = None
        self.samples = 0
        self.now: tuple[tuple[int, ...], ...] = ()  # the shapes of one sample of the batch under way
        self.called = 0  # blocks that were called, in order

    def begin(
        self,
        piece: range,
        take: Callable[[list[Tensor]], list[Tensor]],
        samples: int,
        shapes: tuple[tuple[int, ...], ...],
    ) -> None:
        self.piece, self.take, self.samples, self.now, self.called = piece, take, samples, shapes, 0

    def call(self, number: int) -> None:
        """A block is called: each of them once, in order, or devices would wait for what nobody sends."""
        if number != self.called:
            raise not_in_a_row()
        self.called += 1

    def enter(self, number: int, arguments: tuple[Any, dict[str, Any]]) -> None:
        """The stage's first block is called: put what the stage before sent in the place of what it is given, for all who hold
        it. Raises InputError."""
        assert self.take is not None
        given = self.crossing(number, arguments)
        for tensor, sent in zip(given, self.take(given), strict=True):
            if type(tensor) is not type(sent):
                raise InputError(
                    ASKED,
                    f"block {number} is called with a {type(tensor).__name__}, in whose place nothing can be put",
                    "use pp: 1",
                )
            torch._C._swap_tensor_impl(tensor, sent)  # type: ignore[attr-defined]

    def crossing(self, number: int, arguments: tuple[Any, dict[str, Any]]) -> list[Tensor]:
        """Of what the first block of a stage is called with, the tensors that are sent."""
        found = []
        for path in self.crosses[number]:
            tensor = at(arguments, path)
            if not isinstance(tensor, Tensor):
                raise InputError(
                    ASKED,
                    f"block {number} is called with {type(tensor).__name__} where it was called with a tensor before",
                    "use pp: 1",
                )
            found.append(tensor)
        return found

    def end(self) -> None:
        """All blocks up to the piece's end were called, and now the next one is, or the forward has ended."""
        if self.called != self.piece.stop:
            raise not_in_a_row()


class Leaves(BaseException):
    """Ends a forward behind a device's last block, with what the next device needs."""

    def __init__(self, sent: list[Tensor]) -> None:
        super().__init__()
        self.sent = sent


class Here(nn.Module):
    """Stands before a block of the stage that runs, while it runs."""

    def __init__(self, number: int, passage: Passage, block: nn.Module) -> None:
        super().__init__()
        self.number, self.passage, self.block = number, passage, block

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "block" else getattr(self.block, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.passage.call(self.number)
        if self.number and self.number == self.passage.piece.start:
            self.passage.enter(self.number, (args, kwargs))
        return self.block(*args, **kwargs)


class Elsewhere(nn.Module):
    """Stands for a block that another device has, or that is not of the piece that runs.

    block  what it stands for, whose attributes the model may ask for; its parameters are another device's
    given  makes of what the block would be given what it would hand on, where that is of another shape
    hooks  the model's own on the block
    """

    def __init__(
        self, number: int, passage: Passage, block: nn.Module, given: Callable[[Tensor], Tensor] | None, hooks: Hooks
    ) -> None:
        super().__init__()
        self.number, self.passage, self.given = number, passage, given
        self.hooks = hooks
        self.__dict__["block"] = block  # not as a part of the model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        passage, arguments = self.passage, (args, kwargs)
        if self.number >= passage.piece.stop:
            passage.end()
            raise Leaves(passage.crossing(self.number, arguments))
        passage.call(self.number)
        self.hooks.enter(self.block, args, kwargs)
        returns = passage.returns[self.number]
        leaves = [self._leaf(leaf, arguments, returns.in_place) for leaf in returns.leaves]
        output = tree_unflatten(leaves, returns.spec)
        self.hooks.leave(self.block, args, kwargs, output)
        return output

    def _leaf(self, leaf: Leaf, arguments: tuple[Any, dict[str, Any]], in_place: bool) -> Any:
        if leaf.same is not None:
            return at(arguments, leaf.same)
        if leaf.like is not None:
            like = at(arguments, leaf.like)
            if self.given is not None and like.dim() == 3:  # (samples, length, width)
                like = self.given(like)
            return stand_in(like.shape, like.dtype, like.device, in_place)
        if leaf.dtype is None:
            return leaf.constant
        passage = self.passage
        if passage.now != passage.shapes:
            raise InputError(
                ASKED,
                f"block {self.number} returns a tensor whose shape follows that of the samples, which differ",
                "use samples of one shape, or pp: 1",
            )
        device = next((one.device for one in (*arguments[0], *arguments[1].values()) if isinstance(one, Tensor)), None)
        shape = () if leaf.tail is None else (passage.samples, *leaf.tail)
        return stand_in(shape, leaf.dtype, device or torch.device("cpu"), in_place)
