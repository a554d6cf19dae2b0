"""Leave repeated blocks out of a trace.

Two blocks are of the same kind if their modules have the same classes, and their parameters and
buffers the same names, shapes and dtypes. Of each kind, the first two blocks and the last block are
traced. The second block represents the blocks between the second and the last: the recorder copies
its segments for each of them. In a model of the user's own, a block that is called otherwise than the
second, such as without gradients, is traced too, and represents those after it that are called alike.

A repeated block is left out in one of two ways:

- It is removed from the model before the trace (`create_without_repeated_blocks`). This also saves
  creating, copying, sharding and wrapping it. Of a model that is compiled as a whole, four blocks remain
  (`create_few_blocks`), because its trace has no blocks: see `compiled_depth.py`.
- It is skipped during the trace (`record_blocks`): it returns its input. The user's own models are
  traced like this, because their code may count or index the blocks.

Example: a transformers model with 32 equal layers is created with layers 0, 1 and 31. Its
`BlockMap` has 32 names, and `removed` maps each of the layers 2 to 30 to layer 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from tightfit._torch.modules import forward_attribute, own_children
from tightfit._torch.pytree import tree_flatten, tree_leaves, tree_unflatten
from tightfit._torch.tensors import saved_tensor_hooks_now
from tightfit.job import ModelSpec
from tightfit.models import find_blocks, model_config, with_fewer_blocks

FEW_BLOCKS = 4  # a model with this number of blocks shows whether its blocks are of one kind

Value = TypeVar("Value")


def representatives(blocks: list[nn.Module], lists: list[str] | None = None) -> dict[int, int]:
    """Return which block represents each repeated block: number of the repeated block -> number of
    the second block of its kind. Blocks are of the same kind if they have the same modules and
    shapes.

    Only the blocks between the second and the last block of a kind have a representative.

    blocks  the model's blocks, in order
    lists   for each block, the dotted name of the list that contains it, such as "model.layers";
            blocks of different lists are then of different kinds. None: lists are not compared

    Example: five equal blocks give {2: 1, 3: 1}.
    """
    return {number: earlier[0] for number, earlier in _earlier_of_kind(blocks, lists).items()}


def _earlier_of_kind(blocks: list[nn.Module], lists: list[str] | None = None) -> dict[int, list[int]]:
    """Return number of each block between the second and the last of its kind -> the numbers of the
    blocks of this kind before it, without the first. Arguments: see `representatives`."""
    kinds: dict[Any, list[int]] = defaultdict(list)
    for number, block in enumerate(blocks):
        kinds[lists and lists[number], _kind(block)].append(number)
    return {
        number: members[1:index] for members in kinds.values() for index, number in enumerate(members[:-1]) if index > 1
    }


def _kind(block: nn.Module) -> Any:
    """Return a key that is equal for blocks of the same kind: the classes of a block's modules, and
    the names, shapes and dtypes of its parameters and buffers."""
    tensors = (*block.named_parameters(), *block.named_buffers())
    shapes = tuple((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors)
    kinds = tuple(type(module) for module in block.modules())
    return kinds, shapes


@dataclass(frozen=True)
class BlockMap:
    """Says which blocks of the user's model were removed before a trace, and which remaining block
    each of them repeats.

    names    names of all blocks of the user's model, in order, removed blocks included
    removed  number of each removed block -> number of the block that it repeats
    """

    names: tuple[str, ...] = ()
    removed: dict[int, int] = field(default_factory=dict)

    @property
    def numbers(self) -> list[int]:
        """Numbers of the blocks that were not removed, in order."""
        return [number for number in range(len(self.names)) if number not in self.removed]

    def parameter_of(self, name: str, number: int | None) -> str:
        """Return the name of the parameter of a removed block that corresponds to the parameter `name`, which may be
        of any block. A parameter that is in no block has its own name.

        number  which of the removed blocks, from 0; None: a name that is the same for all blocks
        """
        for path in self.names:
            if name.startswith(f"{path}."):
                inner = name.removeprefix(path)
                return f"*{inner}" if number is None else self.names[sorted(self.removed)[number]] + inner
        return name

    def expand(self, named: dict[str, Value], another: Callable[[Value, str, int], Value]) -> dict[str, Value]:
        """Return values by name (of parameters or updates) for the user's entire model, in its
        order. The values of removed blocks are made from those of the blocks that they repeat.

        named    dotted name -> value, for the remaining blocks and the rest of the model
        another  function of (value, new name, number of the removed block) that returns the value
                 for the removed block

        Example: if layers 2 to 30 were removed and repeat layer 1, the value of "layers.1.weight"
        also gives the values of "layers.2.weight" to "layers.30.weight".
        """
        if not self.removed:
            return named
        prefixes = {f"{self.names[number]}.": number for number in self.numbers}
        block_numbers = {
            name: next((n for prefix, n in prefixes.items() if name.startswith(prefix)), None) for name in named
        }
        expanded: dict[str, Value] = {}
        reached = 0
        for name, value in named.items():
            block_number = block_numbers[name] or 0
            for number in range(reached, block_number):
                if number in self.removed:
                    like, path = self.removed[number], self.names[number]
                    for inner in (inner for inner in named if block_numbers[inner] == like):
                        full = path + inner.removeprefix(self.names[like])
                        expanded[full] = another(named[inner], full, number)
            reached = max(reached, block_number)
            expanded[name] = value
        return expanded


def create_without_repeated_blocks(
    spec: ModelSpec, create: Callable[[ModelSpec], nn.Module], whole: bool
) -> tuple[nn.Module, BlockMap]:
    """Create a transformers model without its repeated blocks. Return (model, BlockMap). The
    BlockMap says which blocks the model lacks, and which block each of them repeats.

    If the configuration states the number of blocks and all are of one kind, the repeated blocks
    are never created. Otherwise they are removed afterwards.

    spec    the job's description of the model
    create  function that creates a model from such a description
    whole   whether to keep all blocks
    """
    few = None if whole else create_few_blocks(spec, create, FEW_BLOCKS - 1)
    if few is not None:
        return few
    model = create(spec)
    names = tuple(path for path, _ in find_blocks(model, spec.blocks))
    return model, BlockMap(names) if whole else remove_repeated_blocks(model, spec.blocks)


def create_few_blocks(
    spec: ModelSpec, create: Callable[[ModelSpec], nn.Module], kept: int = FEW_BLOCKS
) -> tuple[nn.Module, BlockMap] | None:
    """Create a transformers model with only its first blocks and the last one. Return (model, BlockMap). The
    BlockMap says that the second block represents all that the model lacks.

    spec    the job's description of the model
    create  function that creates a model from such a description
    kept    number of blocks that the model has: 3 or 4

    Returns None if the configuration does not state the number of blocks, if the model has no more than 4, if it
    has further blocks, or if its blocks are not all of one kind.
    """
    few = with_fewer_blocks(spec, FEW_BLOCKS)
    if few is None:
        return None
    model, count = create(few), model_config(spec).num_hidden_layers
    found = _removable_blocks(model, spec.blocks)
    lists = {path.rpartition(".")[0] for path in found.names}
    if len(found.names) != FEW_BLOCKS or len(found.removed) != FEW_BLOCKS - 3 or len(lists) != 1:
        return None
    (path,) = lists
    blocks = own_children(model.get_submodule(path))
    last = blocks.pop(str(FEW_BLOCKS - 1))
    for number in range(kept - 1, FEW_BLOCKS - 1):
        del blocks[str(number)]
    blocks[str(count - 1)] = last
    removed = dict.fromkeys(range(kept - 1, count - 1), 1)
    block_map = BlockMap(tuple(f"{path}.{number}" for number in range(count)), removed)
    expected = [block_map.names[number] for number in block_map.numbers]
    return (model, block_map) if [name for name, _ in find_blocks(model, spec.blocks)] == expected else None


def remove_repeated_blocks(model: nn.Module, name: str | None) -> BlockMap:
    """Remove the repeated blocks of a transformers model, in place. Return the BlockMap, which says
    which blocks were removed.

    Nothing is removed if the config names layers of different types, if blocks share parameters, or
    if the blocks are not in a ModuleList.

    name  name of the list that contains the blocks; None to find it
    """
    thin = _removable_blocks(model, name)
    if not thin.removed:
        return thin
    parents = {path: model.get_submodule(path) for path in dict.fromkeys(one.rpartition(".")[0] for one in thin.names)}
    before = {path: dict(own_children(parent)) for path, parent in parents.items()}
    for number in thin.removed:
        path, _, key = thin.names[number].rpartition(".")
        del own_children(parents[path])[key]
    if [path for path, _ in find_blocks(model, name)] == [thin.names[number] for number in thin.numbers]:
        return thin
    for path, parent in parents.items():  # find_blocks finds other blocks now: restore all
        own_children(parent).clear()
        own_children(parent).update(before[path])
    return BlockMap(thin.names)


def _removable_blocks(model: nn.Module, name: str | None) -> BlockMap:
    """Return which blocks `remove_repeated_blocks` may remove, as a BlockMap; the model is not changed."""
    blocks = find_blocks(model, name)
    names = tuple(path for path, _ in blocks)
    config = getattr(model, "config", None)
    # sub-models have configs of their own
    configs = (config, *vars(config).values()) if config is not None else ()
    mixed = any(len(set(getattr(one, "layer_types", None) or ())) > 1 for one in configs)
    owned = [id(parameter) for _, block in blocks for parameter in block.parameters()]
    lists = [path.rpartition(".")[0] for path in names]
    whole = all(isinstance(model.get_submodule(path), nn.ModuleList) for path in dict.fromkeys(lists))
    if mixed or len(set(owned)) < len(owned) or not whole:
        return BlockMap(names)
    return BlockMap(names, representatives([block for _, block in blocks], lists))


class SegmentRecorder(Protocol):
    """The methods that `record_blocks` calls on a recorder. `recorder.Recorder` implements them."""

    def begin_segment(self, part: str, block: int | None = None, copy_of: int | None = None) -> None: ...

    def note_inputs(self, arguments: Any) -> None: ...


class _NoRecorder:
    def begin_segment(self, part: str, block: int | None = None, copy_of: int | None = None) -> None:
        pass

    def note_inputs(self, arguments: Any) -> None:
        pass


@contextmanager
def record_blocks(
    blocks: list[nn.Module], recorder: SegmentRecorder, removed: Mapping[int, int] | None = None, run_all: bool = False
) -> Iterator[set[nn.Module]]:
    """Return a context manager. Inside it, each call of a block is recorded as a segment of its
    own, and repeated blocks are skipped: they return their input.

    blocks    the model's blocks, in order, without those that were removed
    recorder  its methods are called when a segment begins and when a block's inputs are known
    removed   number of each block that was removed from the model -> number of the block that it
              repeats; segments are recorded for removed blocks as well
    run_all   True: run repeated blocks as well, instead of skipping them

    The context manager returns a set that gets the blocks that are called, whether they run or are skipped.
    """
    called: set[nn.Module] = set()
    absent = removed or {}
    numbers = [number for number in range(len(blocks) + len(absent)) if number not in absent]
    earlier = {
        numbers[number]: [numbers[tensor] for tensor in like]
        for number, like in ({} if run_all else _earlier_of_kind(blocks)).items()
    }
    names = [forward_attribute(block) for block in blocks]
    before = [block.__dict__.get(name) for block, name in zip(blocks, names, strict=True)]
    outputs: dict[int, Any] = {}
    reached = 0
    for number, block, name in zip(numbers, blocks, names, strict=True):
        passed = [(between, absent[between]) for between in range(reached, number)]
        setattr(
            block,
            name,
            _RecordedForward(
                recorder,
                number,
                getattr(block, name),
                earlier.get(number, []),
                outputs,
                passed,
                partial(called.add, block),
            ),
        )
        reached = number + 1
    try:
        yield called
    finally:
        for block, name, call in zip(blocks, names, before, strict=True):
            if call is None:
                delattr(block, name)
            else:
                setattr(block, name, call)


@contextmanager
def skip_repeated_blocks(blocks: list[nn.Module]) -> Iterator[set[nn.Module]]:
    """Return a context manager. Inside it, repeated blocks return their input without computing.
    Nothing is recorded. It returns a set that gets the blocks that are called.

    blocks  the model's blocks, in order
    """
    with record_blocks(blocks, _NoRecorder()) as called:
        yield called


class _RecordedForward:
    """Replaces the `forward` of a block. A call records the block as a segment of its own.

    The block is skipped if it is a repeated block and one of the blocks in `earlier` (equal blocks, of
    which some ran) was called in the same way, with inputs of the same shapes and dtypes.
    """

    def __init__(
        self,
        recorder: SegmentRecorder,
        number: int,
        forward: Callable[..., Any],
        earlier: list[int],
        known: dict[int, Any],
        before: list[tuple[int, int]],
        note_call: Callable[[], None],
    ) -> None:
        self.note_call = note_call
        self.recorder, self.number, self.forward, self.earlier, self.known = recorder, number, forward, earlier, known
        self.before = before  # (removed block, the block that it repeats), directly before this one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.note_call()
        for number, copy_of in self.before:
            self._copy_segments(number, copy_of)
        inputs = tree_leaves((args, kwargs)) if self.earlier else []
        for other in filter(self.known.__contains__, self.earlier):
            passed = _output_without_running(self.known[other], inputs)
            if passed is not None:
                self._copy_segments(self.number, other)
                return passed[0]
        self.recorder.begin_segment("block", self.number)
        self.recorder.note_inputs((args, kwargs))
        output = self.forward(*args, **kwargs)
        self.known[self.number] = _describe_call((args, kwargs), output)
        self.recorder.begin_segment("between", self.number)
        return output

    def _copy_segments(self, number: int, copy_of: int) -> None:
        """Tell the recorder that block `number` does not run, and that its segments are copies of
        those of block `copy_of`, its representative."""
        self.recorder.begin_segment("block", number, copy_of=copy_of)
        self.recorder.begin_segment("between", number, copy_of=copy_of)


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf)


def _describe_inputs(inputs: list[Any]) -> list[Any]:
    """Describe how a block is called: its inputs, whether gradients are computed, and which hooks handle the
    tensors that it saves, such as those of torch's checkpoint."""
    hooks = saved_tensor_hooks_now()
    name = "" if hooks is None else getattr(hooks[0], "__qualname__", "")
    return [torch.is_grad_enabled(), name, *map(_describe, inputs)]


