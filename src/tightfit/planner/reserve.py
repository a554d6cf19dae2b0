"""Reserve: what torch's caching allocator takes of a CUDA device to serve a step, beyond the bytes of the tensors.

A step's buffers are played through the allocator's own rules (c10/cuda/CUDACachingAllocator.cpp): sizes are rounded up to
512 bytes; up to 1 MiB come from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, larger ones from a segment of
their own in steps of 2 MiB; the smallest free block that is large enough is taken and split; free neighbours merge;
nothing is given back. With expandable segments each kind has one segment that grows.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from typing import Any

from tightfit.ledger import Ledger

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
        self._free: list[tuple[int, int]] = []  # (size, address), sorted
        self._begins: dict[int, int] = {}  # of free blocks: address -> size
        self._ends: dict[int, int] = {}  # of free blocks: address of the end -> address

    def take(self, size: int) -> tuple[int, int]:
        """(address, size) of a block of at least `size` bytes."""
        place = bisect.bisect_left(self._free, (size, -1))
        if place == len(self._free):
            self._grow(size)
            place = bisect.bisect_left(self._free, (size, -1))
        found, address = self._free[place]
        self._remove(address)
        rest = found - size
        if rest >= LEAST if self.small or self.expandable else rest > SMALL:
            self._add(address + size, rest)
            return address, size
        return address, found

    def give(self, address: int, size: int) -> None:
        """Free a block, and merge it with the free ones that touch it."""
        if address in self._ends:
            before = self._ends[address]
            size += self._remove(before)
            address = before
        if address + size in self._begins:
            size += self._remove(address + size)
        self._add(address, size)

    def _grow(self, size: int) -> None:
        if self.expandable:
            tail = self._begins[self._ends[self._end]] if self._end in self._ends else 0
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

    def _add(self, address: int, size: int) -> None:
        bisect.insort(self._free, (size, address))
        self._begins[address] = size
        self._ends[address + size] = address

    def _remove(self, address: int) -> int:
        size = self._begins.pop(address)
        del self._ends[address + size]
        del self._free[bisect.bisect_left(self._free, (size, address))]
        return size


class Heap:
    """A device's memory as torch's allocator deals it out."""

    def __init__(self, expandable: bool) -> None:
        self.pools = {small: Pool(small, expandable) for small in (True, False)}
        self._taken: dict[object, list[tuple[bool, int, int]]] = defaultdict(list)

    @property
    def reserved(self) -> int:
        return sum(pool.reserved for pool in self.pools.values())

    def take(self, owner: object, size: float) -> None:
        """A block for `owner`, which may have several: the last one taken is the first one given back."""
        rounded = max(-(-int(size) // LEAST) * LEAST, LEAST)
        small = rounded <= SMALL
        self._taken[owner].append((small, *self.pools[small].take(rounded)))

    def give(self, owner: object) -> None:
        if self._taken[owner]:
            small, address, size = self._taken[owner].pop()
            self.pools[small].give(address, size)

    def free(self, owners: set[Any]) -> None:
        """All blocks of `owners`, which is empty afterwards."""
        for owner in owners:
            self.give_all(owner)
        owners.clear()

    def give_all(self, owner: object) -> None:
        while self._taken[owner]:
            self.give(owner)


def reserved_bytes(ledger: Ledger, expandable: bool, late: bool = False) -> float:
    """Bytes of the segments that a step of `ledger` leaves reserved, without what lies in its fixed rows.

    late  of a loop that zeroes the gradients just before backward: they live through the forward of the next step
    """
    heap = Heap(expandable)
    for parameter in ledger.parameters:
        heap.take("parameters", parameter.bytes)
    gradients: set[tuple[str, str, float]] = set()
    for step in range(STEPS):
        before, gradients = gradients, set()
        for visit in ledger.visits():
            heap.take("batch", ledger.batch_bytes * ledger.micro_batch)
            for passage in visit.passages:
                if passage.phase == "backward":
                    heap.free(before)
                for buffer, sign in passage.timeline.events:
                    # equal blocks of a model share their buffers, so what one leaves another may free
                    size = buffer.size.at(ledger.micro_batch)
                    owner = buffer.row, buffer.maker, size
                    if sign > 0:
                        heap.take(owner, size)
                    elif sign < 0:
                        heap.give(owner)
                    if buffer.row == "gradients":
                        gradients.add(owner)
            heap.give("batch")
        _update(heap, ledger, first=step == 0)
        if not late:
            heap.free(gradients)
    return heap.reserved


def _update(heap: Heap, ledger: Ledger, first: bool) -> None:
    for update in ledger.updates.values() if first else ():
        heap.take("optimizer", update.state_bytes)
    if ledger.update_in_backward:
        return
    for update in ledger.updates.values():
        heap.take("update", update.foreach_bytes if ledger.foreach else update.transient_bytes)
        if not ledger.foreach:
            heap.give("update")
    heap.give_all("update")


__all__ = ["Heap", "Pool", "reserved_bytes"]
