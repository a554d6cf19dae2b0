"""Stages: which piece of the model a pipeline's device has, and its ledger cut out of the whole model's."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

from tightfit.entries import Stage
from tightfit.errors import InputError
from tightfit.ledger import Ledger
from tightfit.machine import Machine
from tightfit.methods.hollow import not_in_a_row
from tightfit.methods.mesh import latency, link
from tightfit.plan import Plan
from tightfit.program import LINEAR, Buffer, Linear, Operation, Passage, Timeline
from tightfit.timetable import split_evenly, timetable


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
    divided = _divided(ledger.training, pieces)
    hidden = _hidden(ledger.training)
    programs = {
        piece: _closed(
            divided[0, "forward"] if piece == 0 else [*_before(divided[0, "forward"]), *divided[piece, "forward"]],
            divided[piece, "backward"],
            hidden,
            received=piece > 0,
            handed_on=piece < plan.stages - 1,
        )
        for piece in own
    }
    said = {name: _said(passages) for name, passages in (("all", ledger.training), ("own", _own(programs)))}
    share = said["own"] / said["all"] if said["all"] else 1.0  # of what the tp devices say to each other
    expects = machine.device == "cpu" and plan.schedule != "pipedream"  # what the next action begins with, meanwhile
    expected = hidden.at(ledger.micro_batch) if expects else 0.0
    return replace(
        ledger,
        training=_own(programs),
        fixed={**ledger.fixed, "communication": ledger.fixed.get("communication", 0.0) + expected},
        messages=tuple(message.times(share) for message in ledger.messages),
        parameters=tuple(p for p in ledger.parameters if p.name in mine),
        updates={name: update for name, update in ledger.updates.items() if name in mine},
        stage=Stage(
            programs=programs,
            table=timetable(plan.schedule, plan.pp, plan.virtual_stages, ledger.micro_batches),
            device=number,
            hidden=hidden,
            bytes_per_s=link(plan, machine, ("pp",)),
            latency_s=latency(plan, machine, ("pp",), 1),
            left={piece: _left_for_later(programs[piece][0]) for piece in own}
            if plan.schedule == "zero-bubble"
            else {},
            versions=_versions(plan, number),
            continuous=plan.schedule == "pipedream",
        ),
    )


def _own(programs: dict[int, tuple[tuple[Passage, ...], tuple[Passage, ...]]]) -> tuple[Passage, ...]:
    return tuple(passage for parts in programs.values() for part in parts for passage in part)


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


def _divided(training: tuple[Passage, ...], pieces: list[range]) -> dict[tuple[int, str], list[Passage]]:
    """(piece, phase) -> its passages. What lies between two blocks belongs to the first of them."""
    found: dict[tuple[int, str], list[Passage]] = defaultdict(list)
    inner = {place: number for number, piece in enumerate(pieces) for place in piece}
    here = {"forward": 0, "backward": len(pieces) - 1}
    for passage in training:
        if passage.block is not None:
            here[passage.phase] = inner[passage.block]
        found[here[passage.phase], passage.phase].append(passage)
        if passage.block and passage.phase == "backward":  # what comes next in backward lies behind the block below
            here["backward"] = inner[passage.block - 1]
    return found


def _before(passages: list[Passage]) -> list[Passage]:
    """What the model does before its blocks: every device does it, for masks and positions."""
    found = []
    for passage in passages:
        if passage.block is not None:
            break
        found.append(passage)
    return found


def _hidden(training: tuple[Passage, ...]) -> Linear:
    """Bytes of the hidden states that one block hands to the next: of what a block is called with, what only it is."""
    called = [set(p.timeline.inputs) for p in training if p.phase == "forward" and p.block is not None]
    if len(called) < 2:
        return Linear()
    own = [one - other for one, other in ((called[1], called[0]), (called[0], called[1]))]
    sizes = [buffer.size for buffers in own for buffer in buffers]
    return max(sizes, key=lambda size: size.at(1), default=Linear())


def _closed(
    forward: list[Passage], backward: list[Passage], hidden: Linear, received: bool, handed_on: bool
) -> tuple[tuple[Passage, ...], tuple[Passage, ...]]:
    """A piece's forward and backward as a program of its own: what comes from other devices comes, and what nobody here frees
    goes where the forward or the backward ends."""
    there = _There()
    begin = [(Buffer(hidden, "activations", "received"), 1)] if received else []
    there.come(begin)
    done = [replace(passage, timeline=there.kept(passage.timeline)) for passage in forward]
    made = there.snapshot()
    start = [(Buffer(hidden, "temporaries", "received"), 1)] if handed_on else []
    there.come(start)
    back = [replace(passage, timeline=there.kept(passage.timeline)) for passage in backward]
    left = there.snapshot()
    stays = left & made  # made by the forward, and freed by nobody
    goes = left - stays
    end = Timeline(tuple((buffer, -1) for buffer in stays.elements()))
    last = Timeline(tuple((buffer, -1) for buffer in goes.elements() if buffer.row != "gradients"))
    return (
        (Passage("received", "forward", Timeline(tuple(begin))), *done, Passage("sent", "forward", end)),
        (Passage("received", "backward", Timeline(tuple(start))), *back, Passage("sent", "backward", last)),
    )


class _There:
    """The buffers alive in a piece. Blocks that are alike share their buffers, so each is counted, and one that goes may stand
    for another of its size."""

    def __init__(self) -> None:
        self.alive: Counter[Buffer] = Counter()

    def come(self, events: list[tuple[Buffer, int]]) -> None:
        for buffer, _ in events:
            self.alive[buffer] += 1

    def snapshot(self) -> Counter[Buffer]:
        return +self.alive

    def kept(self, timeline: Timeline) -> Timeline:
        """The timeline without the going of what was never here."""
        events = []
        for buffer, sign in timeline.events:
            if sign > 0:
                self.alive[buffer] += 1
            elif sign < 0:
                one = self._find(buffer)
                if one is None:
                    continue
                self.alive[one] -= 1
                buffer = one
            events.append((buffer, sign))
        return replace(timeline, events=tuple(events))

    def _find(self, buffer: Buffer) -> Buffer | None:
        if self.alive[buffer] > 0:
            return buffer
        same = (b for b, n in self.alive.items() if n > 0 and b.row == buffer.row and b.size == buffer.size)
        return next(same, None)


def _left_for_later(forward: tuple[Passage, ...]) -> Linear:
    """Bytes that the weights' gradients of a piece's linear layers need: each one's input, and its output's gradient."""
    total = Linear()
    for operation in _products(forward):
        _, rows, columns, depth = operation.sizes
        width = {"float32": 4, "tf32": 4, "float64": 8}.get(operation.dtype, 2)
        for length in (columns, depth):
            total = total + rows.times(length.fixed * width * operation.count.fixed)
    return total


def _products(passages: Iterable[Passage]) -> Iterable[Operation]:
    for passage in passages:
        for operation in passage.timeline.operations:
            if operation.name in LINEAR and len(operation.sizes) == 4:
                yield operation


__all__ = ["pieces_of", "pieces_with", "staged"]
