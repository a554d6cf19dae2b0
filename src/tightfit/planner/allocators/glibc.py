"""Simulate glibc's heap on a CPU: how many bytes the process holds, and how many of them a step
obtains anew from the operating system.

The estimator calls `peak_heap_bytes` for the allocator row of a CPU plan, and the time model calls
`page_fault_bytes` for the time of page faults.

**Rules of glibc.** The simulation allocates and frees a step's buffers by glibc's rules (its
manual, "Malloc Tunable Parameters"; malloc/malloc.c):

- Best fit: the smallest free memory block that is large enough is taken and split.
- Free memory blocks are coalesced with free neighbours.
- The heap grows at its end. Free memory at its end is returned to the system once it reaches the
  trim threshold.
- A memory block of at least the mmap threshold is mapped on its own if no free memory block is
  large enough, and unmapped when it is freed.
- By default, glibc raises the mmap threshold to the size of the largest memory block (up to 32 MiB)
  that was mapped and then freed, and the trim threshold to twice that size. The first steps of a
  training free memory blocks of all sizes, so the simulation starts with an mmap threshold of
  32 MiB.
- Returned pages that are used again are new pages: the system fills them with zeros at the first
  write. These page faults cost time.

Worked example, in MiB, with default settings. Allocate A = 8, B = 8, C = 7: the heap grows to 23,
so 23 are page-faulted. Free C: 7 are free at the end, below the trim threshold (2 x 8 = 16), so
nothing is returned, and allocating 7 again costs nothing. Free C and B: 15 are free, still below
16. Free A: 23 are free at the end, so the heap is trimmed to nothing, and the next allocation of 8
costs 8 again. A memory block of 32 MiB (the largest mmap threshold) costs 32 at every allocation.

**Fragmentation by autograd nodes: a fitted heuristic.** torch requests memory blocks that are
aligned to 64 bytes. For each of them, glibc searches for 64 + 32 bytes more than are used, and
frees the unused bytes at both ends. Small allocations then use these bytes. Most small allocations
are freed soon. Those of autograd nodes live from the forward of a segment to the end of its
backward. During this time, the freed memory block beside a node is a few bytes too small for a
tensor of the same size, and it is not coalesced with its neighbours. The heap is then larger than
the tensors in it. glibc's rules do not say which memory blocks get such a node, so this was fitted
to measured processes in fp32 and bf16:

- If glibc is told to keep memory, it is also told to coalesce small memory blocks at once
  (`engine/launch.py`). Then there is one node of 48 bytes for each saved tensor, and for every 12th
  memory block of another tensor, because an operation has a node even if its tensor is not saved
  (recompute drops tensors, not nodes). Outside of the model's blocks, at most one tensor per
  segment that is not saved causes a node, because a chunked loss records no nodes.
- By default, glibc keeps small memory blocks in caches. Then there is a node for every second
  memory block of a forward.

Example: 8 MiB are freed beside a live node of 48 bytes. The next request for 8 MiB needs 48 bytes
more than this free memory block has, so the heap grows by another 8 MiB.

The bytes that the process holds are predicted with nodes. The page-faulted bytes are predicted
without nodes, which is closer to measured times.

**Trimming: a fitted share.** Small memory blocks of Python and torch lie at the end of the heap most of the
time, and keep it from being trimmed. Of the bytes that the simulation trims and allocates again in a step, 0 to
36 % were page-faulted in nine models, and 30 % are predicted. Memory blocks that are mapped on their own
are page-faulted each time.
"""

from __future__ import annotations

import math

from tightfit.cost.ledger import Ledger
from tightfit.cost.recorded_step import Segment
from tightfit.planner.allocators.simulate import Allocator, FreeList, simulate

