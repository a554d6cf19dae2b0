"""What a step holds beside the buffers of its segments: gradient buckets and unsharded parameters.

`Ledger.instants` replays a step segment by segment into a `StepMemory`. It tells an overlay when
the step, a micro-batch and a segment begin and end. The overlay adds the bytes of its strategy:

- `Overlay` adds nothing: each gradient stays where backward makes it.
- `BucketOverlay` moves complete gradients to the buckets in which they are reduced (data
  parallelism, ZeRO-1, ZeRO-2).
- `ShardOverlay` gathers the parameters of one block at a time and reduces its gradients (ZeRO-3).

Example: a block's backward completes 60 MiB of gradients, which `free_completed_gradients` frees in
the recorded step. `BucketOverlay` has them in buckets of 25 MiB instead: it adds 75 MiB.
"""

from __future__ import annotations

from tightfit.cost.entries import BucketedReduction, MicroBatchRun, ShardedParameters
from tightfit.cost.recorded_step import ReplayedSegment, Segment

Rows = dict[str, float]  # bytes by row of the ledger
Instant = tuple[str, str, Rows]  # (phase, part, bytes by row)


def add_rows(rows: Rows, *others: Rows) -> Rows:
    """The sum of bytes by row. All rows of `others` are rows of `rows`."""
    for other in others:
        rows = {**rows, **{row: rows[row] + size for row, size in other.items() if size}}
    return rows


class StepMemory:
    """Device bytes by row while a step is replayed.

    rows      the bytes now
    instants  the bytes at each instant that was noted, in order
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.instants: list[Instant] = []

    def change(self, change: Rows) -> None:
        """Allocate bytes that stay, or free them (negative bytes)."""
        self.rows = add_rows(self.rows, change)

    def note(self, phase: str, part: str, *beside: Rows) -> None:
        """Note an instant at which the bytes of `beside` exist in addition."""
        self.instants.append((phase, part, add_rows(self.rows, *beside)))

    def free_gradients(self) -> None:
        self.rows = {**self.rows, "gradients": 0.0}


class Overlay:
    """The overlay of gradients that stay where backward makes them. Base class of the others."""

    def begin_step(self, memory: StepMemory) -> None:
        memory.note("forward", "start")

    def begin_run(self, run: MicroBatchRun) -> None:
        """A micro-batch, or an action of a pipeline, begins."""

    def at_peak(self, segment: Segment, replayed: ReplayedSegment) -> Rows:
        """What exists beside a segment's own buffers when these are largest."""
        return {}

    def end_segment(self, memory: StepMemory, segment: Segment, replayed: ReplayedSegment) -> None:
        """A segment has ended, and `memory` contains what it leaves."""

    def end_run(self, memory: StepMemory, run: MicroBatchRun) -> None:
        """A micro-batch, or an action of a pipeline, has ended."""

    def free_gradients(self) -> None:
        """An update has used all gradients."""

    def end_backward(self, memory: StepMemory) -> None:
        """The last backward of the step has ended: `memory` gets what the update begins with."""

    def end_step(self, memory: StepMemory) -> None:
        """The update has ended."""


class BucketOverlay(Overlay):
    """Gradients that are reduced in buckets while backward runs.

    whole    bytes of all gradients
    done     bytes of the gradients that this run has completed and moved to buckets
    arrived  bytes of the reduced gradients of earlier micro-batches
    """

    def __init__(self, reduction: BucketedReduction, whole: float) -> None:
        self.reduction, self.whole = reduction, whole
        self.done = self.arrived = 0.0
        self.reduces = self.moves_sums = False

    def begin_step(self, memory: StepMemory) -> None:
        memory.note("forward", "start", {"communication": self.reduction.coming if self.reduction.stays else 0.0})

    def begin_run(self, run: MicroBatchRun) -> None:
        self.done, self.reduces = 0.0, run.reduces
        # the first micro-batches' sums are in `memory`: they leave it when they move to the buckets
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
        last = {"temporaries": replayed.largest_gradient}  # exists until it is in its bucket
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
        """Bytes by row of shards and buckets when `done` bytes of gradients are complete."""
        rows = self.reduction.rows_during(done, self.whole)
        if self.arrived and self.reduction.shards > 1:  # a new shard, beside the sum
            rows["communication"] += 2 * self.reduction.bucket / self.reduction.shards
        return {**rows, "gradients": max(rows["gradients"], self.arrived)}


class ShardOverlay(Overlay):
    """Parameters that are unsharded only while their block computes (ZeRO-3, FSDP).

    whole         bytes of the gradients that this device keeps
    in_pipeline   whether an earlier action's gradients may still be reduced
    done          bytes of the gradients that this run has completed and reduced
    arrived       bytes of the gradient shards of earlier micro-batches
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
        if segment.block is None or not made:  # what is outside of blocks is reduced at the end
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
        """Bytes of the gradient shards: those of earlier micro-batches, or the new ones if they are
        larger."""
        return max(self.arrived, self.done * self.sharded.reduce_dtype_ratio / self.sharded.shards)

    def _unsharded_bytes(self, segment: Segment) -> float:
        """Bytes of the unsharded tensors while a block computes.

        They are its parameters; those of the next block, which are prefetched in backward; and in
        backward the gradients that are being reduced, if an earlier block has computed some.
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
