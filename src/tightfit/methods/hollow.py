"""Hollow: a model of which this device of a pipeline has a piece, and runs the forward of all: stubs stand for what others have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.errors import InputError


def hollow(model: nn.Module, foreign: set[nn.Parameter], first: bool, passage: Passage) -> None:
    """In the place of other devices' parameters, zeros of their shape that take no memory and are no parameters: what lies
    before the blocks runs with them, and its output is not used."""
    for path, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter in foreign:
                module.register_forward_pre_hook(partial(passage.refuse, path))
                del module._parameters[name]
                empty = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
                setattr(module, name, empty)
                if isinstance(module, nn.Embedding) and not first:
                    module.forward = _Zeros(module.embedding_dim, parameter.dtype)  # type: ignore[method-assign]


@dataclass(frozen=True)
class _Zeros:
    """An embedding's forward on a device that does not have it."""

    width: int
    dtype: torch.dtype

    def __call__(self, input: Tensor) -> Tensor:
        return torch.zeros((), dtype=self.dtype, device=input.device).expand(*input.shape, self.width)


class Passage:
    """The forward under way: which blocks run, and what takes the place of the first one's input.

    form  how blocks return: 0 the hidden states, n a tuple of n of which they are the first
    """

    def __init__(self) -> None:
        self.piece = range(0)
        self.take: Any = None
        self.form = 0
        self.left = 0  # blocks of the piece that have not run
        self.passed = 0  # blocks before it that were called

    def begin(self, piece: range, take: Any) -> None:
        self.piece, self.take, self.left, self.passed = piece, take, len(piece), 0

    def pass_by(self, number: int) -> None:
        """A block before the piece is called: each of them once, in order, or devices would wait for what nobody sends."""
        if number != self.passed:
            raise not_in_a_row()
        self.passed += 1

    def end(self) -> None:
        """The piece has run."""
        if self.left < 0:
            raise not_in_a_row()

    def refuse(self, name: str, module: nn.Module, inputs: Any) -> None:
        """A module of which this device has no values is called where its output is used. Raises InputError."""
        if self.left == 0 or self.piece.start == 0:
            used, defined = ("behind", "before") if self.left == 0 else ("before", "behind")
            raise InputError(
                "plan: pp",
                f"{name} is used {used} the model's blocks, and defined {defined} them",
                f"define it {used} them in the model's constructor, so that the device that uses it has it",
            )

    def note_form(self, block: nn.Module, inputs: Any, output: Any) -> None:
        self.left -= 1
        self.form = 0 if isinstance(output, Tensor) else len(output)
        hidden = output if isinstance(output, Tensor) else output[0]
        if not isinstance(hidden, Tensor):
            raise InputError(
                "plan: pp", f"a block returns {type(hidden).__name__}, and no hidden states to hand on", "use pp: 1"
            )


def not_in_a_row() -> InputError:
    return InputError("plan: pp", "the model does not call its blocks in a row, each once", "use pp: 1")


class Leaves(BaseException):
    """Ends a forward behind a device's last block, with what the next device needs."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Elsewhere(nn.Module):
    """Stands for a block that another device has, or that is not of the piece that runs.

    given  makes of what the block would be given what it would hand on, where that is of another shape
    """

    def __init__(self, number: int, passage: Passage, given: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.number, self.passage, self.given = number, passage, given

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        passage = self.passage
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor):
            raise InputError("plan: pp", "the model hands no hidden states from block to block", "use pp: 1")
        if self.number >= passage.piece.stop:
            passage.end()
            raise Leaves(hidden)
        passage.pass_by(self.number)
        if self.given is not None:
            hidden = self.given(hidden)
        if self.number == passage.piece.start - 1:
            hidden = passage.take(hidden)
        return hidden if passage.form == 0 else (hidden, *[None] * (passage.form - 1))
