"""The memory that tightfit's own operations need while they run, against torch's profiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tightfit.methods.attention import kept_factor, probability_count
from tightfit.planner.tracing.live_storages import StorageTracker
from tightfit.planner.tracing.working_memory import working_bytes
from tightfit.runtime.dropout_noise import dropout_noise

FORWARD = torch.ops.tightfit.blocked_attention.default
BACKWARD = torch.ops.tightfit.blocked_attention_backward.default
BESIDE = 64  # bytes of numbers that a CPU kernel allocates


def profiled(operation: Any, args: Any) -> tuple[Any, int]:
    """Return the outputs of an operation, and the most bytes that it held beside them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        outputs = operation(*args)
    results = profiler.profiler and profiler.profiler.kineto_results
    assert results is not None
    now = most = 0
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return outputs, most - now


@pytest.mark.parametrize("length", [40, 300, 700])  # one block of queries, and several with and without a mask
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("form", ["plain", "transposed", "biased"])
def test_blocked_attention_needs_what_the_profiler_sees(length: int, causal: bool, dropout: float, form: str) -> None:
    def states() -> Tensor:
        if form == "transposed":
            return torch.randn(2, length, 3, 8).transpose(1, 2)
        return torch.randn(2, 3, length, 8)

    query, key, value = states(), states(), states()
    bias = torch.randn(2, 1, length, length) if form == "biased" else None
    noise = dropout_noise(query.new_empty(0), [6, probability_count(length, causal)], dropout) if dropout else None
    factor = kept_factor(dropout, query.dtype)
    forward = query, key, value, bias, causal, noise, factor
    (output, probabilities), most = profiled(FORWARD, forward)
    assert most > 0
    assert working_bytes(FORWARD, forward) == pytest.approx(most, abs=BESIDE)
    shape = list(bias.shape) if bias is not None else None
    backward = states(), query, key, value, output, probabilities, causal, shape, factor if dropout else None
    _, most = profiled(BACKWARD, backward)
    assert most > 0
    assert working_bytes(BACKWARD, backward) == pytest.approx(most, abs=BESIDE)


def test_a_peak_contains_it() -> None:
    query = torch.randn(2, 3, 100, 8)
    args = query, query, query, None, False
    with StorageTracker([]) as tracker:
        outputs = FORWARD(*args)
    held = sum(tensor.nbytes for tensor in outputs)
    assert tracker.peak().total == held + working_bytes(FORWARD, args) > held


def test_other_operations_need_none() -> None:
    assert working_bytes(torch.ops.aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2))) == 0
