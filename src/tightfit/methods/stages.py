"""Stages: which piece of the model a pipeline's device has, and its ledger cut out of the whole model's."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace

from tightfit.entries import Part, Stage
from tightfit.errors import InputError
from tightfit.ledger import Ledger
from tightfit.machine import Machine
from tightfit.methods.hollow import not_in_a_row
from tightfit.methods.mesh import latency, link
from tightfit.methods.sections import hidden_states, part, sections_of
from tightfit.plan import Plan
from tightfit.program import Passage
from tightfit.timetable import messages, split_evenly, timetable


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


def staged(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """The ledger of one device: its pieces' passages, parameters and updates, and the order of its actions."""
    pieces = pieces_of(plan, ledger.blocks)
    called = [passage.block for passage in ledger.training if passage.phase == "forward" and passage.block is not None]
    if called != sorted(set(called)):
        raise not_in_a_row()
    refuse_idle_devices(plan, pieces, [parameter.places for parameter in ledger.parameters if parameter.trainable])
    number = ledger.device
    own = [piece for piece in range(plan.stages) if piece % plan.pp == number]
    mine = {p.name for p in ledger.parameters if pieces_with(p.places, pieces) & set(own)}
    sections = sections_of(ledger.training, ledger.blocks, plan.schedule == "zero-bubble")
    hidden = hidden_states(ledger.training)
    parts = {piece: part(sections, pieces[piece], hidden) for piece in own}
    said = {name: _said(passages) for name, passages in (("all", ledger.training), ("own", _own(parts)))}
    share = said["own"] / said["all"] if said["all"] else 1.0  # of what the tp devices say to each other
    table = timetable(plan.schedule, plan.pp, plan.virtual_stages, ledger.micro_batches)
    waits = machine.device == "cpu"  # a GPU's messages are gone, or come, when their turn is there
    ahead = plan.schedule != "pipedream"
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
            hidden=hidden,
            bytes_per_s=link(plan, machine, ("pp",)),
            latency_s=latency(plan, machine, ("pp",), 1),
            messages=messages(table, number, ahead) if waits else (0,) * len(table[number]),
            versions=_versions(plan, number),
            continuous=plan.schedule == "pipedream",
        ),
    )


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
