"""Cut one pipeline stage's program out of a micro-batch's recorded step.

`rank_ledger` calls `stage_program` for each stage of a rank. The recorded step is that of the whole
model, as a list of segments, such as the forward of one block. This module groups the segments into
sections: section n contains the segments of block n and of the code that follows, up to the next
block. A stage takes the sections of its blocks.

The main task is to find the lifetime of each buffer within the stage. Example: 4 blocks, a stage
with the blocks 2 and 3, and hidden states of 16 MiB. In the whole model, section 1 allocates the
hidden states that block 2 reads, and section 2's backward frees them. The stage has no section 1,
so it gets a segment "received" that allocates the 16 MiB, and the end of the stage's backward frees
them. Likewise, the gradient that block 2's backward computes for section 1 is freed in a segment
"sent".

Equal blocks share one recorded segment. So a buffer is identified by its section and its `Buffer`
object in the segment, never by its size: the copy of a weight and a gradient may be equally large.
A tensor that one section passes to the next appears as two `Buffer` objects, one in the segments of
each section. They need not be matched. It is enough to know which section allocates the tensor and
which section frees it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from tightfit.cost.entries import NOTHING, StageProgram
from tightfit.cost.recorded_step import BatchLinear, Buffer, Segment, Timeline

# The section of the code before the blocks. The code after n blocks is section n.
BEFORE = -1
FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"

Events = list[tuple[Buffer, int]]


class Sections:
    """A micro-batch's recorded step divided into sections, with the lifetimes of its buffers.
    Section n is block n with the code up to the next block; section -1 is the code before the
    blocks.

    end       number of blocks, which is also the number of the last section
    segments  (section, phase) -> the section's segments in this phase, in order
    made      buffer -> {section: how often this section allocates the buffer}
    phase     buffer -> the phase in which it is allocated
    freed     buffer -> the sections that free it, except those that allocate it
    tied      the gradients of parameters that several sections use. Such a gradient is the sum of
              its `terms`, one from each section

    With the argument `deferred`, the weight gradients of linear layers are computed in a phase of
    their own, as in the zero-bubble schedule.
    """

    def __init__(self, training: tuple[Segment, ...], blocks: int, deferred: bool) -> None:
        self.end = blocks
        self.segments: dict[tuple[int, str], list[Segment]] = defaultdict(list)
        split: dict[Timeline, tuple[Timeline, Timeline]] = {}
        late = {
            buffer.parameter
            for timeline in {segment.timeline for segment in training if deferred and segment.phase == BACKWARD}
            for buffer in timeline.allocated
            if buffer.parameter and buffer.operands
        }
        for section, segment in _in_sections(training, blocks):
            timeline = segment.timeline
            if deferred:
                if timeline not in split:
                    split[timeline] = _split_weight_gradients(_recast_in_backward(timeline, segment.phase, late))
                timeline, later = split[timeline]
                if later.events:
                    self.segments[section, WEIGHTS].append(replace(segment, timeline=later))
            self.segments[section, segment.phase].append(replace(segment, timeline=timeline))
        self.made: dict[Buffer, Counter[int]] = defaultdict(Counter)
        self.phase: dict[Buffer, str] = {}
        self._freed_by_section: dict[int, set[Buffer]] = defaultdict(set)
        self._find_lifetimes()
        self.tied = [buffer for buffer in self.made if len({min(self.made[term]) for term in buffer.terms}) > 1]

    def _find_lifetimes(self) -> None:
        """Set `made`, `phase` and `freed`: which sections allocate each buffer, in which phase, and
        which sections free it."""
        born: dict[Timeline, Counter[Buffer]] = {}
        for (section, phase), segments in self.segments.items():
            for segment in segments:
                timeline = segment.timeline
                if timeline not in born:
                    born[timeline] = Counter(timeline.allocated)
                for buffer, count in born[timeline].items():
                    self.made[buffer][section] += count
                    self.phase.setdefault(buffer, FORWARD if phase == FORWARD else BACKWARD)
                self._freed_by_section[section] |= timeline.freed
        self.freed: dict[Buffer, set[int]] = defaultdict(set)
        for section, gone in self._freed_by_section.items():
            for buffer in gone:
                if section not in self.made.get(buffer, ()):
                    self.freed[buffer].add(section)

    def freed_by_next(self, buffer: Buffer) -> bool:
        """Return whether `buffer` is freed by the section that runs right after the section that
        allocates it. A section is one block with the code up to the next block. In forward, the
        sections of the blocks run in ascending order, in backward in descending order.

        Equal blocks share their segments, so it is enough that this holds for the first or the last
        of the sections that allocate the buffer.
        """
        allocated, freed = self.made.get(buffer), self.freed.get(buffer)
        if not allocated or not freed:
            return False
        step = 1 if self.phase[buffer] == FORWARD else -1
        return min(freed) - min(allocated) == step or max(freed) - max(allocated) == step

    def saved(self, piece: range) -> frozenset[Buffer]:
        """Return the buffers that the forward of a pipeline stage saves for its backward.

        piece  the numbers of the stage's blocks
        """
        first, last = piece.start or BEFORE, self.end + 1 if piece.stop == self.end else piece.stop
        segments = (segment for section in range(first, last) for segment in self.segments.get((section, FORWARD), ()))
        return frozenset().union(*(segment.timeline.saved for segment in segments))

    def saves_output(self, piece: range, given: Buffer | None) -> bool:
        """Return whether a stage's backward needs the tensor that its forward passes to the next
        stage, so that the stage keeps it anyway.

        piece  the numbers of the stage's blocks
        given  the tensor's buffer in the segment of the next stage's first block; None if the step
               did not allocate it. In the stage's own segments it may be another `Buffer` of the
               same size
        """
        if given is None:
            return False
        saved, last = self.saved(piece), piece.stop - 1
        if not {BEFORE, last}.isdisjoint(self.made.get(given, ())):
            return given in saved
        handed_on = (one for one in self.unfreed(last) if self.phase[one] == FORWARD and self.freed_by_next(one))
        return any(one in saved for one in handed_on if one.size == given.size)

    def unfreed(self, section: int, whole: bool = True) -> Iterator[Buffer]:
        """Yield the buffers that a section allocates and does not free, except gradients of
        parameters. A section is one block with the code up to the next block.

        whole  True: of the section's forward and backward together; False: of its forward alone
        """
        phases = (FORWARD, BACKWARD, WEIGHTS) if whole else (FORWARD,)
        segments = [segment for phase in phases for segment in self.segments.get((section, phase), ())]
        gone = frozenset().union(*(segment.timeline.freed for segment in segments))
        for segment in segments:
            for buffer in segment.timeline.allocated:
                if buffer not in gone and buffer.row != "gradients":
                    yield buffer


def _in_sections(training: tuple[Segment, ...], blocks: int) -> Iterator[tuple[int, Segment]]:
    """Yield (section, segment) for each segment of the recorded step `training`, in order. Section
    n is block n with the code up to the next block; section -1 is the code before the blocks.

    blocks  number of blocks of the model
    """
    current = {FORWARD: BEFORE, BACKWARD: blocks}
    last = blocks - 1
    for segment in training:
        if segment.block is not None:
            current[segment.phase] = segment.block
        elif segment.phase == FORWARD and current[FORWARD] == last:
            current[FORWARD] = blocks
        yield current[segment.phase], segment
        # a segment between the backwards of block n and block n - 1 is in section n - 1
        if segment.block is not None and segment.phase == BACKWARD:
            current[BACKWARD] = segment.block - 1


@lru_cache(16)
def sections_of(training: tuple[Segment, ...], blocks: int, deferred: bool) -> Sections:
    """Return the `Sections` of the recorded step `training`: its segments grouped by block. They
    are cached, because all stages and many plans use the same ones.

    blocks    number of blocks of the model
    deferred  whether weight gradients of linear layers are computed in a phase of their own (zero
              bubble)
    """
    return Sections(training, blocks, deferred)


@dataclass(frozen=True)
class StageInput:
    """Describes the tensors that a stage receives from the stage before it, for one micro-batch.

    saved     bytes of the received tensors that the stage's backward needs
    passing   bytes of the other received tensors, which are freed at the end of the stage's forward
    replaced  buffers that the code before the blocks allocates in the whole model. The stage
              receives them, and so does not allocate them itself
    """

    saved: BatchLinear = NOTHING
    passing: BatchLinear = NOTHING
    replaced: frozenset[Buffer] = frozenset()


def stage_program(sections: Sections, stage: range, received: StageInput, gradients: BatchLinear) -> StageProgram:
    """Return the segments that one pipeline stage of the model runs for a micro-batch, in forward
    and backward.

    Received tensors are allocated at the beginning of the forward or the backward. Buffers that no
    segment of the stage frees are freed at the end of the forward or the backward.

    sections   the recorded step of the whole model
    stage      the numbers of the stage's blocks
    received   the tensors that the stage before sends
    gradients  bytes of the gradients that the next stage sends
    """
    return _StageBuilder(sections, stage, received, gradients).part()


class _StageBuilder:
    """Builds the recorded step of one pipeline stage from the sections of the whole model. A
    section is one block with the code up to the next block.

    own_sections   the sections whose forward and backward the stage runs
    run            the sections whose forward the stage runs: `own_sections` and the code before the
                   blocks, which every rank runs
    alive          buffer -> how often the stage allocates it, if neither its own section nor the
                   next one frees it
    operand        phase -> whether the tensors received in this phase are still needed to compute
                   weight gradients
    saved_buffers  buffers that the forward saves for the backward
    early          section -> events (allocations and frees) of parameter gradients that the loss
                   computes during its forward. They are moved to the section's backward
    becomes        buffer -> the buffer that replaces it in this stage, or None if the stage does
                   not allocate it at all
    """

    def __init__(self, sections: Sections, piece: range, comes: StageInput, gradients: BatchLinear) -> None:
        self.sections, self.comes, self.gradients = sections, comes, gradients
        self.received, self.handed_on = piece.start > 0, piece.stop < sections.end
        self.own_sections = range(
            piece.start if self.received else BEFORE, piece.stop if self.handed_on else sections.end + 1
        )
        self.run = {BEFORE, *self.own_sections}
        self.alive: Counter[Buffer] = Counter()
        self.operand = {FORWARD: False, BACKWARD: False}
        self.saved_buffers = sections.saved(piece)
        self.early: dict[int, Events] = {}
        self.becomes: dict[Buffer, Buffer | None] = {}
        for gradient in sections.tied:
            self._untie_gradient(gradient)
        self.becomes.update((buffer, None) for buffer in comes.replaced if BEFORE in sections.made.get(buffer, ()))

    def _untie_gradient(self, gradient: Buffer) -> None:
        """Replace the gradient of a parameter that several ranks use (such as a tied embedding). In
        the whole model, it is the sum of its terms, one from each use. In this stage, it is only
        the stage's own term."""
        own_terms = [
            term for term in gradient.terms if any(section in self.own_sections for section in self.sections.made[term])
        ]
        if len(own_terms) == 1 and len(gradient.terms) > 1:
            own = self.becomes[own_terms[0]] = replace(own_terms[0], row="gradients")
            self.becomes[gradient] = None
            if self.sections.phase[own_terms[0]] == FORWARD:  # a loss that computes gradients in its forward
                self.early[min(self.sections.made[own_terms[0]])] = [(own_terms[0], -1), (own, 1), (own, 0)]

    def part(self) -> StageProgram:
        inside = self.sections.segments
        forward = [
            (section, segment)
            for section in sorted(self.run)
            for segment in inside.get((section, FORWARD), ())
        ]  # fmt: skip
        backward, weights = (
            [
                (section, segment)
                for section in reversed(self.own_sections)
                for segment in inside.get((section, phase), ())
            ]
            for phase in (BACKWARD, WEIGHTS)
        )
        self._count_unfreed()
        done, back, later = (
            [self._without_foreign_frees(*segment) for segment in phase] for phase in (forward, backward, weights)
        )
        ends: dict[str, Events] = {FORWARD: [], BACKWARD: [], WEIGHTS: []}
        for buffer in self.alive.elements():
            until_backward = buffer in self.saved_buffers or self.sections.phase[buffer] == BACKWARD
            ends[BACKWARD if until_backward else FORWARD].append((buffer, -1))
        begin: dict[str, Events] = {FORWARD: [], BACKWARD: []}
        for phase, row, size, end in (
            (FORWARD, "activations", self.comes.saved, WEIGHTS if self.operand[FORWARD] else BACKWARD),
            (FORWARD, "temporaries", self.comes.passing, FORWARD),
            (BACKWARD, "temporaries", self.gradients, WEIGHTS if self.operand[BACKWARD] else BACKWARD),
        ):
            buffer = Buffer(size, row, "received")
            begin[phase].append((buffer, 1))
            ends[end].append((buffer, -1))
        return StageProgram(
            (_segment("received", FORWARD, begin[FORWARD]), *done, _segment("sent", FORWARD, ends[FORWARD])),
            (_segment("received", BACKWARD, begin[BACKWARD]), *back, _segment("sent", BACKWARD, ends[BACKWARD])),
            (*later, _segment("sent", BACKWARD, ends[WEIGHTS])) if later else (),
        )

    def _count_unfreed(self) -> None:
        """Set `alive`: count how often the stage allocates each buffer that neither the allocating
        section nor the next one frees. A section is one block with the code up to the next
        block."""
        for section in self.run:
            for buffer in self.sections.unfreed(section, whole=section in self.own_sections):
                if buffer in self.becomes:
                    continue
                step = 1 if self.sections.phase[buffer] == FORWARD else -1
                if (
                    section not in self.own_sections
                    or section + step not in self.own_sections
                    or not self.sections.freed_by_next(buffer)
                ):
                    self.alive[buffer] += 1

    def _without_foreign_frees(self, section: int, segment: Segment) -> Segment:
        """Return the segment without the events that free buffers which this stage never allocated.

        section  the section to which the segment belongs
        """
        timeline = segment.timeline
        sections = self.sections
        foreign = {buffer for buffer in timeline.freed if section not in sections.made.get(buffer, ())}
        inner = section - 1 in self.own_sections and section + 1 in self.own_sections
        if inner and all(sections.freed_by_next(buffer) for buffer in foreign):
            return segment
        events: Events = []
        for buffer, sign in timeline.events:
            if buffer in self.becomes:
                own = self.becomes[buffer]
                if own is not None and sign > 0:
                    events += [(buffer, 1)] if segment.phase == FORWARD else [(own, 1), (own, 0)]
                continue
            if sign < 0 and buffer in foreign and not self._is_freed_here(section, buffer):
                if sections.freed_by_next(buffer):
                    self.operand[sections.phase[buffer]] |= segment in sections.segments[section, WEIGHTS]
                continue
            events.append((buffer, sign))
        if segment.phase == BACKWARD:
            events += self.early.pop(section, [])
        return replace(segment, timeline=replace(timeline, events=tuple(events)))

    def _is_freed_here(self, section: int, buffer: Buffer) -> bool:
        sections = self.sections
        if sections.freed_by_next(buffer):
            return section + (-1 if sections.phase[buffer] == FORWARD else 1) in self.own_sections
        if self.alive[buffer] > 0:
            self.alive[buffer] -= 1
            return True
        return False


