"""Dataflow: a record of a model's forward on fake tensors.

A Dataflow lists the tensors that each operation reads, makes and overwrites, and the inputs and
outputs of each of the model's repeated blocks. `models/tracing.py` records it.
`parallel/pipeline/boundaries.py` uses it to find which tensors are sent between pipeline stages.

A tensor is identified by two numbers, one for its Python object and one for its storage. A view is
another Python object with the same storage.

Example: in `h = block0(x); y = block1(h)`, block 0 is called with TensorId(tensor=7, storage=5) and
returns TensorId(9, 6). The call of block 1 has TensorId(9, 6) among its inputs. If block 1 is given
a view of h instead, its input is TensorId(10, 6): another object, but the same storage.
"""

from __future__ import annotations

import functools
import linecache
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from tightfit._torch.pytree import TreeSpec
from tightfit.errors import InputError
from tightfit.models.batches import Batch
from tightfit.models.block_hooks import Hooks
from tightfit.models.tensors import tensors_in

PP_FIELD = "plan: pp"
# The block number of operations before the first block. The block number of operations after the
# last block is the number of blocks.
BEFORE_BLOCKS = -1
# folders of torch and tightfit, whose lines are not the model's own code
LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))

PathTo = tuple[Any, ...]  # to a leaf in (args, kwargs): (0, 2) is args[2], (1, "x") is kwargs["x"]


class TensorId(NamedTuple):
    """Identifies a tensor in a record of a forward.

    tensor   the number of the Python object; another object has another number
    storage  the number of its storage, which a tensor and its views share
    """

    tensor: int
    storage: int


@dataclass(frozen=True)
class OperationCall:
    """Records one operation of a forward, such as a matrix product.

    block        number of the block in which the operation runs, or else of the last block before
                 it; BEFORE_BLOCKS (-1) before the first block, the number of blocks after the last
    inside       True if the operation runs inside that block, False if it runs outside of all
                 blocks
    reads        the tensors that the operation reads
    outputs      the tensors that it returns
    written      the numbers of the storages that it overwrites
    is_random    whether it draws random numbers
    reads_value  whether it gives a tensor's value to Python (as .item() does), usually for a branch
    line         the line of the model that called the operation, (file, number); None for the loss
    generator    whether it draws from a generator of the model's own
    """

    block: int
    inside: bool
    reads: tuple[TensorId, ...]
    outputs: tuple[TensorId, ...]
    written: tuple[int, ...]
    is_random: bool
    reads_value: bool
    line: tuple[str, int] | None
    generator: bool = False


@dataclass(frozen=True)
class BlockCall:
    """Records that block number `block` was called.

    inputs             {path in (args, kwargs): the input tensor there}. Example: the path (0, 2) is
                       args[2]
    without_gradients  whether autograd is off in the call, although an input requires a gradient
    checkpointed       whether the model calls the block in a checkpoint of its own, which backward runs again
    """

    block: int
    inputs: dict[PathTo, TensorId]
    without_gradients: bool = False
    checkpointed: bool = False


@dataclass(frozen=True)
class BlockReturn:
    """Records that block number `block` has returned.

    outputs  (tensor, is_input) for each output tensor; `is_input` is True if the block returns one
             of its input tensors unchanged
    """

    block: int
    outputs: tuple[tuple[TensorId, bool], ...]


Event = OperationCall | BlockCall | BlockReturn


@dataclass(frozen=True)
class Leaf:
    """Describes one value in a block's output. With it, a stub can return a value of this form
    without running the block, which the stub replaces on other pipeline stages.

    Exactly one of these applies; the other fields have their defaults:

    same_as              the value is the block's input at this path in (args, kwargs): (0, 2) is
                         args[2]
    like                 it is a tensor with the shape and type of the input at this path
    sample_shape, dtype  it is a tensor of this dtype and of shape (number of samples,
                         *sample_shape); without dims if sample_shape is None
    constant             it is this value, which is not a tensor; it may be None
    """

    same_as: PathTo | None = None
    like: PathTo | None = None
    sample_shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    constant: Any = None


