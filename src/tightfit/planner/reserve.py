"""Reserve: what torch's caching allocator takes of a CUDA device to serve a step, beyond the bytes of the tensors.

A step's buffers are played through the allocator's own rules (c10/cuda/CUDACachingAllocator.cpp): sizes are rounded up to
512 bytes; up to 1 MiB come from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, larger ones from a segment of
their own in steps of 2 MiB; the smallest free block that is large enough is taken and split; free neighbours merge;
nothing is given back. With expandable segments each kind has one segment that grows.
"""

from __future__ import annotations

from tightfit.ledger import Ledger
from tightfit.planner.blocks import Free, Owned, played

LEAST = 512
SMALL, SMALL_SEGMENT = 2**20, 2 * 2**20
MEDIUM, MEDIUM_SEGMENT = 10 * 2**20, 20 * 2**20
STEPS = 2  # the first makes the optimizer's states; the second lives among the holes that it left


class Pool:
    """The segments of one kind, small or large blocks. Addresses are numbers; segments that do not grow lie apart."""

    def __init__(self, small: bool, expandable: bool) -> None:
        self.small, self.expandable = small, expandable
        self.reserved = 0
        self._end = 0
        self._free = Free()

    def take(self, size: int) -> tuple[int, int]:
        """(address, size) of a block of at least `size` bytes."""
        block = self._free.take(size)
        if block is None:
            self._grow(size)
            block = self._free.take(size)
            assert block is not None, "a segment has room for what it was made for"
        address, found = block
        rest = found - size
        if rest >= LEAST if self.small or self.expandable else rest > SMALL:
            self._free.give(address + size, rest)
            return address, size
        return address, found

    def give(self, address: int, size: int) -> None:
        self._free.give(address, size)

    def _grow(self, size: int) -> None:
        if self.expandable:
            last = self._free.ends.get(self._end)
            tail = 0 if last is None else self._free.begins[last]
            step = SMALL_SEGMENT if self.small else MEDIUM_SEGMENT
            more = -(-(size - tail) // step) * step
        else:
            self._end += 1
            more = SMALL_SEGMENT if self.small else MEDIUM_SEGMENT
            if size >= MEDIUM:
                more = -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        self.reserved += more
        self._end += more
        self.give(self._end - more, more)


class Heap(Owned):
    """A device's memory as torch's allocator deals it out."""

    def __init__(self, expandable: bool) -> None:
        super().__init__()
        self.pools = {small: Pool(small, expandable) for small in (True, False)}

    @property
    def reserved(self) -> int:
        return sum(pool.reserved for pool in self.pools.values())

    def allocate(self, size: int) -> tuple[bool, int, int]:
        rounded = max(-(-size // LEAST) * LEAST, LEAST)
        small = rounded <= SMALL
        return small, *self.pools[small].take(rounded)

    def release(self, block: tuple[bool, int, int]) -> None:
        small, address, size = block
        self.pools[small].give(address, size)


def reserved_bytes(ledger: Ledger, expandable: bool, late: bool = False) -> float:
    """Bytes of the segments that a step of `ledger` leaves reserved, without what lies in its fixed rows. late: see `played`."""
    heap = Heap(expandable)
    for _ in played(heap, ledger, STEPS, late):
        pass
    return heap.reserved


__all__ = ["Heap", "Pool", "reserved_bytes"]
