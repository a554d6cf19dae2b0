"""Gradient buckets and unsharded parameters beside a replayed step, by hand-made segments. Sizes in MiB."""

from __future__ import annotations

from tightfit.cost.entries import BucketedReduction, MicroBatchRun, ShardedParameters
from tightfit.cost.ledger import ROWS
from tightfit.cost.overlays import BucketOverlay, ShardOverlay, StepMemory
from tightfit.cost.recorded_step import ReplayedSegment, Segment, Timeline

BLOCK = Segment("block", "backward", Timeline(), block=0)
HEAD = Segment("head", "backward", Timeline())


def memory(**rows: float) -> StepMemory:
    return StepMemory({**dict.fromkeys(ROWS, 0.0), **rows})


def completing(size: float) -> ReplayedSegment:
    """A backward that completes gradients of this size, the largest of them of 10."""
    return ReplayedSegment({}, {}, (size / 2, size), 10.0)


def test_gradients_move_to_the_buckets_that_have_begun() -> None:
    held, overlay = memory(), BucketOverlay(BucketedReduction(1, 25.0, each_micro_batch=False), 100.0)
    overlay.begin_run(MicroBatchRun((), reduces=True, later=False))
    assert overlay.at_peak(BLOCK, completing(60.0)) == {"gradients": 50.0}  # 30 are complete
    overlay.end_segment(held, BLOCK, completing(60.0))
    ((phase, _, rows),) = held.instants
    assert phase == "backward"
    assert (rows["gradients"], rows["temporaries"]) == (75.0, 10.0)
    overlay.end_run(held, MicroBatchRun((), reduces=True, later=False))
    overlay.end_backward(held)
    assert held.rows["gradients"] == 100.0


def test_buckets_reuse_the_memory_of_earlier_sums() -> None:
    held, overlay = memory(gradients=100.0), BucketOverlay(BucketedReduction(4, 25.0, each_micro_batch=False), 100.0)
    overlay.begin_run(MicroBatchRun((), reduces=True, later=True))
    overlay.end_segment(held, BLOCK, completing(60.0))
    assert held.rows["gradients"] == 40.0
    ((_, _, rows),) = held.instants
    assert (rows["gradients"], rows["communication"]) == (40.0 + 60.0 / 4, 50.0)


def test_weights_are_gathered_where_the_gradients_were() -> None:
    held = memory(gradients=25.0)
    BucketOverlay(BucketedReduction(4, 25.0, each_micro_batch=False, gather_bytes=30.0), 100.0).end_step(held)
    ((phase, part, rows),) = held.instants
    assert (phase, part, rows["gradients"], rows["communication"]) == ("optimizer", "gather", 0.0, 30.0)


def test_unsharding_and_reduction_overlap_with_blocks() -> None:
    # bf16 gradients, which are reduced in fp32
    sharded = ShardedParameters(shards=4, block_bytes=8.0, outside_bytes=3.0, reduced_bytes=16.0, prefetched_bytes=8.0)
    run, held, overlay = MicroBatchRun((), False, False), memory(), ShardOverlay(sharded, 5.0, in_pipeline=False)
    overlay.begin_step(held)
    assert held.rows["communication"] == 3.0
    overlay.begin_run(run)
    assert overlay.at_peak(HEAD, completing(0.0))["communication"] == 0.0
    assert overlay.at_peak(BLOCK, completing(8.0)) == {"communication": 16.0, "gradients": 0.0}
    held.change({"gradients": 8.0})
    overlay.end_segment(held, BLOCK, completing(8.0))
    assert held.instants[-1][2]["communication"] == 3.0 + 16.0 * 1.25
    assert held.rows["gradients"] == 0.0
    # the gradient shards: 8 in bf16 are 16 in fp32, over 4 devices
    assert overlay.at_peak(BLOCK, completing(8.0)) == {"communication": 32.0, "gradients": 4.0}
    held.change({"gradients": 3.0})  # of the parameters outside of blocks
    overlay.end_run(held, run)
    assert held.instants[-1][2]["communication"] == 3.0 + 3.0
    overlay.end_backward(held)
    assert (held.rows["gradients"], held.rows["communication"]) == (5.0, 0.0)
