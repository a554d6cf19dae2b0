"""Find, before training starts, which tensors each pipeline stage has to send to the next stage.

`pipeline` uses this module when it estimates a plan (`place_parameters`) and when it builds a run
(`trace_boundaries`, `boundary_inputs`). If the stages would not compute what the full model
computes, the plan is refused with an InputError that shows the line of the model.

Each stage runs the model's own forward. A stage does not have the parameters and blocks of earlier
stages, so every value that depends on them is meaningless on this stage. Such a value is called
missing. When the stage's first block is called, each missing tensor among its arguments is replaced
by the tensor that the preceding stage sends. It is replaced in place, so every reference to it sees
the new values. In backward, its gradient is sent back. So `h = h + block(h)` works: both `h` are
the received tensor. Values that are computed only from the batch, buffers and constants are not
missing, because each stage computes them again. If a stage would read any other missing value, the
plan is refused, with the line that reads the value.

Example: a model of 8 blocks calls `block(h, mask, positions)`, with h (4, 1024, 2048), on pp: 2.
Stage 1 has blocks 4 to 7. Its h depends on the embedding and on blocks 0 to 3, so h is missing and
is sent from stage 0 to stage 1. mask (4, 1, 1024, 1024) and positions (4, 1024) depend on the batch
alone: stage 1 computes them again, and they are not sent. If the model computed `head(h +
embedding)` at its end, stage 1 would read the missing embedding: the plan is refused.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from torch import nn

from tightfit.cost.entries import Parameter
from tightfit.cost.ledger import Ledger
from tightfit.cost.remembered import remembered
from tightfit.errors import InputError
from tightfit.models import find_blocks, parameter_uses
from tightfit.models.batches import Batch
from tightfit.models.dataflow import (
    BEFORE_BLOCKS,
    PP_FIELD,
    BlockCall,
    BlockReturn,
    Dataflow,
    OperationCall,
    PathTo,
    TensorId,
    describe_line,
)
from tightfit.models.tracing import trace_dataflow
from tightfit.parallel.pipeline.stages import stage_ranges, stages_using
from tightfit.plan import Plan
from tightfit.runtime.run import Run

OTHER_PARALLELISM = "use pp: 1, and split the model with zero: 3 or tp instead"
# With materialize: device, every rank creates a parameter outside of the blocks if it has at most
# this fraction of the model's parameter elements. Any stage may use such a parameter.
MAX_REPLICATED_SHARE = 0.01
CHECKED_FIELDS = ("pp", "virtual_stages", "split", "schedule", "materialize")  # of a plan, in `check_boundaries`

ParameterUses = dict[str, tuple[int, ...]]


def trace_boundaries(run: Run, plan: Plan, example: Batch) -> Run:
    """Trace a forward of the model, and return the Run with the trace as its `dataflow`. The model
    must not have been changed by any method yet.

    example  a micro-batch, whose shapes and types are used

    Raises InputError if the stages of the plan's pipeline would not compute what the full model
    computes.
    """
    blocks = find_blocks(run.model, run.job.blocks_name)
    stages, defined = stage_ranges(plan, len(blocks)), parameter_uses(run.model, blocks)
    refuse_shared_blocks(defined, len(blocks))
    refuse_encoder_decoder(run.model)
    flow = trace_dataflow(run.model, run.objective.total, example, blocks)
    sizes = {name: parameter.numel() for name, parameter in run.model.named_parameters()}
    check_boundaries(flow, plan, stages, defined, resolve_parameter_uses(defined, flow, len(blocks)), sizes)
    return replace(run, dataflow=flow)


def place_parameters(ledger: Ledger, plan: Plan) -> tuple[Ledger, dict[int, tuple[PathTo, ...]]]:
    """Find the blocks that use each parameter, and the block arguments that stages send to each
    other.

    Returns (ledger, sent). In the returned ledger, each parameter's `used_by_blocks` are the numbers of the
    blocks that use it. `sent` maps the number of a stage's first block to those arguments of this
    block that the stage before sends. Each is given by its path in (args, kwargs): (0, 2) is
    args[2]. The model's first stage has no entry, because its input is the batch.

    Raises InputError if the stages of the plan's pipeline would not compute what the full model
    computes.
    """
    assert ledger.dataflow is not None
    stages = stage_ranges(plan, ledger.blocks)
    flow: Dataflow = ledger.dataflow()
    placed = _placed(ledger.parameters, flow, ledger.blocks)
    found = _checked(flow, placed, ledger.blocks, Plan(**{name: getattr(plan, name) for name in CHECKED_FIELDS}))
    crosses = {}
    for stage in stages[1:]:  # an unrecorded block equals the last recorded block before it
        recorded = bisect_right(flow.block_numbers, stage.start) - 1
        crosses[stage.start] = found.get(recorded, found[max(found)])
    return replace(ledger, parameters=placed.parameters), crosses


class _Placed(NamedTuple):
    """Where parameters are defined and used: `defined` and `used` are the numbers of blocks, and
    `sizes` the numbers of elements, by name. Buffers are left out. `parameters` are all parameters and
    buffers, and have the blocks that use them as their `used_by_blocks`."""

    defined: ParameterUses
    used: ParameterUses
    sizes: dict[str, int]
    parameters: tuple[Parameter, ...]


@remembered(16)
def _placed(parameters: tuple[Parameter, ...], flow: Dataflow, blocks: int) -> _Placed:
    defined = {p.name: p.used_by_blocks for p in parameters if not p.buffer}
    refuse_shared_blocks(defined, blocks)
    used = resolve_parameter_uses(defined, flow, blocks)
    sizes = {p.name: p.count for p in parameters if p.name in defined}
    return _Placed(
        defined, used, sizes, tuple(replace(p, used_by_blocks=used.get(p.name, p.used_by_blocks)) for p in parameters)
    )


@remembered(64)
def _checked(flow: Dataflow, placed: _Placed, blocks: int, plan: Plan) -> dict[int, tuple[PathTo, ...]]:
    stages = stage_ranges(plan, blocks)
    return check_boundaries(flow, plan, stages, placed.defined, placed.used, placed.sizes)


def check_boundaries(
    flow: Dataflow, plan: Plan, stages: list[range], defined: ParameterUses, used: ParameterUses, sizes: dict[str, int]
) -> dict[int, tuple[PathTo, ...]]:
    """Check that the stages of the plan's pipeline compute what the full model computes. Return the
    arguments that are sent to each stage, in the form of `boundary_inputs`.

    flow     the trace of a forward of the full model
    stages   the range of block numbers of each stage
    defined  parameter name -> the numbers of the blocks in which the parameter is defined, -1
             before the blocks and the number of blocks after them
    used     the same, of the blocks that use the parameter
    sizes    parameter name -> its number of elements

    Raises InputError if the check fails.
    """
    _refuse_misplaced(plan, stages, defined, used, sizes)
    return boundary_inputs(flow, plan, stages)


def refuse_shared_blocks(uses: ParameterUses, blocks: int) -> None:
    """Raise InputError if a parameter that a block uses is also used outside of this block.

    uses    parameter name -> the numbers of the blocks that use it, -1 before the blocks and the
            number of blocks after them
    blocks  the number of blocks
    """
    for name, where in uses.items():
        inner = {block for block in where if 0 <= block < blocks}
        if len(inner) > 1 or (inner and len(set(where)) > 1):
            raise InputError(
                PP_FIELD, f"{name} is used by several blocks, which a pipeline puts on several devices", "use pp: 1"
            )


def refuse_encoder_decoder(model: nn.Module) -> None:
    """Raise InputError if the model has an encoder and a decoder, as its config says."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise InputError(
            PP_FIELD,
            "an encoder and a decoder are two stacks of blocks, and each decoder block needs the encoder",
            "use pp: 1, and split the model with tp instead",
        )


