"""States in 8 and 4 bits of sharded parameters: a shard that is not a whole number of blocks stays
in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from tightfit.machine import Machine
from tightfit.plan import Plan
from tightfit.planner.dry_run import dry_run
from tightfit.planner.estimator import estimated_ledger
from tightfit.planner.tracing.profiler import Profiler


def job(width: int) -> tightfit.Job:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 136), nn.Linear(136, 128))

    samples = [(torch.zeros(width), 1)] * 8
    train = tightfit.Train(batch=4, steps=2, optimizer="adamw")
    return tightfit.Job(model=model, data=samples, train=train, allow=["8-bit-states", "4-bit-states"])


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("states", "block", "width"), [("8-bit", 256, 96), ("4-bit", 128, 80)])
@pytest.mark.parametrize("zero", [1, 3])
def test_a_shard_of_partial_quantization_blocks_stays_in_fp32(states: Any, block: int, width: int, zero: int) -> None:
    """The first matrix has 51 or 85 blocks per shard; the shards of the second are packed."""
    plan = Plan(states=states, zero=zero, dp_shard=2)
    ledger = estimated_ledger(Profiler(job(width), "cpu"), plan, Machine.detect())
    estimated = ledger.row_bytes()["optimizer"]
    moments = {name: update.state_bytes for name, update in ledger.updates.items()}
    each = {"8-bit": 1.0, "4-bit": 0.5}[states] + 4 / block  # bytes of an element, with its share of a block's scale
    assert moments["1.weight"] == pytest.approx(2 * each * 136 * 128 / 2, rel=0.01)
    assert moments["0.weight"] == pytest.approx(2 * 4 * width * 136 / 2, rel=0.01)
    found = dry_run(job(width), plan).rows["optimizer"]
    new_codes = each * 136 * 128 / 2  # of a state, which an update makes before the old ones are freed
    assert 0.99 * estimated <= found <= 1.01 * (estimated + new_codes)
