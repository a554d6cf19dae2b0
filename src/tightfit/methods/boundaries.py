"""Boundaries: what has to be sent from one stage of a pipeline to the next: found before anything runs, or refused.

Each stage runs the model's own forward. In it, what runs before the stage's first block has no meaningful values: the stage has
neither the parameters nor the blocks that they come from. They are called missing here. When the stage's first block is called,
each missing tensor among its arguments is replaced, for all who hold it, by the one that the stage before sends; its gradient goes
back. So `h = h + block(h)` works: both are the tensor that came. What is computed from the batch, from buffers and from constants
alone is not missing: each stage computes it again. A stage that would read any other missing value is refused, with the line that
reads it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import nn

from tightfit.entries import EVERYWHERE
from tightfit.errors import InputError
from tightfit.job import ModelSpec
from tightfit.ledger import Ledger
from tightfit.methods.run import Run
from tightfit.methods.stages import pieces_of, pieces_with
from tightfit.models import find_blocks, places_of
from tightfit.models.dataflow import (
    ASKED,
    BEFORE,
    Called,
    Dataflow,
    Operation,
    PathTo,
    Returned,
    Seen,
    said,
)
from tightfit.models.tracing import trace
from tightfit.plan import Plan

INSTEAD = "use pp: 1; zero: 3 or tp divide a model too"
SMALL = 0.01  # share of the model's parameters up to which one outside the blocks is created on all devices

Places = dict[str, tuple[int, ...]]


def look(run: Run, plan: Plan) -> Run:
    """Follow a forward of the model before anything of it is taken apart. Raises InputError for what a pipeline would change."""
    blocks = find_blocks(run.model, run.job.model.blocks if isinstance(run.job.model, ModelSpec) else None)
    pieces, defined = pieces_of(plan, len(blocks)), places_of(run.model, blocks)
    refuse_shared_blocks(defined, len(blocks))
    refuse_two_rows(run.model)
    flow = trace(run.model, run.objective.total, run.data.example(), blocks)
    sizes = {name: parameter.numel() for name, parameter in run.model.named_parameters()}
    refuse(flow, plan, pieces, defined, sizes)
    return replace(run, dataflow=flow)


def moved(ledger: Ledger, plan: Plan) -> tuple[Ledger, dict[int, tuple[PathTo, ...]]]:
    """The ledger whose parameters lie where they are used; and by the first block of each stage but the first, which of its
    arguments are sent. Raises InputError where a run would."""
    assert ledger.dataflow is not None
    pieces = pieces_of(plan, ledger.blocks)
    defined = {p.name: p.places for p in ledger.parameters if p.places != EVERYWHERE}
    refuse_shared_blocks(defined, ledger.blocks)
    flow: Dataflow = ledger.dataflow()
    found = refuse(flow, plan, pieces, defined, {p.name: p.count for p in ledger.parameters if p.name in defined})
    crosses = {}
    for piece in pieces[1:]:  # a block that was not recorded is like the one that was recorded last before it
        recorded = bisect_right(flow.numbers, piece.start) - 1
        crosses[piece.start] = found.get(recorded, found[max(found)])
    places = placed(defined, flow, ledger.blocks)
    parameters = tuple(replace(p, places=places.get(p.name, p.places)) for p in ledger.parameters)
    return replace(ledger, parameters=parameters), crosses


def refuse(
    flow: Dataflow, plan: Plan, pieces: list[range], defined: Places, sizes: dict[str, int]
) -> dict[int, tuple[PathTo, ...]]:
    """Raise InputError for a model that the plan's stages would not compute. defined: see `places_of`. Else, what crosses."""
    _refuse_misplaced(plan, pieces, defined, placed(defined, flow, pieces[-1].stop), sizes)
    return crossing(flow, plan, pieces)


