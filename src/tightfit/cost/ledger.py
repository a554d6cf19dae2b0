"""The ledger: what one optimizer step costs one device, in bytes by row (use of memory) and in
operations.

It holds the recorded step of one micro-batch (see `cost/recorded_step.py`), the parameters and
their updates, and the communication. Sizes are linear in the samples of a micro-batch, so one
ledger holds for every micro-batch size. The first ledger is made from a trace of the model, and
each method's `cost` returns an edited one. `peak` replays the whole step and finds the instant with
the most memory. Memory that is in no segment of the recorded step, such as gradient buckets, is
added by an overlay (`cost/overlays.py`).

Example: one device, fp32, AdamW, 1,000 MiB of parameters. Parameters (1,000) and optimizer states
(2,000) live through the whole step. Forward adds the saved activations. Backward frees them while
the gradients grow to 1,000. With 4,000 MiB of saved activations the peak is about 7,000 MiB, at the
beginning of backward. With 500 MiB it is about 4,000 MiB, at the end of backward or in the update.
Temporaries come on top.
"""

from __future__ import annotations

import copy
from collections import Counter
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
    passes_of,
)
from tightfit.cost.overlays import BucketOverlay, Instant, Overlay, ShardOverlay, StepMemory, add_rows
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
from tightfit.cost.remembered import remembered
from tightfit.machine import Machine
from tightfit.plan import Plan

ROWS = ("parameters", "gradients", "optimizer", "activations", "temporaries", "communication", "allocator", "runtime")


