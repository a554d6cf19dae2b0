"""Finds, before anything runs, which tensors each pipeline stage has to send to the next one.

`pipeline` calls it when it estimates a plan (`place_parameters`) and when it builds a run
(`trace_boundaries`, `boundary_inputs`). Where the stages would not compute what the full model
computes, the plan is refused with an InputError that shows the model's line.

Each stage runs the model's own forward. What runs before the stage's first block has no meaningful
values there, because the stage has neither the parameters nor the blocks that they depend on. Such
values are called missing. When the stage's first block is called, each missing tensor among its
arguments is replaced, for everybody who holds a reference to it, by the one that the stage before
sends. The gradient goes back. So `h = h + block(h)` works: both `h` are the received tensor. What
is computed from the batch, from buffers and from constants alone is not missing: each stage
computes it again. A stage that would read any other missing value is refused, with the line that
reads it.

Example: a model of 8 blocks calls `block(h, mask, positions)`, with h (4, 1024, 2048), on pp: 2.
Stage 1 owns the blocks 4 to 7. Its h depends on the embedding and on the blocks 0 to 3, so it is
missing, and it crosses the boundary. mask (4, 1, 1024, 1024) and positions (4, 1024) depend on the
batch alone: stage 1 computes them again, and they do not cross. If the model computed
`head(h + embedding)` at its end, stage 1 would read the missing embedding: the plan is refused.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import nn

from tightfit.cost.entries import EVERYWHERE
from tightfit.cost.ledger import Ledger
from tightfit.errors import InputError
from tightfit.models import find_blocks, parameter_uses
from tightfit.models.dataflow import (
    BEFORE_BLOCKS,
    PP_FIELD,
    BlockCall,
    BlockReturn,
    Dataflow,
    Operation,
    PathTo,
    TensorId,
    describe_line,
)
from tightfit.models.tracing import trace
from tightfit.parallel.pipeline.stages import stage_ranges, stages_using
from tightfit.plan import Plan
from tightfit.runtime.run import Run

OTHER_PARALLELISM = "use pp: 1; zero: 3 or tp shard a model too"
# A parameter outside of the blocks is created on all ranks if it has at most this share of all of
# the model's parameters.
MAX_REPLICATED_SHARE = 0.01

Places = dict[str, tuple[int, ...]]


def trace_boundaries(run: Run, plan: Plan) -> Run:
    """Trace a forward of the model before a method changes it, and store it as the Run's
    `dataflow`.

    Raises InputError where the plan's stages would compute something else than the full model.
    """
    blocks = find_blocks(run.model, run.job.blocks_name)
    pieces, defined = stage_ranges(plan, len(blocks)), parameter_uses(run.model, blocks)
    refuse_shared_blocks(defined, len(blocks))
    refuse_encoder_decoder(run.model)
    flow = trace(run.model, run.objective.total, run.data.example(), blocks)
    sizes = {name: parameter.numel() for name, parameter in run.model.named_parameters()}
    check_boundaries(flow, plan, pieces, defined, sizes)
    return replace(run, dataflow=flow)


def place_parameters(ledger: Ledger, plan: Plan) -> tuple[Ledger, dict[int, tuple[PathTo, ...]]]:
    """Locate each parameter where it is used, and find what crosses the stage boundaries.

    Returns the ledger with these locations, and by the first block of each stage but the first, the
    paths of its arguments that are sent. Raises InputError where a build would.
    """
    assert ledger.dataflow is not None
    pieces = stage_ranges(plan, ledger.blocks)
    defined = {p.name: p.places for p in ledger.parameters if p.places != EVERYWHERE}
    refuse_shared_blocks(defined, ledger.blocks)
    flow: Dataflow = ledger.dataflow()
    found = check_boundaries(
        flow, plan, pieces, defined, {p.name: p.count for p in ledger.parameters if p.name in defined}
    )
    crosses = {}
    for piece in pieces[1:]:  # a block that was not recorded equals the last recorded one before it
        recorded = bisect_right(flow.block_numbers, piece.start) - 1
        crosses[piece.start] = found.get(recorded, found[max(found)])
    places = resolve_parameter_uses(defined, flow, ledger.blocks)
    parameters = tuple(replace(p, places=places.get(p.name, p.places)) for p in ledger.parameters)
    return replace(ledger, parameters=parameters), crosses


def check_boundaries(
    flow: Dataflow, plan: Plan, pieces: list[range], defined: Places, sizes: dict[str, int]
) -> dict[int, tuple[PathTo, ...]]:
    """Return what crosses the boundaries, as `boundary_inputs` does.

    defined  by parameter name, where it is defined (`parameter_uses`)
    sizes    by parameter name, its number of elements

    Raises InputError where the plan's stages would compute something else than the full model.
    """
    _refuse_misplaced(plan, pieces, defined, resolve_parameter_uses(defined, flow, pieces[-1].stop), sizes)
    return boundary_inputs(flow, plan, pieces)


def refuse_shared_blocks(places: Places, blocks: int) -> None:
    """Raise InputError where a block's parameter is used elsewhere too."""
    for name, where in places.items():
        inner = {place for place in where if 0 <= place < blocks}
        if len(inner) > 1 or (inner and len(set(where)) > 1):
            raise InputError(
                PP_FIELD, f"{name} is used by several blocks, which a pipeline puts on several devices", "use pp: 1"
            )