ALIGNMENT = 64  # bytes, of torch's CPU tensors: glibc searches for 64 + 32 more than requested
GRANULE = 16  # sizes of memory blocks are multiples of it
PAGE = 4096
MAX_MMAP_THRESHOLD = 32 * 2**20  # the largest mmap threshold that glibc sets by itself
ALIGNMENT_SLACK = ALIGNMENT + 2 * GRANULE  # bytes at the ends that small allocations can use
NODE_BYTES = 48  # of an autograd node at the end of a memory block
CACHED_NODE_INTERVAL = 2  # fitted: with glibc's caches, every 2nd memory block gets a node
UNSAVED_NODE_INTERVAL = 12  # fitted: without the caches, every 12th unsaved tensor gets a node
TOP_PAD = 128 * 2**10  # M_TOP_PAD: extra bytes when the heap grows or is trimmed
SIMULATED_STEPS = 3  # page faults are counted in the last step
TRIMMED_SHARE = 0.3  # fitted: of the heap's growth in a step, the share that causes page faults


class GlibcHeap(Allocator):
    """Simulates glibc's heap (malloc and free), with default settings or told to keep freed memory.

    keeps_memory  whether glibc is told never to return freed memory to the system
    nodes         whether to simulate the small memory blocks of autograd's nodes as well. They lie
                  between the memory blocks of tensors, and keep freed blocks from being coalesced
    page_faulted  total bytes of the pages that the system had to supply so far; a page that is
                  returned and supplied again counts again
    mapped_bytes  the part of them that is in memory blocks that are mapped on their own
    peak          the most bytes that the process held at one time
    """

    def __init__(self, keeps_memory: bool = False, nodes: bool = False) -> None:
        super().__init__()
        self.page_faulted = self.mapped_bytes = 0
        self.peak = 0
        self._keeps_memory = keeps_memory
        self._mmap_threshold = math.inf if keeps_memory else MAX_MMAP_THRESHOLD
        self._trim_threshold = math.inf if keeps_memory else 2 * TOP_PAD
        self._mapped = 0
        self._free_list = FreeList()
        self._top = 0  # end of the last memory block
        self._heap_end = 0  # end of the heap (the program break)
        self._touched_end = 0  # up to here, pages have been written and are resident
        self._models_nodes = nodes
        self._forward_nodes: list[list[tuple[int, int]]] = []  # nodes of segments whose backward has not begun
        self._nodes: list[tuple[int, int]] = []  # of the current segment
        self._node_candidates = 0  # memory blocks so far that count towards the interval
        self._outside_block = 0  # allocations so far in the current segment outside of the model's blocks
        self._pending_nodes = 0  # nodes to place in the next freed memory blocks, one in each

    def enter_segment(self, segment: Segment | None) -> None:
        if self._phase == "backward":
            for note in self._nodes:
                self._free_range(*note)
        super().enter_segment(segment)
        self._pending_nodes = self._outside_block = 0
        if self._phase == "forward":
            self._nodes = []
            self._forward_nodes.append(self._nodes)
        elif self._phase == "backward":
            self._nodes = self._forward_nodes.pop() if self._forward_nodes else []

    @property
    def _phase(self) -> str:
        return "" if self.segment is None else self.segment.phase

    def allocate_for(self, owner: object, size: float) -> None:
        super().allocate_for(owner, size)
        saved = isinstance(owner, tuple) and owner[0] == "activations"
        if not self._models_nodes or not self._phase:
            return
        if self._keeps_memory:
            in_block = self.segment is not None and self.segment.part == "block"
            self._outside_block += not in_block
            counts = not saved and (in_block or self._outside_block <= UNSAVED_NODE_INTERVAL)
            self._node_candidates += counts
            if saved or (counts and self._node_candidates % UNSAVED_NODE_INTERVAL == 0):
                self._pending_nodes = 1  # further nodes before the next free do not count
        elif saved or self._phase == "forward":
            self._node_candidates += 1
            if self._node_candidates % CACHED_NODE_INTERVAL == 0:
                self._pending_nodes += 1

    def allocate(self, size: int) -> tuple[int | None, int]:
        size = -(-(size + ALIGNMENT_SLACK + GRANULE // 2) // GRANULE) * GRANULE
        if size < MAX_MMAP_THRESHOLD:
            self._trim_threshold = max(self._trim_threshold, 2 * size)
        block = self._free_list.take(size)
        if block is not None:
            address, found = block
            if found > size:
                self._free_list.insert(address + size, found - size)
            return address, size
        if self._heap_end - self._top < size and size >= self._mmap_threshold:
            self.page_faulted += size
            self.mapped_bytes += size
            self._mapped += size
            self.peak = max(self.peak, self._touched_end + self._mapped)
            return None, size
        address, self._top = self._top, self._top + size
        if self._heap_end < self._top:
            self._heap_end = -(-(self._top + TOP_PAD) // PAGE) * PAGE
        self.page_faulted += max(self._top - max(self._touched_end, address), 0)
        self._touched_end = max(self._touched_end, self._top)
        self.peak = max(self.peak, self._touched_end + self._mapped)
        return address, size

    def release(self, block: tuple[int | None, int]) -> None:
        address, size = block
        if address is None:
            self._mapped -= size
            return
        if self._pending_nodes and size > PAGE:
            self._pending_nodes -= 1
            size -= NODE_BYTES
            self._nodes.append((address + size, NODE_BYTES))
        self._free_range(address, size)

    def _free_range(self, address: int, size: int) -> None:
        address, size = self._free_list.insert(address, size)
        if address + size < self._top:
            return
        self._free_list.remove(address)
        self._top = address
        if self._heap_end - self._top >= self._trim_threshold:
            self._heap_end = -(-(self._top + TOP_PAD) // PAGE) * PAGE
            self._touched_end = min(self._touched_end, self._heap_end)


def peak_heap_bytes(ledger: Ledger) -> float:
    """Return the most bytes that the process's heap holds during simulated steps of `ledger`. The
    ledger's fixed rows are not counted.

    The peak is larger than the tensors' bytes, because freed memory blocks wait to be reused.
    Returns 0 if the ledger has an `mmap_threshold`: then every large memory block is mapped on its
    own, and the heap adds nothing to the tensors.
    """
    if ledger.mmap_threshold is not None:
        return 0.0
    heap = GlibcHeap(ledger.caches_memory, nodes=True)
    for _ in simulate(heap, ledger, SIMULATED_STEPS):
        pass
    return heap.peak


def page_fault_bytes(ledger: Ledger) -> float:
    """Return the bytes of the page faults in one step of `ledger`: the system provides new pages of
    memory, filled with zeros. Return 0 if the process keeps the memory that it frees."""
    if ledger.caches_memory:
        return 0.0
    if ledger.mmap_threshold is not None:
        return ledger.micro_batches * _mapped_bytes(ledger, ledger.mmap_threshold)
    heap, before = GlibcHeap(), 0.0
    visits: list[float] = []
    for step in simulate(heap, ledger, SIMULATED_STEPS):
        now = heap.mapped_bytes + TRIMMED_SHARE * (heap.page_faulted - heap.mapped_bytes)
        if step == SIMULATED_STEPS - 1:
            visits.append(now - before)
        before = now
    *passed, update = visits
    # only the first two micro-batches are simulated; the others are taken to be like the second
    alike = ledger.micro_batches - len(passed) if ledger.rank_program is None else 0
    return sum(passed) + alike * passed[-1] + update


def _mapped_bytes(ledger: Ledger, mapped_from: float) -> float:
    """Return the total bytes of the memory blocks that a micro-batch allocates and that have at
    least `mapped_from` bytes. Each of these is mapped on its own."""
    sizes = (
        buffer.size.at(ledger.micro_batch)
        for segment in ledger.training
        for buffer, sign in segment.timeline.events
        if sign > 0
    )
    return sum(size for size in sizes if size >= mapped_from)


__all__ = ["GlibcHeap", "page_fault_bytes", "peak_heap_bytes"]