def _segment(part: str, phase: str, events: Events) -> Segment:
    return Segment(part, phase, Timeline(tuple(events)))


def _recast_in_backward(timeline: Timeline, phase: str, late: set[str]) -> Timeline:
    """Return the timeline of a segment, changed so that linear layers do not save the casts of
    their weights (such as from fp32 to bf16). Backward casts the weights again.

    phase  the segment's phase
    late   names of the weights whose gradients are computed in a phase of their own
    """
    copies = {buffer for buffer, _ in timeline.events if buffer.parameter in late and not buffer.operands}
    copies = {buffer for buffer in copies if buffer.maker == "aten._to_copy" and buffer.row != "gradients"}
    if not copies:
        return timeline
    events: Events = []
    pending_frees: Events = []  # frees of casts, to add after the next allocation, the product's result
    made: set[Buffer] = set()
    for buffer, sign in timeline.events:
        if buffer in copies and sign > 0:
            pending_frees.append((buffer, -1))
            events.append((buffer, 1))
        elif buffer in copies:
            if phase == BACKWARD:
                again = replace(buffer)
                before_product = bool(events) and events[-1][0] not in made
                index = next(
                    (n for n in reversed(range(len(events))) if before_product and events[n][1] > 0), len(events)
                )
                events[index:index] = [(again, 1)]
                events.append((again, -1))
                made.add(again)
        else:
            events.append((buffer, sign))
            if sign > 0:
                events, pending_frees = events + pending_frees, []
    return replace(timeline, events=(*events, *pending_frees), saved=timeline.saved - copies)


def _split_weight_gradients(timeline: Timeline) -> tuple[Timeline, Timeline]:
    """Split the timeline of a backward segment in two. Return (the backward without the weight
    gradients of linear layers, the computation of only these gradients).

    The second timeline also frees the operands that only the weight gradients still need.
    """
    made = [buffer for buffer in timeline.allocated if buffer.parameter and buffer.operands]
    if not made:
        return timeline, Timeline()
    moved, waits = set(made), {operand for buffer in made for operand in buffer.operands}
    now: Events = []
    weights: Events = []
    last: dict[Buffer, int] = {}  # operand -> position after the last product that uses it
    for buffer, sign in timeline.events:
        if buffer in moved:
            weights.append((buffer, sign))
            for operand in buffer.operands:
                last[operand] = len(weights)
        elif not (sign < 0 and buffer in waits):
            now.append((buffer, sign))
    goes = [buffer for buffer, sign in timeline.events if sign < 0 and buffer in waits]
    for buffer in sorted(goes, key=lambda buffer: -last[buffer]):
        weights.insert(last[buffer], (buffer, -1))
    return replace(timeline, events=tuple(now)), Timeline(tuple(weights))


__all__ = ["Sections", "StageInput", "sections_of", "stage_program"]
