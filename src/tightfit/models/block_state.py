"""Find blocks that would compute something else if they ran again.

Recomputation runs the forward of a block a second time, after the forward of the model. If the block reads
state that the model has changed meanwhile, the gradients are wrong. Such state is, for example, an attribute
that is set before each call, or weights that `torch.func.functional_call` substitutes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from tightfit._torch.dispatch import TorchDispatchMode
from tightfit._torch.fake import FakeTensor
from tightfit._torch.pytree import tree_flatten
from tightfit._torch.tensors import storage_id
from tightfit.models.blocks import find_blocks
from tightfit.models.dataflow import describe_line, model_line
from tightfit.models.fake_forward import fake_batch, fake_forwards, restoring_random_states
from tightfit.models.objective import Batch

_SAME_VALUES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
Operation = tuple[Any, tuple[Any, ...], Any]  # the operation, its arguments, and their structure


def changed_after_forward(
    make: Callable[[], nn.Module], total: Callable[[nn.Module, Batch], Tensor], batch: Batch, blocks: str | None
) -> str:
    """Run the model on fake tensors, and then each call of a block again. Return a sentence on the first
    block that does something else the second time; "" if all do the same.

    make    creates the model
    total   (model, batch) -> the loss
    batch   a batch; only the shapes and types of its tensors are used
    blocks  the name of the list of blocks; None: they are looked for
    """
    try:
        with restoring_random_states(), fake_forwards():
            model = make()
            model.train()
            fakes = fake_batch(batch)
            with suppress(Exception):  # it fills the model's caches
                total(model, fakes)
            calls: list[_Call] = []
            with ExitStack() as stack:
                for name, block in find_blocks(model, blocks):
                    stack.callback(setattr, block, "forward", block.forward)
                    block.forward = _noting(name, block, calls)
                with suppress(Exception):
                    total(model, fakes)
            for call in calls:
                if line := call.differs_again():
                    return (
                        f"{call.name} computes something else when it runs again after the forward ({line}): it reads an "
                        "attribute, a weight, a global value or an object that changes in its call or after it"
                    )
    except Exception:  # the model cannot be created on fake tensors
        return ""
    return ""


@dataclass
class _Call:
    """A call of a block.

    name        the block's name
    block       the block
    forward     its forward
    args, kwargs  the arguments of the call
    modes       what a recomputation restores
    operations  what the call did
    kept        the tensors that the operations got, so that no other storage takes their place
    """

    name: str
    block: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modes: _Modes
    operations: list[Operation] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)

    def differs_again(self) -> str:
        """Run the forward again. Return the line of the first operation that differs; "" if none does."""
        again = _Operations([], _names_of(self.block), self.operations)
        try:
            with self.modes.restored(), again:
                self.forward(*self.args, **self.kwargs)
        except _DiffersError as error:
            return str(error)
        except Exception:
            return ""  # it cannot run again on its own: a recomputation says so
        return "" if len(again.found) == len(self.operations) else "it ends earlier"


class _Modes:
    """What a recomputation of a block restores: the states of the random number generators, autocast, and
    whether gradients are computed, all as they were when this object was made."""

    def __init__(self) -> None:
        self._random = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        self._computes_gradients = torch.is_grad_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda")
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        random.setstate(self._random[0])
        numpy.random.set_state(self._random[1])
        torch.set_rng_state(self._random[2])
        with ExitStack() as stack:
            for kind, dtype, enabled in self._autocast:
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype))
            stack.enter_context(torch.set_grad_enabled(self._computes_gradients))
            yield


class _DiffersError(Exception):
    """An operation differs from the one that was noted. Its text is the line of the model's code."""


class _Operations(TorchDispatchMode):
    """A mode that notes operations: an argument is a number if the noted operations have made its storage,
    a name if it is a parameter or a buffer of the block, and else the storage itself.

    kept      gets the tensors
    names     storage -> name of a parameter or a buffer of the block
    expected  the operations of an earlier call: `_DiffersError` is raised at the first that differs. None: none
    """

    def __init__(self, kept: list[Any], names: dict[int, str], expected: list[Operation] | None = None) -> None:
        super().__init__()
        self.found: list[Operation] = []
        self.kept, self._names, self.expected = kept, names, expected
        self._numbers: dict[int, int] = {}
        self._outside: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # a question for the device of a tensor, or what autograd does with tensors that hooks save
        if func.namespace == "prim" or func in _SAME_VALUES:
            return func(*args, **(kwargs or {}))
        leaves, structure = tree_flatten((args, kwargs or {}))
        operation = func, tuple(map(self._noted, leaves)), structure
        if self.expected is not None and (
            len(self.found) >= len(self.expected) or not _same(operation, self.expected[len(self.found)])
        ):
            raise _DiffersError(describe_line(model_line()))
        self.found.append(operation)
        output = func(*args, **(kwargs or {}))
        made = [one for one in tree_flatten(output)[0] if isinstance(one, Tensor)]
        self.kept += [*(one for one in leaves if isinstance(one, Tensor)), *made]
        for one in made:
            place = storage_id(one)
            if place not in self._outside:
                self._numbers.setdefault(place, len(self._numbers))
        return output

    def _noted(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not isinstance(leaf, FakeTensor):  # a constant that the forward makes of numbers
            return "constant", leaf.dtype, tuple(leaf.shape)
        place = storage_id(leaf)
        if place in self._numbers:
            return "made", self._numbers[place], tuple(leaf.shape), leaf.storage_offset()
        self._outside.add(place)
        if place in self._names:
            return "own", self._names[place], tuple(leaf.shape), leaf.storage_offset()
        return "outside", place, tuple(leaf.shape), leaf.storage_offset()


def _same(one: Operation, other: Operation) -> bool:
    if one[0] is not other[0] or one[2] != other[2]:
        return False
    return all(first is second or repr(first) == repr(second) for first, second in zip(one[1], other[1], strict=True))


def _names_of(block: nn.Module) -> dict[int, str]:
    """Return storage -> name of the block's parameters and buffers, as they are now. Tensors that
    functional_call has put in the place of parameters are left out."""
    own = [(name, one) for name, one in block.named_parameters() if isinstance(one, nn.Parameter)]
    return {storage_id(one): name for name, one in [*own, *block.named_buffers()]}


def _noting(name: str, block: nn.Module, calls: list[_Call]) -> Callable[..., Any]:
    forward = block.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        call = _Call(name, block, forward, args, kwargs, _Modes())
        names = _names_of(block)
        call.kept += [*block.parameters(), *block.buffers()]
        mode = _Operations(call.kept, names)
        with mode:
            output = forward(*args, **kwargs)
        call.operations = mode.found
        calls.append(call)
        return output

    return noted


__all__ = ["changed_after_forward"]
