"""Extrapolate the bytes that an allocator needs for a very deep model from two smaller depths.

An allocator is simulated event by event, which takes minutes for thousands of blocks. If the blocks
repeat with a period, every further period needs the same number of bytes. So the model is simulated
at two smaller depths, and the line through the two results gives the bytes at the full depth.

Example: 1000 equal blocks. The allocator needs 300 MiB more than the tensors with 128 blocks, and
236 MiB more with 64 blocks, so each block adds 1 MiB. With 1000 blocks, the allocator needs
300 + 872 x 1 = 1172 MiB more than the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tightfit.cost.fewer_blocks import without_blocks
from tightfit.cost.ledger import Ledger
from tightfit.cost.recorded_step import Segment, Timeline

SIMULATED_BLOCKS = 128  # a stage with more blocks is simulated with so many, and with half of them
MIN_PERIODS = 4  # least number of periods in the simulated blocks
MAX_PERIOD = 256  # number of blocks in the longest period that is searched for
# a difference of up to so many bytes between the two depths is no trend: it comes from the sizes of
# the allocator's segments, or from free memory at the end of a heap
NOISE_BYTES = 22 * 2**20


def extrapolate_layers(ledger: Ledger, taken: Callable[[Ledger], float]) -> float:
    """Return `taken(ledger)`, the bytes that a simulated allocator needs. For a deep model, compute
    it for two models with fewer blocks, and extrapolate to the full depth, to save time.

    taken  function of a ledger that simulates an allocator for its step, and returns the bytes
    """
    period = _period(ledger)
    simulated = SIMULATED_BLOCKS if period is None else max(SIMULATED_BLOCKS, MIN_PERIODS * period)
    while period is not None:
        most = min(len(_block_numbers(segments)) for segments in _segments_by_stage(ledger))
        removed = (most - simulated) // period * period
        if removed <= 0:
            break
        step = max(simulated // 2 // period, 1) * period
        few, fewer = _without_middle_blocks(ledger, removed), _without_middle_blocks(ledger, removed + step)
        if few.peak().phase == fewer.peak().phase == ledger.peak().phase:  # else not one line
            # extrapolate only what the allocator needs more than the tensors: the ledger has the
            # tensors of all blocks
            beside = taken(few) - _tensor_bytes(few)
            added = beside - (taken(fewer) - _tensor_bytes(fewer))
            slope = added / step if abs(added) > NOISE_BYTES else 0.0
            return _tensor_bytes(ledger) + beside + slope * removed
        simulated *= 2
    return taken(ledger)


def _tensor_bytes(ledger: Ledger) -> float:
    return ledger.peak().total - sum(ledger.fixed.values())


def _segments_by_stage(ledger: Ledger) -> list[tuple[Segment, ...]]:
    """Return the segments of one micro-batch as a list with one item for each pipeline stage on the
    ledger's rank. Without a pipeline, the list has one item, the whole model."""
    if ledger.rank_program is None:
        return [ledger.training]
    return [part.segments for part in ledger.rank_program.stage_programs.values()]


def _block_numbers(segments: Iterable[Segment]) -> list[int]:
    return sorted({segment.block for segment in segments if segment.block is not None})


def _period(ledger: Ledger) -> int | None:
    """Return the period of the blocks: after how many blocks the same kinds of blocks follow again,
    in every stage. Return None if a stage has at most SIMULATED_BLOCKS blocks, or if the blocks do
    not repeat.

    Example: a model that alternates sliding-window and full attention has period 2.
    """
    stages = _segments_by_stage(ledger)
    if min(len(_block_numbers(segments)) for segments in stages) <= SIMULATED_BLOCKS:
        return None
    known: dict[Timeline, int] = {}
    kinds: dict[object, int] = {}

    def kind(timeline: Timeline) -> int:
        if timeline not in known:
            content = tuple((buffer.row, buffer.maker, buffer.size, sign) for buffer, sign in timeline.events)
            known[timeline] = kinds.setdefault(content, len(kinds))
        return known[timeline]

    rows: list[list[tuple[int, ...]]] = []
    for segments in stages:
        kinds_by_block: dict[int, list[int]] = {number: [] for number in _block_numbers(segments)}
        for segment in segments:
            if segment.block is not None:
                kinds_by_block[segment.block].append(kind(segment.timeline))
        rows.append([tuple(one) for one in kinds_by_block.values()])
    for period in range(1, min(MAX_PERIOD, min(map(len, rows)) // (2 * MIN_PERIODS)) + 1):
        if all(_repeats(row, period) for row in rows):
            return period
    return None


def _repeats(row: list[tuple[int, ...]], period: int) -> bool:
    """Return whether a stage's blocks repeat with the period `period`, apart from the first and
    last blocks.

    The first two blocks and the last are not compared, because they are traced individually. With
    activation recomputation in groups of blocks, the groups that contain one of these blocks differ
    as well, so one more period is left out at each end.

    row  for each block of the stage: the kinds of its segments, in order
    """
    start, end = period + 2, len(row) - 2 * period - 2
    return row[start:end] == row[start + period : end + period]


def _without_middle_blocks(ledger: Ledger, count: int) -> Ledger:
    """Return the ledger of the model without `count` blocks in the middle of each pipeline
    stage."""
    removed: set[int] = set()
    for segments in _segments_by_stage(ledger):
        numbers = _block_numbers(segments)
        end = len(numbers) - (len(numbers) - count) // 2
        removed.update(numbers[end - count : end])
    return without_blocks(ledger, removed)


__all__ = ["extrapolate_layers"]
