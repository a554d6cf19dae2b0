"""Find blocks that would compute something else if they ran again.

Recomputation runs the forward of a block a second time, after the forward of the model. If the block reads
state that the model has changed meanwhile, the gradients are wrong. Such state is, for example, an attribute
that is set before each call, or weights that `torch.func.functional_call` substitutes.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from tightfit._torch.dispatch import TorchDispatchMode
from tightfit._torch.fake import FakeTensor
from tightfit._torch.pytree import tree_flatten
from tightfit._torch.tensors import storage_id, version_of
from tightfit.models.batches import Batch
from tightfit.models.blocks import find_blocks
from tightfit.models.dataflow import describe_line, model_line
from tightfit.models.fake_forward import Forwards, checked_forwards
from tightfit.models.tensors import written_tensors

_SAME_VALUES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_OVERWRITES = (
    torch.ops.aten.copy_.default,
    torch.ops.aten.zero_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
)
Operation = tuple[Any, tuple[Any, ...], Any]  # the operation, its arguments, and their structure


@dataclass(frozen=True)
class StateOfBlocks:
    """The result of running the blocks of a model again.

    changed    a sentence on the first block that does something else the second time; "" if all do the same
    unchecked  why the forward could not be run to its end; "" if it could
    """

    changed: str = ""
    unchecked: str = ""


def changed_after_forward(
    make: Callable[[], nn.Module], total: Callable[[nn.Module, Batch], Tensor], batch: Batch, blocks: str | None
) -> StateOfBlocks:
    """Run the model as `checked_forwards` says, and then each call of a block again.

    make    creates the model
    total   (model, batch) -> the loss
    batch   a batch of samples
    blocks  the name of the list of blocks; None: they are looked for
    """

    def check(model: nn.Module, forwards: Forwards) -> str:
        forwards.run(model)  # it fills the model's caches
        calls: list[_Call] = []
        with ExitStack() as stack:
            for name, block in find_blocks(model, blocks):
                stack.callback(setattr, block, "forward", block.forward)
                block.forward = _noting(name, block, calls, forwards.is_fake)
            forwards.run(model)
        for call in calls:
            if call.updates:
                return (
                    f"{call.name} updates a tensor that is neither made in its call nor one of its buffers ({call.updates}), "
                    "and would update it again when it runs again"
                )
            if line := call.differs_again():
                return (
                    f"{call.name} computes something else when it runs again after the forward ({line}): it reads an "
                    "attribute, a weight, a global value or an object that changes in its call or after it"
                )
        return ""

    found, unchecked = checked_forwards(check, make, total, batch)
    return StateOfBlocks(next(filter(None, found), ""), unchecked)


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
    is_fake     whether tensors have no values
    buffers     the block's buffers that the call changes, with copies of their values before it, which a recomputation
                restores
    updates     the line that writes to a tensor which it has read, and which is neither made in the call nor
                an argument, a parameter or a buffer; "" if there is none
    """

    name: str
    block: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modes: _Modes
    is_fake: bool
    buffers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    updates: str = ""

    def differs_again(self) -> str:
        """Run the forward again. Return the line of the first operation that differs; "" if none does."""
        again = _Operations([], _names_of(self.block), self.is_fake, self.operations)
        try:
            with self.modes.restored(), _with_values(self.buffers), again:
                self.forward(*self.args, **self.kwargs)
        except _DiffersError as error:
            return str(error)
        except Exception:
            return ""  # it cannot run again on its own: a recomputation says so
        return "" if len(again.found) == len(self.operations) else "it ends earlier"