def resolve_parameter_uses(definitions: ParameterUses, flow: Dataflow, blocks: int | None = None) -> ParameterUses:
    """Return parameter name -> the numbers of the blocks that use the parameter. -1 means code
    before the blocks, the number of blocks means code after them.

    definitions  parameter name -> the numbers of the blocks in which it is defined. A parameter
                 that the traced forward does not use keeps these numbers
    flow         the trace of a forward, which shows where each parameter is used
    blocks       the model's number of blocks, if the trace left out some of them; else None

    Example: an embedding tied to the head of a model of 12 blocks gives (-1, 12), before and after
    the blocks.
    """
    count = flow.block_count if blocks is None else blocks
    numbers = {BEFORE_BLOCKS: BEFORE_BLOCKS, flow.block_count: count, **dict(enumerate(flow.block_numbers))}
    found = {}
    for name, defined in definitions.items():
        used = tuple(sorted({numbers[block] for block in flow.uses.get(name, ())}))
        inner = tuple(block for block in defined if 0 <= block < count)
        found[name] = tuple(sorted({*inner, *used})) if used else defined
    return found


def _refuse_misplaced(
    plan: Plan, stages: list[range], defined: ParameterUses, used: ParameterUses, sizes: dict[str, int]
) -> None:
    last, whole = len(stages) - 1, sum(sizes.values())
    stages_of = cache(lambda block_numbers: stages_using(block_numbers, stages))
    for name, block_numbers in used.items():
        where = stages_of(block_numbers)
        if len(where) > 1 and not where <= {0, last}:
            raise InputError(
                PP_FIELD,
                f"{name} is used by the stages {', '.join(map(str, sorted(where)))}, and only the first and the last stage may "
                "share a parameter",
                OTHER_PARALLELISM,
            )
        if len(where) > 1 and plan.schedule == "pipedream":
            raise InputError(
                "plan: schedule=pipedream",
                f"{name} is used by the first and the last device, which update it at different times",
                "use schedule: 1f1b, or a model whose embeddings are not tied",
            )
        inside = any(0 <= block < stages[-1].stop for block in defined[name])
        if inside and len(where) > 1:
            outside = not all(0 <= block < stages[-1].stop for block in block_numbers)
            users = (
                "a block and outside of the blocks, as by a loss that reads weights" if outside else "several blocks"
            )
            raise InputError(
                PP_FIELD, f"{name} is used by {users}, which a pipeline puts on several devices", "use pp: 1"
            )
        created_elsewhere = plan.materialize == "device" and not where <= stages_of(defined[name])
        if created_elsewhere and sizes[name] > MAX_REPLICATED_SHARE * whole:  # a rank that uses it lacks it
            raise InputError(
                f"plan: pp={plan.pp}, materialize=device",
                f"{name} is used on another pipeline stage than the stage that creates it",
                "use materialize: host, or let the model's constructor define it before the blocks if it is used before "
                "them, else after them",
            )


