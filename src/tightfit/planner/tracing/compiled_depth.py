"""Extend the trace of a model that is compiled as a whole to the model's full depth.

The compiler sees one graph, in which blocks have no borders: it fuses the end of a block with the beginning
of the next. So blocks are not recorded one by one. But a model of equal blocks does the same in each of
them, except around the first and the last. So a model with few blocks is traced, the part of its trace that
repeats is found, and this part is inserted as often as blocks are missing.

Example: the forward of a model with 4 blocks allocates s a b a b a b a e, and the model has 6 blocks. The
part "a b" repeats directly after itself, so two more are inserted: s a b a b a b a b a b a e.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from tightfit.cost.recorded_step import Buffer, Segment, Timeline

Event = tuple[Buffer, int]
# bytes. When backward frees a buffer up to this size, such as the seed of a dropout, does not matter
SMALL = 1024
Item = TypeVar("Item")


class NothingRepeats(Exception):
    """Raised if a trace has no part that could be inserted again."""


def with_more_blocks(
    segments: tuple[Segment, ...], more: int, numbered: Callable[[str, int | None], str]
) -> tuple[Segment, ...]:
    """Return the recorded step of a model that has `more` further blocks, all equal to those of the model whose
    recorded step is `segments`.

    segments  a forward and a backward, each of one segment, of a model with at least 4 blocks
    numbered  (name of a parameter, n) -> the name of the corresponding parameter of the further block n, from
              0. For n None, a name that is the same for the corresponding parameters of all blocks

    Raises NothingRepeats if no part of a segment repeats, or if the repeating parts do not fit together: each
    buffer of an inserted part has to be freed once, or not at all, as the one that it copies.
    """
    if [segment.phase for segment in segments] != ["forward", "backward"]:
        raise NothingRepeats
    extension = _Extension(more, numbered)
    extended = tuple(replace(segment, timeline=extension.extended(segment.timeline)) for segment in segments)
    return extension.checked(extended)


def _repeating_part(keys: Sequence[Hashable]) -> range:
    """Return the positions of the longest part of a list that the list has directly before it, too, and that does
    not itself repeat a shorter part: a loop, such as that of a chunked loss, is no block. Raises NothingRepeats if
    there is none."""
    for length in range(len(keys) // 2, 0, -1):
        equal = 0
        for position in range(length, len(keys)):
            equal = equal + 1 if keys[position] == keys[position - length] else 0
            if equal == length:
                part = range(position + 1 - length, position + 1)
                if not _repeats_shorter([keys[one] for one in part]):
                    return part
                equal -= 1  # another part of this length may begin one later
    raise NothingRepeats


def _repeats_shorter(keys: list[Hashable]) -> bool:
    """Return whether a list is a shorter list, several times."""
    lengths = (length for length in range(1, len(keys) // 2 + 1) if len(keys) % length == 0)
    return any(keys == keys[:length] * (len(keys) // length) for length in lengths)


class _Extension:
    """Extends the forward and then the backward of a step by `more` blocks.

    Corresponding buffers of the blocks are one series: those of the model that was traced, numbered from the one
    that the repeating part allocates, which is 0, and the copies of this one, which come directly after it.

    series  buffer of a traced block -> (the buffer 0 of its series, its own number)
    traced  buffer 0 -> number -> the buffer of the traced model
    copies  buffer 0 -> its copies
    born    buffer -> number of the segment that allocates it: 0 forward, 1 backward
    """

    def __init__(self, more: int, numbered: Callable[[str, int | None], str]) -> None:
        self.more, self.numbered = more, numbered
        self.series: dict[Buffer, tuple[Buffer, int]] = {}
        self.traced: dict[Buffer, dict[int, Buffer]] = {}
        self.copies: dict[Buffer, list[Buffer]] = {}
        self.born: dict[Buffer, int] = {}
        self.segment = -1

    def extended(self, timeline: Timeline) -> Timeline:
        """Return the timeline of the forward or, called next, of the backward of the model with all blocks."""
        self.segment += 1
        self.born.update(dict.fromkeys(timeline.allocated, self.segment))
        # without the completed gradients: the compiled backward returns them all at its end
        uses = [event for event in timeline.events if event[1]]
        keys = [self._key(event) for event in uses]
        part = _repeating_part(keys)
        self._number(uses, keys, part)
        events: list[Event] = []
        passed = 0  # allocations and frees
        for buffer, sign in timeline.events:
            if sign == 0:
                events += [(each, 0) for each in (buffer, *self.copies.get(buffer, ()))]
                continue
            events.append((self._inserted(buffer, None if passed < part.stop else self.more + 1), sign))
            passed += 1
            if passed == part.stop:
                events += self._repetitions(uses[part.start : part.stop])
        again = _repeating_part(timeline.operations)
        ends = [
            end + self.more * len(found) * (end >= found.stop)
            for end, found in zip(timeline.recompute_end, (part, again), strict=True)
        ]
        return replace(
            timeline,
            events=tuple(events),
            operations=_inserting(timeline.operations, again, self.more),
            recompute_end=(ends[0], ends[1]),
            saved=timeline.saved.union(*(self.copies.get(buffer, ()) for buffer in timeline.saved)),
        )

    def _repetitions(self, repeated: list[Event]) -> Iterator[Event]:
        """Yield the events of the inserted parts. repeated: the events of the part that they repeat."""
        for number in range(1, self.more + 1):
            for buffer, sign in repeated:
                if sign > 0:
                    self.copies[buffer].append(self._copy(buffer, number))
                yield self._inserted(buffer, number), sign

    def _key(self, event: Event) -> Hashable:
        """Return what is equal for corresponding events of equal blocks."""
        buffer, sign = event
        return sign, buffer.size, buffer.row, buffer.maker, buffer.parameter and self.numbered(buffer.parameter, None)

    def _number(self, events: Sequence[Event], keys: Sequence[Hashable], part: range) -> None:
        """Find the series of the buffers that a segment allocates."""
        first, last = part.start, part.stop
        while first > 0 and keys[first - 1] == keys[first - 1 + len(part)]:
            first -= 1
        while last < len(keys) and keys[last] == keys[last - len(part)]:
            last += 1
        for position in range(first, last):
            buffer, sign = events[position]
            if sign > 0:
                number, within = divmod(position - part.start, len(part))
                start = events[part.start + within][0]
                self.series[buffer] = start, number
                self.traced.setdefault(start, {})[number] = buffer
                self.copies.setdefault(start, [])

    def _inserted(self, buffer: Buffer, number: int | None, may_be_shared: bool = False) -> Buffer:
        """Return the buffer of the extended step that stands where the traced step has `buffer`.

        number         number of the inserted part, from 1; None: before all, `more` + 1: after all inserted parts
        may_be_shared  whether the inserted parts may have the same buffer there; otherwise NothingRepeats is raised

        Backward goes through the blocks in the other direction than forward, which allocated what it frees.
        """
        if buffer not in self.series:
            if number is not None and number <= self.more and not may_be_shared:
                raise NothingRepeats
            return buffer
        start, position = self.series[buffer]
        passed = min(number or 0, self.more)  # inserted parts that come before
        position += passed if self.born[buffer] == self.segment else self.more - passed
        if 1 <= position <= self.more:
            copies = self.copies[start]
            found = copies[position - 1] if position <= len(copies) else None
        else:
            found = self.traced[start].get(position if position <= 0 else position - self.more)
        if found is None:
            raise NothingRepeats
        return found

    def _copy(self, buffer: Buffer, number: int) -> Buffer:
        """Return the copy of a buffer that inserted part `number` allocates."""
        operands, terms = (
            tuple(self._inserted(source, number, may_be_shared=True) for source in sources)
            for sources in (buffer.operands, buffer.terms)
        )
        parameter = buffer.parameter and self.numbered(buffer.parameter, number - 1)
        return replace(buffer, parameter=parameter, operands=operands, terms=terms)

    def checked(self, extended: tuple[Segment, ...]) -> tuple[Segment, ...]:
        """Return the extended step. Small buffers that nothing frees yet are freed at its end, as the traced ones are.

        Raises NothingRepeats if a buffer of a block is allocated or freed twice in the extended step, if a larger one
        is not freed and the corresponding ones are, or the other way round, or if two gradients are of one
        parameter.
        """
        counts: dict[int, Counter[Buffer]] = {1: Counter(), -1: Counter(), 0: Counter()}
        for segment in extended:
            for buffer, sign in segment.timeline.events:
                counts[sign][buffer] += 1
        all_of = {start: [*self.traced[start].values(), *copies] for start, copies in self.copies.items()}
        left: list[Buffer] = []
        for series in all_of.values():
            for sign, counted in counts.items():
                without = [buffer for buffer in series if not counted[buffer]]
                if 0 < len(without) < len(series):
                    if sign >= 0 or series[0].size.fixed > SMALL:
                        raise NothingRepeats
                    left += without
                if any(counted[buffer] > 1 for buffer in series):
                    raise NothingRepeats
        if any(count > 1 for count in Counter(buffer.parameter for buffer in counts[0]).values()):
            raise NothingRepeats
        last = extended[-1].timeline
        freed = replace(last, events=(*last.events, *((buffer, -1) for buffer in left)))
        return (*extended[:-1], replace(extended[-1], timeline=freed))


def _inserting(items: tuple[Item, ...], part: range, more: int) -> tuple[Item, ...]:
    """Return the items with `more` repetitions of a part directly after it."""
    return items[: part.stop] + items[part.start : part.stop] * more + items[part.stop :]


__all__ = ["NothingRepeats", "with_more_blocks"]
