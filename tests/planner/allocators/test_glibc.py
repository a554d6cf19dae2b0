"""The model of glibc's heap, against results worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tightfit
from tests.planner import cases
from tightfit.cost.recorded_step import Segment, Timeline
from tightfit.machine import Machine
from tightfit.planner.allocators.glibc import SIMULATED_STEPS, GlibcHeap, page_fault_bytes, peak_heap_bytes
from tightfit.planner.allocators.simulate import simulate
from tightfit.planner.estimator import Estimator

MB = 2**20


def fetched_by(heap: GlibcHeap, *steps: str) -> int:
    """MiB of page faults for blocks that are taken ("8" for 8 MiB) and given back ("-8")."""
    before = heap.page_faulted
    for step in steps:
        size = int(step.lstrip("-")) * MB
        if step.startswith("-"):
            heap.free_last(size)
        else:
            heap.allocate_for(size, size)
    return round((heap.page_faulted - before) / MB)


def test_freed_blocks_are_reused() -> None:
    heap = GlibcHeap()
    assert fetched_by(heap, "8", "4") == 12  # the second keeps the first from the end
    assert fetched_by(heap, "-8", "8", "-8", "2", "5") == 0


def test_the_heap_end_is_released_at_twice_the_largest_block() -> None:
    heap = GlibcHeap()
    assert fetched_by(heap, "8", "8", "7") == 23
    assert fetched_by(heap, "-7", "7") == 0
    assert fetched_by(heap, "-7", "-8", "-8", "8") == 8


def test_blocks_of_32_mebibytes_are_mapped_each_time() -> None:
    heap = GlibcHeap()
    for _ in range(3):
        assert fetched_by(heap, "32", "-32") == 32
        assert heap._top == 0


@pytest.mark.slow
def test_page_faults_depend_on_the_allocator() -> None:
    """Kept memory causes no page faults, a lean allocator causes some for every block, and glibc's
    default lies between."""
    images = [(torch.zeros(3, 128, 128), number) for number in range(8)]  # so that blocks have 8 MiB
    job = tightfit.Job(model=cases.convolutions, data=images, train=tightfit.Train(batch=8, steps=4))
    estimator = Estimator(job, Machine.detect())
    found = {name: estimator.estimate(tightfit.Plan(allocator=name)).ledger for name in ("tuned", "default", "lean")}
    tuned, default, lean = (page_fault_bytes(ledger) for ledger in found.values())
    assert tuned == 0 <= default < lean
    four = replace(found["lean"], micro_batches=4)
    assert page_fault_bytes(four) == 4 * lean


def fetched_in_passages(heap: GlibcHeap, row: str) -> list[int]:
    """MiB of page faults in a forward that keeps a block of `row` while two others come and go, in
    its backward, and in both again."""
    found = []
    for _ in range(2):
        for phase in ("forward", "backward"):
            heap.enter_segment(Segment("block", phase, Timeline()))
            before = heap.page_faulted
            if phase == "forward":
                heap.allocate_for((row, "kept", 4), 4 * MB)
            for _ in range(2):
                heap.allocate_for("passes", 8 * MB)
                heap.allocate_for("beyond", MB)  # so that what passes is not at the end
                heap.free_last("passes")
            heap.free_all("beyond")
            if phase == "backward":
                heap.free_all((row, "kept", 4))
            found.append(round((heap.page_faulted - before) / MB))
        heap.enter_segment(None)
    return found


def test_autograd_nodes_of_saved_tensors_stay_until_backward() -> None:
    """The autograd node of each saved tensor takes the place of a freed block, so only the small
    block fits there until the next forward."""
    assert fetched_in_passages(GlibcHeap(keeps_memory=True), "activations") == [14, 0, 0, 0]
    assert fetched_in_passages(GlibcHeap(keeps_memory=True, nodes=True), "activations") == [21, 0, 0, 0]


def test_every_twelfth_unsaved_block_leaves_an_autograd_node() -> None:
    """The twelfth block comes in the second forward: the first takes five, its backward four.
    Outside of the model's blocks it is a twelfth of a segment."""
    assert fetched_in_passages(GlibcHeap(keeps_memory=True, nodes=True), "temporaries") == [14, 0, 7, 0]
    most = {}
    for part in ("block", "after"):
        heap = GlibcHeap(keeps_memory=True, nodes=True)
        heap.enter_segment(Segment(part, "forward", Timeline()))
        for _ in range(40):  # as of a loss in chunks
            heap.allocate_for("chunk", 8 * MB)
            heap.allocate_for("beyond", MB)
            heap.free_last("chunk")
            heap.free_last("beyond")
        most[part] = round(heap.peak / MB)
    assert most["after"] == 16
    assert most["block"] > 2 * most["after"]


def test_unsaved_blocks_leave_nodes_if_small_ones_are_cached() -> None:
    assert (
        fetched_in_passages(GlibcHeap(nodes=True), "temporaries")[0]
        > fetched_in_passages(GlibcHeap(), "temporaries")[0]
    )


def test_autograd_nodes_of_a_step_are_simulated() -> None:
    """They occupy memory between the blocks of a model that recomputes, so its heap is larger."""
    job = cases.job("llama", batch=8)
    ledger = Estimator(job, Machine.detect()).estimate(tightfit.Plan(recompute="full", allocator="tuned")).ledger
    plain = GlibcHeap(ledger.caches_memory)
    for _ in simulate(plain, ledger, SIMULATED_STEPS):
        pass
    assert peak_heap_bytes(ledger) > plain.peak