def boundary_inputs(flow: Dataflow, plan: Plan, stages: list[range]) -> dict[int, tuple[PathTo, ...]]:
    """Find the arguments that have to be sent to each stage.

    Returns the number of a stage's first block -> the paths of those arguments of this block that
    the stage before sends. A path leads to a value in (args, kwargs): (0, 2) is args[2]. The
    model's first stage has no entry, because its input is the batch.

    flow    the trace of a forward of the full model
    stages  the range of block numbers of each stage

    Raises InputError if a stage would read a value that it does not have.
    """
    if flow.changed:
        raise InputError(
            PP_FIELD,
            f"each forward changes {flow.changed[0]}, and a pipeline stage does not see the changes of the other stages",
            f"do not change {flow.changed[0]} in forward, or {OTHER_PARALLELISM}",
        )
    if plan.virtual_stages > 1:
        _refuse_repeated_writes(flow)
    if flow.block_numbers != tuple(range(stages[-1].stop)):  # only some of the equal blocks were recorded
        stages = [range(0, 2), range(2, 3)] if len(stages) == 2 else [range(n, n + 1) for n in range(flow.block_count)]
    traces = [_StageTrace(flow, blocks) for blocks in stages]
    for trace in traces:
        trace.run()
    for before, after in itertools.pairwise(traces):
        before.check_sent(after.taken)
    firsts = {trace.blocks.start for trace in traces[1:]}
    for event in flow.forwards[0]:
        if isinstance(event, BlockCall) and event.checkpointed:
            raise InputError(
                PP_FIELD,
                f"the model calls block {event.block} in a checkpoint of its own (torch.utils.checkpoint), which a pipeline "
                "stage cannot run again",
                f"leave out the model's checkpoint and set plan.recompute: full, or {OTHER_PARALLELISM}",
            )
        if isinstance(event, BlockCall) and event.without_gradients and event.block in firsts:
            raise InputError(
                PP_FIELD,
                f"the model calls block {event.block}, with which a stage begins, under torch.no_grad or in a reentrant "
                "checkpoint, so the stage would return no gradients to the one before",
                "use another split, leave out the model's checkpoint and set plan.recompute: full, or "
                f"{OTHER_PARALLELISM}",
            )
    return {trace.blocks.start: tuple(trace.taken) for trace in traces[1:]}


