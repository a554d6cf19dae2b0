"""Simulate an allocator: replay the allocations and frees of training steps.

`FreeList` holds the free memory blocks of an allocator. `Allocator` is the base class of the two
simulated allocators: torch's CUDA caching allocator and glibc's heap. `simulate` passes the buffers
of a ledger's steps to an allocator, in order.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from tightfit.cost.entries import MicroBatchRun
from tightfit.cost.ledger import Ledger
from tightfit.cost.recorded_step import Segment

MAX_KNOWN_STATES = 256  # the most states of an allocator that are kept for one step


class FreeList:
    """Holds the free memory blocks of an allocator. `take` returns the smallest block that is large
    enough (best fit), and `insert` coalesces adjacent free blocks.

    begins  address of a free block -> its size
    ends    address of a free block's end -> address of the block
    """

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []  # sorted (size, address)
        self.begins: dict[int, int] = {}  # address of a block -> its size
        self.ends: dict[int, int] = {}  # address of a block's end -> address of the block

    def take(self, size: int) -> tuple[int, int] | None:
        """Remove the smallest free memory block of at least `size` bytes and return its (address,
        size). Return None if no free memory block is large enough."""
        index = bisect.bisect_left(self._by_size, (size, -1))
        if index == len(self._by_size):
            return None
        found, address = self._by_size[index]
        self.remove(address)
        return address, found

    def insert(self, address: int, size: int) -> tuple[int, int]:
        """Insert a free memory block and coalesce it with its free neighbours. Return the (address,
        size) of the coalesced block.

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

    def state(self) -> tuple[tuple[int, int], ...]:
        """Return the (size, address) of all free memory blocks, sorted."""
        return tuple(self._by_size)

    def restore(self, state: tuple[tuple[int, int], ...]) -> None:
        """Return to the `state` that an earlier call of `state` returned."""
        self._by_size = list(state)
        self.begins = {address: size for size, address in state}
        self.ends = {address + size: address for size, address in state}

    def remove(self, address: int) -> int:
        """Remove the free memory block that begins at `address`, and return its size in bytes."""
        size = self.begins.pop(address)
        del self.ends[address + size]
        del self._by_size[bisect.bisect_left(self._by_size, (size, address))]
        return size


class Allocator(ABC):
    """Base class of simulated allocators.

    Each memory block has an owner: a hashable value that says what the block is for, such as
    "batch". If an owner has several memory blocks, the last one allocated is the first one freed.

    segment  the segment of the recorded step that is being simulated; None between segments
    """

    def __init__(self) -> None:
        self.segment: Segment | None = None
        self._blocks: dict[object, list[Any]] = defaultdict(list)

    @abstractmethod
    def allocate(self, size: int) -> Any:
        """Allocate a memory block of at least `size` bytes. Return it in the form that `release`
        expects."""

    @abstractmethod
    def release(self, block: Any) -> None:
        """Free a memory block that `allocate` returned."""

    def state(self) -> Any:
        """Return everything that decides what later allocations and frees do, as a hashable value.
        Return None if `restore` is not supported."""
        return None

    def restore(self, state: Any) -> None:
        """Return to the `state` that an earlier call of `state` returned."""
        raise NotImplementedError

    def enter_segment(self, segment: Segment | None) -> None:
        """Begin to simulate a segment of the recorded step. None: the next allocations and frees
        belong to no segment, for example those of the optimizer."""
        self.segment = segment

    def allocate_for(self, owner: object, size: float) -> None:
        self._blocks[owner].append(self.allocate(int(size)))

    def free_last(self, owner: object) -> None:
        if self._blocks[owner]:
            self.release(self._blocks[owner].pop())

    def free_owners(self, owners: set[Any]) -> None:
        """Free all memory blocks of all `owners`. Then make the set `owners` empty."""
        for owner in owners:
            self.free_all(owner)
        owners.clear()

    def free_all(self, owner: object) -> None:
        while self._blocks[owner]:
            self.free_last(owner)


def simulate(allocator: Allocator, ledger: Ledger, steps: int, zero_grad_late: bool = False) -> Iterator[int]:
    """Simulate `steps` training steps: make `allocator` allocate and free the buffers of `ledger`,
    in order.

    Yields the number of the step again and again, so that the caller can read the allocator's
    counters in between: after each micro-batch (in a pipeline, after each action of the rank), and
    after the optimizer update.

    zero_grad_late  whether the training loop zeroes gradients just before backward, so that they
                    are alive during the next step's forward
    """
    for parameter in ledger.parameters:
        allocator.allocate_for("parameters", parameter.bytes)
    gradients: set[tuple[str, str, float]] = set()
    states = _states(ledger)
    # states that are not allocated yet; the first step allocates each after its gradient
    missing = Counter(states.values())
    if ledger.batches_ahead:
        allocator.allocate_for("batches ahead", ledger.batch_bytes * ledger.micro_batch * ledger.batches_ahead)
    for step in range(steps):
        before, gradients = gradients, set()
        state, is_current = allocator.state(), True
        # key: an action of a pipeline, and the state in which it begins; value: the action, and the
        # state in which it ends. A long pipeline soon repeats the same states
        ends: dict[Any, tuple[MicroBatchRun, Any]] = {}
        for visit in ledger.micro_batch_runs():
            waiting = len(before), missing.total()  # what the visit may change outside of the allocator
            key = id(visit), state, waiting
            if key in ends:
                state, is_current = ends[key][1], False
                yield step
                continue
            if not is_current:
                allocator.restore(state)
                is_current = True
            _simulate_visit(allocator, ledger, visit, states, missing, before, gradients)
            if len(ends) < MAX_KNOWN_STATES and (state := allocator.state()) is not None:
                if waiting == (len(before), missing.total()):
                    ends[key] = visit, state
            else:
                state = None
            yield step
        if not is_current:
            allocator.restore(state)
        for state in missing.elements():
            _allocate_states(allocator, *state)
        missing.clear()
        _simulate_update(allocator, ledger)
        if not zero_grad_late:
            allocator.free_owners(gradients)
        yield step


def _simulate_visit(
    allocator: Allocator,
    ledger: Ledger,
    visit: MicroBatchRun,
    states: dict[str, tuple[int, int]],
    missing: Counter[tuple[int, int]],
    before: set[tuple[str, str, float]],
    gradients: set[tuple[str, str, float]],
) -> None:
    """Simulate a micro-batch, or an action of a pipeline.

    states     parameter name -> its optimizer states, as `_states` returns them
    missing    optimizer states that are not allocated yet. Those that the visit allocates are
               removed
    before     owners of the previous step's gradients. The first backward frees them and makes the
               set empty
    gradients  owners of this step's gradients; those of the visit are added
    """
    allocator.allocate_for("batch", ledger.batch_bytes * ledger.micro_batch)
    for segment in visit.segments:
        allocator.enter_segment(segment)
        if segment.phase == "backward":
            allocator.free_owners(before)
        for buffer, sign in segment.timeline.events:
            # equal blocks of a model share Buffer objects, so one block may free what
            # another block allocated: the owner is therefore a description of the buffer
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


def _states(ledger: Ledger) -> dict[str, tuple[int, int]]:
    """Return parameter name -> (bytes of its optimizer states, bytes of the largest memory block in
    which they are allocated). Such a memory block has at most the parameter's own bytes, if it has any. Example:
    Adam's two states are two memory blocks."""
    sizes = {parameter.name: parameter.bytes for parameter in ledger.parameters}
    return {
        name: (update.state_bytes, min(sizes[name] or update.state_bytes, update.state_bytes))
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