@dataclass(frozen=True)
class Ledger:
    """The ledger of one device: all memory and work of one optimizer step. Sizes are in bytes.

    micro_batch              number of samples in one micro-batch
    micro_batches            number of micro-batches in one step
    training                 recorded step of one micro-batch: forward, then backward
    inference                function that returns the recorded step of one micro-batch of an evaluation.
                             Its first call traces the model
    parameters               the model's parameters and buffers
    blocks                   number of repeated blocks
    experts                  for each kind of mixture of experts: (number of experts, number that a token
                             chooses)
    dataflow                 function that returns which tensors a forward computes from which
                             (`models/dataflow.py`), for the methods that cut the model
    check_block_groups       function that raises InputError if the model's blocks cannot be recomputed
                             in groups
    updates                  parameter name -> the optimizer's update of this parameter
    once_per_step            operations that run once in a step and belong to no segment and no update,
                             such as gradient clipping
    batch_bytes              bytes of one sample's data, in device memory (on a CPU: in host memory)
    batches_ahead            number of micro-batches of data in device memory beside the current one
    update_in_backward       whether each parameter is updated as soon as its gradient is complete
    foreach                  whether the optimizer updates all parameters with multi-tensor kernels
    host_batch               whether the device is the CPU, so that the data of all micro-batches of a
                             step is in its memory
    caches_memory            whether the process keeps freed memory and uses it again
    uses_cuda_graphs         whether the memory of forward and backward is kept from step to step and
                             used by nothing else, as the memory pool of CUDA graphs is
    mmap_threshold           if caches_memory is False: an allocation of at least this many bytes gets a
                             memory mapping of its own, whose pages are faulted in again each time. None
                             if the allocator adapts the threshold (see `planner/allocators/glibc.py`)
    fixed                    row -> bytes that live through the whole step and do not belong to the
                             model, such as those of the CUDA context
    phases                   name of a phase before the first step -> its peak in bytes, without `fixed`
    host_work_s              purpose -> seconds of the host's work that is done once in a step
    overlapped_work          the keys of `host_work_s` whose work overlaps with the step's computation
    sample_s                 measured seconds to prepare one sample
    stream_bytes             the most bytes of host memory that a process needs to read streamed data; 0
                             if data is not streamed
    host                     purpose -> bytes of host memory that are not this device's memory
    transient_host_bytes     purpose -> bytes of host memory that are used only before the first step or
                             between steps
    disk                     purpose -> bytes of files
    checkpoint_buffer_bytes  bytes of a checkpoint's files that each process holds in host memory while
                             it writes them
    compile_s                seconds of compilation before the first step
    replica_sum_bytes        bytes of the flat copy in which gradient shards are all-reduced over the
                             replicas after backward (ZeRO-1 and -2)
    bucketed_reduction       how gradients are reduced in buckets over the data-parallel ranks; None if
                             they are not
    sharded_parameters       how parameters are gathered and resharded; None if they are not sharded
    messages                 all communication of a step
    offloads_gradients       whether each gradient is offloaded as soon as it is complete
    pipeline_rank            the pipeline rank that this ledger describes
    rank_program             what this pipeline rank does in a step; None without a pipeline
    """

    micro_batch: int
    micro_batches: int
    training: tuple[Segment, ...]
    inference: Callable[[], tuple[Segment, ...]]
    parameters: tuple[Parameter, ...]
    blocks: int = 0
    experts: tuple[tuple[int, int], ...] = ()
    dataflow: Callable[[], Any] | None = None
    check_block_groups: Callable[[], None] | None = None
    updates: dict[str, Update] = field(default_factory=dict)
    once_per_step: tuple[Operation, ...] = ()
    batch_bytes: float = 0.0
    batches_ahead: int = 0
    update_in_backward: bool = False
    foreach: bool = False
    host_batch: bool = False
    caches_memory: bool = False
    uses_cuda_graphs: bool = False
    mmap_threshold: float | None = None
    fixed: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    host_work_s: dict[str, float] = field(default_factory=dict)
    overlapped_work: frozenset[str] = frozenset()
    sample_s: float = 0.0
    stream_bytes: float = 0.0
    host: dict[str, float] = field(default_factory=dict)
    transient_host_bytes: dict[str, float] = field(default_factory=dict)
    disk: dict[str, float] = field(default_factory=dict)
    checkpoint_buffer_bytes: float = 0.0
    compile_s: float = 0.0
    replica_sum_bytes: float = 0.0
    bucketed_reduction: BucketedReduction | None = None
    sharded_parameters: ShardedParameters | None = None
    messages: tuple[Message, ...] = ()
    offloads_gradients: bool = False
    pipeline_rank: int = 0
    rank_program: RankProgram | None = None

    def row_bytes(self) -> dict[str, float]:
        """Return the bytes that live from step to step, by row: parameters, optimizer states and
        the bytes of `fixed`. The other rows are 0."""
        rows = dict.fromkeys(ROWS, 0.0)
        rows["parameters"] = sum(parameter.bytes for parameter in self.parameters)
        if self.rank_program is not None:
            rows["parameters"] += self.rank_program.versions * self.trainable_bytes()
        rows["optimizer"] = sum(update.state_bytes for update in self.updates.values())
        for row, size in self.fixed.items():
            rows[row] += size
        return rows

    def gradient_bytes(self) -> float:
        """Return the bytes of all gradients that this device keeps."""
        return sum(parameter.gradient_bytes for parameter in self.parameters if parameter.trainable)

    def gradient_sums(self) -> tuple[Operation, ...]:
        """Return the additions that sum the gradients of a step's micro-batches. Each micro-batch but
        the first adds its gradients to those before.

        Gradients that are offloaded are summed on the host. Gradients that are sharded in each
        micro-batch are summed as shards.
        """
        later = self.micro_batches - 1
        if later == 0 or self.offloads_gradients or self.update_in_backward:
            return ()
        shards, sharded = 1.0, self.sharded_parameters
        if sharded is not None and not sharded.each_micro_batch:
            shards = 1 / sharded.shards  # full gradients, of parameters of which this device has shards
        elif self.bucketed_reduction is not None and self.bucketed_reduction.each_micro_batch:
            shards = self.bucketed_reduction.shards
        return _gradient_sums(self.parameters, later, shards)

    def trainable_bytes(self) -> float:
        """Return the bytes of all trainable parameters that this device keeps."""
        return sum(parameter.bytes for parameter in self.parameters if parameter.trainable)

    def instants(self) -> Iterator[Instant]:
        """Yield (phase, part, bytes by row) for points in time of one training step, in order. They
        are the peak of each segment (such as the backward of one block), and instants between
        segments, such as a reduction.

        The first micro-batch allocates the gradients. Each later micro-batch adds its gradients to
        the existing ones.
        """
        if not self.uses_cuda_graphs:
            yield from self._replayed_step()
            return
        pool = self._pool_bytes()
        for phase, part, rows in self._replayed_step():
            inside = sum(rows[row] for row in _OF_A_GRAPH)
            beside = rows if phase in _IN_A_GRAPH else add_rows(rows, {"temporaries": max(pool - inside, 0.0)})
            yield phase, part, beside

    def _pool_bytes(self) -> float:
        """Return the bytes of the memory pool of CUDA graphs, which is kept from step to step: the
        most that activations, temporaries and gradients need together at one time in forward and
        backward."""
        steps = (rows for phase, _, rows in self._replayed_step() if phase in _IN_A_GRAPH)
        return max(sum(rows[row] for row in _OF_A_GRAPH) for rows in steps)

    def _replayed_step(self, distinct: bool = False) -> list[Instant]:
        """Return (phase, part, bytes by row) for the instants of a training step, in order. The
        memory pool of CUDA graphs is not counted.

        distinct  leave out the instants of a pipeline's action that begins with the same bytes as
                  an equal action before it, because its instants are those of that action
        """
        memory, overlay = StepMemory(self.row_bytes()), self._overlay()
        batches = self.micro_batches if self.host_batch else 1 + self.batches_ahead
        memory.change({"activations": self.batch_bytes * self.micro_batch * batches})
        update = {"temporaries": self._update_bytes()}
        known: dict[Timeline, ReplayedSegment] = {}
        overlay.begin_step(memory)
        # key: an action, and the bytes when it begins; value: the action, and the bytes when it ends
        run_ends: dict[Any, tuple[MicroBatchRun, dict[str, float], Overlay]] = {}
        for run in self.micro_batch_runs():
            key = id(run), *memory.rows.items(), *overlay.state()
            if distinct and key in run_ends:
                _, memory.rows, after = run_ends[key]
                overlay = copy.copy(after)
                continue
            overlay.begin_run(run)
            for segment in run.segments:
                if segment.timeline not in known:
                    known[segment.timeline] = replay(segment.timeline, self.micro_batch)
                replayed = known[segment.timeline]
                memory.note(segment.phase, segment.part, replayed.at_peak, overlay.at_peak(segment, replayed))
                memory.change(replayed.at_end)
                overlay.end_segment(memory, segment, replayed)
            overlay.end_run(memory, run)
            if run.updates:
                memory.note("optimizer", "update", update)
                memory.free_gradients()
                overlay.free_gradients()
            if distinct:
                run_ends[key] = run, memory.rows, copy.copy(overlay)
        overlay.end_backward(memory)
        if self.replica_sum_bytes:
            memory.note("backward", "reduce", {"temporaries": self.replica_sum_bytes})
        memory.note("optimizer", "update", update)
        overlay.end_step(memory)
        return memory.instants

    def _overlay(self) -> Overlay:
        """Return the overlay that adds the plan's gradient buckets or unsharded parameters while a
        step is replayed."""
        if self.sharded_parameters is not None:
            return ShardOverlay(self.sharded_parameters, self.gradient_bytes(), self.rank_program is not None)
        if self.bucketed_reduction is not None:
            return BucketOverlay(self.bucketed_reduction, self.gradient_bytes())
        return Overlay()

    def model_flops(self) -> float:
        """Return the model FLOPs of one step, as MFU counts them (Chowdhery et al. 2022,
        arXiv:2204.02311, appendix B). In a pipeline, it is the mean over its ranks.

        A forward of all samples counts, with attention over all pairs even under a causal mask, and
        backward counts twice as much, or less if weights are frozen (`passes_of`). Recomputation does not count.
        """
        forward = sum(
            operation.flops.at(self.micro_batch) * operation.count.at(self.micro_batch)
            for segment in self.inference()
            for operation in segment.timeline.operations
        )
        ranks = len(self.rank_program.schedule) if self.rank_program is not None else 1
        weights = [(parameter.count, parameter.trainable) for parameter in self.parameters if not parameter.buffer]
        passes = passes_of(sum(count for count, trained in weights if trained), sum(count for count, _ in weights))
        return passes * forward * self.micro_batches / ranks

    def micro_batch_runs(self) -> Iterator[MicroBatchRun]:
        """Yield a `MicroBatchRun` for each micro-batch of a step, in order: the segments that it
        runs, and what happens to its gradients.

        Without a pipeline, only the first two micro-batches are yielded, because every later one
        equals the second. In a pipeline, there is one item for each action of this rank. Equal
        actions are one object.
        """
        if self.rank_program is not None:
            yield from self._actions_of_rank(self.rank_program)
            return
        steps = self.first_and_later(self.training, self.micro_batches)
        for number, segments in enumerate(steps):
            yield MicroBatchRun(segments, reduces=self._reduces(last=number == len(steps) - 1), later=number > 0)

    def _actions_of_rank(self, rank: RankProgram) -> Iterator[MicroBatchRun]:
        """Yield a `MicroBatchRun` for each action of the pipeline rank `rank`, in order. Its first
        segment allocates the messages that are in memory during the action, and its last segment
        frees them."""
        backward = {stage: self.first_and_later(part.backward, 2) for stage, part in rank.stage_programs.items()}
        weights = {stage: self.first_and_later(part.weights, 2) for stage, part in rank.stage_programs.items()}
        done: set[tuple[str, int]] = set()  # kind and stage of the backward actions so far
        known: dict[Any, MicroBatchRun] = {}
        for number, action in enumerate(rank.schedule[rank.pipeline_rank]):
            stage, micro_batch = action.stage, action.micro_batch % self.micro_batches
            last = micro_batch == self.micro_batches - 1
            later = micro_batch > 0 if rank.continuous else (action.kind, stage) in done
            resident = rank.resident_message_bytes(number)
            if action.kind == FORWARD:
                last = later = False
            else:
                done.add((action.kind, stage))
            key = action.kind, stage, last, later, resident
            if key not in known:
                known[key] = self._action_run(rank, *key, backward, weights)
            yield known[key]

    def _action_run(
        self,
        rank: RankProgram,
        kind: str,
        stage: int,
        last: bool,
        later: bool,
        resident: BatchLinear,
        backward: dict[int, list[tuple[Segment, ...]]],
        weights: dict[int, list[tuple[Segment, ...]]],
    ) -> MicroBatchRun:
        """Return the `MicroBatchRun` of an action of the pipeline rank `rank`.

        kind, stage        of the action
        last               whether its micro-batch is the last of the step
        later              whether gradients of earlier micro-batches exist
        resident           bytes of the messages that are in memory during the action
        backward, weights  stage -> its segments for the first and for later micro-batches
        """
        allocate, free = _messages(resident, "forward" if kind == FORWARD else "backward")
        if kind == FORWARD:
            forward = rank.stage_programs[stage].forward
            return MicroBatchRun((allocate, *forward, free), reduces=False, later=False, ends=False)
        completes = kind == WEIGHTS or not rank.stage_programs[stage].weights
        segments = (weights if kind == WEIGHTS else backward)[stage][int(later)]
        return MicroBatchRun(
            (allocate, *segments, free),
            reduces=self._reduces(last) and completes,
            later=later,
            ends=completes,
            updates=last and completes and rank.continuous,
        )

    def _reduces(self, last: bool) -> bool:
        """Return whether a micro-batch reduces its gradients over the data-parallel ranks, in
        buckets or (ZeRO-3) block by block.

        last  whether it is the last micro-batch of the step
        """
        if self.sharded_parameters is not None:
            return self.sharded_parameters.each_micro_batch or last
        return self.bucketed_reduction is not None and (self.bucketed_reduction.each_micro_batch or last)

    def first_and_later(self, training: tuple[Segment, ...], micro_batches: int) -> list[tuple[Segment, ...]]:
        """Return [first], or with several micro-batches [first, later]: the recorded step of the
        first micro-batch, and that of each later micro-batch.

        They differ in what happens to gradients. By default the first micro-batch allocates them,
        and a later one adds to them. A plan may also free gradients when they are complete, because
        they are reduced or applied at once; then both are the same.

        training       the recorded step of one micro-batch. Equal blocks share one timeline (their
                       list of allocations and frees) in it, and also in the results
        micro_batches  number of micro-batches in a step
        """
        edits: list[Callable[[Timeline], Timeline]] = []
        if self.update_in_backward:
            needed = {
                name: float(update.transient_bytes + update.upload_bytes) for name, update in self.updates.items()
            }
            edits.append(lambda timeline: fuse_updates(timeline, needed))
        if self.offloads_gradients:
            edits.append(free_completed_gradients)
        first = edit_backward(training, edits)
        if self.offloads_gradients or self.sharded_parameters is not None:
            return [first] * min(micro_batches, 2)
        if self.bucketed_reduction is not None and (self.bucketed_reduction.each_micro_batch or micro_batches == 1):
            first = edit_backward(first, [free_completed_gradients])
            return [first] * min(micro_batches, 2)
        return [first] if micro_batches == 1 else [first, edit_backward(first, [accumulate_gradients])]

    def evaluation(self) -> Iterator[Instant]:
        """Yield (phase, part, bytes by row) for points in time of one evaluation micro-batch, in
        order: the peak of each segment, such as the forward of one block. The phase is always
        "evaluation"."""
        rows = self.row_bytes()
        rows["activations"] += self.batch_bytes * self.micro_batch * (1 + self.batches_ahead)
        if self.uses_cuda_graphs:
            rows["temporaries"] += self._pool_bytes()
        for segment in self.inference():
            played = replay(segment.timeline, self.micro_batch)
            yield "evaluation", segment.part, add_rows(rows, played.at_peak)
            rows = add_rows(rows, played.at_end)

    def peak(self) -> PeakInstant:
        """Return the instant of a step with the most memory. With CUDA graphs the instants of
        evaluations count, too, because evaluations need memory beside the graphs' pool."""
        if self.uses_cuda_graphs:
            return _largest((*self.instants(), *self.evaluation()))
        return _largest(self._replayed_step(distinct=True))

    def peaks(self) -> dict[str, float]:
        """Return phase -> device bytes at its peak: first the phases of a step and of an
        evaluation, then the phases outside of steps."""
        found: dict[str, float] = {}
        for phase, _, rows in (*self.instants(), *self.evaluation()):
            found[phase] = max(found.get(phase, 0.0), sum(rows.values()))
        return {**found, **self.peaks_outside_steps()}

    def peaks_outside_steps(self) -> dict[str, float]:
        """Return phase -> device bytes at its peak, for each phase outside of the steps: the phases
        before the first step, and "checkpoint", the writing of a checkpoint.

        A checkpoint gathers sharded tensors in host memory, a few files at a time. So it needs more
        memory only on a CPU.
        """
        rows = self.row_bytes()
        fixed = sum(self.fixed.values())
        checkpoint = sum(rows.values()) + (self.checkpoint_buffer_bytes if self.host_batch else 0.0)
        return {**{name: size + fixed for name, size in self.phases.items()}, "checkpoint": checkpoint}

    def _update_bytes(self) -> float:
        """Return the bytes of temporary tensors at the peak of the optimizer update. They are 0 if
        parameters are updated in backward."""
        if self.update_in_backward or not self.updates:
            return 0.0
        largest, left, leaving = 0, dict[int, int](), 0
        order = sorted(self.updates.values(), key=lambda update: update.group)
        order = [update for update in order if update.operations or not update.elements]  # others are part of a batch
        for update, following in zip(order, [*order[1:], None], strict=True):
            beside = leaving + update.upload_bytes + (following.upload_bytes if following is not None else 0)
            largest = max(largest, update.transient_bytes + left.get(update.group, 0) + beside)
            left[update.group], leaving = update.held_into_next_bytes, update.download_bytes
        together = sum(update.foreach_bytes for update in self.updates.values())
        return max(largest, together) if self.foreach else largest

    def operations(self) -> Iterator[tuple[str, str, Operation, float]]:
        """Yield (phase, part, operation, how often the operation runs in a step) for each operation
        of a step.

        The FLOPs and bytes of an operation are those of one run. In the phases "forward" and
        "backward", they are functions of the number of samples in a micro-batch.
        """
        for segment in self.training:
            for operation in segment.timeline.operations:
                yield segment.phase, segment.part, operation, operation.count.at(self.micro_batch) * self.micro_batches
        for operation in self.once_per_step:
            yield "optimizer", "whole step", operation, operation.count.at(1)
        for update in self.updates.values():
            for operation in update.operations:
                yield "optimizer", "update", operation, operation.count.at(1)


