"""Dataflow: one forward of a model on fake tensors, as the list of what each operation reads, makes and overwrites, and of what
each of the model's repeated blocks is called with and returns. `models/tracing.py` makes it; `methods/boundaries.py` reads from it
what crosses the stages of a pipeline.

Tensors are told apart by the Python object and by the memory (storage) behind it: views share their storage.
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_leaves

from tightfit.errors import InputError
from tightfit.models.hooks import Hooks
from tightfit.models.objective import Batch

ASKED = "plan: pp"
BEFORE = -1  # the place of what runs before the first block; what runs after the last one has the number of blocks
LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))

PathTo = tuple[Any, ...]  # where a leaf lies in (args, kwargs): indices and keys


class Seen(NamedTuple):
    """A tensor: the Python object, and the storage behind it. Numbers that are never used again."""

    tensor: int
    storage: int


@dataclass(frozen=True)
class Operation:
    """place: the block that it runs in or after; BEFORE the first. inside: whether it runs in that block.

    made     its outputs; written: storages that it overwrites
    is_random, and decides: whether the program reads a value of its input, to branch on it
    line     of the model that called it: (file, number)
    """

    place: int
    inside: bool
    reads: tuple[Seen, ...]
    made: tuple[Seen, ...]
    written: tuple[int, ...]
    is_random: bool
    decides: bool
    line: tuple[str, int] | None


@dataclass(frozen=True)
class Called:
    """A block is called: by path, the tensors that it is given."""

    block: int
    given: dict[PathTo, Seen]


@dataclass(frozen=True)
class Returned:
    """A block has returned: of each tensor that it returns, what it is, and whether it was given this very tensor."""

    block: int
    returned: tuple[tuple[Seen, bool], ...]


Event = Operation | Called | Returned


@dataclass(frozen=True)
class Leaf:
    """One leaf of what a block returns: the tensor that it was given at `same`, one shaped like that at `like`, one of the batch's
    samples by `tail`, or a constant."""

    same: PathTo | None = None
    like: PathTo | None = None
    tail: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    constant: Any = None


@dataclass(frozen=True)
class Returns:
    """What a block returns, in shape. in_place: whether code between the blocks overwrites it."""

    spec: TreeSpec
    leaves: tuple[Leaf, ...]
    in_place: bool = False


@dataclass
class Dataflow:
    """Of one forward of the model and its loss, or of two where the first one leaves something behind.

    parameters  by storage, the names of those that lie there
    persistent  storages that are there before the forward, the batch apart, with a name to say
    uses        by name, where each parameter was used: numbers of blocks, BEFORE, or the count of blocks
    changed     attributes of modules that each forward changes, and that are no tensors
    shapes      of one sample of the batch's tensors
    is_random   whether it draws random numbers; parameter_count: elements of the model's parameters
    blocks      how many are recorded; numbers: which of the model's they are, where others were taken out
    hooks       the model's own on each block; some models install them in their first forward
    replaced    by name, the tensor that the first forward puts in the place of a buffer
    """

    forwards: list[list[Event]]
    parameters: dict[int, frozenset[str]]
    persistent: dict[int, str]
    uses: dict[str, tuple[int, ...]]
    changed: list[str]
    returns: list[Returns]
    shapes: tuple[tuple[int, ...], ...]
    blocks: int
    is_random: bool
    parameter_count: int = 0
    numbers: tuple[int, ...] = ()
    hooks: tuple[Hooks, ...] = ()
    replaced: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Attribute:
    """A key of a path that is an attribute."""

    name: str


def path_of(keys: Any) -> PathTo:
    found: list[Any] = []
    for key in keys:
        if hasattr(key, "idx"):
            found.append(key.idx)
        elif hasattr(key, "key"):
            found.append(key.key)
        else:
            found.append(_Attribute(key.name))
    return tuple(found)


def at(arguments: tuple[Any, dict[str, Any]], path: PathTo) -> Any:
    """The leaf of (args, kwargs) at `path`; None where there is none."""
    value: Any = arguments
    for key in path:
        try:
            value = getattr(value, key.name) if isinstance(key, _Attribute) else value[key]
        except (LookupError, AttributeError, TypeError):
            return None
    return value


def said(line: tuple[str, int] | None) -> str:
    """A line of the model, as it is shown: where it is, and what it says."""
    if line is None:
        return "the loss"
    text = linecache.getline(*line).strip()
    return f"{Path(line[0]).name}, line {line[1]}" + (f" ({text[:80]})" if text else "")


def sample_shapes(batch: Batch) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(leaf.shape[1:]) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def not_in_a_row() -> InputError:
    return InputError(ASKED, "the model does not call its blocks in a row, each once", "use pp: 1")


def line_of(error: Exception) -> tuple[str, int] | None:
    """The innermost line of the model's own code that an error passed through."""
    found, here = None, error.__traceback__
    while here is not None:
        name = here.tb_frame.f_code.co_filename
        found = found if name.startswith(LIBRARIES) else (name, here.tb_lineno)
        here = here.tb_next
    return found


__all__ = [
    "ASKED",
    "BEFORE",
    "LIBRARIES",
    "Called",
    "Dataflow",
    "Leaf",
    "Operation",
    "PathTo",
    "Returned",
    "Returns",
    "Seen",
    "at",
    "line_of",
    "not_in_a_row",
    "path_of",
    "said",
    "sample_shapes",
]
