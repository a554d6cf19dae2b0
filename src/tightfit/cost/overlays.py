"""Overlays add the memory that is in no segment of a recorded step: gradient buckets and unsharded
parameters.

`Ledger.instants` replays a step segment by segment into a `StepMemory`. It tells an overlay when
the step, a micro-batch and a segment begin and end, and the overlay adds bytes:

- `Overlay` adds nothing: each gradient stays where backward allocates it.
- `BucketOverlay` moves complete gradients to the buckets in which they are reduced (data
  parallelism, ZeRO-1, ZeRO-2).
- `ShardOverlay` gathers the parameters of one block at a time and reduces its gradients (ZeRO-3).

Example: backward has completed 60 of 100 MiB of gradients. In the recorded step,
`free_completed_gradients` (`cost/recorded_step.py`) frees each gradient when it is complete, because
it is copied to a bucket. `BucketOverlay` adds the buckets. With buckets of 25 MiB, two are full and
the third is partly filled. A bucket is allocated whole, so the overlay adds 3 x 25 = 75 MiB.
"""

from __future__ import annotations

from tightfit.cost.entries import BucketedReduction, MicroBatchRun, ShardedParameters
from tightfit.cost.recorded_step import ReplayedSegment, Segment

Rows = dict[str, float]  # bytes by row of the ledger
Instant = tuple[str, str, Rows]  # (phase, part, bytes by row)


def add_rows(rows: Rows, *others: Rows) -> Rows:
    """Add bytes row by row. `rows` must have every row of `others`."""
    for other in others:
        rows = {**rows, **{row: rows[row] + size for row, size in other.items() if size}}
    return rows


class StepMemory:
    """Device bytes by row while a step is replayed.

    rows      bytes by row at the current point of the replay
    instants  (phase, part, bytes by row) of each instant that `note` was called for, in order
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.instants: list[Instant] = []

    def change(self, change: Rows) -> None:
        """Add these bytes to the rows (negative bytes: free them) until a later change."""
        self.rows = add_rows(self.rows, change)

    def note(self, phase: str, part: str, *beside: Rows) -> None:
        """Add an instant at which the bytes of `beside` are allocated in addition to `rows`."""
        self.instants.append((phase, part, add_rows(self.rows, *beside)))

    def free_gradients(self) -> None:
        self.rows = {**self.rows, "gradients": 0.0}


class Overlay:
    """The overlay that adds nothing: gradients stay where backward allocates them. Base class of the
    other overlays."""

    def begin_step(self, memory: StepMemory) -> None:
        memory.note("forward", "start")

    def begin_run(self, run: MicroBatchRun) -> None:
        """Called when a micro-batch, or an action of a pipeline, begins."""

    def at_peak(self, segment: Segment, replayed: ReplayedSegment) -> Rows:
        """Return the bytes that the overlay adds at the segment's peak."""
        return {}

    def end_segment(self, memory: StepMemory, segment: Segment, replayed: ReplayedSegment) -> None:
        """Called when a segment has ended. `memory` contains the buffers that it did not free."""

    def end_run(self, memory: StepMemory, run: MicroBatchRun) -> None:
        """Called when a micro-batch, or an action of a pipeline, has ended."""

    def free_gradients(self) -> None:
        """Called when an update has used and freed all gradients."""

    def end_backward(self, memory: StepMemory) -> None:
        """Called when the last backward of the step has ended. Changes `memory` to the bytes that
        are allocated when the update begins."""

    def end_step(self, memory: StepMemory) -> None:
        """Called when the update has ended."""


