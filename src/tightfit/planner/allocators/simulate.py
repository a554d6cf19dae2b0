"""Simulate an allocator: replay the allocations and frees of a training step.

`FreeList` holds an allocator's free blocks. `Allocator` is the base of the two allocators that are
simulated: torch's CUDA caching allocator and glibc's heap. `simulate` feeds them the buffers of a
ledger's steps, in order.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from tightfit.cost.ledger import Ledger
from tightfit.cost.recorded_step import Segment


class FreeList:
    """An allocator's free blocks: best fit, and adjacent blocks are coalesced."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []  # sorted (size, address)
        self.begins: dict[int, int] = {}  # address of a block -> its size
        self.ends: dict[int, int] = {}  # address of a block's end -> address of the block

    def take(self, size: int) -> tuple[int, int] | None:
        """Remove the smallest free block of at least `size` bytes and return its (address, size);
        None if there is none."""
        place = bisect.bisect_left(self._by_size, (size, -1))
        if place == len(self._by_size):
            return None
        found, address = self._by_size[place]
        self.remove(address)
        return address, found

    def insert(self, address: int, size: int) -> tuple[int, int]:
        """Insert a free block and coalesce it with its free neighbours; returns the (address,
        size) of the result.

        Example: with free blocks [0, 4) and [8, 12), inserting [4, 8) returns (0, 12).
        """
        if address in self.ends:
            before = self.ends[address]
            size += self.remove(before)
            address = before
        if address + size in self.begins:
            size += self.remove(address + size)
        bisect.insort(self._by_size, (size, address))
        self.begins[address] = size
        self.ends[address + size] = address
        return address, size

    def remove(self, address: int) -> int:
        """Remove the free block at an address; returns its size."""
        size = self.begins.pop(address)
        del self.ends[address + size]
        del self._by_size[bisect.bisect_left(self._by_size, (size, address))]
        return size


class Allocator(ABC):
    """Base class of simulated allocators. Each block has an owner, a hashable value.

    An owner can have several blocks; the last one allocated is the first one freed.

    segment  the segment that is being simulated; None between segments
    """

    def __init__(self) -> None:
        self.segment: Segment | None = None
        self._blocks: dict[object, list[Any]] = defaultdict(list)

    @abstractmethod
    def allocate(self, size: int) -> Any:
        """Allocate at least `size` bytes; returns the block, to be passed to `release`."""

    @abstractmethod
    def release(self, block: Any) -> None:
        """Free a block that `allocate` returned."""

    def enter_segment(self, segment: Segment | None) -> None:
        """A segment begins; None: what follows is in no segment."""
        self.segment = segment

    def allocate_for(self, owner: object, size: float) -> None:
        self._blocks[owner].append(self.allocate(int(size)))

    def free_last(self, owner: object) -> None:
        if self._blocks[owner]:
            self.release(self._blocks[owner].pop())

    def free_owners(self, owners: set[Any]) -> None:
        """Free all blocks of all `owners`, and clear the set."""
        for owner in owners:
            self.free_all(owner)
        owners.clear()

    def free_all(self, owner: object) -> None:
        while self._blocks[owner]:
            self.free_last(owner)


def simulate(allocator: Allocator, ledger: Ledger, steps: int, zero_grad_late: bool = False) -> Iterator[int]:
    """Allocate and free the buffers of `steps` steps of `ledger`.

    Yields the number of the step after each visit (a micro-batch, or an action of a pipeline rank)
    and after the optimizer update, so that the caller can read the allocator's counters.

    zero_grad_late  the training loop zeroes gradients just before backward: they live through the
                    next step's forward
    """
    for parameter in ledger.parameters:
        allocator.allocate_for("parameters", parameter.bytes)
    gradients: set[tuple[str, str, float]] = set()
    states = _states(ledger)
    missing = Counter(states.values())  # created in the first step, each after its gradient
    if ledger.batches_ahead:
        allocator.allocate_for("batches ahead", ledger.batch_bytes * ledger.micro_batch * ledger.batches_ahead)
    for step in range(steps):
        before, gradients = gradients, set()
        for visit in ledger.micro_batch_runs():
            allocator.allocate_for("batch", ledger.batch_bytes * ledger.micro_batch)
            for segment in visit.segments:
                allocator.enter_segment(segment)
                if segment.phase == "backward":
                    allocator.free_owners(before)
                for buffer, sign in segment.timeline.events:
                    # equal blocks of a model share Buffer objects, so one block may free what
                    # another allocated: the owner is therefore a description of the buffer
                    size = buffer.size.at(ledger.micro_batch)
                    owner = buffer.row, buffer.maker, size
                    if sign > 0:
                        allocator.allocate_for(owner, size)
                    elif sign < 0:
                        state = states.get(buffer.parameter)
                        if ledger.update_in_backward and buffer.row == "gradients" and state and missing[state]:
                            missing[state] -= 1
                            _allocate_states(allocator, *state)
                        allocator.free_last(owner)
                    if buffer.row == "gradients":
                        gradients.add(owner)
            allocator.enter_segment(None)
            allocator.free_last("batch")
            yield step
        for state in missing.elements():
            _allocate_states(allocator, *state)
        missing.clear()
        _simulate_update(allocator, ledger)
        if not zero_grad_late:
            allocator.free_owners(gradients)
        yield step


def _states(ledger: Ledger) -> dict[str, tuple[int, int]]:
    """(bytes of the optimizer states, bytes of the largest of their blocks) by parameter. A block
    has at most the parameter's own bytes: Adam's states are two such blocks."""
    sizes = {parameter.name: parameter.bytes for parameter in ledger.parameters}
    return {
        name: (update.state_bytes, min(sizes[name], update.state_bytes))
        for name, update in ledger.updates.items()
        if update.state_bytes
    }


def _allocate_states(heap: Allocator, state_bytes: int, block: int) -> None:
    while state_bytes > 0:
        heap.allocate_for("optimizer", min(block, state_bytes))
        state_bytes -= block


def _simulate_update(heap: Allocator, ledger: Ledger) -> None:
    if ledger.update_in_backward:
        return
    for update in ledger.updates.values():
        heap.allocate_for("update", update.foreach_bytes if ledger.foreach else update.transient_bytes)
        if not ledger.foreach:
            heap.free_last("update")
    heap.free_all("update")


__all__ = ["Allocator", "FreeList", "simulate"]
