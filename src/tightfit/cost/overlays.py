"""Overlays add memory that is in no segment of a recorded step: gradient buckets and unsharded
parameters.

`Ledger.instants` replays a step segment by segment into a `StepMemory`. It tells an overlay when
the step, a micro-batch and a segment begin and end, and the overlay adds bytes:

- `Overlay` adds nothing: each gradient stays where backward allocates it.
- `BucketOverlay` moves complete gradients to the buckets in which they are reduced (data
  parallelism, ZeRO-1, ZeRO-2).
- `ShardOverlay` gathers the parameters of one block at a time and reduces its gradients (ZeRO-3).

Example: backward has completed 60 of 100 MiB of gradients. In the recorded step,
`free_completed_gradients` (`cost/recorded_step.py`) frees each gradient when it is complete,
because it is copied to a bucket. `BucketOverlay` adds the buckets. With buckets of 25 MiB, two are
full and the third is partly filled. A bucket is allocated whole, so the overlay adds 3 x 25 = 75
MiB.
"""

from __future__ import annotations

from typing import Any

from tightfit.cost.entries import BucketedReduction, MicroBatchRun, ShardedParameters
from tightfit.cost.recorded_step import ReplayedSegment, Segment

Rows = dict[str, float]  # bytes by row of the ledger
Instant = tuple[str, str, Rows]  # (phase, part, bytes by row)


def add_rows(rows: Rows, *others: Rows) -> Rows:
    """Return `rows` plus the bytes of `others`, row by row. `rows` must have every row of `others`,
    and is not changed."""
    for other in others:
        rows = {**rows, **{row: rows[row] + size for row, size in other.items() if size}}
    return rows


class StepMemory:
    """The device memory, in bytes by row, while a step is replayed.

    rows      row -> bytes at the current point of the replay
    instants  (phase, part, bytes by row) of each instant for which `note` was called, in order
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.instants: list[Instant] = []

    def change(self, change: Rows) -> None:
        """Add bytes to the rows, from now on. `change` maps a row to the bytes that are allocated;
        negative bytes are freed."""
        self.rows = add_rows(self.rows, change)

    def note(self, phase: str, part: str, *beside: Rows) -> None:
        """Append an instant to `instants`. Its bytes are those of `rows` now, plus those of
        `beside` (row -> bytes), which are allocated only at this instant.

        phase, part  when the instant is, such as "backward", "block"
        """
        self.instants.append((phase, part, add_rows(self.rows, *beside)))

    def free_gradients(self) -> None:
        self.rows = {**self.rows, "gradients": 0.0}


class Overlay:
    """Base class of the overlays, which add memory to a replayed step. This class adds nothing:
    gradients stay where backward allocates them."""

    def state(self) -> tuple[Any, ...]:
        """Return everything that the overlay remembers between two micro-batches, or between two
        actions of a pipeline."""
        return ()

    def begin_step(self, memory: StepMemory) -> None:
        memory.note("forward", "start")

    def begin_run(self, run: MicroBatchRun) -> None:
        """Called when a micro-batch, or an action of a pipeline, begins. `run` says what it does
        with gradients."""

    def at_peak(self, segment: Segment, replayed: ReplayedSegment) -> Rows:
        """Return the bytes, by row, that the overlay adds at the peak of a segment. `replayed` has
        the segment's own bytes."""
        return {}

    def end_segment(self, memory: StepMemory, segment: Segment, replayed: ReplayedSegment) -> None:
        """Called when a segment has ended. `memory` already contains the buffers that the segment
        allocated and did not free; the overlay changes it. `replayed` has the segment's own
        bytes."""

    def end_run(self, memory: StepMemory, run: MicroBatchRun) -> None:
        """Called when a micro-batch, or an action of a pipeline, has ended. The overlay changes
        `memory`."""

    def free_gradients(self) -> None:
        """Called when an optimizer update has used and freed all gradients. The overlay then adds
        no gradients."""

    def end_backward(self, memory: StepMemory) -> None:
        """Called when the last backward of the step has ended. The overlay changes `memory` to the
        bytes that are allocated when the update begins."""

    def end_step(self, memory: StepMemory) -> None:
        """Called when the update has ended. The overlay may add instants to `memory`."""


class BucketOverlay(Overlay):
    """Adds the buckets in which gradients are reduced over the data-parallel ranks while backward
    runs.

    reduction   the size of a bucket, and how gradients are reduced
    whole       bytes of all gradients
    done        bytes of the gradients that the current micro-batch has completed and moved to
                buckets
    arrived     bytes of the reduced gradients of earlier micro-batches
    reduces     whether the current micro-batch reduces its gradients
    moves_sums  whether a gradient that is moved to a bucket is a sum over micro-batches. `memory`
                contains such a sum, so it is freed there
    """

    def __init__(self, reduction: BucketedReduction, whole: float) -> None:
        self.reduction, self.whole = reduction, whole
        self.done = self.arrived = 0.0
        self.reduces = self.moves_sums = False

    def state(self) -> tuple[Any, ...]:
        return self.done, self.arrived, self.reduces, self.moves_sums

    def begin_step(self, memory: StepMemory) -> None:
        memory.note(
            "forward",
            "start",
            {"communication": self.reduction.gather_bytes if self.reduction.keeps_gather_buffers else 0.0},
        )

    def begin_run(self, run: MicroBatchRun) -> None:
        self.done, self.reduces = 0.0, run.reduces
        # `memory` contains the sums over the earlier micro-batches until they move to buckets
        self.moves_sums = run.later and not self.reduction.each_micro_batch

    def at_peak(self, segment: Segment, replayed: ReplayedSegment) -> Rows:
        if not self.reduces:
            return {"gradients": self.arrived}
        return self._rows_after(self.done + replayed.completed_gradients[0])

    def end_segment(self, memory: StepMemory, segment: Segment, replayed: ReplayedSegment) -> None:
        made = replayed.completed_gradients[1]
        if not self.reduces or not made:
            return
        if self.moves_sums:
            memory.change({"gradients": -made})
        self.done += made
        last = {"temporaries": replayed.largest_gradient}  # allocated until it is copied to a bucket
        memory.note(segment.phase, segment.part, self._rows_after(self.done), last)

    def end_run(self, memory: StepMemory, run: MicroBatchRun) -> None:
        if self.reduces:
            self.arrived = self.reduction.rows_during(self.whole, self.whole)["gradients"]

    def free_gradients(self) -> None:
        self.arrived = 0.0

    def end_backward(self, memory: StepMemory) -> None:
        memory.change({"gradients": self.arrived})

    def end_step(self, memory: StepMemory) -> None:
        if self.reduction.gather_bytes:
            memory.free_gradients()
            memory.note("optimizer", "gather", {"communication": self.reduction.gather_bytes})

    def _rows_after(self, done: float) -> Rows:
        """Return the bytes of gradient shards and of buckets, by row, when `done` bytes of
        gradients are complete."""
        rows = self.reduction.rows_during(done, self.whole)
        if self.arrived and self.reduction.shards > 1:  # a new shard, before it is added to the sum
            rows["communication"] += 2 * self.reduction.bucket_bytes / self.reduction.shards
        return {**rows, "gradients": max(rows["gradients"], self.arrived)}


