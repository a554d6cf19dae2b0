"""Heap: what a process takes of a processor's memory to serve a step, and what a step fetches anew of what was given back.

A step's buffers are played through glibc's rules (its manual, "Malloc Tunable Parameters"; malloc/malloc.c): the smallest free
block that is large enough is taken and split, free neighbours merge, the heap grows at its end, and what is free there goes back
from the trim threshold on. A block from the mapping threshold on, for which nothing free is large enough, is mapped by itself
and goes back when it is freed. Left alone, glibc raises the mapping threshold to the largest block up to 32 MiB that it has mapped
and seen freed, and the other to twice that; a training has shown it all of its sizes before long. Pages that come back are new:
the system fills them with zeros when they are first written to.

torch asks for blocks at a multiple of 64 bytes. For such a one glibc looks for so much more than is used, and gives the ends back,
which small blocks take. While these are there, what was freed neither serves its own size again nor is one with its neighbours: a heap
is larger than what lies in it. Those that stay are what autograd notes of a passage until its backward has ended. Where glibc was told
to keep memory it was told as well to make small blocks one with what they touch at once (`engine/launch.py`): a note for each saved
tensor lies where a block was, and one for each twelfth of the others, whose operations are noted whether or not a tensor is kept
(recomputation gives tensors away, not notes); outside of the model's blocks one of a passage, for a loss in chunks notes nothing. Left
alone, it keeps small blocks in caches, and half of a forward's blocks leave one behind. Which do was read off measured processes, in
fp32 and bf16. What a process holds is predicted with them; what a step fetches without, which is nearer to measured times.
"""

from __future__ import annotations

import math

from tightfit.ledger import Ledger
from tightfit.planner.blocks import Free, Owned, played
from tightfit.program import Passage

ALIGNED = 64  # bytes, torch's on processors: glibc looks for so much more, and 32 of its own
ROUNDED = 16
PAGE = 4096
LARGEST_THRESHOLD = 32 * 2**20
ENDS = ALIGNED + 2 * ROUNDED  # of a block, which others take
NOTE = 48  # bytes of what is noted of a passage
LEFT = 2  # one of so many blocks leaves a note behind where small blocks are cached
UNSAVED = 12  # one of so many blocks that are not saved does where they are not
PAD = 128 * 2**10  # by which the heap grows and is cut beyond what is asked
STEPS = 3  # played; the last counts


class Heap(Owned):
    """A process's memory as glibc deals it out where nobody has told it how, or where it was told to keep it.

    keeps    it was told to
    notes    what is noted of passages takes the ends of blocks
    fetched  bytes from the system so far
    most     bytes that the process has had at once
    """

    def __init__(self, keeps: bool = False, notes: bool = False) -> None:
        super().__init__()
        self.fetched = 0
        self.most = 0
        self._keeps = keeps
        self._maps_from = math.inf if keeps else LARGEST_THRESHOLD
        self._trim = math.inf if keeps else 2 * PAD
        self._mapped = 0
        self._free = Free()
        self._top = 0  # where the blocks end
        self._end = 0  # of the heap
        self._written = 0  # up to where its pages are there
        self._with_notes = notes
        self._forwards: list[list[tuple[int, int]]] = []  # notes of those whose backward has not begun
        self._notes: list[tuple[int, int]] = []  # of this passage
        self._noted = 0  # blocks so far
        self._elsewhere = 0  # blocks so far of a passage that is none of the model's
        self._waiting = 0  # notes for the next blocks that go

    def enter(self, passage: Passage | None) -> None:
        if self._phase == "backward":
            for note in self._notes:
                self._release(*note)
        super().enter(passage)
        self._waiting = self._elsewhere = 0
        if self._phase == "forward":
            self._notes = []
            self._forwards.append(self._notes)
        elif self._phase == "backward":
            self._notes = self._forwards.pop() if self._forwards else []

    @property
    def _phase(self) -> str:
        return "" if self.passage is None else self.passage.phase

    def take(self, owner: object, size: float) -> None:
        super().take(owner, size)
        saved = isinstance(owner, tuple) and owner[0] == "activations"
        if not self._with_notes or not self._phase:
            return
        if self._keeps:
            in_block = self.passage is not None and self.passage.part == "block"
            self._elsewhere += not in_block
            counts = not saved and (in_block or self._elsewhere <= UNSAVED)
            self._noted += counts
            if saved or (counts and self._noted % UNSAVED == 0):
                self._waiting = 1  # where several come before a block goes, the others find room elsewhere
        elif saved or self._phase == "forward":
            self._noted += 1
            if self._noted % LEFT == 0:
                self._waiting += 1

    def allocate(self, size: int) -> tuple[int | None, int]:
        size = -(-(size + ENDS + ROUNDED // 2) // ROUNDED) * ROUNDED
        if size < LARGEST_THRESHOLD:
            self._trim = max(self._trim, 2 * size)
        block = self._free.take(size)
        if block is not None:
            address, found = block
            if found > size:
                self._free.give(address + size, found - size)
            return address, size
        if self._end - self._top < size and size >= self._maps_from:
            self.fetched += size
            self._mapped += size
            self.most = max(self.most, self._written + self._mapped)
            return None, size
        address, self._top = self._top, self._top + size
        if self._end < self._top:
            self._end = -(-(self._top + PAD) // PAGE) * PAGE
        self.fetched += max(self._top - max(self._written, address), 0)
        self._written = max(self._written, self._top)
        self.most = max(self.most, self._written + self._mapped)
        return address, size

    def release(self, block: tuple[int | None, int]) -> None:
        address, size = block
        if address is None:
            self._mapped -= size
            return
        if self._waiting and size > PAGE:
            self._waiting -= 1
            size -= NOTE
            self._notes.append((address + size, NOTE))
        self._release(address, size)

    def _release(self, address: int, size: int) -> None:
        address, size = self._free.give(address, size)
        if address + size < self._top:
            return
        self._free.remove(address)
        self._top = address
        if self._end - self._top >= self._trim:
            self._end = -(-(self._top + PAD) // PAGE) * PAGE
            self._written = min(self._written, self._end)


def held_bytes(ledger: Ledger) -> float:
    """Bytes that steps of `ledger` make a process hold at once, without what lies in its fixed rows: those of its tensors where
    blocks are mapped by themselves, more where freed ones wait to be used again."""
    if ledger.mapped_from is not None:
        return 0.0
    heap = Heap(ledger.keeps_memory, notes=True)
    for _ in played(heap, ledger, STEPS):
        pass
    return heap.most


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


__all__ = ["Heap", "fetched_bytes", "held_bytes"]