class BucketOverlay(Overlay):
    """Adds the buckets in which gradients are reduced while backward runs.

    whole       bytes of all gradients
    done        bytes of the gradients that the current micro-batch has completed and moved to
                buckets
    arrived     bytes of the reduced gradients of earlier micro-batches
    reduces     whether the current micro-batch reduces its gradients
    moves_sums  whether a gradient that is moved to a bucket is a sum over micro-batches, which
                `memory` contains and which is then freed
    """

    def __init__(self, reduction: BucketedReduction, whole: float) -> None:
        self.reduction, self.whole = reduction, whole
        self.done = self.arrived = 0.0
        self.reduces = self.moves_sums = False

    def begin_step(self, memory: StepMemory) -> None:
        memory.note("forward", "start", {"communication": self.reduction.coming if self.reduction.stays else 0.0})

    def begin_run(self, run: MicroBatchRun) -> None:
        self.done, self.reduces = 0.0, run.reduces
        # `memory` contains the sums over the earlier micro-batches until they move to buckets
        self.moves_sums = run.later and not self.reduction.always

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
        if self.reduction.coming:
            memory.free_gradients()
            memory.note("optimizer", "gather", {"communication": self.reduction.coming})

    def _rows_after(self, done: float) -> Rows:
        """Bytes of shards and buckets, by row, when `done` bytes of gradients are complete."""
        rows = self.reduction.rows_during(done, self.whole)
        if self.arrived and self.reduction.shards > 1:  # a new shard, before it is added to the sum
            rows["communication"] += 2 * self.reduction.bucket / self.reduction.shards
        return {**rows, "gradients": max(rows["gradients"], self.arrived)}


class ShardOverlay(Overlay):
    """Adds the parameters that are unsharded while their block computes (ZeRO-3, FSDP), and the
    sharded gradients.

    whole        bytes of the gradients that this device keeps after each micro-batch
    in_pipeline  whether the ledger is that of a pipeline rank. The gradients of its previous action
                 may still be being reduced when an action begins
    done         bytes of the gradients that the current micro-batch has completed and reduced
    arrived      bytes of the gradient shards of earlier micro-batches
    """

    def __init__(self, sharded: ShardedParameters, whole: float, in_pipeline: bool) -> None:
        self.sharded, self.whole, self.in_pipeline = sharded, whole, in_pipeline
        self.done = self.arrived = 0.0

    def begin_step(self, memory: StepMemory) -> None:
        memory.change({"communication": self.sharded.rest})
        memory.note("forward", "start")

    def begin_run(self, run: MicroBatchRun) -> None:
        self.done = 0.0

    def at_peak(self, segment: Segment, replayed: ReplayedSegment) -> Rows:
        return {"communication": self._unsharded_bytes(segment), "gradients": self._shard_bytes()}

    def end_segment(self, memory: StepMemory, segment: Segment, replayed: ReplayedSegment) -> None:
        made = replayed.completed_gradients[1]
        if segment.block is None or not made:  # gradients outside of blocks are reduced at the end
            return
        reduced = self.sharded.reduced * (1 + 1 / self.sharded.shards)
        memory.note(segment.phase, "reduce", {"communication": reduced, "gradients": self._shard_bytes()})
        self.done += made
        memory.change({"gradients": -made})

    def end_run(self, memory: StepMemory, run: MicroBatchRun) -> None:
        if not run.ends:
            return
        outside_blocks = memory.rows["gradients"]
        memory.note("backward", "reduce", {"gradients": self._shard_bytes(), "communication": outside_blocks})
        memory.change({"gradients": -outside_blocks})
        self.arrived = self.whole

    def free_gradients(self) -> None:
        self.arrived = 0.0

    def end_backward(self, memory: StepMemory) -> None:
        memory.change({"communication": -self.sharded.rest, "gradients": self.arrived})

    def _shard_bytes(self) -> float:
        """Bytes of the gradient shards: the shards of earlier micro-batches, or the current
        micro-batch's shards if they are larger."""
        return max(self.arrived, self.done * self.sharded.reduce_dtype_ratio / self.sharded.shards)

    def _unsharded_bytes(self, segment: Segment) -> float:
        """Bytes of the unsharded tensors while a block computes; 0 for a segment outside of blocks.

        These are the block's parameters and, if they are prefetched, the next block's. In backward
        the gradients that are being reduced count, too, if another block has computed some before.
        """
        if segment.block is None:
            return 0.0
        in_backward = segment.phase == "backward"
        size = self.sharded.block
        if in_backward or self.sharded.ahead:
            size += self.sharded.prefetched
        if in_backward and (self.done > 0 or self.in_pipeline):
            size += self.sharded.reduced
        return size


__all__ = ["BucketOverlay", "Instant", "Overlay", "Rows", "ShardOverlay", "StepMemory", "add_rows"]
