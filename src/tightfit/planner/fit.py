"""Two traces of one model, at two batch sizes, as one that is linear in the batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from tightfit.program import TRACED, Buffer, Given, Linear, Operation, Passage, Timeline


def fitted(
    small: tuple[Passage, ...], large: tuple[Passage, ...], samples: tuple[int, int]
) -> tuple[Passage, ...] | None:
    """The program whose sizes at the two numbers of samples are those of `small` and `large`.

    A passage that runs different operations at the two (a loop over chunks) keeps its largest instant and its end, and
    its operations by kind. None where the passages themselves differ, or what they leave to each other.
    """
    if [one.place for one in small] != [one.place for one in large]:
        return None
    fit = _Fit(samples)
    try:
        return tuple(
            replace(one, timeline=fit.timeline(one.timeline, other.timeline))
            for one, other in zip(small, large, strict=True)
        )
    except _Differs:
        return None


class _Fit:
    def __init__(self, samples: tuple[int, int]) -> None:
        self.samples = samples
        self.buffers: dict[Buffer, Buffer] = {}
        self.timelines: dict[Timeline, Timeline] = {}

    def line(self, small: float, large: float) -> Linear:
        first, second = self.samples
        if first == second:
            return Linear(small)
        slope = (large - small) / (second - first)
        return Linear(small - slope * first, slope)

    def timeline(self, small: Timeline, large: Timeline) -> Timeline:
        if small not in self.timelines:
            self.timelines[small] = self._timeline(small, large)
        return self.timelines[small]

    def _timeline(self, small: Timeline, large: Timeline) -> Timeline:
        pairs = list(zip(small.events, large.events, strict=False))
        if len(small.events) == len(large.events) and all(_alike(one, other) for one, other in pairs):
            events = tuple((self._buffer(one[0], other[0]), one[1]) for one, other in pairs)
            needed = small.needed
        else:
            events, needed = self._compressed(small, large), (0, 0)
        inputs = tuple(self._buffer(one, other) for one, other in zip(small.inputs, large.inputs, strict=True))
        kept = frozenset(self.buffers[buffer] for buffer in small.kept if buffer in self.buffers)
        given = tuple(self._given(one, other) for one, other in zip(small.given, large.given, strict=True))
        return Timeline(events, self._operations(small.operations, large.operations), needed, inputs, kept, given)

    def _given(self, small: Given, large: Given) -> Given:
        both = small.buffer is not None and large.buffer is not None
        buffer = self._buffer(small.buffer, large.buffer) if both else None  # type: ignore[arg-type]
        return Given(small.path, self.line(small.size.fixed, large.size.fixed), buffer, small.has_gradient)

    def _buffer(self, small: Buffer, large: Buffer) -> Buffer:
        if small not in self.buffers:
            size = self.line(small.size.fixed, large.size.fixed)
            operands, terms = (
                tuple(self._buffer(one, other) for one, other in zip(*pair, strict=False))
                for pair in ((small.operands, large.operands), (small.terms, large.terms))
            )
            self.buffers[small] = Buffer(size, large.row, small.maker, small.parameter, operands, terms)
        return self.buffers[small]

    def _compressed(self, small: Timeline, large: Timeline) -> tuple[tuple[Buffer, int], ...]:
        """What comes from or goes to other passages, and one buffer for each row of what else lives at the largest instant."""
        one, other = _Outline(small), _Outline(large)
        common = Counter(map(_key, one.outside)) & Counter(map(_key, other.outside))
        mine, its = one.kept(common), other.kept(common)
        if list(map(_key, mine)) != list(map(_key, its)):
            raise _Differs
        outside = [(self._buffer(event[0], same[0]), event[1]) for event, same in zip(mine, its, strict=True)]
        at = sum(_key(event) in common for event in other.outside[: other.before])
        before, after = outside[:at], outside[at:]
        inner = [Buffer(self.line(one.inner[row], other.inner[row]), row, "sum") for row in one.inner]
        return (*before, *((buffer, 1) for buffer in inner), *((buffer, -1) for buffer in reversed(inner)), *after)

    def _operations(self, small: tuple[Operation, ...], large: tuple[Operation, ...]) -> tuple[Operation, ...]:
        if len(small) == len(large) and all(one.name == other.name for one, other in zip(small, large, strict=True)):
            return tuple(self._operation(one, other) for one, other in zip(small, large, strict=True))
        first, second = Counter(small), Counter(large)
        return tuple(replace(one, count=self.line(first[one], second[one])) for one in dict.fromkeys((*small, *large)))

    def _operation(self, small: Operation, large: Operation) -> Operation:
        return Operation(
            small.name,
            small.dtype,
            self.line(small.flops.fixed, large.flops.fixed),
            self.line(small.moved.fixed, large.moved.fixed),
            tuple(self.line(one.fixed, other.fixed) for one, other in zip(small.sizes, large.sizes, strict=True)),
            computed=small.computed,
        )


NEGLIGIBLE = 1e-3  # share of a stretch's largest instant that may be of buffers that only one of two traces has


class _Differs(Exception):
    """Two traces leave different buffers behind."""


class _Outline:
    """A timeline as other passages see it: events of buffers that it does not make, or leaves, and how many of them come
    before its largest instant; and by row what it makes and frees itself, at that instant."""

    def __init__(self, timeline: Timeline) -> None:
        inside = timeline.gone.intersection(timeline.born)
        total, best, largest, place = 0.0, 0.0, {}, 0
        rows: dict[str, float] = dict.fromkeys(TRACED, 0.0)
        for position, (buffer, sign) in enumerate(timeline.events):
            size = sign * buffer.size.fixed
            total += size
            if buffer in inside:
                rows[buffer.row] += size
            if total > best:
                best, largest, place = total, dict(rows), position + 1
        self.outside = [event for event in timeline.events if event[0] not in inside]
        self.before = sum(event[0] not in inside for event in timeline.events[:place])
        self.inner = {row: largest.get(row, 0.0) for row in TRACED}
        self.most = best

    def kept(self, common: Counter[Any]) -> list[tuple[Buffer, int]]:
        """The outside events that `common` has; raises _Differs where one that it lacks is no small thing."""
        left, kept = Counter(common), []
        for event in self.outside:
            if left[_key(event)]:
                left[_key(event)] -= 1
                kept.append(event)
            elif event[0].size.fixed > NEGLIGIBLE * self.most:
                raise _Differs
        return kept


def _key(event: tuple[Buffer, int]) -> tuple[str, str, int]:
    """What two events of two traces share that are the same: a buffer that leaves may count under another row."""
    buffer, sign = event
    return buffer.maker, buffer.parameter, sign


def _alike(one: tuple[Buffer, int], other: tuple[Buffer, int]) -> bool:
    return _key(one) == _key(other) and one[0].row == other[0].row
