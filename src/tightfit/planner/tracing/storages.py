"""Storages of tensors, and a torch dispatch mode that follows each one until it is freed.

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

# AccumulateGrad nodes have sequence numbers from here on; they belong to no operation of the
# forward
ACCUMULATES = 2**63

Note = TypeVar("Note")


class StorageMode(TorchDispatchMode, Generic[Note]):
    """A dispatch mode that follows storages by weak references, on real or fake tensors.

    A subclass implements `run_operation`, calls `follow` for each storage that it meets first, and
    is told of each free by `record_free`. A Note is what it keeps of a storage.
    """

    def __init__(self) -> None:
        super().__init__()
        # by id of the storage
        self._live: dict[int, tuple[Note, weakref.ref[torch.UntypedStorage]]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch traces compiled regions below this mode. The mode sees their operations when they
        run; on fake tensors these are the expected kernels."""
        return True

    def run_operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on plain tensors, record it, and return its output."""
        raise NotImplementedError

    def record_free(self, note: Note) -> None:
        raise NotImplementedError

    def follow(self, storage: torch.UntypedStorage, note: Note) -> None:
        """Keep `note` of a storage until it is freed."""
        self._live[id(storage)] = note, weakref.ref(storage, partial(self._end, id(storage)))

    def notes_of(self, keys: Iterable[int]) -> list[Note]:
        """The notes of those storages that are live and followed. keys: the storages' ids"""
        return [self._live[key][0] for key in keys if key in self._live]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args)  # fake tensors are asked for it all the time
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # the mode sees the operations on the inner tensors
        return self.run_operation(func, args, kwargs or {})

    def _end(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        found = self._live.pop(key, None)
        if found is not None:
            self.record_free(found[0])


def backward_node() -> int:
    """The sequence number of the autograd node that runs; at least ACCUMULATES if it belongs to no
    operation of the forward, or if none runs."""
    number = running_sequence_number()
    return ACCUMULATES if number is None else number


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages of a tensor's bytes. A tensor subclass (such as DTensor) has those of its inner
    tensors, a sparse tensor those of its indices and values."""
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
    """The ids of the storages of `tensors`, each once."""
    return list(dict.fromkeys(id(storage) for tensor in tensors for storage in storages_of(tensor)))


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of `tensors`; a shared storage counts once."""
    storages = {id(storage): storage for tensor in tensors for storage in storages_of(tensor)}
    return sum(storage.nbytes() for storage in storages.values())


__all__ = ["ACCUMULATES", "StorageMode", "backward_node", "keys_of", "storages_of", "tensor_bytes"]
