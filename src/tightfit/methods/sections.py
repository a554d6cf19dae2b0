"""Sections: one device's part of a micro-batch's program, cut out of the whole model's, with each buffer's life in it.

A section is a block with what lies between it and the next one. Blocks that are alike share one recorded program, so a buffer is told
by its section and its name in it, never by its size: the copy of a weight and a gradient may be equally large. What one section
leaves to the next has another name in the program of the first block than in that of the second; all that is asked of it is which of
the two neighbours makes it, and which frees it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from tightfit.entries import NOTHING, Part
from tightfit.program import Buffer, Linear, Passage, Timeline

BEFORE = -1  # the section of what comes before the blocks; what comes after them is of the section with their number
FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"

Events = list[tuple[Buffer, int]]


class Sections:
    """A micro-batch's program by section, and where its buffers are made and freed.

    deferred  whether the gradients of linear layers' weights are made in a phase of their own
    """

    def __init__(self, training: tuple[Passage, ...], blocks: int, deferred: bool) -> None:
        self.end = blocks
        self.passages: dict[tuple[int, str], list[Passage]] = defaultdict(list)
        split: dict[Timeline, tuple[Timeline, Timeline]] = {}
        late = {
            buffer.parameter
            for timeline in {passage.timeline for passage in training if deferred and passage.phase == BACKWARD}
            for buffer in timeline.born
            if buffer.parameter and buffer.operands
        }
        for section, passage in _in_sections(training, blocks):
            timeline = passage.timeline
            if deferred:
                if timeline not in split:
                    split[timeline] = _without_weights(_cast_again(timeline, passage.phase, late))
                timeline, later = split[timeline]
                if later.events:
                    self.passages[section, WEIGHTS].append(replace(passage, timeline=later))
            self.passages[section, passage.phase].append(replace(passage, timeline=timeline))
        self.made: dict[Buffer, Counter[int]] = defaultdict(Counter)  # by section, how often
        self.phase: dict[Buffer, str] = {}  # in which a buffer is made
        self._gone: dict[int, set[Buffer]] = defaultdict(set)  # by section
        self._look()
        self.tied = [buffer for buffer in self.made if len({min(self.made[term]) for term in buffer.terms}) > 1]

    def _look(self) -> None:
        born: dict[Timeline, Counter[Buffer]] = {}
        for (section, phase), passages in self.passages.items():
            for passage in passages:
                timeline = passage.timeline
                if timeline not in born:
                    born[timeline] = Counter(timeline.born)
                for buffer, count in born[timeline].items():
                    self.made[buffer][section] += count
                    self.phase.setdefault(buffer, FORWARD if phase == FORWARD else BACKWARD)
                self._gone[section] |= timeline.gone
        self.freed: dict[Buffer, set[int]] = defaultdict(set)  # by other sections than made them
        for section, gone in self._gone.items():
            for buffer in gone:
                if section not in self.made.get(buffer, ()):
                    self.freed[buffer].add(section)

    def to_next(self, buffer: Buffer) -> bool:
        """Whether a section leaves the buffer to the one that comes after it: in forward the one above, in backward the one
        below. Of blocks that are alike, only the first and the last have neighbours that were recorded."""
        made, freed = self.made.get(buffer), self.freed.get(buffer)
        if not made or not freed:
            return False
        step = 1 if self.phase[buffer] == FORWARD else -1
        return min(freed) - min(made) == step or max(freed) - max(made) == step

    def kept(self, piece: range) -> frozenset[Buffer]:
        """What the forward of a piece keeps for its backward."""
        first, last = piece.start or BEFORE, self.end + 1 if piece.stop == self.end else piece.stop
        here = (passage for section in range(first, last) for passage in self.passages.get((section, FORWARD), ()))
        return frozenset().union(*(passage.timeline.kept for passage in here))

    def keeps(self, piece: range, given: Buffer | None) -> bool:
        """Whether backward needs what a piece gives to the next block. given: as the program of that block names it, which the
        piece may know by another name."""
        if given is None:
            return False
        kept, last = self.kept(piece), piece.stop - 1
        if not {BEFORE, last}.isdisjoint(self.made.get(given, ())):
            return given in kept
        handed_on = (one for one in self.left(last) if self.phase[one] == FORWARD and self.to_next(one))
        return any(one in kept for one in handed_on if one.size == given.size)

    def left(self, section: int, whole: bool = True) -> Iterator[Buffer]:
        """What a section makes and does not free itself, but gradients of parameters. whole: its backward too."""
        phases = (FORWARD, BACKWARD, WEIGHTS) if whole else (FORWARD,)
        passages = [passage for phase in phases for passage in self.passages.get((section, phase), ())]
        gone = frozenset().union(*(passage.timeline.gone for passage in passages))
        for passage in passages:
            for buffer in passage.timeline.born:
                if buffer not in gone and buffer.row != "gradients":
                    yield buffer


def _in_sections(training: tuple[Passage, ...], blocks: int) -> Iterator[tuple[int, Passage]]:
    here = {FORWARD: BEFORE, BACKWARD: blocks}
    last = blocks - 1
    for passage in training:
        if passage.block is not None:
            here[passage.phase] = passage.block
        elif passage.phase == FORWARD and here[FORWARD] == last:
            here[FORWARD] = blocks
        yield here[passage.phase], passage
        if passage.block is not None and passage.phase == BACKWARD:  # what comes next lies behind the block below
            here[BACKWARD] = passage.block - 1


@lru_cache(16)
def sections_of(training: tuple[Passage, ...], blocks: int, deferred: bool) -> Sections:
    return Sections(training, blocks, deferred)


@dataclass(frozen=True)
class Received:
    """Bytes of what a piece is sent: of what its backward needs, and of the rest, which goes when its forward ends. instead: the
    buffers in whose place it comes, of what lies before the blocks."""

    kept: Linear = NOTHING
    passing: Linear = NOTHING
    instead: frozenset[Buffer] = frozenset()


def part(sections: Sections, piece: range, received: Received, gradients: Linear) -> Part:
    """The program of a piece of the model by itself. What comes from another device comes, and what no passage here frees goes
    where the forward or the backward ends.

    received   from the piece before; gradients: bytes of those that come from the piece behind
    """
    return _Piece(sections, piece, received, gradients).part()


class _Piece:
    """One piece's program in the making.

    here     the sections whose forward and backward it runs; of what comes before the blocks each device runs the forward
    """

    def __init__(self, sections: Sections, piece: range, comes: Received, gradients: Linear) -> None:
        self.sections, self.comes, self.gradients = sections, comes, gradients
        self.received, self.handed_on = piece.start > 0, piece.stop < sections.end
        self.here = range(piece.start if self.received else BEFORE, piece.stop if self.handed_on else sections.end + 1)
        self.run = {BEFORE, *self.here}
        self.alive: Counter[Buffer] = (
            Counter()
        )  # of what is made here, and is neither freed where it is made nor next to it
        self.operand = {
            FORWARD: False,
            BACKWARD: False,
        }  # whether what is received in a phase waits for the weights' part
        self.kept = sections.kept(piece)
        self.early: dict[int, Events] = {}  # by section: what forward made is a gradient when backward comes to it
        self.becomes: dict[
            Buffer, Buffer | None
        ] = {}  # what a buffer is here, where it is something else; None: nothing
        for gradient in sections.tied:
            self._untie(gradient)
        self.becomes.update((buffer, None) for buffer in comes.instead if BEFORE in sections.made.get(buffer, ()))

    def _untie(self, gradient: Buffer) -> None:
        """A parameter that pieces on several devices use has on each of them a gradient of its own, and no sum of them."""
        here = [term for term in gradient.terms if any(section in self.here for section in self.sections.made[term])]
        if len(here) == 1 and len(gradient.terms) > 1:
            own = self.becomes[here[0]] = replace(here[0], row="gradients")
            self.becomes[gradient] = None
            if self.sections.phase[here[0]] == FORWARD:  # of a loss that makes it before it is asked for
                self.early[min(self.sections.made[here[0]])] = [(here[0], -1), (own, 1), (own, 0)]

    def part(self) -> Part:
        inside = self.sections.passages
        forward = [
            (section, passage)
            for section in sorted(self.run)
            for passage in inside.get((section, FORWARD), ())
        ]  # fmt: skip
        backward, weights = (
            [(section, passage) for section in reversed(self.here) for passage in inside.get((section, phase), ())]
            for phase in (BACKWARD, WEIGHTS)
        )
        self._find_left()
        done, back, later = ([self._closed(*one) for one in passages] for passages in (forward, backward, weights))
        ends: dict[str, Events] = {FORWARD: [], BACKWARD: [], WEIGHTS: []}
        for buffer in self.alive.elements():
            kept = buffer in self.kept or self.sections.phase[buffer] == BACKWARD
            ends[BACKWARD if kept else FORWARD].append((buffer, -1))
        begin: dict[str, Events] = {FORWARD: [], BACKWARD: []}
        for phase, row, size, end in (
            (FORWARD, "activations", self.comes.kept, WEIGHTS if self.operand[FORWARD] else BACKWARD),
            (FORWARD, "temporaries", self.comes.passing, FORWARD),
            (BACKWARD, "temporaries", self.gradients, WEIGHTS if self.operand[BACKWARD] else BACKWARD),
        ):
            buffer = Buffer(size, row, "received")
            begin[phase].append((buffer, 1))
            ends[end].append((buffer, -1))
        return Part(
            (_passage("received", FORWARD, begin[FORWARD]), *done, _passage("sent", FORWARD, ends[FORWARD])),
            (_passage("received", BACKWARD, begin[BACKWARD]), *back, _passage("sent", BACKWARD, ends[BACKWARD])),
            (*later, _passage("sent", BACKWARD, ends[WEIGHTS])) if later else (),
        )

    def _find_left(self) -> None:
        """Count what is alive when its own section is done, and is not the next one's to free."""
        for section in self.run:
            for buffer in self.sections.left(section, whole=section in self.here):
                if buffer in self.becomes:
                    continue
                step = 1 if self.sections.phase[buffer] == FORWARD else -1
                if section not in self.here or section + step not in self.here or not self.sections.to_next(buffer):
                    self.alive[buffer] += 1

    def _closed(self, section: int, passage: Passage) -> Passage:
        """A passage without the going of what was never here."""
        timeline = passage.timeline
        sections = self.sections
        elsewhere = {buffer for buffer in timeline.gone if section not in sections.made.get(buffer, ())}
        inner = section - 1 in self.here and section + 1 in self.here
        if inner and all(sections.to_next(buffer) for buffer in elsewhere):
            return passage
        events: Events = []
        for buffer, sign in timeline.events:
            if buffer in self.becomes:
                own = self.becomes[buffer]
                if own is not None and sign > 0:
                    events += [(buffer, 1)] if passage.phase == FORWARD else [(own, 1), (own, 0)]
                continue
            if sign < 0 and buffer in elsewhere and not self._goes_here(section, buffer):
                if sections.to_next(buffer):
                    self.operand[sections.phase[buffer]] |= passage in sections.passages[section, WEIGHTS]
                continue
            events.append((buffer, sign))
        if passage.phase == BACKWARD:
            events += self.early.pop(section, [])
        return replace(passage, timeline=replace(timeline, events=tuple(events)))

    def _goes_here(self, section: int, buffer: Buffer) -> bool:
        sections = self.sections
        if sections.to_next(buffer):
            return section + (-1 if sections.phase[buffer] == FORWARD else 1) in self.here
        if self.alive[buffer] > 0:
            self.alive[buffer] -= 1
            return True
        return False


