"""Find the storages of tensors, and follow each storage until it is freed, with a torch dispatch
mode.

`recorder.Recorder` and `live_storages.StorageTracker` are such modes. The first records the
operations of a trace, the second adds up the live bytes of a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from tightfit._torch.dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from tightfit._torch.tensors import running_sequence_number, sparse_parts

# AccumulateGrad nodes have sequence numbers of at least this; they belong to no operation of the
# forward
ACCUMULATES = 2**63

Note = TypeVar("Note")


class StorageMode(TorchDispatchMode, Generic[Note]):
    """A dispatch mode that follows storages by weak references, on real or fake tensors.

    A subclass implements `run_operation`, and calls `follow` for each new storage. The mode calls
    `record_free` when a storage is freed. `Note` is the type of the object that the subclass
    remembers for a storage.
    """

    def __init__(self) -> None:
        super().__init__()
        # id of a storage -> (its note, a weak reference to it)
        self._live: dict[int, tuple[Note, weakref.ref[torch.UntypedStorage]]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that torch turns this mode off while torch.compile compiles a region. The
        mode then sees only the operations that a compiled region runs. On fake tensors, they are
        the kernels that the compiler is expected to generate."""
        return True

    def run_operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on plain tensors, record it, and return its output."""
        raise NotImplementedError

    def record_free(self, note: Note) -> None:
        """Record that the storage with this note was freed."""
        raise NotImplementedError

    def follow(self, storage: torch.UntypedStorage, note: Note) -> None:
        """Remember `note` for `storage`. When the storage is freed, pass the note to
        `record_free`."""
        self._live[id(storage)] = note, weakref.ref(storage, partial(self._end, id(storage)))

    def notes_of(self, keys: Iterable[int]) -> list[Note]:
        """Return the notes of the storages with these ids (`id(storage)`). Storages that are not
        followed or already freed are left out."""
        return [self._live[key][0] for key in keys if key in self._live]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args)  # not recorded; very frequent on fake tensors
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # the mode sees the operations on the inner tensors
        return self.run_operation(func, args, kwargs or {})

    def _end(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        found = self._live.pop(key, None)
        if found is not None:
            self.record_free(found[0])


def backward_node() -> int:
    """Return the sequence number of the autograd node that is running in backward. torch numbers
    nodes in the order in which the forward creates them.

    The number is at least ACCUMULATES if the node belongs to no operation of the forward, or if no
    node runs.
    """
    number = running_sequence_number()
    return ACCUMULATES if number is None else number


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages that contain a tensor's bytes. For a tensor subclass (such as DTensor),
    they are the storages of its inner tensors; for a sparse tensor, those of its indices and
    values."""
    if is_traceable_wrapper_subclass(tensor):
        for inner in map(partial(getattr, tensor), tensor.__tensor_flatten__()[0]):
            if isinstance(inner, Tensor):
                yield from storages_of(inner)
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
    elif tensor.layout is torch.sparse_coo:
        for part in sparse_parts(tensor):
            yield from storages_of(part)


def keys_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return the ids (`id(storage)`) of the storages of `tensors`, each id once."""
    return list(dict.fromkeys(id(storage) for tensor in tensors for storage in storages_of(tensor)))


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of `tensors`. A shared storage counts once."""
    storages = {id(storage): storage for tensor in tensors for storage in storages_of(tensor)}
    return sum(storage.nbytes() for storage in storages.values())


__all__ = ["ACCUMULATES", "StorageMode", "backward_node", "keys_of", "storages_of", "tensor_bytes"]
