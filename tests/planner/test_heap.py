"""The model of glibc's heap, by hand."""

from __future__ import annotations

from dataclasses import replace

import torch

import tightfit
from tests.planner import cases
from tightfit.machine import Machine
from tightfit.planner.estimate import Estimator
from tightfit.planner.heap import Heap, fetched_bytes

MB = 2**20


def fetched_by(heap: Heap, *steps: str) -> int:
    """MiB that are fetched by what is taken ("8" for a block of 8 MiB) and given back ("-8")."""
    before = heap.fetched
    for step in steps:
        size = int(step.lstrip("-")) * MB
        if step.startswith("-"):
            heap.give(size)
        else:
            heap.take(size, size)
    return round((heap.fetched - before) / MB)


def test_what_was_freed_is_taken_again() -> None:
    heap = Heap()
    assert fetched_by(heap, "8", "4") == 12  # the second keeps the first from the end
    assert fetched_by(heap, "-8", "8", "-8", "2", "5") == 0


def test_the_end_goes_back_where_it_is_twice_the_largest_block() -> None:
    heap = Heap()
    assert fetched_by(heap, "8", "8", "7") == 23
    assert fetched_by(heap, "-7", "7") == 0
    assert fetched_by(heap, "-7", "-8", "-8", "8") == 8


def test_blocks_of_32_mebibytes_are_mapped_each_time() -> None:
    heap = Heap()
    for _ in range(3):
        assert fetched_by(heap, "32", "-32") == 32
        assert heap._top == 0


def test_a_ledger_s_fetches_by_allocator() -> None:
    """Kept memory is fetched by nobody, a lean allocator's with every block, and glibc's own somewhere between."""
    images = [(torch.zeros(3, 128, 128), number) for number in range(8)]  # so that blocks have 8 MiB
    job = tightfit.Job(model=cases.convolutions, data=images, train=tightfit.Train(batch=8, steps=4))
    estimator = Estimator(job, Machine.detect())
    found = {name: estimator.estimate(tightfit.Plan(allocator=name)).ledger for name in ("tuned", "default", "lean")}
    tuned, default, lean = (fetched_bytes(ledger) for ledger in found.values())
    assert tuned == 0 <= default < lean
    four = replace(found["lean"], micro_batches=4)
    assert fetched_bytes(four) == 4 * lean
