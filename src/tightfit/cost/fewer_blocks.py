"""The ledger of a model with fewer blocks, derived from that of the whole model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from tightfit.cost.entries import EVERYWHERE, Parameter
from tightfit.cost.ledger import Ledger
from tightfit.cost.recorded_step import Segment


def without_blocks(ledger: Ledger, removed: Collection[int]) -> Ledger:
    """The ledger without the blocks `removed`, and without the segments that follow these blocks.
    The other blocks keep their numbers."""

    def remaining(program: tuple[Segment, ...]) -> tuple[Segment, ...]:
        found, here = [], None
        for segment in program:
            here = segment.block if segment.block is not None else here  # the last block so far
            if here not in removed:
                found.append(segment)
        return tuple(found)

    def remains(parameter: Parameter) -> bool:
        return not parameter.places or any(place not in removed for place in parameter.places)

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
    """The base ledger of the model with only `count` blocks (at least 2): the first ones and the
    last."""
    removed = range(count - 1, ledger.blocks - 1)
    few = without_blocks(ledger, removed)

    def renumbered(place: int) -> int:
        return place - len(removed) if place >= removed.stop else place

    def moved(parameter: Parameter) -> Parameter:
        if parameter.places == EVERYWHERE:
            return parameter
        return replace(parameter, places=tuple(map(renumbered, parameter.places)))

    return replace(
        few,
        training=tuple(
            segment if segment.block is None else replace(segment, block=renumbered(segment.block))
            for segment in few.training
        ),
        parameters=tuple(map(moved, few.parameters)),
    )


__all__ = ["with_depth", "without_blocks"]
