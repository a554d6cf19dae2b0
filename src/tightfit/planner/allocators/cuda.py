"""Simulate torch's CUDA caching allocator: the bytes that it reserves on the device for a step.

The estimator calls `reserved_bytes` for the allocator row of a GPU plan: reserved bytes minus the
bytes of the tensors. In this module, a segment is memory that the allocator reserves on the device
with one call, as in torch's allocator. A memory block is a part of a segment and holds one tensor.
The allocator's own rules (c10/cuda/CUDACachingAllocator.cpp) decide how a step's buffers are
allocated and freed:

- Sizes are rounded up to 512 bytes.
- Memory blocks of up to 1 MiB come from segments of 2 MiB, those below 10 MiB from segments of
  20 MiB. A larger memory block gets a segment of its own, whose size is a multiple of 2 MiB.
- Best fit: the smallest free memory block that is large enough is taken and split.
- Free memory blocks are coalesced with their neighbours. No segment is returned to the device.
- With expandable segments there are two segments, one for small and one for large memory blocks.
  Both grow.

Example without expandable segments: a tensor of 5 MiB reserves a segment of 20 MiB, and two more
tensors of 5 MiB fit into the same segment. A tensor of 25 MiB reserves 26 MiB. After all are freed,
46 MiB stay reserved. A tensor of 30 MiB then needs a new segment, because the two segments cannot
be coalesced.
"""

from __future__ import annotations

from typing import Any

from tightfit.cost.ledger import Ledger
from tightfit.planner.allocators.simulate import Allocator, FreeList, simulate

MIN_BLOCK = 512
SMALL, SMALL_SEGMENT = 2**20, 2 * 2**20
MEDIUM, MEDIUM_SEGMENT = 10 * 2**20, 20 * 2**20
# the first step creates the optimizer states; the second step shows the fragmentation that they
# cause
SIMULATED_STEPS = 2


class Pool:
    """The memory that the caching allocator reserves for small memory blocks (up to 1 MiB), or for
    large ones, as segments. It allocates and frees memory blocks in these segments.

    Addresses are simulated. Segments that cannot grow are never adjacent, so memory blocks of
    different segments are not coalesced.

    small       whether the pool is for small memory blocks
    expandable  whether the pool has a single segment that can grow
    reserved    bytes of all segments
    """

    def __init__(self, small: bool, expandable: bool) -> None:
        self.small, self.expandable = small, expandable
        self.reserved = 0
        self._next_address = 0
        self._free = FreeList()

    def allocate(self, size: int) -> tuple[int, int]:
        """Allocate a memory block of at least `size` bytes. Return its (address, size)."""
        block = self._free.take(size)
        if block is None:
            self._grow(size)
            block = self._free.take(size)
            assert block is not None, "a new segment is large enough for its first memory block"
        address, found = block
        rest = found - size
        if rest >= MIN_BLOCK if self.small or self.expandable else rest > SMALL:
            self._free.insert(address + size, rest)
            return address, size
        return address, found

    def free(self, address: int, size: int) -> None:
        self._free.insert(address, size)

    def state(self) -> tuple[Any, ...]:
        return self.reserved, self._next_address, self._free.state()

    def restore(self, state: tuple[Any, ...]) -> None:
        self.reserved, self._next_address, free = state
        self._free.restore(free)

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
    """Simulates torch's CUDA caching allocator.

    expandable  whether the allocator has expandable segments
    reserved    bytes of all segments so far; they are never returned to the device
    """

    def __init__(self, expandable: bool) -> None:
        super().__init__()
        self.pools = {small: Pool(small, expandable) for small in (True, False)}

    @property
    def reserved(self) -> int:
        return sum(pool.reserved for pool in self.pools.values())

    def state(self) -> Any:
        blocks = tuple((owner, tuple(own)) for owner, own in self._blocks.items() if own)
        return blocks, *(pool.state() for pool in self.pools.values())

    def restore(self, state: Any) -> None:
        blocks, *pools = state
        self._blocks.clear()
        self._blocks.update((owner, list(own)) for owner, own in blocks)
        for pool, own in zip(self.pools.values(), pools, strict=True):
            pool.restore(own)

    def allocate(self, size: int) -> tuple[bool, int, int]:
        rounded = max(-(-size // MIN_BLOCK) * MIN_BLOCK, MIN_BLOCK)
        small = rounded <= SMALL
        return small, *self.pools[small].allocate(rounded)

    def release(self, block: tuple[bool, int, int]) -> None:
        small, address, size = block
        self.pools[small].free(address, size)


def reserved_bytes(ledger: Ledger, expandable: bool, zero_grad_late: bool = False) -> float:
    """Return the bytes that torch's caching allocator reserves on a GPU for the steps that `ledger`
    describes. The ledger's fixed rows, such as the CUDA context, are not counted.

    expandable      whether the allocator has expandable segments
    zero_grad_late  whether the training loop zeroes gradients just before backward, so that they
                    are alive during the next step's forward
    """
    heap = CachingAllocator(expandable)
    for _ in simulate(heap, ledger, SIMULATED_STEPS, zero_grad_late):
        pass
    return heap.reserved


__all__ = ["CachingAllocator", "Pool", "reserved_bytes"]
