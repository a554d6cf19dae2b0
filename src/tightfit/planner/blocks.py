"""Blocks: free ones by size and place, and a step's buffers taken from an allocator and given back, in order."""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from tightfit.ledger import Ledger
from tightfit.program import Passage


class Free:
    """Blocks that nobody uses: the smallest that is large enough is found, and those that touch are one."""

    def __init__(self) -> None:
        self._sorted: list[tuple[int, int]] = []  # (size, address)
        self.begins: dict[int, int] = {}  # address -> size
        self.ends: dict[int, int] = {}  # address of the end -> address

    def take(self, size: int) -> tuple[int, int] | None:
        """(address, size) of the smallest block of at least `size` bytes, which is free no more; None where none is."""
        place = bisect.bisect_left(self._sorted, (size, -1))
        if place == len(self._sorted):
            return None
        found, address = self._sorted[place]
        self.remove(address)
        return address, found

    def give(self, address: int, size: int) -> tuple[int, int]:
        """Free a block, and merge it with the free ones that touch it; returns what it is then."""
        if address in self.ends:
            before = self.ends[address]
            size += self.remove(before)
            address = before
        if address + size in self.begins:
            size += self.remove(address + size)
        bisect.insort(self._sorted, (size, address))
        self.begins[address] = size
        self.ends[address + size] = address
        return address, size

    def remove(self, address: int) -> int:
        """Take out the block that begins at an address; returns its size."""
        size = self.begins.pop(address)
        del self.ends[address + size]
        del self._sorted[bisect.bisect_left(self._sorted, (size, address))]
        return size


class Owned(ABC):
    """An allocator whose blocks have owners: any number each, of which the last one taken is the first one given back."""

    def __init__(self) -> None:
        self.passage: Passage | None = None
        self._taken: dict[object, list[Any]] = defaultdict(list)

    @abstractmethod
    def allocate(self, size: int) -> Any:
        """A block of at least `size` bytes, as `release` wants it."""

    @abstractmethod
    def release(self, block: Any) -> None: ...

    def enter(self, passage: Passage | None) -> None:
        """What follows is of `passage`; None: of none."""
        self.passage = passage

    def take(self, owner: object, size: float) -> None:
        self._taken[owner].append(self.allocate(int(size)))

    def give(self, owner: object) -> None:
        if self._taken[owner]:
            self.release(self._taken[owner].pop())

    def free(self, owners: set[Any]) -> None:
        """All blocks of `owners`, which is empty afterwards."""
        for owner in owners:
            self.give_all(owner)
        owners.clear()

    def give_all(self, owner: object) -> None:
        while self._taken[owner]:
            self.give(owner)


def played(heap: Owned, ledger: Ledger, steps: int, late: bool = False) -> Iterator[int]:
    """Steps of `ledger`, taken from a heap and given back; yields the number of the step after each of its visits and after its
    update.

    late  of a loop that zeroes the gradients just before backward: they live through the forward of the next step
    """
    for parameter in ledger.parameters:
        heap.take("parameters", parameter.bytes)
    gradients: set[tuple[str, str, float]] = set()
    states = _states(ledger)
    missing = Counter(states.values())  # the first step makes them, each after its gradient
    if ledger.batches_ahead:
        heap.take("batches ahead", ledger.batch_bytes * ledger.micro_batch * ledger.batches_ahead)
    for step in range(steps):
        before, gradients = gradients, set()
        for visit in ledger.visits():
            heap.take("batch", ledger.batch_bytes * ledger.micro_batch)
            for passage in visit.passages:
                heap.enter(passage)
                if passage.phase == "backward":
                    heap.free(before)
                for buffer, sign in passage.timeline.events:
                    # equal blocks of a model share their buffers, so what one leaves another may free
                    size = buffer.size.at(ledger.micro_batch)
                    owner = buffer.row, buffer.maker, size
                    if sign > 0:
                        heap.take(owner, size)
                    elif sign < 0:
                        state = states.get(buffer.parameter)
                        if ledger.update_in_backward and buffer.row == "gradients" and state and missing[state]:
                            missing[state] -= 1
                            _make(heap, *state)
                        heap.give(owner)
                    if buffer.row == "gradients":
                        gradients.add(owner)
            heap.enter(None)
            heap.give("batch")
            yield step
        for state in missing.elements():
            _make(heap, *state)
        missing.clear()
        _update(heap, ledger)
        if not late:
            heap.free(gradients)
        yield step


def _states(ledger: Ledger) -> dict[str, tuple[int, int]]:
    """By parameter, bytes of its optimizer's states, and of the largest block of these: as much as it takes itself."""
    sizes = {parameter.name: parameter.bytes for parameter in ledger.parameters}
    return {
        name: (update.state_bytes, min(sizes[name], update.state_bytes))
        for name, update in ledger.updates.items()
        if update.state_bytes
    }


def _make(heap: Owned, state_bytes: int, block: int) -> None:
    while state_bytes > 0:
        heap.take("optimizer", min(block, state_bytes))
        state_bytes -= block


def _update(heap: Owned, ledger: Ledger) -> None:
    if ledger.update_in_backward:
        return
    for update in ledger.updates.values():
        heap.take("update", update.foreach_bytes if ledger.foreach else update.transient_bytes)
        if not ledger.foreach:
            heap.give("update")
    heap.give_all("update")


__all__ = ["Free", "Owned", "played"]
