"""Offloads the tensors that a forward saves for backward, and prefetches them during backward."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tightfit._torch.tensors import storage_id
from tightfit.runtime.offload_store import PendingFetch, Store
from tightfit.target_device import has_own_memory

MIN_OFFLOAD_BYTES = 2**16  # bytes; saved tensors up to this size are not offloaded
# bytes; the most saved tensors that are prefetched at a time, unless one tensor is larger
MAX_PREFETCH_BYTES = 2**28


def offload_saved(store: Store, parameters: set[int]) -> saved_tensors_hooks:
    """Return a context manager. The tensors that a forward inside it saves for backward are
    offloaded to the store; backward copies them back. Tensors of at most MIN_OFFLOAD_BYTES stay
    on the device.

    store       the store
    parameters  `storage_id` of the parameters, which stay on the device, too
    """

    order = _SaveOrder(store)

    def pack(tensor: Tensor) -> Any:
        if tensor.nbytes <= MIN_OFFLOAD_BYTES or storage_id(tensor) in parameters:
            return tensor
        return order.put(tensor.detach())

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else order.fetch(packed)

    return saved_tensors_hooks(pack, unpack)


class _SavedTensor:
    """A tensor that a forward has saved for backward and that was offloaded to the store. It is
    released when the autograd graph drops it.

    stored  the tensor in the store
    order   the `_SaveOrder` of the forward, which knows all of its saved tensors
    index   the tensor's index in `order`
    coming  the prefetched copy on the device; None if there is none
    asked   whether a copy back to the device has begun at least once
    """

    def __init__(self, stored: Tensor, order: _SaveOrder, index: int) -> None:
        self.stored, self.order, self.index = stored, order, index
        self.coming: PendingFetch | None = None
        self.asked = False

    def __del__(self) -> None:
        if self.coming is not None:
            self.order.ahead -= self.stored.nbytes
        self.order.store.release(self.stored)


class _SaveOrder:
    """The offloaded tensors of one forward, in the order in which it saved them. Backward uses them
    in about the reverse order, so the next ones can be prefetched.

    When backward uses a tensor, the tensors that were saved just before it are prefetched: at least
    one tensor, and as many as fit in both MAX_PREFETCH_BYTES and the size of the largest saved
    tensor. Each tensor is prefetched only once. If backward runs again through a retained graph, it
    copies each tensor back when it uses the tensor. Only the autograd graph keeps the saved tensors
    alive.

    Example: a forward saves a, b, c, d of 100 MiB each, so at most max_prefetch_bytes(100 MiB) =
    100 MiB are prefetched at a time. When backward uses d, c is prefetched; when it uses c, b is
    prefetched.

    largest  bytes of the largest saved tensor
    ahead    bytes of the prefetched tensors that were not used yet
    next     index of the next tensor to prefetch
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.saved: list[weakref.ref[_SavedTensor]] = []
        self.largest = self.ahead = 0  # bytes
        self.next = 0

    def put(self, value: Tensor) -> _SavedTensor:
        """Begin to copy `value`, a tensor that the forward saves, to the store. Return an object to
        pass to `fetch` in backward."""
        stored = self.store.empty(value.shape, value.dtype)
        if is_dense(value):  # one contiguous copy, and kernels get the original layout
            stored = stored.as_strided(value.shape, value.stride())
        self.store.send(value, stored)
        saved = _SavedTensor(stored, self, len(self.saved))
        self.saved.append(weakref.ref(saved))
        self.largest, self.next = max(self.largest, stored.nbytes), len(self.saved)
        return saved

    def fetch(self, saved: _SavedTensor) -> Tensor:
        """Return a saved tensor on the device, and begin to prefetch the tensors that backward will
        use next.

        saved  what `put` returned
        """
        coming, saved.coming = saved.coming, None
        if coming is None:
            coming = self.store.begin_fetch(saved.stored)
        else:
            self.ahead -= saved.stored.nbytes
        saved.asked = True
        on_device = coming.wait()
        if has_own_memory(self.store.device):
            self._fetch_ahead(saved.index)
        return on_device

    def _fetch_ahead(self, index: int) -> None:
        """Begin to prefetch tensors that were saved before tensor number `index`, beginning with the
        one that was saved last."""
        most = max_prefetch_bytes(self.largest)
        self.next = min(self.next, index - 1)
        while self.next >= 0:
            saved = self.saved[self.next]()
            if saved is not None and not saved.asked:
                size = saved.stored.nbytes
                if self.ahead and self.ahead + size > most:
                    return
                saved.coming, saved.asked = self.store.begin_fetch(saved.stored), True
                self.ahead += size
            self.next -= 1


def max_prefetch_bytes(largest: float) -> float:
    """Return how many bytes of saved tensors may be prefetched at a time. One tensor is always
    prefetched, even if it is larger.

    largest  bytes of the largest saved tensor
    """
    return min(MAX_PREFETCH_BYTES, largest)


def is_dense(value: Tensor) -> bool:
    """Return whether a tensor's elements fill its memory without gaps or overlaps, in any order of
    its dimensions. Examples: True for the transpose of a contiguous matrix x, False for x[:, ::2].
    """
    count = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != count:
            return False
        count *= size
    return True
