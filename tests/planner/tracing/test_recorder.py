"""What a trace records of each operation."""

from __future__ import annotations

import pytest

import tightfit
from tightfit.planner.tracing.profiler import Profiler

GPT2 = {"architecture": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 16}


@pytest.mark.sweep(8)
@pytest.mark.parametrize(("compiled", "unaligned"), [("block", True), ("model", False)])
def test_alignment_of_products(compiled: str, unaligned: bool) -> None:
    """101 classes of 2 bytes: rows of the logits begin at multiples of 2 bytes, in all three products of the head. The
    compiler pads such rows."""
    data = {"synthetic": "tokens", "sequence_length": 16}
    job = tightfit.Job(model=GPT2, data=data, allow=["bf16"], train=tightfit.Train(batch=4, steps=10))
    ledger = Profiler(job, "cuda").ledger(tightfit.Plan(precision="bf16-mixed", compile=compiled))
    alignments = {
        tuple(size.at(4) for size in operation.sizes): operation.alignment
        for segment in ledger.training
        for operation in segment.timeline.operations
        if operation.name in ("aten.mm", "aten.addmm")
    }
    head = {(1, 64, 101, 48), (1, 101, 48, 64), (1, 64, 48, 101)}
    assert head < alignments.keys()
    assert {shape for shape, alignment in alignments.items() if alignment < 16} == (head if unaligned else set())
    assert all(alignments[shape] == 2 for shape in head) is unaligned
