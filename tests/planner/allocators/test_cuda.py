"""The model of torch's caching allocator, against results worked out by hand."""

from __future__ import annotations

import pytest

import tightfit
from tests.planner import cases
from tightfit.machine import Machine
from tightfit.planner.allocators.cuda import CachingAllocator, Pool, reserved_bytes
from tightfit.planner.estimator import Estimator

MB = 2**20


def test_small_blocks_share_a_segment_of_two_mebibytes() -> None:
    heap = CachingAllocator(expandable=False)
    for _ in range(2):
        heap.allocate_for("small", MB)
    assert heap.reserved == 2 * MB
    heap.allocate_for("small", 1)
    assert heap.reserved == 4 * MB


def test_medium_blocks_share_20_mib_and_large_ones_do_not() -> None:
    heap = CachingAllocator(expandable=False)
    heap.allocate_for("medium", 6 * MB)
    heap.allocate_for("medium", 6 * MB)
    assert heap.reserved == 20 * MB
    heap.allocate_for("large", 11 * MB + 1)
    assert heap.reserved == 32 * MB


def reserved_after_frees(count: int, size: int, larger: int, expandable: bool) -> float:
    """Reserved bytes after `count` blocks are freed and a larger one is allocated."""
    heap = CachingAllocator(expandable=expandable)
    for _ in range(count):
        heap.allocate_for("one", size)
    heap.free_all("one")
    heap.allocate_for("whole", larger)
    return heap.reserved


def test_freed_blocks_are_reused_and_neighbours_merge() -> None:
    assert reserved_after_frees(3, 6 * MB, 20 * MB, expandable=False) == 20 * MB


def test_a_larger_block_does_not_fit_between_segments() -> None:
    assert reserved_after_frees(2, 12 * MB, 24 * MB, expandable=False) == 48 * MB
    assert reserved_after_frees(2, 12 * MB, 24 * MB, expandable=True) == 40 * MB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    pool = Pool(small=False, expandable=False)
    blocks = [pool.allocate(size * MB) for size in (30, 12, 20)]
    for address, size in blocks:
        pool.free(address, size)
    assert pool.allocate(12 * MB) == blocks[1]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize(
    "fields", [{}, {"micro_batch": 2}, {"recompute": "full"}, {"update_in_backward": True}], ids=str
)
def test_a_step_reserves_little_more_than_its_tensors(fields: dict[str, object], expandable: bool) -> None:
    estimate = Estimator(cases.job("llama", batch=64), Machine.named("a100-40gb")).estimate(tightfit.Plan(**fields))
    tensors = estimate.peak.total - estimate.peak.rows["runtime"]
    reserved = reserved_bytes(estimate.ledger, expandable)
    assert tensors < reserved < 1.5 * tensors + 44 * MB
