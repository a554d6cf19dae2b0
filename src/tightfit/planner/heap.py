"""Heap: what a step fetches from the operating system on a processor, whose allocator gives freed memory back.

A step's buffers are played through glibc's rules (its manual, "Malloc Tunable Parameters"; malloc/malloc.c): the smallest free
block that is large enough is taken and split, free neighbours merge, the heap grows at its end, and what is free there goes back
from the trim threshold on. A block from the mapping threshold on, for which nothing free is large enough, is mapped by itself
and goes back when it is freed. Left alone, glibc raises the mapping threshold to the largest block up to 32 MiB that it has mapped
and seen freed, and the other to twice that; a training has shown it all of its sizes before long. Pages that come back are new:
the system fills them with zeros when they are first written to.
"""

from __future__ import annotations

from tightfit.ledger import Ledger
from tightfit.planner.blocks import Free, Owned, played

ALIGNED = 64  # bytes, torch's on processors: glibc looks for so much more, and 32 of its own
ROUNDED = 16
PAGE = 4096
LARGEST_THRESHOLD = 32 * 2**20
PAD = 128 * 2**10  # by which the heap grows and is cut beyond what is asked
STEPS = 3  # played; the last counts


class Heap(Owned):
    """A process's memory as glibc deals it out where nobody has told it how."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched = 0  # bytes
        self._trim = 2 * PAD
        self._free = Free()
        self._top = 0  # where the blocks end
        self._end = 0  # of the heap
        self._written = 0  # up to where its pages are there

    def allocate(self, size: int) -> tuple[int | None, int]:
        size = -(-(size + ALIGNED + 2 * ROUNDED + ROUNDED // 2) // ROUNDED) * ROUNDED
        if size < LARGEST_THRESHOLD:
            self._trim = max(self._trim, 2 * size)
        block = self._free.take(size)
        if block is not None:
            address, found = block
            if found > size:
                self._free.give(address + size, found - size)
            return address, size
        if self._end - self._top < size and size >= LARGEST_THRESHOLD:
            self.fetched += size
            return None, size
        address, self._top = self._top, self._top + size
        if self._end < self._top:
            self._end = -(-(self._top + PAD) // PAGE) * PAGE
        self.fetched += max(self._top - max(self._written, address), 0)
        self._written = max(self._written, self._top)
        return address, size

    def release(self, block: tuple[int | None, int]) -> None:
        address, size = block
        if address is None:
            return
        address, size = self._free.give(address, size)
        if address + size < self._top:
            return
        self._free.remove(address)
        self._top = address
        if self._end - self._top >= self._trim:
            self._end = -(-(self._top + PAD) // PAGE) * PAGE
            self._written = min(self._written, self._end)


def fetched_bytes(ledger: Ledger) -> float:
    """Bytes that a step fetches from the system: none where the process keeps what it frees."""
    if ledger.keeps_memory:
        return 0.0
    if ledger.mapped_from is not None:
        return ledger.micro_batches * _mapped_bytes(ledger, ledger.mapped_from)
    heap, before = Heap(), 0
    visits: list[int] = []
    for step in played(heap, ledger, STEPS):
        if step == STEPS - 1:
            visits.append(heap.fetched - before)
        before = heap.fetched
    *passed, update = visits
    alike = (
        ledger.micro_batches - len(passed) if ledger.stage is None else 0
    )  # of its micro-batches the first two are played
    return sum(passed) + alike * passed[-1] + update


def _mapped_bytes(ledger: Ledger, mapped_from: float) -> float:
    """Of a micro-batch's blocks that are mapped by themselves."""
    sizes = (
        buffer.size.at(ledger.micro_batch)
        for passage in ledger.training
        for buffer, sign in passage.timeline.events
        if sign > 0
    )
    return sum(size for size in sizes if size >= mapped_from)


__all__ = ["Heap", "fetched_bytes"]
