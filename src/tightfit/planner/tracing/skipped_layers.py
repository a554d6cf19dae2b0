"""Skip repeated blocks in a trace: of each kind, the first two and the last run, and a block
between them returns its input.

The recorder copies the segments of the second block for each skipped block. Blocks are of one kind
if they have the same classes, and parameters and buffers of the same shapes and dtypes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from tightfit._torch.modules import forward_attribute
from tightfit._torch.pytree import tree_flatten, tree_leaves, tree_unflatten


class SegmentRecorder(Protocol):
    """A recorder of the calls of blocks: `trace.Recorder` is one."""

    def begin_segment(self, part: str, block: int | None = None, copy_of: int | None = None) -> None: ...

    def note_inputs(self, arguments: Any) -> None: ...


class _NoRecorder:
    def begin_segment(self, part: str, block: int | None = None, copy_of: int | None = None) -> None:
        pass

    def note_inputs(self, arguments: Any) -> None:
        pass


@contextmanager
def skip_repeated_layers(blocks: list[nn.Module]) -> Iterator[None]:
    """Inside this context, repeated blocks return their input. Nothing is recorded."""
    with record_layers(blocks, _NoRecorder()):
        yield


def representatives(blocks: list[nn.Module], lists: list[str] | None = None) -> dict[int, int]:
    """The representative of each repeated block: number of the block -> number of the second of
    its kind.

    Only blocks between the second and the last of a kind have one.

    lists  for each block, the list that it is in, if kinds must not span several lists

    Example: five equal blocks give {2: 1, 3: 1}.
    """
    kinds: dict[Any, list[int]] = defaultdict(list)
    for number, block in enumerate(blocks):
        kinds[lists and lists[number], _kind(block)].append(number)
    return {number: members[1] for members in kinds.values() for number in members[2:-1]}


@contextmanager
def record_layers(
    blocks: list[nn.Module], recorder: SegmentRecorder, removed: Mapping[int, int] | None = None, run_all: bool = False
) -> Iterator[None]:
    """Inside this context, each call of a block is a segment of the recorder, and repeated blocks
    are skipped.

    blocks    the blocks that the model has, in order
    recorder  is told of the segments
    removed   by number, the blocks that were removed from the model, and the block that each one
              repeats: they get segments too
    run_all   skip no block
    """
    absent = removed or {}
    numbers = [number for number in range(len(blocks) + len(absent)) if number not in absent]
    second = {numbers[number]: numbers[like] for number, like in ({} if run_all else representatives(blocks)).items()}
    names = [forward_attribute(block) for block in blocks]
    before = [block.__dict__.get(name) for block, name in zip(blocks, names, strict=True)]
    outputs: dict[int, Any] = {}
    reached = 0
    for number, block, name in zip(numbers, blocks, names, strict=True):
        passed = [(between, absent[between]) for between in range(reached, number)]
        setattr(
            block, name, _RecordedForward(recorder, number, getattr(block, name), second.get(number), outputs, passed)
        )
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
    """Equal for two blocks that do the same: their classes, and the shapes and dtypes of their
    parameters and buffers."""
    tensors = (*block.named_parameters(), *block.named_buffers())
    shapes = tuple((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors)
    kinds = tuple(type(module) for module in block.modules())
    return kinds, shapes


class _RecordedForward:
    """Replaces a block's forward: runs it as a segment, or skips it if a block of the same kind
    was called with inputs of the same shapes."""

    def __init__(
        self,
        recorder: SegmentRecorder,
        number: int,
        forward: Callable[..., Any],
        second: int | None,
        known: dict[int, Any],
        before: list[tuple[int, int]],
    ) -> None:
        self.recorder, self.number, self.forward, self.second, self.known = recorder, number, forward, second, known
        self.before = before  # (removed block, the block that it repeats), directly before this one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for number, copy_of in self.before:
            self.recorder.begin_segment("block", number, copy_of=copy_of)
            self.recorder.begin_segment("between", number, copy_of=copy_of)
        if self.second in self.known:
            inputs = tree_leaves((args, kwargs))
            passed = _output_without_running(self.known[self.second], inputs)
            if passed is not None:
                self.recorder.begin_segment("block", self.number, copy_of=self.second)
                self.recorder.begin_segment("between", self.number, copy_of=self.second)
                return passed[0]
        self.recorder.begin_segment("block", self.number)
        self.recorder.note_inputs((args, kwargs))
        output = self.forward(*args, **kwargs)
        self.known[self.number] = _describe_call((args, kwargs), output)
        self.recorder.begin_segment("between", self.number)
        return output


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf)


def _describe_call(arguments: Any, output: Any) -> Any:
    """What is known of a call: descriptions of its inputs; the output's tree; for each leaf of the
    output, the position of an input that is the same or has the same shape; the leaves that are no
    tensors."""
    inputs = tree_leaves(arguments)
    leaves, tree = tree_flatten(output)
    sources = [_source(leaf, inputs) for leaf in leaves]
    return [_describe(leaf) for leaf in inputs], tree, sources, [_constant(leaf) for leaf in leaves]


def _source(leaf: Any, inputs: list[Any]) -> int | None:
    if not isinstance(leaf, Tensor):
        return None
    tensors = [(position, one) for position, one in enumerate(inputs) if isinstance(one, Tensor)]
    same = [position for position, one in tensors if one is leaf]
    like = [position for position, one in tensors if (one.shape, one.dtype) == (leaf.shape, leaf.dtype)]
    return next(iter(same or like), None)


_TENSOR = object()  # placeholder for a tensor in an output


def _constant(leaf: Any) -> Any:
    return _TENSOR if isinstance(leaf, Tensor) else leaf


def _output_without_running(known: Any, inputs: list[Any]) -> tuple[Any] | None:
    """The output of a skipped block, in a tuple of one; None if its inputs differ from the known
    call's, or an output resembles no input."""
    described, tree, sources, constants = known
    if [_describe(leaf) for leaf in inputs] != described:
        return None
    leaves = []
    for source, constant in zip(sources, constants, strict=True):
        if source is None and constant is _TENSOR:
            return None
        leaves.append(constant if source is None else inputs[source])
    return (tree_unflatten(leaves, tree),)


__all__ = ["record_layers", "representatives", "skip_repeated_layers"]