def buffers_updated_elsewhere(flow: Dataflow, stages: list[range], own: list[int]) -> frozenset[str]:
    """Return the names of the model's buffers that the forward changes on other pipeline ranks
    only. This rank's copies of these buffers are stale.

    flow    the trace of a forward of the full model
    stages  the range of block numbers of each stage
    own     the numbers of this rank's stages
    """
    return frozenset(
        name for event, name in _changed_buffers(flow) if name and not stages_using([event.block], stages) & set(own)
    )


def _changed_buffers(flow: Dataflow) -> Iterator[tuple[OperationCall, str]]:
    """Yield (operation, buffer name) for each traced operation that overwrites a buffer, or that
    computes the tensor by which the model replaces a buffer.

    For an operation that overwrites a parameter, the name is "".
    """
    made = {tensor: name for name, tensor in flow.replaced.items()}
    for event in flow.forwards[0]:
        if isinstance(event, OperationCall):
            for storage in event.written:
                if storage in flow.persistent or storage in flow.parameters:
                    yield event, flow.persistent.get(storage, "")
            for output in event.outputs:
                if output.tensor in made:
                    yield event, made[output.tensor]


def _refuse_repeated_writes(flow: Dataflow) -> None:
    """Raise InputError if an operation outside of the blocks overwrites or replaces a buffer,
    overwrites a parameter, or draws from a generator of the model's own.

    A rank with several stages runs the code outside of the blocks once for each of its stages, so
    it would repeat the change.
    """
    for event, name in _changed_buffers(flow):
        if not event.inside:
            raise InputError(
                "plan: schedule=interleaved",
                f"{describe_line(event.line)} modifies {name or 'a parameter'} in place, outside of the blocks; with "
                "interleaved, a device runs several stages and would repeat this for each of them",
                "use schedule: 1f1b",
            )
    for drawn in flow.forwards[0]:
        if isinstance(drawn, OperationCall) and drawn.generator and not drawn.inside:
            raise InputError(
                "plan: schedule=interleaved",
                f"{describe_line(drawn.line)} draws from a generator of the model's own, outside of the blocks; with "
                "interleaved, a device runs several stages and would draw for each of them",
                "use schedule: 1f1b, or draw from torch's global generator",
            )