def _describe_call(arguments: Any, output: Any) -> Any:
    """Describe a call of a block, so that `_output_without_running` can make the output of an equal
    call.

    Returns (description of the call, structure of the output, sources, constants). The last two
    are lists with an entry for each leaf of the output. For a tensor, `sources` has the position of
    an input that is this tensor, or else has the same shape and dtype; None if there is no such
    input. For another leaf, `constants` has the leaf itself.
    """
    inputs = tree_leaves(arguments)
    leaves, tree = tree_flatten(output)
    sources = [_source(leaf, inputs) for leaf in leaves]
    return _describe_inputs(inputs), tree, sources, [_constant(leaf) for leaf in leaves]


def _source(leaf: Any, inputs: list[Any]) -> int | None:
    if not isinstance(leaf, Tensor):
        return None
    tensors = [(position, tensor) for position, tensor in enumerate(inputs) if isinstance(tensor, Tensor)]
    same = [position for position, one in tensors if one is leaf]
    like = [position for position, one in tensors if (one.shape, one.dtype) == (leaf.shape, leaf.dtype)]
    return next(iter(same or like), None)


_TENSOR = object()  # placeholder for a tensor in an output


def _constant(leaf: Any) -> Any:
    return _TENSOR if isinstance(leaf, Tensor) else leaf


def _output_without_running(known: Any, inputs: list[Any]) -> tuple[Any] | None:
    """Return the output of a skipped block, in a tuple of one element. Its tensors are tensors of
    the block's inputs, with the right shapes and dtypes.

    known   what `_describe_call` returned for the call of an equal block that ran
    inputs  leaves of the skipped block's arguments

    Returns None if the inputs differ from those of the known call, or if an output tensor has the
    shape and dtype of no input.
    """
    described, tree, sources, constants = known
    if _describe_inputs(inputs) != described:
        return None
    leaves = []
    for source, constant in zip(sources, constants, strict=True):
        if source is None and constant is _TENSOR:
            return None
        leaves.append(constant if source is None else inputs[source])
    return (tree_unflatten(leaves, tree),)


__all__ = [
    "BlockMap",
    "create_few_blocks",
    "create_without_repeated_blocks",
    "record_blocks",
    "remove_repeated_blocks",
    "representatives",
    "skip_repeated_blocks",
]
