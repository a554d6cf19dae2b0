"""Extrapolate what an allocator needs for a very deep model from two shallower ones.

An allocator is simulated event by event, which takes minutes for thousands of blocks. If the blocks
repeat with a period, every further period needs the same. So two depths are simulated, and the line
through them gives the full depth.

Example: 1000 equal blocks. The allocator's bytes beside the tensors are 300 MiB with 128 blocks and
236 MiB with 64, so each block adds 1 MiB. The 1000 blocks need 300 + 872 x 1 = 1172 MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tightfit.cost.fewer_blocks import without_blocks
from tightfit.cost.ledger import Ledger
from tightfit.cost.recorded_step import Segment, Timeline

SIMULATED_BLOCKS = 128  # blocks per stage that are simulated, and half as many, if a stage has more
MIN_PERIODS = 4  # periods among the simulated blocks, at least
MAX_PERIOD = 256  # blocks of the longest period that is looked for
# bytes by which segments, or the end of a heap, may differ between two depths without a trend
NOISE_BYTES = 22 * 2**20


def extrapolate_layers(ledger: Ledger, taken: Callable[[Ledger], float]) -> float:
    """Return `taken(ledger)`; for a deep model, extrapolated from two smaller depths.

    taken  bytes that a simulated allocator needs for a step
    """
    period = _period(ledger)
    simulated = SIMULATED_BLOCKS if period is None else max(SIMULATED_BLOCKS, MIN_PERIODS * period)
    while period is not None:
        most = min(len(_block_numbers(program)) for program in _segments_by_stage(ledger))
        removed = (most - simulated) // period * period
        if removed <= 0:
            break
        step = max(simulated // 2 // period, 1) * period
        few, fewer = _without_middle_blocks(ledger, removed), _without_middle_blocks(ledger, removed + step)
        if few.peak().phase == fewer.peak().phase == ledger.peak().phase:  # else not one line
            # extrapolate only the bytes beyond the tensors: the ledger knows the tensors of all
            # blocks
            beside = taken(few) - _tensor_bytes(few)
            added = beside - (taken(fewer) - _tensor_bytes(fewer))
            slope = added / step if abs(added) > NOISE_BYTES else 0.0
            return _tensor_bytes(ledger) + beside + slope * removed
        simulated *= 2
    return taken(ledger)


def _tensor_bytes(ledger: Ledger) -> float:
    return ledger.peak().total - sum(ledger.fixed.values())


def _segments_by_stage(ledger: Ledger) -> list[tuple[Segment, ...]]:
    """The segments of one micro-batch: of the whole model, or of each stage of a pipeline rank."""
    if ledger.rank_program is None:
        return [ledger.training]
    return [part.segments for part in ledger.rank_program.stage_programs.values()]


def _block_numbers(program: Iterable[Segment]) -> list[int]:
    return sorted({segment.block for segment in program if segment.block is not None})


def _period(ledger: Ledger) -> int | None:
    """The number of blocks after which the blocks repeat, in every stage; None if the model is not
    deep or does not repeat.

    Example: a model that alternates sliding-window and full attention has period 2.
    """
    stages = _segments_by_stage(ledger)
    if min(len(_block_numbers(program)) for program in stages) <= SIMULATED_BLOCKS:
        return None
    known: dict[Timeline, int] = {}
    kinds: dict[object, int] = {}

    def kind(timeline: Timeline) -> int:
        if timeline not in known:
            content = tuple((buffer.row, buffer.maker, buffer.size, sign) for buffer, sign in timeline.events)
            known[timeline] = kinds.setdefault(content, len(kinds))
        return known[timeline]

    rows: list[list[tuple[int, ...]]] = []
    for program in stages:
        kinds_by_block: dict[int, list[int]] = {number: [] for number in _block_numbers(program)}
        for segment in program:
            if segment.block is not None:
                kinds_by_block[segment.block].append(kind(segment.timeline))
        rows.append([tuple(one) for one in kinds_by_block.values()])
    for period in range(1, min(MAX_PERIOD, min(map(len, rows)) // (2 * MIN_PERIODS)) + 1):
        if all(_repeats(row, period) for row in rows):
            return period
    return None


def _repeats(row: list[tuple[int, ...]], period: int) -> bool:
    """Whether a stage's blocks repeat with `period`, apart from its ends.

    The first two blocks and the last are traced individually, so a recomputed segment that contains
    one of them differs as well.

    row  what identifies each block: its segments' kinds, in order
    """
    start, end = period + 2, len(row) - 2 * period - 2
    return row[start:end] == row[start + period : end + period]


def _without_middle_blocks(ledger: Ledger, count: int) -> Ledger:
    """The ledger without `count` blocks in the middle of each stage."""
    removed: set[int] = set()
    for program in _segments_by_stage(ledger):
        numbers = _block_numbers(program)
        end = len(numbers) - (len(numbers) - count) // 2
        removed.update(numbers[end - count : end])
    return without_blocks(ledger, removed)


__all__ = ["extrapolate_layers"]