@dataclass
class _StageTrace:
    """Goes through a traced forward for one stage, and finds which values are missing on this
    stage, and why.

    A value is missing if it depends on parameters or blocks that the stage does not have. In its
    place the stage usually has a stub: a tensor of the right shape without the values. A tensor is
    identified by its number, and its memory by the number of its storage, which views share. A path
    is the place of an argument in (args, kwargs): (0, 2) is args[2].

    flow     the trace of a forward of the full model
    blocks   the range of the stage's block numbers
    taken    path -> tensor: the arguments of the stage's first block that have to be sent to it
    missing  storage -> why all tensors in it are missing (except those in `known`)
    known    missing storage -> the tensors in it that are nevertheless known: the received tensors,
             and views that are computed from them. In the real run, each received tensor has memory
             of its own
    unknown  tensor -> why it is missing, although other tensors in its storage may not be
    left     tensor -> why the stage does not even have a stub of it: another stage computes it, and
             no block has returned it
    sent     path -> tensor: the arguments of the next stage's first block
    lacks    path -> why this argument of the next stage's first block is missing here
    inner    tensor -> the number of the block that has computed it, and that has not returned it
    """

    flow: Dataflow
    blocks: range
    taken: dict[PathTo, TensorId] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)
    known: dict[int, set[int]] = field(default_factory=dict)
    unknown: dict[int, str] = field(default_factory=dict)
    left: dict[int, str] = field(default_factory=dict)
    sent: dict[PathTo, TensorId] = field(default_factory=dict)
    lacks: dict[PathTo, str] = field(default_factory=dict)
    inner: dict[int, int] = field(default_factory=dict)

    def run(self) -> None:
        """Go through the traced events, and fill the attributes. Raises InputError if the stage
        reads a missing value.
        """
        for events in self.flow.forwards:
            real, ended = self.blocks.start == 0, False
            for event in events:
                if isinstance(event, BlockCall):
                    if event.block == self.blocks.start and not real:
                        self._receive(event)
                        real = True
                    if event.block == self.blocks.stop:
                        self._send(event)
                        ended = True
                elif isinstance(event, BlockReturn):
                    if event.block < self.blocks.start:
                        self._returned(event)
                    for output, _ in event.outputs:
                        self.inner.pop(output.tensor, None)
                elif ended or (event.inside and event.block < self.blocks.start):
                    self._run_elsewhere(event)
                elif real:
                    self._compute(event)
                else:
                    self._run_before(event)

    def check_sent(self, taken: dict[PathTo, TensorId]) -> None:
        """Raise InputError if an argument that the next stage has to receive is missing on this
        stage, too.

        taken  the `taken` of the next stage
        """
        for path in taken:
            if path not in self.sent or path in self.lacks:
                why = self.lacks.get(path, "it is passed as a different argument in each forward")
                raise InputError(
                    PP_FIELD,
                    f"block {self.blocks.stop} takes an argument that the preceding stage does not have: {why}",
                    f"pass the value to each block as an argument, or {OTHER_PARALLELISM}",
                )

    def _reason_missing(self, tensor_id: TensorId) -> str | None:
        """Return why a tensor is missing on this stage, or None if it is not missing."""
        if tensor_id.tensor in self.unknown:
            return self.unknown[tensor_id.tensor]
        if tensor_id.storage in self.known:
            return (
                None
                if tensor_id.tensor in self.known[tensor_id.storage]
                else "it is another view of a tensor that the stage receives"
            )
        return self.missing.get(tensor_id.storage)

    def _run_elsewhere(self, event: OperationCall) -> None:
        """Record an operation that another stage runs, and this stage does not. All of its results
        are missing here.
        """
        line = describe_line(event.line)
        for storage in event.written:
            self.missing[storage] = f"{line} overwrites the value on another stage"
            self.known.pop(storage, None)
        storages, tensors = {read.storage for read in event.reads}, {read.tensor for read in event.reads}
        for output in event.outputs:
            if output.tensor not in tensors:
                self.unknown[output.tensor] = self.left[output.tensor] = f"{line} computes the value on another stage"
            if output.storage not in storages:
                self.missing[output.storage] = f"{line} computes the value on another stage"

    def _returned(self, event: BlockReturn) -> None:
        """Record that a block of an earlier stage returns. On this stage a stub replaces the block,
        so its outputs are missing.

        If an output is also an input of the block, such as a tensor that the block passes on, the
        call does not change whether it is missing.
        """
        for output, is_given in event.outputs:
            self.left.pop(output.tensor, None)
            if not is_given:
                self.unknown[output.tensor] = f"block {event.block}, on another stage, returns the value"

    def _run_before(self, event: OperationCall) -> None:
        """Record an operation of the model's code before the stage's first block. This stage runs
        it, as all stages do.

        The operation's output is missing here if the operation reads a missing value or a
        parameter, or draws random numbers. In these cases, this stage cannot compute the same
        output as the first stage.

        Raises InputError if the operation gives a missing value to Python code, or reads a tensor
        of which this stage has not even a stub (a tensor of the right shape).
        """
        why = f"{describe_line(event.line)} draws the value at random, again on each stage" if event.is_random else None
        for read in event.reads:
            if read.tensor in self.left:
                raise self._refused(event, self.left[read.tensor])
            if read.storage in self.flow.parameters and why is None:
                why = f"it depends on {min(self.flow.parameters[read.storage])}, which is read before the stage's first block"
            why = self._reason_missing(read) or why
        if why is None:
            return
        if event.reads_value:
            raise self._refused(event, why, "reads (in Python)")
        for storage in event.written:
            self.missing[storage] = why
        for output in event.outputs:
            source = [one for one in event.reads if one.storage == output.storage]
            if not source:
                self.missing[output.storage] = why
            elif output.storage in self.missing or output.storage in event.written:
                continue
            elif output.storage in self.flow.parameters or any(map(self._reason_missing, source)):  # a view
                self.unknown[output.tensor] = why

    def _compute(self, event: OperationCall) -> None:
        """Record an operation that belongs to this stage. Raises InputError if the operation reads
        a missing value.
        """
        for read in event.reads:
            why = self._reason_missing(read) or self._reason_uncollected(read, event)
            if why is not None:
                raise self._refused(event, why)
        if event.inside:
            read_tensors = {read.tensor for read in event.reads}
            self.inner.update(
                {output.tensor: event.block for output in event.outputs if output.tensor not in read_tensors}
            )
        for storage in event.written:
            if len({taken.tensor for taken in self.taken.values() if taken.storage == storage}) > 1:
                raise self._refused(event, "it is sent as two tensors, which no longer share memory", "overwrites")
        for output in event.outputs:
            if output.storage in self.known:
                self.known[output.storage].add(output.tensor)

    def _reason_uncollected(self, tensor_id: TensorId, event: OperationCall) -> str | None:
        """Return why this stage cannot read a tensor that a block has stored and not returned.
        Return None if the stage can read it.

        Example: each block appends a tensor to a list. This stage's list lacks the tensors of the
        blocks of other stages, so `list[i]` would be a different tensor.

        tensor_id  the tensor
        event      the operation that reads it
        """
        made = self.inner.get(tensor_id.tensor)
        if made is None or not self.blocks.start or (event.inside and event.block == made):
            return None
        return f"block {made} stored it instead of returning it, as blocks on other stages do"

    def _receive(self, event: BlockCall) -> None:
        """Record the call of the stage's first block: the arguments that are missing here become
        `taken`, because the stage before sends them.

        Raises InputError if the stage has not even a stub of an argument (a tensor of the right
        shape), into which the sent values could be put.
        """
        received: dict[int, PathTo] = {}
        for path, argument in event.inputs.items():
            if argument.tensor in received or self._reason_missing(argument) is None:
                continue
            if argument.tensor in self.left:
                raise InputError(
                    PP_FIELD,
                    f"block {event.block} uses a value that an earlier block stored instead of returning "
                    f"({self.left[argument.tensor]}), and only arguments of blocks are sent between pipeline stages",
                    f"let the earlier block return the value, or {OTHER_PARALLELISM}",
                )
            received[argument.tensor] = path
            self.taken[path] = argument
            self.unknown.pop(argument.tensor, None)
            if argument.storage in self.missing:
                self.known.setdefault(argument.storage, set()).add(argument.tensor)

    def _send(self, event: BlockCall) -> None:
        """Record the call of the next stage's first block: set `sent` to its arguments, and `lacks`
        to those that are missing here.
        """
        reasons = {path: self._reason_missing(argument) for path, argument in event.inputs.items()}
        self.sent = dict(event.inputs)
        self.lacks = {path: why for path, why in reasons.items() if why is not None}

    def _refused(self, event: OperationCall, why: str, does: str = "uses") -> InputError:
        return InputError(
            PP_FIELD,
            f"{describe_line(event.line)} {does} a value that its stage does not have: {why}; "
            "only arguments of blocks are sent between pipeline stages",
            f"pass the value to each block as an argument, or {OTHER_PARALLELISM}",
        )


__all__ = [
    "boundary_inputs",
    "buffers_updated_elsewhere",
    "place_parameters",
    "resolve_parameter_uses",
    "trace_boundaries",
]
