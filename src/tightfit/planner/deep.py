"""Deep: what an allocator takes for a model of very many blocks, from what it takes for fewer of them.

An allocator is played event by event, which takes minutes for thousands of blocks. Where the blocks repeat each other, what each
more of them takes is the same: two depths are played, and the line through them is followed to the whole depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from tightfit.ledger import Ledger
from tightfit.program import Passage, Timeline

PLAYED = 128  # blocks of each piece that are played, and half as many, where a piece has more
PERIODS = 4  # that are among them at least
LONGEST = 256  # blocks of a period that is looked for
SEGMENT = (
    22 * 2**20
)  # bytes by which an allocator's segments or a heap's ends may differ between two depths for no lasting reason


def of_all_blocks(ledger: Ledger, taken: Callable[[Ledger], float]) -> float:
    """taken(ledger), of a deep model by the line through two depths. taken: bytes that an allocator takes to serve a step."""
    period = _period(ledger)
    played = PLAYED if period is None else max(PLAYED, PERIODS * period)
    while period is not None:
        most = min(len(_numbers(program)) for program in _programs(ledger))
        removed = (most - played) // period * period
        if removed <= 0:
            break
        step = max(played // 2 // period, 1) * period
        few, fewer = _without(ledger, removed), _without(ledger, removed + step)
        if few.peak().phase == fewer.peak().phase == ledger.peak().phase:  # else the line has a bend between them
            beside = taken(few) - _tensors(few)  # what is beside the tensors, and what of it each more block adds
            added = beside - (taken(fewer) - _tensors(fewer))
            slope = added / step if abs(added) > SEGMENT else 0.0
            return _tensors(ledger) + beside + slope * removed
        played *= 2
    return taken(ledger)


def _tensors(ledger: Ledger) -> float:
    return ledger.peak().total - sum(ledger.fixed.values())


def _programs(ledger: Ledger) -> list[tuple[Passage, ...]]:
    """The programs of one micro-batch: of the whole model, or of each piece of it that a pipeline's device has."""
    if ledger.stage is None:
        return [ledger.training]
    return [part.passages for part in ledger.stage.parts.values()]


def _numbers(program: Iterable[Passage]) -> list[int]:
    return sorted({passage.block for passage in program if passage.block is not None})


def _period(ledger: Ledger) -> int | None:
    """After how many blocks the same comes again, in each piece of the model; None where it is not deep, or nothing repeats."""
    pieces = _programs(ledger)
    if min(len(_numbers(program)) for program in pieces) <= PLAYED:
        return None
    known: dict[Timeline, int] = {}
    kinds: dict[object, int] = {}

    def kind(timeline: Timeline) -> int:
        if timeline not in known:
            said = tuple((buffer.row, buffer.maker, buffer.size, sign) for buffer, sign in timeline.events)
            known[timeline] = kinds.setdefault(said, len(kinds))
        return known[timeline]

    rows: list[list[tuple[int, ...]]] = []
    for program in pieces:
        told: dict[int, list[int]] = {number: [] for number in _numbers(program)}
        for passage in program:
            if passage.block is not None:
                told[passage.block].append(kind(passage.timeline))
        rows.append([tuple(one) for one in told.values()])
    for period in range(1, min(LONGEST, min(map(len, rows)) // (2 * PERIODS)) + 1):
        if all(_repeats(row, period) for row in rows):
            return period
    return None


def _repeats(row: list[tuple[int, ...]], period: int) -> bool:
    """Whether all but the ends of a row repeat: the first two blocks and the last are traced by themselves, and a segment that has
    one of them differs, too."""
    start, end = period + 2, len(row) - 2 * period - 2
    return row[start:end] == row[start + period : end + period]


def _without(ledger: Ledger, count: int) -> Ledger:
    """The ledger without so many blocks in the middle of each piece, and what lies behind them."""
    gone: set[int] = set()
    for program in _programs(ledger):
        numbers = _numbers(program)
        end = len(numbers) - (len(numbers) - count) // 2
        gone.update(numbers[end - count : end])

    def left(program: tuple[Passage, ...]) -> tuple[Passage, ...]:
        found, here = [], None
        for passage in program:
            here = passage.block if passage.block is not None else here
            if here not in gone:
                found.append(passage)
        return tuple(found)

    parameters = tuple(p for p in ledger.parameters if not p.places or any(place not in gone for place in p.places))
    names = {parameter.name for parameter in ledger.parameters} - {parameter.name for parameter in parameters}
    stage = ledger.stage
    if stage is not None:
        parts = {
            piece: replace(part, forward=left(part.forward), backward=left(part.backward), weights=left(part.weights))
            for piece, part in stage.parts.items()
        }
        stage = replace(stage, parts=parts)
    return replace(
        ledger,
        training=left(ledger.training),
        parameters=parameters,
        updates={name: update for name, update in ledger.updates.items() if name not in names},
        blocks=ledger.blocks - len(gone),
        stage=stage,
    )


__all__ = ["of_all_blocks"]