_IN_A_GRAPH = ("forward", "backward")
_OF_A_GRAPH = ("activations", "temporaries", "gradients")  # rows in a CUDA graph's pool


@remembered(32)
def _gradient_sums(parameters: tuple[Parameter, ...], times: int, shards: float) -> tuple[Operation, ...]:
    """Return the additions that sum `times` + 1 gradients of each parameter, each divided into
    `shards`."""
    sizes = Counter(
        (
            parameter.gradient_bytes,
            "bfloat16" if parameter.bytes == parameter.gradient_bytes == 2 * parameter.count else "float32",
        )
        for parameter in parameters
        if parameter.trainable and parameter.gradient_bytes
    )
    return tuple(  # both terms are read, and the sum is written
        Operation("aten.add_", dtype, BatchLinear(), BatchLinear(3 * size / shards), count=BatchLinear(count * times))
        for (size, dtype), count in sizes.items()
    )


def _messages(size: BatchLinear, phase: str) -> tuple[Segment, Segment]:
    """Return two segments around a pipeline action: the first allocates `size` bytes for messages,
    the second frees them.

    phase  the action's phase, "forward" or "backward"
    """
    buffer = Buffer(size, "temporaries", "message")
    allocate, free = (Timeline(((buffer, sign),)) for sign in (1, -1))
    return Segment("messages", phase, allocate), Segment("messages", phase, free)


def _largest(instants: Iterable[Instant]) -> PeakInstant:
    best = PeakInstant()
    for phase, part, rows in instants:
        total = sum(rows.values())
        if total > best.total:
            best = PeakInstant(total, rows, phase, part)
    return best


def cost_in_trace(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Return `ledger` unchanged. This is the `cost` of a method that changes the model before it is
    traced: the recorded step contains the method's changes already."""
    return ledger