def refuse_shared_blocks(places: Places, blocks: int) -> None:
    """Raise InputError for a parameter of a block that something else has too."""
    for name, where in places.items():
        inner = {place for place in where if 0 <= place < blocks}
        if len(inner) > 1 or (inner and len(set(where)) > 1):
            raise InputError(
                ASKED, f"{name} is used by several blocks, which a pipeline puts on several devices", "use pp: 1"
            )


def refuse_two_rows(model: nn.Module) -> None:
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise InputError(
            ASKED, "an encoder and a decoder are two rows of blocks, and each decoder block needs the encoder", "use tp"
        )


def placed(places: Places, flow: Dataflow, blocks: int | None = None) -> Places:
    """Where each parameter is used: by the dataflow where that saw it, else by where it is defined (`places_of`).

    blocks  how many the model has, where the dataflow is of fewer
    """
    count = flow.blocks if blocks is None else blocks
    numbers = {BEFORE: BEFORE, flow.blocks: count, **dict(enumerate(flow.numbers))}
    found = {}
    for name, defined in places.items():
        used = tuple(sorted({numbers[place] for place in flow.uses.get(name, ())}))
        inner = tuple(place for place in defined if 0 <= place < count)
        found[name] = tuple(sorted({*inner, *used})) if used else defined
    return found


def _refuse_misplaced(plan: Plan, pieces: list[range], defined: Places, used: Places, sizes: dict[str, int]) -> None:
    last, whole = len(pieces) - 1, sum(sizes.values())
    for name, places in used.items():
        where = pieces_with(places, pieces)
        if len(where) > 1 and not where <= {0, last}:
            raise InputError(
                ASKED,
                f"{name} is used by the stages {', '.join(map(str, sorted(where)))}: only the first and the last may share one",
                INSTEAD,
            )
        if len(where) > 1 and plan.schedule == "pipedream":
            raise InputError(
                "plan: schedule=pipedream",
                f"{name} is used by the first and the last device, which update it at different times",
                "use schedule: 1f1b, or a model whose embeddings are not tied",
            )
        inside = any(0 <= place < pieces[-1].stop for place in defined[name])
        if inside and len(where) > 1:
            raise InputError(
                ASKED, f"{name} is used by several blocks, which a pipeline puts on several devices", "use pp: 1"
            )
        elsewhere = plan.materialize == "device" and not where <= pieces_with(defined[name], pieces)
        if elsewhere and sizes[name] > SMALL * whole:  # the device that uses it did not keep it
            raise InputError(
                f"plan: pp={plan.pp}, materialize=device",
                f"{name} is used on another stage than it is defined for",
                "use materialize: host, or define it in the model's constructor where it is used",
            )


def crossing(flow: Dataflow, plan: Plan, pieces: list[range]) -> dict[int, tuple[PathTo, ...]]:
    """By the first block of each stage but the first: which of its arguments have to be sent. Raises InputError."""
    if flow.changed:
        raise InputError(
            ASKED,
            f"each forward changes {flow.changed[0]}, and a stage would not see what another one does to it",
            f"keep it out of forward, or {INSTEAD}",
        )
    if plan.virtual_stages > 1:
        _refuse_what_is_written(flow)
    if flow.numbers != tuple(range(pieces[-1].stop)):  # of blocks that are alike only some are known
        pieces = [range(0, 2), range(2, 3)] if len(pieces) == 2 else [range(n, n + 1) for n in range(flow.blocks)]
    stages = [_Stage(flow, piece) for piece in pieces]
    for stage in stages:
        stage.run()
    for before, after in itertools.pairwise(stages):
        before.hands_on(after.taken)
    return {stage.piece.start: tuple(stage.taken) for stage in stages[1:]}


def overwritten_elsewhere(flow: Dataflow, pieces: list[range], own: list[int]) -> frozenset[str]:
    """Names of the buffers that forwards overwrite or replace, and that another device than the one with the pieces `own` has
    right."""
    return frozenset(
        name for event, name in _changed_buffers(flow) if name and not pieces_with([event.place], pieces) & set(own)
    )


