"""Entries: what a ledger is made of beside programs: parameters and their updates, and what travels between devices."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from tightfit.program import Linear, Operation, Passage
from tightfit.timetable import FORWARD, WEIGHTS, Action, Timetable, taken_by

NOTHING = Linear()
EVERYWHERE = (-1, 10**9)  # of a buffer: before the blocks and after them, and it is small


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter or buffer of the model, in the type it is kept in.

    places  where it is used: the numbers of blocks, -1 before them, their count after (see models/blocks.py)
    """

    name: str
    shape: tuple[int, ...]
    bytes: int
    trainable: bool
    places: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True, slots=True)
class Update:
    """What the optimizer does to one parameter: state it keeps, bytes it needs meanwhile, operations.

    elements  of a parameter that is updated in one batch with others: how many it has; dtype: its type. Of a batch, the first
              update has the bytes and the operations of all
    comes     bytes that are brought to the device for it while the update before it runs, of states and what else is offloaded;
              leaves: bytes that go back while the one after it runs
    """

    state_bytes: int
    transient_bytes: int
    operations: tuple[Operation, ...] = ()
    foreach_bytes: int = 0  # of the transient bytes, what a kernel over all parameters holds for each of them at once
    left_bytes: int = 0  # of the transient bytes, what is still there while the next parameter of its group is updated
    group: int = 0
    elements: int = 0
    dtype: str = ""
    comes: int = 0
    leaves: int = 0


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest instant of a step: its bytes, by row, and the phase and part it falls in."""

    total: float = 0.0
    rows: dict[str, float] = field(default_factory=dict)
    phase: str = ""
    part: str = ""


@dataclass(frozen=True, slots=True)
class Sent:
    """How gradients leave a device in buckets while backward goes on.

    devices  among which each gradient is divided; 1: every device gets all of it
    bucket   bytes of one bucket
    always   whether each micro-batch's are sent, or only the sums of the last one
    coming   bytes in which updated weights come back from those who divide them; stays: whether they are there until the next
             forward begins
    """

    devices: int
    bucket: float
    always: bool
    coming: float = 0.0
    stays: bool = False

    def opened(self, done: float, whole: float) -> float:
        """Bytes of the buckets that are begun when `done` of the `whole` bytes of gradients are made."""
        return min(math.ceil(done / self.bucket) * self.bucket, whole)

    def during(self, done: float, whole: float) -> dict[str, float]:
        if self.devices == 1:
            return {"gradients": self.opened(done, whole)}
        return {"gradients": done / self.devices, "communication": min(2 * self.bucket, self.opened(done, whole))}


@dataclass(frozen=True, slots=True)
class Gathered:
    """Parameters that are there whole only while their block is at work.

    devices  among which they are divided; of gradients that leave for another memory none is kept, as among infinitely many
    block    bytes of the largest block's, in the type that they are gathered in; rest: of what belongs to no block, which
             stays from forward to backward
    reduced  bytes of the largest block's gradients, as they are summed
    coming   bytes of a next block that is brought together meanwhile, in backward; ahead: in forward too
    """

    devices: float
    block: float
    rest: float
    reduced: float
    coming: float
    ahead: bool = False

    @property
    def widened(self) -> float:
        """How much larger gradients are summed than made."""
        return self.reduced / self.block if self.block else 1.0


@dataclass(frozen=True, slots=True)
class Message:
    """What a device sends in a step.

    bytes_per_s  of the slowest link on its way
    hides        whether the device works on meanwhile
    at_start     of what passes beside a step's first forward alone, the share that has to be there when it begins; 0 of what
                 does not
    latency_s    what all its calls take however little is sent
    during       between a device and its host: the work that it passes beside (forward, backward, update), of all micro-batches;
                 way: in or out, which pass at the same time. Both are empty between devices
    """

    name: str
    bytes: float
    bytes_per_s: float
    hides: bool
    latency_s: float = 0.0
    during: str = ""
    way: str = ""
    at_start: float = 0.0

    def times(self, share: float) -> Message:
        """A part of it: of the bytes, and of the calls."""
        return replace(self, bytes=self.bytes * share, latency_s=self.latency_s * share)


@dataclass(frozen=True)
class Part:
    """What a device does with a micro-batch in one piece of the model.

    weights   the gradients of linear layers' weights, where they have an action of their own
    """

    forward: tuple[Passage, ...]
    backward: tuple[Passage, ...]
    weights: tuple[Passage, ...] = ()

    @property
    def passages(self) -> tuple[Passage, ...]:
        return (*self.forward, *self.backward, *self.weights)


@dataclass(frozen=True, slots=True)
class Crossing:
    """What one piece of the model hands to the next, and gets back.

    forward   bytes of each tensor that is sent for a micro-batch; backward: of their gradients, those that there are
    kept      of the forward's, bytes of what the sender's backward needs, which stay with it anyway
    """

    forward: tuple[Linear, ...] = ()
    backward: tuple[Linear, ...] = ()
    kept: Linear = NOTHING

    def sent(self, kind: str) -> tuple[Linear, ...]:
        return self.forward if kind == FORWARD else self.backward


@dataclass(frozen=True, eq=False)
class Stage:
    """What a device of a pipeline does.

    parts        by piece of the model that it has: the program of one micro-batch
    table        every device's actions; device: which of them this is
    crossings    by piece of the model but the first, what it is given by the one before
    bytes_per_s  of the link to the next device; latency_s: of one message
    messages     for each of its actions, the messages that lie in memory beside it: (sent, coming), by the actions that take them
    versions     of the weights that are kept beside the newest
    continuous   whether steps follow each other without waiting for the last backward
    """

    parts: dict[int, Part]
    table: Timetable
    device: int
    crossings: dict[int, Crossing]
    bytes_per_s: float
    messages: tuple[tuple[tuple[Action, ...], tuple[Action, ...]], ...]
    latency_s: float = 0.0
    versions: int = 0
    continuous: bool = False

    def message(self, taken: Action) -> tuple[Linear, ...]:
        """Bytes of each tensor that an action begins with."""
        crossing = self.crossings.get(taken.chunk if taken.kind == FORWARD else taken.chunk + 1, Crossing())
        return crossing.sent(taken.kind)

    def sent_bytes(self, samples: int) -> float:
        """What this device sends to its neighbours in the step of the table."""
        own = (taken_by(action) for action in self.table[self.device] if action.kind != WEIGHTS)
        return sum(size.at(samples) for taken in own if taken.chunk >= 0 for size in self.message(taken))

    def beside(self, place: int) -> Linear:
        """Bytes of the messages that lie in memory beside the action at `place`."""
        sent, coming = self.messages[place]
        total = Linear()
        for taken in (*sent, *coming):
            total = sum(self.message(taken), total)
        for taken in sent:
            if taken.kind == FORWARD:
                total += self.crossings[taken.chunk].kept.times(-1.0)
        return total


@dataclass(frozen=True, slots=True)
class Visit:
    """A stretch of a step: one micro-batch's passages.

    sends     whether the gradients that it completes are sent; later: whether those of earlier micro-batches are there
    ends      whether it ends a micro-batch's backward; updates: and an update follows while others are under way
    """

    passages: tuple[Passage, ...]
    sends: bool
    later: bool
    ends: bool = True
    updates: bool = False
