"""Dataflow: a record of one forward of a model on fake tensors.

It lists the tensors that each operation reads, makes and overwrites, and the inputs and outputs of
each of the model's repeated blocks. `models/tracing.py` records it. From it,
`parallel/pipeline/boundaries.py` finds which tensors are sent between pipeline stages.

A tensor is identified by its Python object and by its storage. Views share their storage.

Example: in `h = block0(x); y = block1(h)`, block 0 is called with TensorId(tensor=7, storage=5) and
returns TensorId(9, 6). The call of block 1 has TensorId(9, 6) among its inputs. If block 1 is given
a view of h instead, its input is TensorId(10, 6): another object, but the same storage.
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tightfit._torch.pytree import TreeSpec
from tightfit.errors import InputError
from tightfit.models.block_hooks import Hooks
from tightfit.models.objective import Batch
from tightfit.models.tensors import tensors_in

PP_FIELD = "plan: pp"
# The block number of operations before the first block. The block number of operations after the
# last block is the number of blocks.
BEFORE_BLOCKS = -1
# folders of torch and tightfit, whose lines are not the model's own code
LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))

PathTo = tuple[Any, ...]  # to a leaf in (args, kwargs): (0, 2) is args[2], (1, "x") is kwargs["x"]


class TensorId(NamedTuple):
    """The identity of a tensor: a number for the Python object and a number for its storage. No
    number is used twice."""

    tensor: int
    storage: int


@dataclass(frozen=True)
class Operation:
    """One operation of the forward.

    block        number of the block in which the operation runs, or of the last block before it;
                 BEFORE_BLOCKS before the first block, the number of blocks after the last one
    inside       whether the operation runs inside of that block
    reads        the tensors that the operation reads
    outputs      the tensors that it returns
    written      the storages that it overwrites
    is_random    whether it draws random numbers
    reads_value  whether Python reads a value of its input (as .item() does), usually to branch on
                 it
    line         the line of the model that called the operation, (file, number); None for the loss
    """

    block: int
    inside: bool
    reads: tuple[TensorId, ...]
    outputs: tuple[TensorId, ...]
    written: tuple[int, ...]
    is_random: bool
    reads_value: bool
    line: tuple[str, int] | None


@dataclass(frozen=True)
class BlockCall:
    """The call of a block. inputs: the block's input tensors by their path in (args, kwargs)."""

    block: int
    inputs: dict[PathTo, TensorId]


@dataclass(frozen=True)
class BlockReturn:
    """The return of a block. outputs: the block's output tensors, each with True if it is one of
    the block's inputs itself."""

    block: int
    outputs: tuple[tuple[TensorId, bool], ...]


Event = Operation | BlockCall | BlockReturn


@dataclass(frozen=True)
class Leaf:
    """One leaf of a block's output, described so that a stub can return it without running the
    block.

    The leaf is one of these:

    same_as              the input at this path itself
    like                 a tensor with the shape and type of the input at this path
    sample_shape, dtype  a tensor of this dtype and of shape (samples of the batch, *sample_shape);
                         a tensor without dims if sample_shape is None
    constant             a value that is not a tensor, or None
    """

    same_as: PathTo | None = None
    like: PathTo | None = None
    sample_shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    constant: Any = None


@dataclass(frozen=True)
class OutputStructure:
    """The structure and shapes of a block's output.

    spec      the nested containers of the output
    leaves    the tensors and constants in these containers
    in_place  whether operations outside of the blocks overwrite a tensor of the output in place
    """

    spec: TreeSpec
    leaves: tuple[Leaf, ...]
    in_place: bool = False


@dataclass
class Dataflow:
    """The events of one forward of the model and its loss. If this forward changes persistent
    state, the events of a second forward follow.

    forwards         the events of each forward, in order
    parameters       by storage, the names of the parameters in it
    persistent       by storage, the name of the buffer in it
    uses             by name of a parameter, the numbers of the blocks that use it; BEFORE_BLOCKS
                     for uses before the blocks, the number of blocks for uses after them
    changed          names of module attributes, other than tensors, that every forward changes
    block_outputs    the structure of each block's output
    shapes           for each tensor of the batch, the shape of one sample
    block_count      how many blocks are recorded
    is_random        whether the forward draws random numbers
    parameter_count  number of elements of all of the model's parameters
    block_numbers    the numbers of the recorded blocks among all of the model's blocks
    hooks            the model's own hooks on each block; some models install them in their first
                     forward
    replaced         by name of a buffer, the number of the tensor that the first forward puts in
                     its place
    """

    forwards: list[list[Event]]
    parameters: dict[int, frozenset[str]]
    persistent: dict[int, str]
    uses: dict[str, tuple[int, ...]]
    changed: list[str]
    block_outputs: list[OutputStructure]
    shapes: tuple[tuple[int, ...], ...]
    block_count: int
    is_random: bool
    parameter_count: int = 0
    block_numbers: tuple[int, ...] = ()
    hooks: tuple[Hooks, ...] = ()
    replaced: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Attribute:
    """A part of a path that is the name of an attribute, not an index or a key."""

    name: str


def path_of(keys: Any) -> PathTo:
    """Return the path of a leaf, from the key entries that torch's tree_flatten_with_path gives."""
    found: list[Any] = []
    for key in keys:
        if hasattr(key, "idx"):
            found.append(key.idx)
        elif hasattr(key, "key"):
            found.append(key.key)
        else:
            found.append(_Attribute(key.name))
    return tuple(found)


def leaf_at(arguments: tuple[Any, dict[str, Any]], path: PathTo) -> Any:
    """Return the leaf of (args, kwargs) at `path`, or None if no leaf has this path."""
    value: Any = arguments
    for key in path:
        try:
            value = getattr(value, key.name) if isinstance(key, _Attribute) else value[key]
        except (LookupError, AttributeError, TypeError):
            return None
    return value


def describe_line(line: tuple[str, int] | None) -> str:
    """Return a line of the model as messages show it, such as "model.py, line 12 (h = h + x)". For
    a `line` of None, return "the loss"."""
    if line is None:
        return "the loss"
    text = linecache.getline(*line).strip()
    return f"{Path(line[0]).name}, line {line[1]}" + (f" ({text[:80]})" if text else "")


def sample_shapes(batch: Batch) -> tuple[tuple[int, ...], ...]:
    """Return, for each tensor of a batch, the shape of one sample (all dims but the first)."""
    return tuple(tuple(leaf.shape[1:]) for leaf in tensors_in(batch))


def blocks_out_of_order() -> InputError:
    """Return the error for a model whose forward does not call each block once, in order. Such a
    model cannot be a pipeline."""
    return InputError(PP_FIELD, "the model does not call each of its blocks once, in order", "use pp: 1")


def innermost_model_line(error: Exception) -> tuple[str, int] | None:
    """Return the innermost line of the model's own code in an error's traceback, as (file, number).
    Return None if the traceback has no such line."""
    found, here = None, error.__traceback__
    while here is not None:
        name = here.tb_frame.f_code.co_filename
        found = found if name.startswith(LIBRARIES) else (name, here.tb_lineno)
        here = here.tb_next
    return found


__all__ = [
    "BEFORE_BLOCKS",
    "LIBRARIES",
    "PP_FIELD",
    "BlockCall",
    "BlockReturn",
    "Dataflow",
    "Leaf",
    "Operation",
    "OutputStructure",
    "PathTo",
    "TensorId",
    "blocks_out_of_order",
    "describe_line",
    "innermost_model_line",
    "leaf_at",
    "path_of",
    "sample_shapes",
]