def refuse_encoder_decoder(model: nn.Module) -> None:
    """Raise InputError for a model with an encoder and a decoder."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise InputError(
            PP_FIELD,
            "an encoder and a decoder are two stacks of blocks, and each decoder block needs the encoder",
            "use tp",
        )


def resolve_parameter_uses(places: Places, flow: Dataflow, blocks: int | None = None) -> Places:
    """The blocks where each parameter is used, according to the dataflow.

    Parameters that the dataflow does not have are located where they are defined
    (`parameter_uses`). blocks: number of blocks of the model, where the dataflow is of a model with
    fewer.
    """
    count = flow.block_count if blocks is None else blocks
    numbers = {BEFORE_BLOCKS: BEFORE_BLOCKS, flow.block_count: count, **dict(enumerate(flow.block_numbers))}
    found = {}
    for name, defined in places.items():
        used = tuple(sorted({numbers[place] for place in flow.uses.get(name, ())}))
        inner = tuple(place for place in defined if 0 <= place < count)
        found[name] = tuple(sorted({*inner, *used})) if used else defined
    return found


def _refuse_misplaced(plan: Plan, pieces: list[range], defined: Places, used: Places, sizes: dict[str, int]) -> None:
    last, whole = len(pieces) - 1, sum(sizes.values())
    for name, places in used.items():
        where = stages_using(places, pieces)
        if len(where) > 1 and not where <= {0, last}:
            raise InputError(
                PP_FIELD,
                f"{name} is used by the stages {', '.join(map(str, sorted(where)))}: only the first and the last may share one",
                OTHER_PARALLELISM,
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
                PP_FIELD, f"{name} is used by several blocks, which a pipeline puts on several devices", "use pp: 1"
            )
        elsewhere = plan.materialize == "device" and not where <= stages_using(defined[name], pieces)
        if elsewhere and sizes[name] > MAX_REPLICATED_SHARE * whole:  # the rank that uses it did not create it
            raise InputError(
                f"plan: pp={plan.pp}, materialize=device",
                f"{name} is used on another stage than it is defined for",
                "use materialize: host, or define it in the model's constructor where it is used",
            )


def boundary_inputs(flow: Dataflow, plan: Plan, pieces: list[range]) -> dict[int, tuple[PathTo, ...]]:
    """By the first block of each stage but the first, the paths of its arguments that have to be
    sent.

    Raises InputError where a stage would read a value that it does not have.
    """
    if flow.changed:
        raise InputError(
            PP_FIELD,
            f"each forward changes {flow.changed[0]}, and a stage would not see what another one does to it",
            f"keep it out of forward, or {OTHER_PARALLELISM}",
        )
    if plan.virtual_stages > 1:
        _refuse_repeated_writes(flow)
    if flow.block_numbers != tuple(range(pieces[-1].stop)):  # of equal blocks, only some were recorded
        pieces = [range(0, 2), range(2, 3)] if len(pieces) == 2 else [range(n, n + 1) for n in range(flow.block_count)]
    stages = [_StageTrace(flow, piece) for piece in pieces]
    for stage in stages:
        stage.run()
    for before, after in itertools.pairwise(stages):
        before.check_sent(after.taken)
    return {stage.piece.start: tuple(stage.taken) for stage in stages[1:]}


def buffers_updated_elsewhere(flow: Dataflow, pieces: list[range], own: list[int]) -> frozenset[str]:
    """Names of buffers that the forward overwrites or replaces on another rank than this one.

    own: the numbers of this rank's stages. The other rank has the correct value.
    """
    return frozenset(
        name for event, name in _changed_buffers(flow) if name and not stages_using([event.block], pieces) & set(own)
    )


def _changed_buffers(flow: Dataflow) -> Iterator[tuple[Operation, str]]:
    """Operations that overwrite a buffer or make its replacement, with the buffer's name.

    Operations that overwrite a parameter come with an empty name.
    """
    made = {tensor: name for name, tensor in flow.replaced.items()}
    for event in flow.forwards[0]:
        if isinstance(event, Operation):
            for storage in event.written:
                if storage in flow.persistent or storage in flow.parameters:
                    yield event, flow.persistent.get(storage, "")
            for seen in event.outputs:
                if seen.tensor in made:
                    yield event, made[seen.tensor]


def _refuse_repeated_writes(flow: Dataflow) -> None:
    """Raise InputError where an operation outside of the blocks overwrites a buffer or parameter.

    A rank with several stages runs what is outside of the blocks once for each of them.
    """
    for event, name in _changed_buffers(flow):
        if not event.inside:
            raise InputError(
                "plan: schedule=interleaved",
                f"{describe_line(event.line)} overwrites {name or 'a parameter'} outside of the blocks: a device would "
                "repeat that for each of its stages",
                "use schedule: 1f1b",
            )


@dataclass
class _StageTrace:
    """Follows one stage through a traced forward: which values are missing on it, and why.

    piece    the range of the stage's blocks
    taken    paths of the arguments of its first block that have to be sent to it
    missing  storages without meaningful values, and why
    known    of storages that were missing: the tensors that were received. They have memory of
             their own now
    unknown  tensors without meaningful values, and why, whose storage also holds meaningful ones
    left     tensors made on another stage that no block returned: they do not exist here
    sent     by path, the arguments of the next stage's first block; lacks: which of them this stage
             does not have, and why
    inner    by tensor, the block that made it and has not returned it
    """

    flow: Dataflow
    piece: range
    taken: dict[PathTo, TensorId] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)
    known: dict[int, set[int]] = field(default_factory=dict)
    unknown: dict[int, str] = field(default_factory=dict)
    left: dict[int, str] = field(default_factory=dict)
    sent: dict[PathTo, TensorId] = field(default_factory=dict)
    lacks: dict[PathTo, str] = field(default_factory=dict)
    inner: dict[int, int] = field(default_factory=dict)

    def run(self) -> None:
        """Go through the traced events in order."""
        for events in self.flow.forwards:
            real, ended = self.piece.start == 0, False
            for event in events:
                if isinstance(event, BlockCall):
                    if event.block == self.piece.start and not real:
                        self._receive(event)
                        real = True
                    if event.block == self.piece.stop:
                        self._send(event)
                        ended = True
                elif isinstance(event, BlockReturn):
                    if event.block < self.piece.start:
                        self._returned(event)
                    for seen, _ in event.outputs:
                        self.inner.pop(seen.tensor, None)
                elif ended or (event.inside and event.block < self.piece.start):
                    self._run_elsewhere(event)
                elif real:
                    self._compute(event)
                else:
                    self._run_before(event)

    def check_sent(self, taken: dict[PathTo, TensorId]) -> None:
        """Raise InputError where this stage does not have what the next one has to receive."""
        for path in taken:
            if path not in self.sent or path in self.lacks:
                why = self.lacks.get(path, "it is another argument at each call")
                raise InputError(
                    PP_FIELD,
                    f"block {self.piece.stop} is called with a value that the stage before does not have: {why}",
                    f"give it to each block as an argument, or {OTHER_PARALLELISM}",
                )

    def _reason_missing(self, seen: TensorId) -> str | None:
        """Why a tensor has no meaningful value here; None where it has one."""
        if seen.tensor in self.unknown:
            return self.unknown[seen.tensor]
        if seen.storage in self.known:
            return (
                None if seen.tensor in self.known[seen.storage] else "it is another view of what a block is called with"
            )
        return self.missing.get(seen.storage)

    def _run_elsewhere(self, event: Operation) -> None:
        """An operation that this stage does not run."""
        line = describe_line(event.line)
        for storage in event.written:
            self.missing[storage] = f"{line} writes it on another stage"
            self.known.pop(storage, None)
        there, tensors = {seen.storage for seen in event.reads}, {seen.tensor for seen in event.reads}
        for seen in event.outputs:
            if seen.tensor not in tensors:
                self.unknown[seen.tensor] = self.left[seen.tensor] = f"{line} makes it on another stage"
            if seen.storage not in there:
                self.missing[seen.storage] = f"{line} makes it on another stage"

    def _returned(self, event: BlockReturn) -> None:
        """A block of an earlier stage has returned: its outputs exist here as stubs."""
        for seen, is_given in event.outputs:
            self.left.pop(seen.tensor, None)
            if not is_given:
                self.unknown[seen.tensor] = f"block {event.block}, on another stage, returns it"

    def _run_before(self, event: Operation) -> None:
        """An operation before the stage's first block: it runs, but its output may be meaningless."""
        why = f"{describe_line(event.line)} draws it at random, on each stage anew" if event.is_random else None
        for seen in event.reads:
            if seen.tensor in self.left:
                raise self._refused(event, self.left[seen.tensor])
            if seen.storage in self.flow.parameters and why is None:
                why = f"it is computed from {min(self.flow.parameters[seen.storage])} before the stage's first block"
            why = self._reason_missing(seen) or why
        if why is None:
            return
        if event.reads_value:
            raise self._refused(event, why, "decides by")
        for storage in event.written:
            self.missing[storage] = why
        for seen in event.outputs:
            source = [one for one in event.reads if one.storage == seen.storage]
            if not source:
                self.missing[seen.storage] = why
            elif seen.storage in self.missing or seen.storage in event.written:
                continue
            elif seen.storage in self.flow.parameters or any(map(self._reason_missing, source)):  # a view
                self.unknown[seen.tensor] = why

    def _compute(self, event: Operation) -> None:
        """An operation of this stage: everything that it reads has to be meaningful."""
        for seen in event.reads:
            why = self._reason_missing(seen) or self._reason_uncollected(seen, event)
            if why is not None:
                raise self._refused(event, why)
        if event.inside:
            there = {seen.tensor for seen in event.reads}
            self.inner.update({seen.tensor: event.block for seen in event.outputs if seen.tensor not in there})
        for storage in event.written:
            if len({seen.tensor for seen in self.taken.values() if seen.storage == storage}) > 1:
                raise self._refused(event, "it is sent as two tensors, which shared their memory", "overwrites")
        for seen in event.outputs:
            if seen.storage in self.known:
                self.known[seen.storage].add(seen.tensor)

    def _reason_uncollected(self, seen: TensorId, event: Operation) -> str | None:
        """Why a tensor that a block left behind, without returning it, cannot be read here.

        Blocks may append tensors to a list. On this stage the list lacks those that other stages'
        blocks append, so that an index would find another tensor.
        """
        made = self.inner.get(seen.tensor)
        if made is None or not self.piece.start or (event.inside and event.block == made):
            return None
        return f"block {made} leaves it behind and does not return it, as do blocks on another stage"

    def _receive(self, event: BlockCall) -> None:
        """The stage's first block is called: its missing arguments come from the stage before."""
        received: dict[int, PathTo] = {}
        for path, seen in event.inputs.items():
            if seen.tensor in received or self._reason_missing(seen) is None:
                continue
            if seen.tensor in self.left:
                raise InputError(
                    PP_FIELD,
                    f"block {event.block} is called with a value that a block leaves behind and does not return: "
                    f"{self.left[seen.tensor]}",
                    f"let blocks return it, or {OTHER_PARALLELISM}",
                )
            received[seen.tensor] = path
            self.taken[path] = seen
            self.unknown.pop(seen.tensor, None)
            if seen.storage in self.missing:
                self.known.setdefault(seen.storage, set()).add(seen.tensor)

    def _send(self, event: BlockCall) -> None:
        """The next stage's first block is called: note its arguments, and which of them are missing
        here."""
        reasons = {path: self._reason_missing(seen) for path, seen in event.inputs.items()}
        self.sent = dict(event.inputs)
        self.lacks = {path: why for path, why in reasons.items() if why is not None}

    def _refused(self, event: Operation, why: str, does: str = "uses") -> InputError:
        return InputError(
            PP_FIELD,
            f"{describe_line(event.line)} {does} a value that its stage does not have: {why}; "
            "stages send only what blocks are called with",
            f"give it to each block as an argument, or {OTHER_PARALLELISM}",
        )


__all__ = [
    "boundary_inputs",
    "buffers_updated_elsewhere",
    "place_parameters",
    "resolve_parameter_uses",
    "trace_boundaries",
]