@dataclass(frozen=True)
class OutputStructure:
    """Describes a block's output: nested containers, and the form of each value in them.

    spec      the nested containers, such as a tuple
    leaves    the form of each tensor or constant in these containers, in order
    in_place  whether an operation outside of the blocks overwrites a tensor of the output in place
    """

    spec: TreeSpec
    leaves: tuple[Leaf, ...]
    in_place: bool = False


@dataclass
class Dataflow:
    """The record of a forward of the model and its loss: its operations, and the calls and returns
    of blocks. If this forward changes parameters, buffers or attributes of the model, a second
    forward is recorded, too.

    forwards         for each forward, its events in order (`OperationCall`, `BlockCall`, `BlockReturn`)
    parameters       {number of a storage: the names of the parameters in it}
    persistent       {number of a storage: the name of the buffer in it}
    uses             {name of a parameter: the numbers of the blocks that use it}; BEFORE_BLOCKS
                     (-1) for uses before the blocks, the number of blocks for uses after them
    changed          names of module attributes, other than tensors, that every forward changes
    block_outputs    a description of each block's output
    shapes           for each tensor of the batch, the shape of one sample
    block_count      how many blocks are recorded
    is_random        whether the forward draws random numbers
    parameter_count  number of elements of all of the model's parameters
    block_numbers    the numbers of the recorded blocks among all of the model's blocks
    hooks            the model's own hooks on each block, including those that it registers in its
                     first forward
    replaced         {name of a buffer: the number of the tensor that replaces it in the first
                     forward}
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
    """One element of a `PathTo` that is the name of an attribute, such as `logits` in
    outputs.logits. (A `PathTo` says where a tensor is in the arguments or outputs of a block. Its
    other elements are indices and dict keys.)"""

    name: str


def path_of(keys: Any) -> PathTo:
    """Convert the keys that torch's tree_flatten_with_path returns for a leaf to a path: a tuple of
    indices, dict keys and attributes. Example: the path of args[2] is (0, 2)."""
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
    """Return the value at `path` in the arguments (args, kwargs) of a call, or None if they have no
    such path. Example: the path (1, "x") gives kwargs["x"]."""
    value: Any = arguments
    for key in path:
        try:
            value = getattr(value, key.name) if isinstance(key, _Attribute) else value[key]
        except (LookupError, AttributeError, TypeError):
            return None
    return value


@functools.cache
def describe_line(line: tuple[str, int] | None) -> str:
    """Return a text for messages that shows a line of the model's code, such as "model.py, line 12
    (h = h + x)". Return "the loss" if `line` is None.

    line: (file, number)
    """
    if line is None:
        return "the loss"
    text = linecache.getline(*line).strip()
    return f"{Path(line[0]).name}, line {line[1]}" + (f" ({text[:80]})" if text else "")


def model_line() -> tuple[str, int] | None:
    """Return the innermost line on the stack that is the model's own code, as (file, number)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(LIBRARIES) and not name.startswith("<"):
            return name, frame.f_lineno
        frame = frame.f_back
    return None


def sample_shapes(batch: Batch) -> tuple[tuple[int, ...], ...]:
    """Return, for each tensor of a batch, the shape of one sample (all dims but the first)."""
    return tuple(tuple(leaf.shape[1:]) for leaf in tensors_in(batch))


def blocks_out_of_order() -> InputError:
    """Return the error for a model whose forward does not call each block once, in order. Such a
    model cannot be a pipeline."""
    return InputError(PP_FIELD, "the model does not call each of its blocks once, in order", "use pp: 1")


def innermost_model_line(error: Exception) -> tuple[str, int] | None:
    """Return the innermost line of an error's traceback that is not in torch's or tightfit's code,
    as (file, number). Return None if the traceback has no such line."""
    found, entry = None, error.__traceback__
    while entry is not None:
        name = entry.tb_frame.f_code.co_filename
        found = found if name.startswith(LIBRARIES) else (name, entry.tb_lineno)
        entry = entry.tb_next
    return found


__all__ = [
    "BEFORE_BLOCKS",
    "LIBRARIES",
    "PP_FIELD",
    "BlockCall",
    "BlockReturn",
    "Dataflow",
    "Leaf",
    "OperationCall",
    "OutputStructure",
    "PathTo",
    "TensorId",
    "blocks_out_of_order",
    "describe_line",
    "innermost_model_line",
    "leaf_at",
    "model_line",
    "path_of",
    "sample_shapes",
]
