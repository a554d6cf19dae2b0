"""Simulate torch's CUDA caching allocator: the bytes that it reserves on the device for a step.

The estimator calls `reserved_bytes` for the allocator row of a GPU plan: reserved bytes minus the
bytes of the tensors. A step's buffers are allocated and freed by the allocator's own rules
(c10/cuda/CUDACachingAllocator.cpp):

- Sizes are rounded up to 512 bytes.
- Blocks up to 1 MiB come from segments of 2 MiB, below 10 MiB from segments of 20 MiB. A larger
  block gets a segment of its own, in steps of 2 MiB.
- Best fit: the smallest free block that is large enough is taken and split.
- Free blocks are coalesced with their neighbours. No segment is returned to the device.
- With expandable segments, the small and the large blocks each have one segment, which grows.

Example without expandable segments: a tensor of 5 MiB reserves a segment of 20 MiB, and a second
and third one fit into the same segment. A tensor of 25 MiB reserves 26 MiB. After all are freed,
46 MiB stay reserved. A tensor of 30 MiB then needs a new segment, because the two segments cannot
be coalesced.
"""

from __future__ import annotations

from tightfit.cost.ledger import Ledger
from tightfit.planner.allocators.simulate import Allocator, FreeList, simulate

MIN_BLOCK = 512
SMALL, SMALL_SEGMENT = 2**20, 2 * 2**20
MEDIUM, MEDIUM_SEGMENT = 10 * 2**20, 20 * 2**20
# the first step creates the optimizer states; the second one lives with the fragmentation that this
# leaves
SIMULATED_STEPS = 2


class Pool:
    """The segments of one kind of block, small or large.

    Addresses are made up. Segments that do not grow are never adjacent, so their blocks are not
    coalesced.

    reserved  bytes of all segments
    """

    def __init__(self, small: bool, expandable: bool) -> None:
        self.small, self.expandable = small, expandable
        self.reserved = 0
        self._next_address = 0
        self._free = FreeList()

    def allocate(self, size: int) -> tuple[int, int]:
        """Allocate a block of at least `size` bytes; returns (address, size)."""
        block = self._free.take(size)
        if block is None:
            self._grow(size)
            block = self._free.take(size)
            assert block is not None, "a segment has room for what it was made for"
        address, found = block
        rest = found - size
        if rest >= MIN_BLOCK if self.small or self.expandable else rest > SMALL:
            self._free.insert(address + size, rest)
            return address, size
        return address, found

    def free(self, address: int, size: int) -> None:
        self._free.insert(address, size)

    def _grow(self, size: int) -> None:
        if self.expandable:
            last = self._free.ends.get(self._next_address)
            tail = 0 if last is None else self._free.begins[last]
            step = SMALL_SEGMENT if self.small else MEDIUM_SEGMENT
            more = -(-(size - tail) // step) * step
        else:
            self._next_address += 1
            more = SMALL_SEGMENT if self.small else MEDIUM_SEGMENT
            if size >= MEDIUM:
                more = -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        self.reserved += more
        self._next_address += more
        self.free(self._next_address - more, more)


class CachingAllocator(Allocator):
    """torch's CUDA caching allocator, with or without expandable segments.

    reserved  bytes of all segments
    """

    def __init__(self, expandable: bool) -> None:
        super().__init__()
        self.pools = {small: Pool(small, expandable) for small in (True, False)}

    @property
    def reserved(self) -> int:
        return sum(pool.reserved for pool in self.pools.values())

    def allocate(self, size: int) -> tuple[bool, int, int]:
        rounded = max(-(-size // MIN_BLOCK) * MIN_BLOCK, MIN_BLOCK)
        small = rounded <= SMALL
        return small, *self.pools[small].allocate(rounded)

    def release(self, block: tuple[bool, int, int]) -> None:
        small, address, size = block
        self.pools[small].free(address, size)


def reserved_bytes(ledger: Ledger, expandable: bool, zero_grad_late: bool = False) -> float:
    """Bytes of the segments that steps of `ledger` leave reserved, without the ledger's fixed rows.

    expandable      whether the allocator has expandable segments
    zero_grad_late  see `simulate`
    """
    heap = CachingAllocator(expandable)
    for _ in simulate(heap, ledger, SIMULATED_STEPS, zero_grad_late):
        pass
    return heap.reserved


__all__ = ["CachingAllocator", "Pool", "reserved_bytes"]
