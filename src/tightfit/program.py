"""Program: what a micro-batch does, as passages through parts of a model: buffers that come and go, and operations.

Sizes are linear in the samples, so one program stands for any number of them. It is traced from the model (planner/trace.py);
the largest instant is found by playing it through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

TRACED = ("activations", "temporaries", "gradients", "optimizer", "parameters")  # rows that events may be of

LINEAR = ("aten.mm", "aten.addmm")  # products with the weights of a layer


@dataclass(frozen=True, slots=True)
class Linear:
    """A number that grows with the samples of a micro-batch: fixed + per_sample x samples."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, samples: float) -> float:
        return self.fixed + self.per_sample * samples

    def __add__(self, other: Linear) -> Linear:
        return Linear(self.fixed + other.fixed, self.per_sample + other.per_sample)

    def times(self, factor: float) -> Linear:
        return Linear(self.fixed * factor, self.per_sample * factor)


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """One storage: its bytes, the row it counts under, the operation that made it.

    parameter  of a gradient, of the product that it is cast from, and of a weight's copy in another type: whose
    operands   of a gradient that is a matrix product: the buffers that are multiplied
    terms      of the gradient of a parameter that is used several times: the gradients of its uses, which it is the sum of
    """

    size: Linear
    row: str
    maker: str = ""
    parameter: str = ""
    operands: tuple[Buffer, ...] = ()
    terms: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class Operation:
    """One kernel, or `count` equal ones: FLOPs, bytes read and written, each, and of a product its sizes.

    name   the operation's, such as aten.mm
    dtype  of what it computes in
    flops  as model FLOPs count them: of attention over all pairs of queries and keys
    sizes  of a product: (batches, rows, columns, depth)
    computed  share of `flops` that is computed: attention skips the pairs that a causal mask hides
    """

    name: str
    dtype: str
    flops: Linear
    moved: Linear
    sizes: tuple[Linear, ...] = ()
    count: Linear = Linear(1.0)
    computed: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """A tensor that a block is called with.

    path          where it lies in the block's arguments
    size          bytes of the tensor, which may be a part of its storage
    buffer        its storage, where the step made it
    has_gradient  whether backward makes a gradient of it
    """

    path: str
    size: Linear
    buffer: Buffer | None = None
    has_gradient: bool = False


@dataclass(frozen=True, eq=False)
class Timeline:
    """Buffers in the order in which they come (+1) and go (-1), and the operations of the same stretch.

    A gradient has a third event, 0: it is complete, and its parameter's.

    needed  how many of the events, and of the operations, come before the last tensor that backward needs: where a
            recomputation stops
    inputs  of a block: the buffers that it was called with; given: all tensors that it was
    kept    of a forward: the buffers, its own or others', that it keeps for backward
    """

    events: tuple[tuple[Buffer, int], ...] = ()
    operations: tuple[Operation, ...] = ()
    needed: tuple[int, int] = (0, 0)
    inputs: tuple[Buffer, ...] = ()
    kept: frozenset[Buffer] = frozenset()
    given: tuple[Given, ...] = ()

    def then(self, other: Timeline) -> Timeline:
        events, operations = other.needed
        needed = (len(self.events) + events, len(self.operations) + operations) if events else self.needed
        return Timeline(
            self.events + other.events,
            self.operations + other.operations,
            needed,
            self.inputs + other.inputs,
            self.kept | other.kept,
            self.given or other.given,
        )

    @property
    def born(self) -> list[Buffer]:
        return [buffer for buffer, sign in self.events if sign > 0]

    @cached_property
    def gone(self) -> frozenset[Buffer]:
        return frozenset(buffer for buffer, sign in self.events if sign < 0)


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage of a micro-batch through a part of the model.

    part      "block" for one of the repeated blocks, else where it lies between them
    block     its position among the model's blocks, None for what is no block
    phase     forward, backward, inference (a forward that keeps nothing) or optimizer
    call      of a block that a forward calls more than once: which time
    """

    part: str
    phase: str
    timeline: Timeline
    block: int | None = None
    call: int = 0

    @property
    def place(self) -> tuple[str, str, int | None, int]:
        """What a passage is told by."""
        return self.part, self.phase, self.block, self.call


@dataclass(frozen=True, slots=True)
class Played:
    """A timeline played through: bytes by row that it adds at its largest instant, and at its end.

    made  bytes of the gradients that are complete at either; gradient: of the largest one
    """

    largest: dict[str, float]
    net: dict[str, float]
    made: tuple[float, float] = (0.0, 0.0)
    gradient: float = 0.0


def play(timeline: Timeline, samples: float) -> Played:
    rows = dict.fromkeys(TRACED, 0.0)
    total, best, largest = 0.0, 0.0, dict(rows)
    made, made_then, gradient = 0.0, 0.0, 0.0
    for buffer, sign in timeline.events:
        size = buffer.size.at(samples)
        if sign == 0:
            made, gradient = made + size, max(gradient, size)
            continue
        rows[buffer.row] += sign * size
        total += sign * size
        if total > best:
            best, largest, made_then = total, dict(rows), made
    return Played(largest, rows, (made_then, made), gradient)


def edited(program: tuple[Passage, ...], edits: list[Callable[[Timeline], Timeline]]) -> tuple[Passage, ...]:
    """The program with the timelines of its backward edited, each once."""
    known: dict[Timeline, Timeline] = {}

    def changed(passage: Passage) -> Passage:
        if passage.phase != "backward" or not edits:
            return passage
        if passage.timeline not in known:
            timeline = passage.timeline
            for edit in edits:
                timeline = edit(timeline)
            known[passage.timeline] = timeline
        return replace(passage, timeline=known[passage.timeline])

    return tuple(map(changed, program))


def handed_over(timeline: Timeline) -> Timeline:
    """Each gradient leaves for its bucket as soon as it is complete."""
    events: list[tuple[Buffer, int]] = []
    for buffer, sign in timeline.events:
        if buffer.row != "gradients" or sign > 0:
            events.append((buffer, sign))
        elif sign == 0:
            events += [(buffer, 0), (buffer, -1)]
    return replace(timeline, events=tuple(events))


def accumulated(timeline: Timeline) -> Timeline:
    """Of a later micro-batch: each new gradient is added to the one that is there, and freed."""
    events: list[tuple[Buffer, int]] = []
    passing: dict[Buffer, Buffer] = {}
    for buffer, sign in timeline.events:
        if buffer.row != "gradients":
            events.append((buffer, sign))
        elif sign > 0:
            passing[buffer] = replace(buffer, row="temporaries")
            events.append((passing[buffer], 1))
        elif buffer in passing:
            events += [(buffer, sign), (passing.pop(buffer), -1)] if sign == 0 else [(passing.pop(buffer), -1)]
    return replace(timeline, events=(*events, *((buffer, -1) for buffer in passing.values())))


def updated_at_once(timeline: Timeline, needed: Mapping[str, float]) -> Timeline:
    """Each gradient is used up by its own update as soon as it is complete. needed: bytes that one needs meanwhile, by parameter."""
    events: list[tuple[Buffer, int]] = []
    for buffer, sign in timeline.events:
        if buffer.row != "gradients" or sign > 0:
            events.append((buffer, sign))
        elif sign == 0:
            transient = Buffer(Linear(needed.get(buffer.parameter, 0.0)), "temporaries")
            events += [(transient, 1), (transient, -1), (buffer, -1)]
    return replace(timeline, events=tuple(events))
