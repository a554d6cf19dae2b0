"""Two traces of one model, at two batch sizes, as one that is linear in the batch."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tightfit.ledger import Buffer, Linear, Operation, Passage, Timeline, play


def fitted(
    small: tuple[Passage, ...], large: tuple[Passage, ...], samples: tuple[int, int]
) -> tuple[Passage, ...] | None:
    """The program whose sizes at the two numbers of samples are those of `small` and `large`.

    A passage that runs different operations at the two (a loop over chunks) keeps its largest instant and its end, and
    its operations by kind. None where the passages themselves differ.
    """
    if [(one.part, one.phase, one.block) for one in small] != [(one.part, one.phase, one.block) for one in large]:
        return None
    fit = _Fit(samples)
    return tuple(
        Passage(one.part, one.phase, fit.timeline(one.timeline, other.timeline), one.block)
        for one, other in zip(small, large, strict=True)
    )


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
        return Timeline(events, self._operations(small.operations, large.operations), needed, inputs)

    def _buffer(self, small: Buffer, large: Buffer) -> Buffer:
        if small not in self.buffers:
            size = self.line(small.size.fixed, large.size.fixed)
            self.buffers[small] = Buffer(size, small.row, small.maker, small.parameter)
        return self.buffers[small]

    def _compressed(self, small: Timeline, large: Timeline) -> tuple[tuple[Buffer, int], ...]:
        """Two steps: up to the largest instant, then to the end."""
        first, second = play(small, 1), play(large, 1)
        up = [Buffer(self.line(first.largest[row], second.largest[row]), row) for row in first.net]
        down = [
            Buffer(self.line(first.net[row] - first.largest[row], second.net[row] - second.largest[row]), row)
            for row in first.net
        ]
        largest = self.samples[1]
        return tuple(  # what goes before what comes, so that no instant between is larger
            (buffer, 1) for buffers in (up, down) for buffer in sorted(buffers, key=lambda one: one.size.at(largest))
        )

    def _operations(self, small: tuple[Operation, ...], large: tuple[Operation, ...]) -> tuple[Operation, ...]:
        if len(small) == len(large) and all(one.name == other.name for one, other in zip(small, large, strict=True)):
            return tuple(self._operation(one, other) for one, other in zip(small, large, strict=True))
        first, second = Counter(small), Counter(large)
        return tuple(
            Operation(one.name, one.dtype, one.flops, one.moved, one.sizes, self.line(first[one], second[one]))
            for one in dict.fromkeys((*small, *large))
        )

    def _operation(self, small: Operation, large: Operation) -> Operation:
        return Operation(
            small.name,
            small.dtype,
            self.line(small.flops.fixed, large.flops.fixed),
            self.line(small.moved.fixed, large.moved.fixed),
            tuple(self.line(one.fixed, other.fixed) for one, other in zip(small.sizes, large.sizes, strict=True)),
        )


def _alike(one: Any, other: Any) -> bool:
    (buffer, sign), (another, its_sign) = one, other
    return (buffer.row, buffer.maker, buffer.parameter, sign) == (
        another.row,
        another.maker,
        another.parameter,
        its_sign,
    )