def _changed_buffers(flow: Dataflow) -> Iterator[tuple[Operation, str]]:
    """Operations that overwrite a buffer or make what replaces it, with its name; those that overwrite a parameter with none."""
    made = {tensor: name for name, tensor in flow.replaced.items()}
    for event in flow.forwards[0]:
        if isinstance(event, Operation):
            for storage in event.written:
                if storage in flow.persistent or storage in flow.parameters:
                    yield event, flow.persistent.get(storage, "")
            for seen in event.made:
                if seen.tensor in made:
                    yield event, made[seen.tensor]


def _refuse_what_is_written(flow: Dataflow) -> None:
    """A device with several stages runs what lies outside the blocks for each of them."""
    for event, name in _changed_buffers(flow):
        if not event.inside:
            raise InputError(
                "plan: schedule=interleaved",
                f"{said(event.line)} overwrites {name or 'a parameter'} outside the blocks, which each stage of a device would do "
                "again",
                "use schedule: 1f1b",
            )


@dataclass
class _Stage:
    """What one stage, the blocks of `piece`, has of a forward: which storages hold no meaningful values on it, and why.

    taken    paths of the arguments of its first block that have to be sent
    missing  storages without meaningful values, and why
    known    of storages that were missing, the tensors that were sent: they have other memory now
    unknown  tensors without meaningful values, and why, that share their storage with what has some
    left     tensors made on another stage that no block returned: they do not exist here
    sent     by path, what the next stage's first block is called with; lacks: what of it this stage has not
    inner    by tensor, the block that made it and did not return it
    """

    flow: Dataflow
    piece: range
    taken: dict[PathTo, Seen] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)
    known: dict[int, set[int]] = field(default_factory=dict)
    unknown: dict[int, str] = field(default_factory=dict)
    left: dict[int, str] = field(default_factory=dict)
    sent: dict[PathTo, Seen] = field(default_factory=dict)
    lacks: dict[PathTo, str] = field(default_factory=dict)
    inner: dict[int, int] = field(default_factory=dict)

    def run(self) -> None:
        for events in self.flow.forwards:
            real, ended = self.piece.start == 0, False
            for event in events:
                if isinstance(event, Called):
                    if event.block == self.piece.start and not real:
                        self._take(event)
                        real = True
                    if event.block == self.piece.stop:
                        self._end(event)
                        ended = True
                elif isinstance(event, Returned):
                    if event.block < self.piece.start:
                        self._returned(event)
                    for seen, _ in event.returned:
                        self.inner.pop(seen.tensor, None)
                elif ended or (event.inside and event.place < self.piece.start):
                    self._elsewhere(event)
                elif real:
                    self._compute(event)
                else:
                    self._stand_in(event)

    def hands_on(self, taken: dict[PathTo, Seen]) -> None:
        """Refuse what the next stage needs and this one has not. Raises InputError."""
        for path in taken:
            if path not in self.sent or path in self.lacks:
                why = self.lacks.get(path, "it is another argument at each call")
                raise InputError(
                    ASKED,
                    f"block {self.piece.stop} is called with a value that the stage before does not have: {why}",
                    f"give it to each block as an argument, or {INSTEAD}",
                )

    def _why(self, seen: Seen) -> str | None:
        """Why a tensor has no meaningful value here; None where it has one."""
        if seen.tensor in self.unknown:
            return self.unknown[seen.tensor]
        if seen.storage in self.known:
            return (
                None if seen.tensor in self.known[seen.storage] else "it is another view of what a block is called with"
            )
        return self.missing.get(seen.storage)

    def _elsewhere(self, event: Operation) -> None:
        """An operation that this stage does not run."""
        line = said(event.line)
        for storage in event.written:
            self.missing[storage] = f"{line} writes it on another stage"
            self.known.pop(storage, None)
        there, tensors = {seen.storage for seen in event.reads}, {seen.tensor for seen in event.reads}
        for seen in event.made:
            if seen.tensor not in tensors:
                self.unknown[seen.tensor] = self.left[seen.tensor] = f"{line} makes it on another stage"
            if seen.storage not in there:
                self.missing[seen.storage] = f"{line} makes it on another stage"

    def _returned(self, event: Returned) -> None:
        for seen, is_given in event.returned:
            self.left.pop(seen.tensor, None)
            if not is_given:
                self.unknown[seen.tensor] = f"block {event.block}, on another stage, returns it"

    def _stand_in(self, event: Operation) -> None:
        """An operation before the stage's first block: it runs, and what it gives may have no meaning."""
        why = f"{said(event.line)} draws it at random, on each stage anew" if event.is_random else None
        for seen in event.reads:
            if seen.tensor in self.left:
                raise self._refused(event, self.left[seen.tensor])
            if seen.storage in self.flow.parameters and why is None:
                why = f"it is computed from {min(self.flow.parameters[seen.storage])} before the stage's first block"
            why = self._why(seen) or why
        if why is None:
            return
        if event.decides:
            raise self._refused(event, why, "decides by")
        for storage in event.written:
            self.missing[storage] = why
        for seen in event.made:
            source = [one for one in event.reads if one.storage == seen.storage]
            if not source:
                self.missing[seen.storage] = why
            elif seen.storage in self.missing or seen.storage in event.written:
                continue
            elif seen.storage in self.flow.parameters or any(map(self._why, source)):  # a view
                self.unknown[seen.tensor] = why

    def _compute(self, event: Operation) -> None:
        """An operation of this stage: all that it reads has to be there."""
        for seen in event.reads:
            why = self._why(seen) or self._why_collected(seen, event)
            if why is not None:
                raise self._refused(event, why)
        if event.inside:
            there = {seen.tensor for seen in event.reads}
            self.inner.update({seen.tensor: event.place for seen in event.made if seen.tensor not in there})
        for storage in event.written:
            if len({seen.tensor for seen in self.taken.values() if seen.storage == storage}) > 1:
                raise self._refused(event, "it is sent as two tensors, which shared their memory", "overwrites")
        for seen in event.made:
            if seen.storage in self.known:
                self.known[seen.storage].add(seen.tensor)

    def _why_collected(self, seen: Seen, event: Operation) -> str | None:
        """Blocks may leave tensors in a list, in which this stage has none of those that another stage's blocks leave: who looks for
        one by its number would find another one."""
        made = self.inner.get(seen.tensor)
        if made is None or not self.piece.start or (event.inside and event.place == made):
            return None
        return f"block {made} leaves it behind and does not return it, as do blocks on another stage"

    def _take(self, event: Called) -> None:
        """The stage's first block is called: what is missing of its arguments comes from the stage before."""
        came: dict[int, PathTo] = {}
        for path, seen in event.given.items():
            if seen.tensor in came or self._why(seen) is None:
                continue
            if seen.tensor in self.left:
                raise InputError(
                    ASKED,
                    f"block {event.block} is called with a value that a block leaves behind and does not return: "
                    f"{self.left[seen.tensor]}",
                    f"let blocks return it, or {INSTEAD}",
                )
            came[seen.tensor] = path
            self.taken[path] = seen
            self.unknown.pop(seen.tensor, None)
            if seen.storage in self.missing:
                self.known.setdefault(seen.storage, set()).add(seen.tensor)

    def _end(self, event: Called) -> None:
        reasons = {path: self._why(seen) for path, seen in event.given.items()}
        self.sent = dict(event.given)
        self.lacks = {path: why for path, why in reasons.items() if why is not None}

    def _refused(self, event: Operation, why: str, does: str = "uses") -> InputError:
        return InputError(
            ASKED,
            f"{said(event.line)} {does} a value that its stage does not have: {why}; stages hand on what blocks are called with",
            f"give it to each block as an argument, or {INSTEAD}",
        )


__all__ = ["crossing", "look", "moved", "overwritten_elsewhere", "placed"]