def _passage(part: str, phase: str, events: Events) -> Passage:
    return Passage(part, phase, Timeline(tuple(events)))


def _cast_again(timeline: Timeline, phase: str, late: set[str]) -> Timeline:
    """A passage whose linear layers, of the weights `late`, keep no copies of them in another type: backward makes its own."""
    copies = {buffer for buffer, _ in timeline.events if buffer.parameter in late and not buffer.operands}
    copies = {buffer for buffer in copies if buffer.maker == "aten._to_copy" and buffer.row != "gradients"}
    if not copies:
        return timeline
    events: Events = []
    there: Events = []  # copies whose product is still to come
    made: set[Buffer] = set()
    for buffer, sign in timeline.events:
        if buffer in copies and sign > 0:
            there.append((buffer, -1))
            events.append((buffer, 1))
        elif buffer in copies:
            if phase == BACKWARD:
                again = replace(buffer)
                here = bool(events) and events[-1][0] not in made
                place = next((n for n in reversed(range(len(events))) if here and events[n][1] > 0), len(events))
                events[place:place] = [(again, 1)]
                events.append((again, -1))
                made.add(again)
        else:
            events.append((buffer, sign))
            if sign > 0:
                events, there = events + there, []
    return replace(timeline, events=(*events, *there), kept=timeline.kept - copies)


def _without_weights(timeline: Timeline) -> tuple[Timeline, Timeline]:
    """A passage of backward without the gradients of linear layers' weights, and these with all that is left for them."""
    made = [buffer for buffer in timeline.born if buffer.parameter and buffer.operands]
    if not made:
        return timeline, Timeline()
    moved, waits = set(made), {operand for buffer in made for operand in buffer.operands}
    now: Events = []
    weights: Events = []
    last: dict[Buffer, int] = {}  # where the last product of an operand stands
    for buffer, sign in timeline.events:
        if buffer in moved:
            weights.append((buffer, sign))
            for operand in buffer.operands:
                last[operand] = len(weights)
        elif not (sign < 0 and buffer in waits):
            now.append((buffer, sign))
    goes = [buffer for buffer, sign in timeline.events if sign < 0 and buffer in waits]
    for buffer in sorted(goes, key=lambda one: -last[one]):
        weights.insert(last[buffer], (buffer, -1))
    return replace(timeline, events=tuple(now)), Timeline(tuple(weights))


__all__ = ["Received", "Sections", "part", "sections_of"]
