"""The estimate of updates that draw random numbers, and of scalar buffers."""

from __future__ import annotations

from typing import Any

import pytest

import tightfit
from tests.planner import cases
from tightfit.machine import Machine
from tightfit.planner.estimator import estimated_ledger
from tightfit.planner.tracing.profiler import Profiler, profile

GEMMA: dict[str, Any] = {
    "architecture": "gemma",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_stochastic_rounding_adds_only_its_noise(optimizer: str) -> None:
    """The noise is one integer for each weight of the updated parameter."""
    job = cases.job("llama", optimizer=optimizer)
    narrow = tightfit.Plan(precision="bf16-true", states="bf16")
    updates = profile(job, narrow).updates
    drawn = profile(job, narrow.replace(rounding="stochastic")).updates
    assert updates.keys() == drawn.keys()
    for name, update in drawn.items():
        assert update.state_bytes == updates[name].state_bytes
        assert update.transient_bytes >= updates[name].transient_bytes


def test_a_scalar_buffer_is_not_sharded() -> None:
    job = cases.job("llama").replace(model=tightfit.Job(model=GEMMA, data=cases.TEXT, train={}).model)
    plan = tightfit.Plan(zero=3, dp_shard=2)
    found = {
        parameter.name: parameter
        for parameter in estimated_ledger(Profiler(job, "cpu"), plan, Machine.detect()).parameters
    }
    (single,) = (parameter for parameter in found.values() if not parameter.shape)
    assert single.name == "model.embed_tokens.embed_scale"
    assert single.bytes == 4  # of two devices each has it whole
