"""Derive the ledger of a model with fewer blocks from the ledger of the whole model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from tightfit.cost.entries import EVERYWHERE, Parameter
from tightfit.cost.ledger import Ledger
from tightfit.cost.recorded_step import Segment


def without_blocks(ledger: Ledger, removed: Collection[int]) -> Ledger:
    """Return the ledger of the model without the blocks whose numbers are in `removed`.

    A segment (a recorded part of the step) between two blocks is removed together with the block
    that runs before it. A parameter is removed if only removed blocks use it. The remaining blocks
    keep their numbers.
    """

    def remaining(program: tuple[Segment, ...]) -> tuple[Segment, ...]:
        found, block = [], None
        for segment in program:
            block = segment.block if segment.block is not None else block  # the latest block
            if block not in removed:
                found.append(segment)
        return tuple(found)

    def remains(parameter: Parameter) -> bool:
        return not parameter.used_by_blocks or any(number not in removed for number in parameter.used_by_blocks)

    parameters = tuple(filter(remains, ledger.parameters))
    left_out = {parameter.name for parameter in ledger.parameters if not remains(parameter)}
    stage = ledger.rank_program
    if stage is not None:
        parts = {
            index: replace(
                part,
                forward=remaining(part.forward),
                backward=remaining(part.backward),
                weights=remaining(part.weights),
            )
            for index, part in stage.stage_programs.items()
        }
        stage = replace(stage, stage_programs=parts)
    return replace(
        ledger,
        training=remaining(ledger.training),
        parameters=parameters,
        updates={name: update for name, update in ledger.updates.items() if name not in left_out},
        blocks=ledger.blocks - len(removed),
        rank_program=stage,
    )


def with_depth(ledger: Ledger, count: int) -> Ledger:
    """Return the ledger of the model with only `count` blocks (at least 2): the first `count` - 1
    blocks and the last block. They are numbered from 0.

    ledger  the ledger of the traced model, before any method's `cost`
    """
    removed = range(count - 1, ledger.blocks - 1)
    few = without_blocks(ledger, removed)

    def renumbered(block: int) -> int:
        return block - len(removed) if block >= removed.stop else block

    def moved(parameter: Parameter) -> Parameter:
        if parameter.used_by_blocks == EVERYWHERE:
            return parameter
        return replace(parameter, used_by_blocks=tuple(map(renumbered, parameter.used_by_blocks)))

    return replace(
        few,
        training=tuple(
            segment if segment.block is None else replace(segment, block=renumbered(segment.block))
            for segment in few.training
        ),
        parameters=tuple(map(moved, few.parameters)),
    )


__all__ = ["with_depth", "without_blocks"]