class ShardOverlay(Overlay):
    """Adds the parameters that are unsharded while their block computes (ZeRO-3, FSDP), and the
    sharded gradients.

    sharded      bytes of a block's parameters and gradients, and the number of shards
    whole        bytes of the gradients that this device keeps after each micro-batch
    in_pipeline  whether the ledger is that of a pipeline rank. The gradients of its previous action
                 may still be in reduction when an action begins
    done         bytes of the gradients that the current micro-batch has completed and reduced
    arrived      bytes of the gradient shards of earlier micro-batches
    reduces      whether the current micro-batch reduces its gradients. If not, they are summed in
                 full, in fp32, and `memory` contains the sums
    sums         whether `memory` contains sums of earlier micro-batches, to which gradients are added
    outside      bytes of the gradients outside of blocks that the current micro-batch has completed
    """

    def __init__(self, sharded: ShardedParameters, whole: float, in_pipeline: bool) -> None:
        self.sharded, self.whole, self.in_pipeline = sharded, whole, in_pipeline
        self.done = self.arrived = self.outside = 0.0
        self.reduces, self.sums = True, False

    def state(self) -> tuple[Any, ...]:
        return self.done, self.arrived

    def begin_step(self, memory: StepMemory) -> None:
        memory.change({"communication": self.sharded.outside_bytes})
        memory.note("forward", "start")

    def begin_run(self, run: MicroBatchRun) -> None:
        self.done = self.outside = 0.0
        self.reduces = run.reduces or self.sharded.each_micro_batch
        self.sums = run.later and not self.sharded.each_micro_batch

    def at_peak(self, segment: Segment, replayed: ReplayedSegment) -> Rows:
        return {"communication": self._unsharded_bytes(segment), "gradients": self._shard_bytes()}

    def end_segment(self, memory: StepMemory, segment: Segment, replayed: ReplayedSegment) -> None:
        made = replayed.completed_gradients[1]
        if not self.reduces:
            ratio = self.sharded.outside_sum_ratio if segment.block is None else self.sharded.block_sum_ratio
            memory.change({"gradients": -made if self.sums else made * (ratio - 1)})
            return
        if segment.block is None or not made:  # gradients outside of blocks are reduced at the end
            self.outside += made
            return
        reduced = self.sharded.reduced_bytes * (1 + 1 / self.sharded.shards)
        memory.note(segment.phase, "reduce", {"communication": reduced, "gradients": self._shard_bytes()})
        self.done += made
        memory.change({"gradients": -made * (1 + self.sharded.block_sum_ratio * self.sums)})

    def end_run(self, memory: StepMemory, run: MicroBatchRun) -> None:
        if not run.ends or not self.reduces:
            return
        outside_blocks = memory.rows["gradients"] if self.sharded.each_micro_batch else self.outside
        memory.note("backward", "reduce", {"gradients": self._shard_bytes(), "communication": outside_blocks})
        memory.change({"gradients": -memory.rows["gradients"]})
        self.arrived = self.whole

    def free_gradients(self) -> None:
        self.arrived = 0.0

    def end_backward(self, memory: StepMemory) -> None:
        memory.change({"communication": -self.sharded.outside_bytes, "gradients": self.arrived})

    def _shard_bytes(self) -> float:
        """Return the bytes of the gradient shards: those of earlier micro-batches, or those of the
        current micro-batch if they are larger."""
        return max(self.arrived, self.done * self.sharded.reduce_dtype_ratio / self.sharded.shards)

    def _unsharded_bytes(self, segment: Segment) -> float:
        """Return the bytes of the unsharded tensors while a block computes; 0 for a segment outside
        of blocks.

        These are the block's parameters and, if they are prefetched, the next block's. In backward,
        the gradients that are being reduced count, too, if another block has computed gradients
        before.
        """
        if segment.block is None:
            return 0.0
        in_backward = segment.phase == "backward"
        size = self.sharded.block_bytes
        if in_backward or self.sharded.prefetches_in_forward:
            size += self.sharded.prefetched_bytes
        if in_backward and self.reduces and (self.done > 0 or self.in_pipeline):
            size += self.sharded.reduced_bytes
        return size


__all__ = ["BucketOverlay", "Instant", "Overlay", "Rows", "ShardOverlay", "StepMemory", "add_rows"]