@contextmanager
def _with_values(buffers: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """A context in which buffers have the given values."""
    now = [one.clone() for one, _ in buffers]
    try:
        for one, value in buffers:
            one.copy_(value)
        yield
    finally:
        for (one, _), value in zip(buffers, now, strict=True):
            one.copy_(value)


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
    a name if it is a parameter or a buffer of the block, and else the storage itself, or its values if it has
    some.

    kept      gets the tensors
    names     storage -> name of a parameter or a buffer of the block
    is_fake   whether tensors have no values
    expected  the operations of an earlier call: `_DiffersError` is raised at the first that differs. None: none

    After the call, `updates` is the line that writes to a storage of none of these, and of no tensor of
    `arguments`, which it has read; "" if there is none.
    """

    def __init__(
        self, kept: list[Any], names: dict[int, str], is_fake: bool, expected: list[Operation] | None = None
    ) -> None:
        super().__init__()
        self.found: list[Operation] = []
        self.updates = ""
        self.arguments: set[int] = set()
        self.kept, self._names, self.expected, self._is_fake = kept, names, expected, is_fake
        self._numbers: dict[int, int] = {}
        self._outside: set[int] = set()
        self._read: set[int] = set()

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
        self._note_update(func, args, kwargs or {})
        output = func(*args, **(kwargs or {}))
        made = [one for one in tree_flatten(output)[0] if isinstance(one, Tensor)]
        self.kept += [*(leaf for leaf in leaves if isinstance(leaf, Tensor)), *made]
        for one in made:
            storage = storage_id(one)
            if storage not in self._outside:
                self._numbers.setdefault(storage, len(self._numbers))
        return output

    def _note_update(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note the model's line if the operation writes to a tensor from outside of the call that the call has
        read. An overwritten tensor that it has not read has the same values after the second call."""
        written = {storage_id(tensor) for tensor in written_tensors(func, args, kwargs) if isinstance(tensor, Tensor)}
        read = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
        if func in _OVERWRITES:
            read = read[1:]
        self._read |= {storage_id(one) for one in read}
        updated = (written & self._read & self._outside) - set(self._names) - self.arguments
        if updated and not self.updates:
            self.updates = describe_line(model_line())

    def _noted(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if self._is_fake and not isinstance(leaf, FakeTensor):  # a constant that the forward makes of numbers
            return "constant", leaf.dtype, tuple(leaf.shape)
        storage = storage_id(leaf)
        if storage in self._numbers:
            return "made", self._numbers[storage], tuple(leaf.shape), leaf.storage_offset()
        self._outside.add(storage)
        if storage in self._names:
            return "own", self._names[storage], tuple(leaf.shape), leaf.storage_offset()
        return "outside", storage if self._is_fake else _checksum(leaf), tuple(leaf.shape), leaf.storage_offset()


def _checksum(tensor: Tensor) -> int:
    """Return a number that is equal for equal values."""
    return zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _same(one: Operation, other: Operation) -> bool:
    if one[0] is not other[0] or one[2] != other[2]:
        return False
    return all(first is second or repr(first) == repr(second) for first, second in zip(one[1], other[1], strict=True))


def _names_of(block: nn.Module) -> dict[int, str]:
    """Return storage -> name of the block's parameters and buffers, as they are now. Tensors that
    functional_call has put in the place of parameters are left out."""
    own = [(name, parameter) for name, parameter in block.named_parameters() if isinstance(parameter, nn.Parameter)]
    return {storage_id(one): name for name, one in [*own, *block.named_buffers()]}


def _noting(name: str, block: nn.Module, calls: list[_Call], is_fake: bool) -> Callable[..., Any]:
    forward = block.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        call = _Call(name, block, forward, args, kwargs, _Modes(), is_fake)
        before = [
            (buffer, version_of(buffer), buffer.clone()) for buffer in block.buffers() if not buffer.requires_grad
        ]
        names = _names_of(block)
        call.kept += [*block.parameters(), *block.buffers()]
        mode = _Operations(call.kept, names, is_fake)
        mode.arguments = {storage_id(one) for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)}
        with mode:
            output = forward(*args, **kwargs)
        call.operations, call.updates = mode.found, mode.updates
        call.buffers = [  # batch_norm changes its buffers without counting a version
            (one, value)
            for one, version, value in before
            if version != version_of(one) or not (is_fake or torch.equal(one, value))
        ]
        calls.append(call)
        return output

    return noted


__all__ = ["changed_after_forward"]
