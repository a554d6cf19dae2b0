"""Passing: of blocks that are alike, the first two and the last run, and those between pass their
input through."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


class Passages(Protocol):
    """Who is told of each block that begins and ends, and of what it is called with."""

    def begin(self, part: str, block: int | None = None, copy_of: int | None = None) -> None: ...

    def note_inputs(self, arguments: Any) -> None: ...


class _Nobody:
    def begin(self, part: str, block: int | None = None, copy_of: int | None = None) -> None:
        pass

    def note_inputs(self, arguments: Any) -> None:
        pass


@contextmanager
def shortened(blocks: list[nn.Module]) -> Iterator[None]:
    """Within, of each kind of block the first two and the last run; those between pass their input
    through."""
    with watched(blocks, _Nobody()):
        yield


def stand_ins(blocks: list[nn.Module], lists: list[str] | None = None) -> dict[int, int]:
    """By its number, for each block between the second and the last of its kind, the second.
    lists: what each of them is in, where kinds do not reach beyond that."""
    kinds: dict[Any, list[int]] = defaultdict(list)
    for number, block in enumerate(blocks):
        kinds[lists and lists[number], _kind(block)].append(number)
    return {number: members[1] for members in kinds.values() for number in members[2:-1]}


@contextmanager
def watched(
    blocks: list[nn.Module], recorder: Passages, missing: Mapping[int, int] | None = None, every: bool = False
) -> Iterator[None]:
    """Within, each block's forward is a passage of its own, and those between the second and the
    last of a kind skip.

    missing  numbers of blocks that were taken out before, and for each the one that stands for it:
             they are passages too
    every    whether none skips
    """
    absent = missing or {}
    numbers = [number for number in range(len(blocks) + len(absent)) if number not in absent]
    second = {numbers[number]: numbers[like] for number, like in ({} if every else stand_ins(blocks)).items()}
    names = ["forward" if block._compiled_call_impl is None else "_compiled_call_impl" for block in blocks]
    before = [block.__dict__.get(name) for block, name in zip(blocks, names, strict=True)]
    outputs: dict[int, Any] = {}
    reached = 0
    for number, block, name in zip(numbers, blocks, names, strict=True):
        passed = [(between, absent[between]) for between in range(reached, number)]
        setattr(block, name, _Watch(recorder, number, getattr(block, name), second.get(number), outputs, passed))
        reached = number + 1
    try:
        yield
    finally:
        for block, name, call in zip(blocks, names, before, strict=True):
            if call is None:
                delattr(block, name)
            else:
                setattr(block, name, call)


def _kind(block: nn.Module) -> Any:
    """What two blocks share that do the same: their class, and their parameters' and buffers'
    shapes and types."""
    tensors = (*block.named_parameters(), *block.named_buffers())
    shapes = tuple((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors)
    kinds = tuple(type(module) for module in block.modules())
    return kinds, shapes


class _Watch:
    """A block's forward, as a passage; or the block passed through, where another of its kind is
    known to do the same."""

    def __init__(
        self,
        recorder: Passages,
        number: int,
        forward: Callable[..., Any],
        second: int | None,
        known: dict[int, Any],
        before: list[tuple[int, int]],
    ) -> None:
        self.recorder, self.number, self.forward, self.second, self.known = recorder, number, forward, second, known
        self.before = before  # blocks that are not there, and what stands for each

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for number, copy_of in self.before:
            self.recorder.begin("block", number, copy_of=copy_of)
            self.recorder.begin("between", number, copy_of=copy_of)
        if self.second in self.known:
            inputs = tree_leaves((args, kwargs))
            passed = _passed_through(self.known[self.second], inputs)
            if passed is not None:
                self.recorder.begin("block", self.number, copy_of=self.second)
                self.recorder.begin("between", self.number, copy_of=self.second)
                return passed[0]
        self.recorder.begin("block", self.number)
        self.recorder.note_inputs((args, kwargs))
        output = self.forward(*args, **kwargs)
        self.known[self.number] = _shape_of_call((args, kwargs), output)
        self.recorder.begin("between", self.number)
        return output


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf)


def _shape_of_call(arguments: Any, output: Any) -> Any:
    """(inputs as described; the output's tree; of each leaf the input that it is or looks like;
    leaves but tensors)."""
    inputs = tree_leaves(arguments)
    leaves, tree = tree_flatten(output)
    sources = [_source(leaf, inputs) for leaf in leaves]
    return [_described(leaf) for leaf in inputs], tree, sources, [_constant(leaf) for leaf in leaves]


def _source(leaf: Any, inputs: list[Any]) -> int | None:
    if not isinstance(leaf, Tensor):
        return None
    tensors = [(position, one) for position, one in enumerate(inputs) if isinstance(one, Tensor)]
    same = [position for position, one in tensors if one is leaf]
    like = [position for position, one in tensors if (one.shape, one.dtype) == (leaf.shape, leaf.dtype)]
    return next(iter(same or like), None)


_TENSOR = object()  # stands where an output has a tensor


def _constant(leaf: Any) -> Any:
    return _TENSOR if isinstance(leaf, Tensor) else leaf


def _passed_through(known: Any, inputs: list[Any]) -> tuple[Any] | None:
    """The output of a block that is passed through, in a tuple; None where its call is another
    than the known one's."""
    described, tree, sources, constants = known
    if [_described(leaf) for leaf in inputs] != described:
        return None
    leaves = []
    for source, constant in zip(sources, constants, strict=True):
        if source is None and constant is _TENSOR:
            return None
        leaves.append(constant if source is None else inputs[source])
    return (tree_unflatten(leaves, tree),)


__all__ = ["shortened", "stand_ins", "watched"]
