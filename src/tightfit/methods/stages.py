"""Stages: which piece of the model a pipeline's device has, and its ledger cut out of the whole model's."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import replace

from tightfit.entries import Crossing, Part, Stage
from tightfit.errors import InputError
from tightfit.ledger import Ledger
from tightfit.machine import Machine
from tightfit.methods.hollow import not_in_a_row
from tightfit.methods.mesh import latency, link
from tightfit.methods.sections import Received, Sections, part, sections_of
from tightfit.models.dataflow import PathTo
from tightfit.plan import Plan
from tightfit.program import Given, Linear, Passage
from tightfit.timetable import coming, late, sent, split_evenly, timetable


def pieces_of(plan: Plan, blocks: int) -> list[range]:
    """The blocks of each piece of the model, first to last. Raises InputError where there are too few, or a split that does
    not add up."""
    split = plan.split or split_evenly(blocks, plan.stages)
    if sum(split) != blocks or min(split) < 1:
        fewer = f"use a pipeline of at most {blocks} pieces" if blocks > 1 else "use pp: 1"
        if plan.split:
            said = f"the model has {blocks} blocks, not {sum(split)}"
            raise InputError(f"plan: split={list(plan.split)}", said, "mend split, or leave it out")
        what = f"has {blocks} blocks" if blocks else "has no repeated blocks"
        raise InputError(f"plan: pp={plan.pp}, {plan.stages} pieces", f"the model {what}", fewer)
    ends = [sum(split[: number + 1]) for number in range(len(split))]
    return [range(end - length, end) for end, length in zip(ends, split, strict=True)]


def pieces_with(places: Iterable[int], pieces: list[range]) -> set[int]:
    """Which pieces of the model have a parameter. places: of its uses (see `places_of`)."""
    ends = [piece.stop for piece in pieces]
    return {min(bisect_right(ends, max(place, 0)), len(pieces) - 1) for place in places}


def refuse_idle_devices(plan: Plan, pieces: list[range], trained: list[tuple[int, ...]]) -> None:
    """Raise InputError, on every device, where one of them would have nothing to train. trained: see `places_of`."""
    for device in range(plan.pp):
        own = set(range(device, plan.stages, plan.pp))
        if not any(pieces_with(places, pieces) & own for places in trained):
            raise InputError(
                f"plan: pp={plan.pp}",
                f"device {device} of the pipeline would have no trainable parameter",
                "use pp: 1, or a split that gives each device some of those that are trained",
            )


def staged(ledger: Ledger, crosses: Mapping[int, tuple[PathTo, ...]], plan: Plan, machine: Machine) -> Ledger:
    """The ledger of one device: its pieces' passages, parameters and updates, and the order of its actions.

    crosses  by the first block of each stage but the first, which of its arguments are sent to it
    """
    pieces = pieces_of(plan, ledger.blocks)
    called = [passage.block for passage in ledger.training if passage.phase == "forward" and passage.block is not None]
    if called != sorted(set(called)):
        raise not_in_a_row()
    refuse_idle_devices(plan, pieces, [parameter.places for parameter in ledger.parameters if parameter.trainable])
    number = ledger.device
    own = [piece for piece in range(plan.stages) if piece % plan.pp == number]
    mine = {p.name for p in ledger.parameters if pieces_with(p.places, pieces) & set(own)}
    sections = sections_of(ledger.training, ledger.blocks, plan.schedule == "zero-bubble")
    given = [_given(ledger.training, piece.start, crosses.get(piece.start, ())) for piece in pieces]
    crossings = {
        piece: Crossing(
            tuple(one.size for one in tensors),
            tuple(one.size for one in tensors if one.has_gradient),
            _sum(one.size for one in tensors if sections.keeps(pieces[piece - 1], one.buffer)),
        )
        for piece, tensors in enumerate(given)
        if piece
    }
    parts = {}
    for piece in own:
        comes = _received(sections, pieces[piece], given[piece])
        gradients = crossings[piece + 1].backward if piece + 1 in crossings else ()
        parts[piece] = part(sections, pieces[piece], comes, _sum(gradients))
    said = {name: _said(passages) for name, passages in (("all", ledger.training), ("own", _own(parts)))}
    share = said["own"] / said["all"] if said["all"] else 1.0  # of what the tp devices say to each other
    shape = plan.schedule, plan.pp, plan.virtual_stages, ledger.micro_batches
    table, stops = timetable(*shape), machine.device != "cpu"
    ahead = coming(*shape, number, stops)
    stays = ((),) * len(ahead) if stops else sent(table, number)  # a GPU knows what has arrived
    return replace(
        ledger,
        training=_own(parts),
        messages=tuple(message.times(share) for message in ledger.messages),
        parameters=tuple(p for p in ledger.parameters if p.name in mine),
        updates={name: update for name, update in ledger.updates.items() if name in mine},
        stage=Stage(
            parts=parts,
            table=table,
            device=number,
            crossings=crossings,
            bytes_per_s=link(plan, machine, ("pp",)),
            latency_s=latency(plan, machine, ("pp",), 1),
            messages=tuple((there, () if one is None else (one,)) for there, one in zip(stays, ahead, strict=True)),
            versions=_versions(plan, number),
            late=late(*shape) if stops else frozenset(),
            continuous=plan.schedule == "pipedream",
        ),
    )


def _given(training: Iterable[Passage], block: int, paths: tuple[PathTo, ...]) -> list[Given]:
    """Of what a block is called with, the tensors at these paths, each storage once."""
    called = next((one for one in training if one.phase == "forward" and one.block == block), None)
    known = {one.path: one for one in called.timeline.given} if called is not None else {}
    return [known[str(path)] for path in paths if str(path) in known]


def _received(sections: Sections, piece: range, given: list[Given]) -> Received:
    kept = sections.kept(piece)
    return Received(
        _sum(one.size for one in given if one.buffer in kept),
        _sum(one.size for one in given if one.buffer not in kept),
        frozenset(one.buffer for one in given if one.buffer is not None),
    )


def _sum(sizes: Iterable[Linear]) -> Linear:
    return sum(sizes, Linear())


def _own(parts: dict[int, Part]) -> tuple[Passage, ...]:
    return tuple(passage for one in parts.values() for passage in one.passages)


def _said(passages: Iterable[Passage]) -> float:
    """Bytes that operations send, at one sample."""
    return sum(
        operation.moved.at(1) * operation.count.at(1)
        for passage in passages
        for operation in passage.timeline.operations
        if operation.name.startswith(("c10d.", "_c10d_functional."))  # the latter in compiled blocks
    )


def _versions(plan: Plan, device: int) -> int:
    """Of the weights, that a device keeps beside the newest: one for each micro-batch that is under way."""
    if plan.schedule != "pipedream":
        return 0
    return plan.pp - 1 - (0 if plan.vertical_sync else device)


__all__ = ["pieces_of", "pieces_with", "staged"]
