"""A dataset handed over in Python, sent to worker processes: its tensors in shared memory, all in one block where they are many.

torch shares each tensor by a file descriptor of its own. A process is started with at most some 250 of them, and a list of
samples has a tensor or two for each sample. Packed, they take one descriptor, and all workers read the same memory.
"""

from __future__ import annotations

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

FEW = 32  # storages that are shared one by one: nothing is copied then
ALIGNED = 64  # bytes, as torch's own allocations

Place = tuple[int, torch.dtype, int, torch.Size, tuple[int, ...], bool]  # storage, type, offset, size, strides, trained


def packed(dataset: Any) -> tuple[bytes, list[Tensor], list[int] | None]:
    """What `unpacked` makes the dataset of: its pickle without tensors, the bytes of their storages, and where in one block
    of bytes each storage begins, and the last ends.

    The last is None where they are few, and left as they are. Raises what pickle raises for what cannot be sent.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dump(dataset)
    storages = [_bytes(storage) for storage in pickler.storages]
    if len(storages) <= FEW:
        return file.getvalue(), storages, None
    offsets, end = [], 0
    for storage in storages:
        offsets.append(end)
        end += -(-storage.nbytes // ALIGNED) * ALIGNED
    block = torch.empty(end, dtype=torch.uint8).share_memory_()
    for storage, offset in zip(storages, offsets, strict=True):
        block[offset : offset + storage.nbytes] = storage
    return file.getvalue(), [block], [*offsets, end]


def unpacked(content: bytes, storages: list[Tensor], offsets: list[int] | None) -> Any:
    """The dataset that `packed` was given; its tensors lie in the memory that it made, and must not be written to."""
    return _Unpickler(io.BytesIO(content), storages, offsets).load()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class _Pickler(ForkingPickler):
    """As processes pickle what they are started with, but for the storages of tensors, which are numbered."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.storages: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}  # by address of a storage

    def persistent_id(self, thing: Any) -> Place | int | None:
        if type(thing) is Tensor:
            if thing.layout != torch.strided or thing.device.type != "cpu" or thing.is_conj() or thing.is_neg():
                return None
            if thing.is_quantized or not thing.is_leaf:  # torch's own pickling says that a graph cannot be sent
                return None
            number = self._number(thing.untyped_storage())
            return number, thing.dtype, int(thing.storage_offset()), thing.size(), thing.stride(), thing.requires_grad
        if type(thing) is torch.UntypedStorage and thing.device.type == "cpu":  # of a subclass of Tensor
            return self._number(thing)
        return None

    def _number(self, storage: torch.UntypedStorage) -> int:
        address = storage.data_ptr() or -id(storage)
        if address not in self._numbers:
            self._numbers[address] = len(self.storages)
            self.storages.append(storage)  # kept, so that no other comes to lie at its address
        return self._numbers[address]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, storages: list[Tensor], offsets: list[int] | None) -> None:
        super().__init__(file)
        self._storages, self._offsets = storages, offsets

    def persistent_load(self, known: Any) -> Any:
        if isinstance(known, int):
            if self._offsets is None:
                return self._storages[known].untyped_storage()
            return self._storages[0][self._offsets[known] : self._offsets[known + 1]].clone().untyped_storage()
        number, dtype, offset, size, stride, trained = known
        storage = self._storages[number if self._offsets is None else 0].untyped_storage()
        if self._offsets is not None:
            offset += self._offsets[number] // dtype.itemsize
        return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride).requires_grad_(trained)


__all__ = ["packed", "unpacked"]
