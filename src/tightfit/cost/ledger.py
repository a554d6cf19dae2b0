"""The ledger: what one optimizer step costs one device, in bytes by row and in operations.

It holds the recorded step of one micro-batch (see the module of `Segment`), the parameters and
their updates, and the communication. Sizes are linear in the samples of a micro-batch, so one
ledger holds for every micro-batch size. The profiler makes the first ledger from a trace; each
method's `cost` returns an edited one. `peak` replays the whole step and finds the instant with the
most memory.

Example: one device, fp32, AdamW, 1,000 MiB of parameters. Parameters (1,000) and optimizer states
(2,000) live through the whole step. Forward adds the saved activations. Backward frees them while
the gradients grow to 1,000. With 4,000 MiB of saved activations the peak is about 7,000 MiB, at the
begin of backward. With 500 MiB it is about 4,000 MiB, at the end of backward or in the update.
Temporaries come on top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tightfit.cost.entries import (
    BucketedReduction,
    Message,
    MicroBatchRun,
    Parameter,
    PeakInstant,
    RankProgram,
    ShardedParameters,
    Update,
)
from tightfit.cost.pipeline_schedule import FORWARD, WEIGHTS
from tightfit.cost.recorded_step import (
    BatchLinear,
    Buffer,
    Operation,
    ReplayedSegment,
    Segment,
    Timeline,
    accumulate_gradients,
    edit_backward,
    free_completed_gradients,
    fuse_updates,
    replay,
)
from tightfit.machine import Machine
from tightfit.plan import Plan

ROWS = ("parameters", "gradients", "optimizer", "activations", "temporaries", "communication", "allocator", "runtime")


@dataclass(frozen=True)
class Ledger:
    """What one device holds and does in one optimizer step. Sizes are bytes unless said otherwise.

    micro_batch     samples of one micro-batch
    micro_batches   micro-batches in one step
    training        recorded step of one micro-batch: forward, then backward
    inference       returns the recorded step of one micro-batch of an evaluation; the model is
                    traced for it at the first call
    parameters      the model's parameters and buffers
    blocks          number of repeated blocks
    dataflow        returns which tensors a forward computes from which (`models/dataflow.py`), for
                    the methods that cut the model
    check_segments  raises InputError for a model whose blocks cannot be recomputed in segments
    updates         by parameter name: what the optimizer does to it
    whole_step      operations that run once in a step and belong to no segment and no update, such
                    as clipping
    batch_bytes     one sample's data, in device memory (on a CPU: in host memory)
    batches_ahead   micro-batches of data in device memory beside the current one
    update_in_backward  whether each parameter is updated as soon as its gradient is complete
    foreach         whether the optimizer updates all parameters with multi-tensor kernels
    host_batch      whether the device is the CPU, so that the whole step's data is in its memory
    caches_memory   whether the process keeps freed memory and uses it again
    mmap_threshold  otherwise: bytes from which an allocation is mapped by itself, and its pages are
                    faulted in anew each time; None where the allocator adapts the threshold
                    (see `planner/allocators/glibc.py`)
    keeps_step      whether the memory of forward and backward is kept from step to step, for them
                    alone, as the pool of CUDA graphs is
    fixed           by row: bytes that live through the whole step beside the model
    phases          by name: the peak of each phase before the first step, without the fixed rows
    seconds         by purpose: seconds once in a step
    ahead           the purposes among them that overlap with the step's computation
    sample_s        measured seconds to prepare one sample
    host            by purpose: host memory that is not this device's memory
    passing         the same, for memory that is used only before the first step or between steps
    disk            by purpose: bytes of files
    saving          a checkpoint's files that each process holds in host memory while it writes them
    compile_s       seconds of compilation before the first step
    summed_bytes    temporaries of the reduction of gradients after backward has ended
    bucketed_reduction  how gradients are reduced over data-parallel ranks; None if they are not
    sharded_parameters  how parameters are gathered and resharded; None if they are not sharded
    messages        all communication of a step
    takes_gradients  whether each gradient is offloaded to other memory when it is complete
    device          which rank of a pipeline this ledger describes
    rank_program    what that rank does; None without a pipeline
    """

    micro_batch: int
    micro_batches: int
    training: tuple[Segment, ...]
    inference: Callable[[], tuple[Segment, ...]]
    parameters: tuple[Parameter, ...]
    blocks: int = 0
    dataflow: Callable[[], Any] | None = None
    check_segments: Callable[[], None] | None = None
    updates: dict[str, Update] = field(default_factory=dict)
    whole_step: tuple[Operation, ...] = ()
    batch_bytes: float = 0.0
    batches_ahead: int = 0
    update_in_backward: bool = False
    foreach: bool = False
    host_batch: bool = False
    caches_memory: bool = False
    keeps_step: bool = False
    mmap_threshold: float | None = None
    fixed: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    ahead: frozenset[str] = frozenset()
    sample_s: float = 0.0
    host: dict[str, float] = field(default_factory=dict)
    passing: dict[str, float] = field(default_factory=dict)
    disk: dict[str, float] = field(default_factory=dict)
    saving: float = 0.0
    compile_s: float = 0.0
    summed_bytes: float = 0.0
    bucketed_reduction: BucketedReduction | None = None
    sharded_parameters: ShardedParameters | None = None
    messages: tuple[Message, ...] = ()
    takes_gradients: bool = False
    device: int = 0
    rank_program: RankProgram | None = None

    def row_bytes(self) -> dict[str, float]:
        """Bytes that live from step to step, by row."""
        rows = dict.fromkeys(ROWS, 0.0)
        rows["parameters"] = sum(parameter.bytes for parameter in self.parameters)
        if self.rank_program is not None:
            rows["parameters"] += self.rank_program.versions * self.gradient_bytes()
        rows["optimizer"] = sum(update.state_bytes for update in self.updates.values())
        for row, size in self.fixed.items():
            rows[row] += size
        return rows

    def gradient_bytes(self) -> float:
        """Bytes of all gradients that this device keeps, in their parameters' dtypes."""
        return sum(parameter.bytes for parameter in self.parameters if parameter.trainable)

    def instants(self) -> Iterator[tuple[str, str, dict[str, float]]]:
        """(phase, part, bytes by row) at the peak of each segment of a step, in order, and between
        segments.

        In the first micro-batch there are no gradients yet. In later ones each gradient is added to
        the existing one.
        """
        if not self.keeps_step:
            yield from self._instants()
            return
        pool = self._pool_bytes()
        for phase, part, rows in self._instants():
            inside = sum(rows[row] for row in _OF_A_GRAPH)
            beside = rows if phase in _IN_A_GRAPH else _sum(rows, {"temporaries": max(pool - inside, 0.0)})
            yield phase, part, beside

    def _pool_bytes(self) -> float:
        """Size of the CUDA graphs' pool, which is kept from step to step: the most that forward and
        backward need beside parameters and optimizer states."""
        steps = (rows for phase, _, rows in self._instants() if phase in _IN_A_GRAPH)
        return max(sum(rows[row] for row in _OF_A_GRAPH) for rows in steps)

    def _instants(self) -> Iterator[tuple[str, str, dict[str, float]]]:
        rows = self.row_bytes()
        there = self.micro_batches if self.host_batch else 1 + self.batches_ahead
        in_memory = self.batch_bytes * self.micro_batch * there
        rows["activations"] += in_memory
        if self.sharded_parameters is not None:
            rows["communication"] += self.sharded_parameters.rest
        coming = (
            self.bucketed_reduction.coming
            if self.bucketed_reduction is not None and self.bucketed_reduction.stays
            else 0.0
        )
        yield "forward", "start", {**rows, "communication": rows["communication"] + coming}
        known: dict[Timeline, ReplayedSegment] = {}
        whole, arrived = self.gradient_bytes(), 0.0
        for visit in self.micro_batch_runs():
            sends, done = visit.reduces, 0.0
            for segment in visit.segments:
                if segment.timeline not in known:
                    known[segment.timeline] = replay(segment.timeline, self.micro_batch)
                played = known[segment.timeline]
                reduced_rows: dict[str, float] = {"gradients": arrived}
                then, made = played.completed_gradients
                if sends and self.bucketed_reduction is not None:
                    reduced_rows = self._bucket_rows(done + then, whole, arrived)
                if self.sharded_parameters is not None:
                    parts = max(
                        arrived, done * self.sharded_parameters.reduce_dtype_ratio / self.sharded_parameters.shards
                    )
                    reduced_rows = self._unsharded_rows(
                        segment, parts, reducing=done > 0 or self.rank_program is not None
                    )
                yield segment.phase, segment.part, _sum(_sum(rows, played.at_peak), reduced_rows)
                rows = _sum(rows, played.at_end)
                if sends and self.bucketed_reduction is not None and made:
                    if visit.later and not self.bucketed_reduction.always:  # the sums move to the buckets
                        rows = _sum(rows, {"gradients": -made})
                    done += made
                    last = {"temporaries": played.largest_gradient}
                    yield segment.phase, segment.part, _sum(_sum(rows, self._bucket_rows(done, whole, arrived)), last)
                if self.sharded_parameters is not None and segment.block is not None:  # leaves a shard
                    if made:
                        summed = self.sharded_parameters.reduced * (1 + 1 / self.sharded_parameters.shards)
                        yield segment.phase, "reduce", _sum_all(rows, {"communication": summed, "gradients": parts})
                    done += made
                    rows = _sum(rows, {"gradients": -made})
            if sends and self.bucketed_reduction is not None:
                arrived = self.bucketed_reduction.rows_during(whole, whole)["gradients"]
            if self.sharded_parameters is not None and visit.ends:
                rest = rows["gradients"]
                yield (
                    "backward",
                    "reduce",
                    _sum_all(
                        rows,
                        {
                            "gradients": max(
                                arrived,
                                done * self.sharded_parameters.reduce_dtype_ratio / self.sharded_parameters.shards,
                            ),
                            "communication": rest,
                        },
                    ),
                )
                rows = _sum(rows, {"gradients": -rest})
                arrived = whole
            if visit.updates:
                yield "optimizer", "update", {**rows, "temporaries": rows["temporaries"] + self._update_bytes()}
                rows, arrived = {**rows, "gradients": 0.0}, 0.0
        if self.sharded_parameters is not None:
            rows = _sum(rows, {"communication": -self.sharded_parameters.rest})
        rows = _sum(rows, {"gradients": arrived})
        if self.summed_bytes:
            yield "backward", "reduce", {**rows, "temporaries": rows["temporaries"] + self.summed_bytes}
        yield "optimizer", "update", {**rows, "temporaries": rows["temporaries"] + self._update_bytes()}
        if self.bucketed_reduction is not None and self.bucketed_reduction.coming:
            without = {**rows, "gradients": 0.0}
            yield "optimizer", "gather", _sum_all(without, {"communication": self.bucketed_reduction.coming})

    def _bucket_rows(self, done: float, whole: float, arrived: float) -> dict[str, float]:
        """Bytes by row of shards and buckets when `done` bytes of gradients are complete, and
        `arrived` bytes of earlier micro-batches' gradients exist."""
        assert self.bucketed_reduction is not None
        found = self.bucketed_reduction.rows_during(done, whole)
        if arrived and self.bucketed_reduction.shards > 1:  # a new shard, beside the sum
            found["communication"] += 2 * self.bucketed_reduction.bucket / self.bucketed_reduction.shards
        return {**found, "gradients": max(found["gradients"], arrived)}

    def _unsharded_rows(self, segment: Segment, arrived: float, reducing: bool) -> dict[str, float]:
        """Bytes by row beside a segment's own buffers under ZeRO-3.

        The unsharded parameters of its block; the next block's, which are prefetched in backward;
        in backward the gradients that are being reduced, if an earlier block has computed some; and
        the gradient shards that have arrived.
        """
        assert self.sharded_parameters is not None
        there = 0.0
        if segment.block is not None:
            there = self.sharded_parameters.block
            if segment.phase == "backward" or self.sharded_parameters.ahead:
                there += self.sharded_parameters.prefetched
            if segment.phase == "backward" and reducing:
                there += self.sharded_parameters.reduced
        return {"communication": there, "gradients": arrived}

    def model_flops(self) -> float:
        """Model FLOPs of a step, as MFU counts them (Chowdhery et al. 2022, arXiv:2204.02311,
        appendix B).

        A forward of all samples, with attention over all pairs even under a causal mask, and twice
        as much for backward. Recomputation does not count. In a pipeline: the mean over its ranks.
        """
        forward = sum(
            operation.flops.at(self.micro_batch) * operation.count.at(self.micro_batch)
            for segment in self.inference()
            for operation in segment.timeline.operations
        )
        devices = len(self.rank_program.schedule) if self.rank_program is not None else 1
        return 3 * forward * self.micro_batches / devices

    def micro_batch_runs(self) -> Iterator[MicroBatchRun]:
        """What the micro-batches of a step run, in order.

        Without a pipeline the first two micro-batches, because all later ones equal the second. In
        a pipeline every action of this rank.
        """
        sent = self.bucketed_reduction
        if self.rank_program is None:
            programs = self.first_and_later(self.training, self.micro_batches)
            for number, program in enumerate(programs):
                yield MicroBatchRun(
                    program, sent is not None and (sent.always or number == len(programs) - 1), number > 0
                )
            return
        own = self.rank_program
        backward = {stage: self.first_and_later(part.backward, 2) for stage, part in own.stage_programs.items()}
        weights = {stage: self.first_and_later(part.weights, 2) for stage, part in own.stage_programs.items()}
        seen: set[tuple[str, int]] = set()
        for number, action in enumerate(own.schedule[own.pipeline_rank]):
            kind, stage, place = action.kind, action.stage, action.micro_batch % self.micro_batches
            allocate, free = _messages(own.resident_message_bytes(number), "forward" if kind == FORWARD else "backward")
            if kind == FORWARD:
                yield MicroBatchRun((allocate, *own.stage_programs[stage].forward, free), False, False, ends=False)
                continue
            last, completes = place == self.micro_batches - 1, kind == WEIGHTS or not own.stage_programs[stage].weights
            later = place > 0 if own.continuous else (kind, stage) in seen
            segments = (weights if kind == WEIGHTS else backward)[stage][int(later)]
            sends = sent is not None and (sent.always or last) and completes
            updates = last and completes and own.continuous
            yield MicroBatchRun((allocate, *segments, free), sends, later, ends=completes, updates=updates)
            seen.add((kind, stage))

    def first_and_later(self, training: tuple[Segment, ...], micro_batches: int) -> list[tuple[Segment, ...]]:
        """The recorded steps of the first micro-batch and, if there are more, of a later one, as
        this plan runs them.

        Segments that share a timeline still share it afterwards.
        """
        edits: list[Callable[[Timeline], Timeline]] = []
        if self.update_in_backward:
            needed = {name: float(update.transient_bytes + update.comes) for name, update in self.updates.items()}
            edits.append(lambda timeline: fuse_updates(timeline, needed))
        if self.takes_gradients:
            edits.append(free_completed_gradients)
        first = edit_backward(training, edits)
        if self.takes_gradients:
            return [first] * min(micro_batches, 2)
        if self.sharded_parameters is not None:
            return [first] * min(micro_batches, 2)
        if self.bucketed_reduction is not None and (self.bucketed_reduction.always or micro_batches == 1):
            first = edit_backward(first, [free_completed_gradients])
            return [first] * min(micro_batches, 2)
        return [first] if micro_batches == 1 else [first, edit_backward(first, [accumulate_gradients])]

    def evaluation(self) -> Iterator[tuple[str, str, dict[str, float]]]:
        """Like `instants`, for one micro-batch of an evaluation."""
        rows = self.row_bytes()
        rows["activations"] += self.batch_bytes * self.micro_batch * (1 + self.batches_ahead)
        if self.keeps_step:
            rows["temporaries"] += self._pool_bytes()
        for segment in self.inference():
            played = replay(segment.timeline, self.micro_batch)
            yield "evaluation", segment.part, _sum(rows, played.at_peak)
            rows = _sum(rows, played.at_end)

    def peak(self) -> PeakInstant:
        """The peak of a step. With CUDA graphs, evaluations count too, because they need memory
        beside the graphs' pool."""
        return _largest((*self.instants(), *self.evaluation()) if self.keeps_step else self.instants())

    def peaks(self) -> dict[str, float]:
        """Device bytes at the peak of each phase, in the order in which the phases run."""
        found: dict[str, float] = {}
        for phase, _, rows in (*self.instants(), *self.evaluation()):
            found[phase] = max(found.get(phase, 0.0), sum(rows.values()))
        return {**found, **self.peaks_outside_steps()}

    def peaks_outside_steps(self) -> dict[str, float]:
        """Device bytes at the peak of each phase outside the steps: those before the first step,
        and the checkpoint.

        A checkpoint gathers sharded tensors in host memory, a few files at a time.
        """
        rows = self.row_bytes()
        fixed = sum(self.fixed.values())
        checkpoint = sum(rows.values()) + (self.saving if self.host_batch else 0.0)
        return {**{name: size + fixed for name, size in self.phases.items()}, "checkpoint": checkpoint}

    def _update_bytes(self) -> float:
        """Temporary bytes of the update at its peak."""
        if self.update_in_backward or not self.updates:
            return 0.0
        largest, left, leaving = 0, dict[int, int](), 0
        order = sorted(self.updates.values(), key=lambda update: update.group)
        order = [update for update in order if update.operations or not update.elements]  # others are part of a batch
        for update, following in zip(order, [*order[1:], None], strict=True):
            beside = leaving + update.comes + (following.comes if following is not None else 0)
            largest = max(largest, update.transient_bytes + left.get(update.group, 0) + beside)
            left[update.group], leaving = update.left_bytes, update.leaves
        together = sum(update.foreach_bytes for update in self.updates.values())
        return max(largest, together) if self.foreach else largest

    def operations(self) -> Iterator[tuple[str, str, Operation, float]]:
        """(phase, part, operation, how often it runs) for a whole step; sizes at this
        micro-batch."""
        for segment in self.training:
            for operation in segment.timeline.operations:
                yield segment.phase, segment.part, operation, operation.count.at(self.micro_batch) * self.micro_batches
        for operation in self.whole_step:
            yield "optimizer", "whole step", operation, operation.count.at(1)
        for update in self.updates.values():
            for operation in update.operations:
                yield "optimizer", "update", operation, operation.count.at(1)


_IN_A_GRAPH = ("forward", "backward")
_OF_A_GRAPH = ("activations", "temporaries", "gradients")  # rows in a CUDA graph's pool


def _messages(size: BatchLinear, phase: str) -> tuple[Segment, Segment]:
    """Two segments: one allocates messages of `size` bytes before an action, one frees them after
    it."""
    buffer = Buffer(size, "temporaries", "message")
    allocate, free = (Timeline(((buffer, sign),)) for sign in (1, -1))
    return Segment("messages", phase, allocate), Segment("messages", phase, free)


def _sum(rows: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    return {**rows, **{row: rows[row] + size for row, size in more.items() if size}}


def _sum_all(rows: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    return {row: rows.get(row, 0.0) + more.get(row, 0.0) for row in {**rows, **more}}


def _largest(instants: Iterable[tuple[str, str, dict[str, float]]]) -> PeakInstant:
    best = PeakInstant()
    for phase, part, rows in instants:
        total = sum(rows.values())
        if total > best.total:
            best = PeakInstant(total, rows, phase, part)
    return best


def cost_in_trace(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """The `cost` of a method that is applied before the trace: the ledger contains its changes
    already."""
    return ledger
