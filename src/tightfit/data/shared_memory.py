"""Sends a dataset object to worker processes, with its tensors in shared memory that all workers
read.

torch shares each tensor through a file descriptor of its own. A new process can receive at most
about 250 file descriptors, but a list of samples has one or two tensors per sample. So if a dataset
has many tensors, this module copies them into one block of shared memory, which needs one file
descriptor.
"""

from __future__ import annotations

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

MAX_SHARED_SINGLY = 32  # up to this many storages are shared one by one, without a copy
ALIGNMENT = 64  # bytes, the alignment of torch's own allocations

# storage number, type, storage offset in elements, size, strides, requires_grad
TensorLocation = tuple[int, torch.dtype, int, torch.Size, tuple[int, ...], bool]


def pack_dataset(dataset: Any) -> tuple[bytes, list[Tensor], list[int] | None]:
    """Pickle a dataset, with the contents of its tensors kept apart. Return the three arguments of
    `unpack_dataset`: (content, storages, offsets).

    content   the pickled dataset, without the contents of its tensors
    storages  uint8 tensors. If the dataset's tensors have at most 32 storages, one tensor for each
              storage; torch moves them to shared memory when they are sent. Otherwise one tensor, a
              block of shared memory that contains all storages
    offsets   in bytes: where each storage begins in the block, and where the last one ends; None if
              there is no block

    Raises the errors of pickle for objects that cannot be sent.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dump(dataset)
    storages = [_as_bytes(storage) for storage in pickler.storages]
    if len(storages) <= MAX_SHARED_SINGLY:
        return file.getvalue(), storages, None
    offsets, end = [], 0
    for storage in storages:
        offsets.append(end)
        end += -(-storage.nbytes // ALIGNMENT) * ALIGNMENT
    block = torch.empty(end, dtype=torch.uint8).share_memory_()
    for storage, offset in zip(storages, offsets, strict=True):
        block[offset : offset + storage.nbytes] = storage
    return file.getvalue(), [block], [*offsets, end]


def unpack_dataset(content: bytes, storages: list[Tensor], offsets: list[int] | None) -> Any:
    """Return the dataset that `pack_dataset` pickled, from the three values that it returned. The
    dataset's tensors are views of the shared memory: do not write to them."""
    return _Unpickler(io.BytesIO(content), storages, offsets).load()


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class _Pickler(ForkingPickler):
    """Pickles as multiprocessing does, but writes a number in place of the contents of each CPU
    tensor: the index of the tensor's storage in the list `storages`, which it fills."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.storages: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}  # by address of a storage

    def persistent_id(self, thing: Any) -> TensorLocation | int | None:
        if type(thing) is Tensor:
            if thing.layout != torch.strided or thing.device.type != "cpu" or thing.is_conj() or thing.is_neg():
                return None
            # torch's own pickling reports that a graph cannot be sent
            if thing.is_quantized or not thing.is_leaf:
                return None
            number = self._number(thing.untyped_storage())
            return number, thing.dtype, int(thing.storage_offset()), thing.size(), thing.stride(), thing.requires_grad
        # the storage of a subclass of Tensor
        if type(thing) is torch.UntypedStorage and thing.device.type == "cpu":
            return self._number(thing)
        return None

    def _number(self, storage: torch.UntypedStorage) -> int:
        address = storage.data_ptr() or -id(storage)
        if address not in self._numbers:
            self._numbers[address] = len(self.storages)
            self.storages.append(storage)  # a reference, so that no other storage gets its address
        return self._numbers[address]


class _Unpickler(pickle.Unpickler):
    """Unpickles what `_Pickler` wrote: restores the tensors as views of the given storages.

    storages, offsets  as `pack_dataset` returns them
    """

    def __init__(self, file: io.BytesIO, storages: list[Tensor], offsets: list[int] | None) -> None:
        super().__init__(file)
        self._storages, self._offsets = storages, offsets

    def persistent_load(self, reference: Any) -> Any:
        if isinstance(reference, int):
            if self._offsets is None:
                return self._storages[reference].untyped_storage()
            return self._storages[0][self._offsets[reference] : self._offsets[reference + 1]].clone().untyped_storage()
        number, dtype, offset, size, stride, requires_grad = reference
        storage = self._storages[number if self._offsets is None else 0].untyped_storage()
        if self._offsets is not None:
            offset += self._offsets[number] // dtype.itemsize
        return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride).requires_grad_(requires_grad)


__all__ = ["pack_dataset", "unpack_dataset"]
