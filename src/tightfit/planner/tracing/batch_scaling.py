"""Combine the traces of a model at two micro-batch sizes into one trace, whose sizes are linear in
the number of samples.

Example: a buffer has 6 MiB with 2 samples and 10 MiB with 4. In the combined trace its size is
`BatchLinear(fixed=2 MiB, per_sample=2 MiB)`, which gives 34 MiB for 16 samples.

Some models compare all samples of a batch with each other, in a matrix with a row and a column for
each sample. Such sizes are not linear, and their traces are not combined. Example: a matrix has 16
MiB with 2,048 samples and 64 MiB with 4,096. The line through both would give -8 MiB for 1,024.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from tightfit.cost.recorded_step import TRACED_ROWS, BatchLinear, BlockInput, Buffer, Operation, Segment, Timeline

# a size grows faster than the number of samples if the line through its two values is below minus this
# share of the smaller value for 0 samples. The line of a square is below minus the smaller value; rounded
# sizes and differences of neighbouring samples are a little below 0
MAX_BELOW_ZERO = 0.25


def fit_batch_scaling(
    small: tuple[Segment, ...], large: tuple[Segment, ...], samples: tuple[int, int]
) -> tuple[Segment, ...] | None:
    """Combine two traces of the same model into one. Return its segments, whose sizes are linear in
    the number of samples: they equal those of `small` and of `large` at the micro-batch sizes of
    these two traces.

    small, large  the segments (parts of the recorded step) of the two traces
    samples       the micro-batch sizes of `small` and `large`

    A segment may run different operations in the two traces, for example a loop over chunks. Then
    only three things of the segment are kept: the bytes at its peak, the buffers that it shares
    with other segments, and the number of operations of each kind.

    Returns None if the traces have different segments, or if the buffers that a segment shares with
    other segments are not the same in both traces. Raises SuperlinearGrowth if a buffer, the FLOPs of
    an operation or the peak of a segment grow faster than the number of samples.
    """
    if [one.key for one in small] != [one.key for one in large]:
        return None
    fit = _BatchScaling(samples)
    try:
        return tuple(
            replace(one, timeline=fit.timeline(one.timeline, other.timeline))
            for one, other in zip(small, large, strict=True)
        )
    except _TracesDiffer:
        return None


class SuperlinearGrowth(Exception):
    """Raised if a size grows faster than the number of samples, as a matrix of all pairs of samples."""


class _BatchScaling:
    def __init__(self, samples: tuple[int, int]) -> None:
        self.samples = samples
        self.buffers: dict[Buffer, Buffer] = {}
        self.timelines: dict[Timeline, Timeline] = {}

    def line(self, small: float, large: float) -> BatchLinear:
        first, second = self.samples
        if first == second:
            return BatchLinear(small)
        slope = (large - small) / (second - first)
        return BatchLinear(small - slope * first, slope)

    def at_most_linear(self, small: float, large: float) -> BatchLinear:
        """Return the line through a size in the two traces. Raises SuperlinearGrowth if the size grows
        faster than the number of samples."""
        found = self.line(small, large)
        if small > 0 and found.fixed < -MAX_BELOW_ZERO * small:
            raise SuperlinearGrowth
        return found

    def timeline(self, small: Timeline, large: Timeline) -> Timeline:
        if small not in self.timelines:
            self.timelines[small] = self._timeline(small, large)
        return self.timelines[small]

    def _timeline(self, small: Timeline, large: Timeline) -> Timeline:
        pairs = list(zip(small.events, large.events, strict=False))
        if len(small.events) == len(large.events) and all(_same_event(one, other) for one, other in pairs):
            events = tuple((self._buffer(one[0], other[0]), one[1]) for one, other in pairs)
            needed = small.recompute_end
        else:
            events, needed = self._compressed(small, large), (0, 0)
        inputs = tuple(self._buffer(one, other) for one, other in zip(small.inputs, large.inputs, strict=True))
        kept = frozenset(self.buffers[buffer] for buffer in small.saved if buffer in self.buffers)
        given = tuple(
            self._block_input(one, other) for one, other in zip(small.block_inputs, large.block_inputs, strict=True)
        )
        return Timeline(events, self._operations(small.operations, large.operations), needed, inputs, kept, given)

    def _block_input(self, small: BlockInput, large: BlockInput) -> BlockInput:
        both = small.buffer is not None and large.buffer is not None
        buffer = self._buffer(small.buffer, large.buffer) if both else None  # type: ignore[arg-type]
        return BlockInput(small.path, self.line(small.size.fixed, large.size.fixed), buffer, small.has_gradient)

    def _buffer(self, small: Buffer, large: Buffer) -> Buffer:
        if small not in self.buffers:
            size = self.at_most_linear(small.size.fixed, large.size.fixed)
            operands, terms = (
                tuple(self._buffer(one, other) for one, other in zip(*pair, strict=False))
                for pair in ((small.operands, large.operands), (small.terms, large.terms))
            )
            self.buffers[small] = Buffer(size, large.row, small.maker, small.parameter, operands, terms, small.retained)
        return self.buffers[small]

    def _compressed(self, small: Timeline, large: Timeline) -> tuple[tuple[Buffer, int], ...]:
        """Return events (allocations and frees) for a segment that runs different operations in the
        two traces.

        They are the events of the buffers that this segment does not both allocate and free,
        because other segments use these buffers. All other buffers are replaced by one buffer per
        row, with the row's bytes at the segment's peak. Raises _TracesDiffer if the buffers that
        the segment shares with other segments are not the same in both traces, and SuperlinearGrowth if
        the bytes at the peak grow faster than the number of samples.
        """
        small_outline, large_outline = _Outline(small), _Outline(large)
        self.at_most_linear(small_outline.most, large_outline.most)
        common = Counter(map(_event_key, small_outline.outside)) & Counter(map(_event_key, large_outline.outside))
        mine, its = small_outline.kept(common), large_outline.kept(common)
        if list(map(_event_key, mine)) != list(map(_event_key, its)):
            raise _TracesDiffer
        outside = [(self._buffer(event[0], same[0]), event[1]) for event, same in zip(mine, its, strict=True)]
        at = sum(_event_key(event) in common for event in large_outline.outside[: large_outline.before])
        before, after = outside[:at], outside[at:]
        inner = [
            Buffer(self.line(small_outline.inner[row], large_outline.inner[row]), row, "sum")
            for row in small_outline.inner
        ]
        return (*before, *((buffer, 1) for buffer in inner), *((buffer, -1) for buffer in reversed(inner)), *after)

    def _operations(self, small: tuple[Operation, ...], large: tuple[Operation, ...]) -> tuple[Operation, ...]:
        if len(small) == len(large) and all(one.name == other.name for one, other in zip(small, large, strict=True)):
            return tuple(self._operation(one, other) for one, other in zip(small, large, strict=True))
        first, second = Counter(small), Counter(large)
        return tuple(
            replace(
                operation,
                count=self.line(first[operation] * operation.count.fixed, second[operation] * operation.count.fixed),
            )
            for operation in dict.fromkeys((*small, *large))
        )

    def _operation(self, small: Operation, large: Operation) -> Operation:
        return Operation(
            small.name,
            small.dtype,
            self.at_most_linear(small.flops.fixed, large.flops.fixed),
            self.line(small.bytes_accessed.fixed, large.bytes_accessed.fixed),
            tuple(self.line(size.fixed, other.fixed) for size, other in zip(small.sizes, large.sizes, strict=True)),
            self.line(small.count.fixed, large.count.fixed),
            computed_share=small.computed_share,
            alignment=min(small.alignment, large.alignment),
            convolution=large.convolution,
        )


# a buffer that only one of the traces has is ignored, up to this share of the segment's peak bytes
NEGLIGIBLE = 1e-3


class _TracesDiffer(Exception):
    """Raised if two traces cannot be combined, because the buffers that a segment shares with other
    segments are not the same in both traces."""


class _Outline:
    """Summarizes a segment's timeline (its allocations and frees) by what matters to other
    segments.

    outside  events of the buffers that the segment does not both allocate and free
    before   number of outside events before the segment's peak
    inner    bytes at the peak, by row, of the buffers that the segment both allocates and frees
    most     bytes at the peak, of all buffers
    """

    def __init__(self, timeline: Timeline) -> None:
        inside = timeline.freed.intersection(timeline.allocated)
        total, best, largest, peak_stop = 0.0, 0.0, {}, 0
        rows: dict[str, float] = dict.fromkeys(TRACED_ROWS, 0.0)
        for position, (buffer, sign) in enumerate(timeline.events):
            size = sign * buffer.size.fixed
            total += size
            if buffer in inside:
                rows[buffer.row] += size
            if total > best:
                best, largest, peak_stop = total, dict(rows), position + 1
        self.outside = [event for event in timeline.events if event[0] not in inside]
        self.before = sum(event[0] not in inside for event in timeline.events[:peak_stop])
        self.inner = {row: largest.get(row, 0.0) for row in TRACED_ROWS}
        self.most = best

    def kept(self, common: Counter[Any]) -> list[tuple[Buffer, int]]:
        """Return the outside events that both traces have. Raises _TracesDiffer if only this trace
        has the event of a large buffer.

        common  key of an event (see `_event_key`) -> how often both traces have it
        """
        left, kept = Counter(common), []
        for event in self.outside:
            if left[_event_key(event)]:
                left[_event_key(event)] -= 1
                kept.append(event)
            elif event[0].size.fixed > NEGLIGIBLE * self.most:
                raise _TracesDiffer
        return kept


def _event_key(event: tuple[Buffer, int]) -> tuple[str, str, int]:
    """Return a key that is equal for the same event in two traces: the operation that allocates the
    buffer, the buffer's parameter, and +1, 0 or -1 (allocated, gradient complete, freed). The key
    does not contain the row, because a buffer that outlives its segment may be in another row in
    the other trace."""
    buffer, sign = event
    return buffer.maker, buffer.parameter, sign


def _same_event(one: tuple[Buffer, int], other: tuple[Buffer, int]) -> bool:
    return _event_key(one) == _event_key(other) and one[0].row == other[0].row
