"""What benchmarks/published.py knows of other frameworks' loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from benchmarks import published
from tests.planner import cases
from tightfit.machine import Machine
from tightfit.plan import Plan
from tightfit.planner.estimate import Estimate, Estimator
from tightfit.planner.time_model import CostModel

GPUS = Machine.named("h100-sxm:8")


def estimate(plan: Plan, machine: Machine = GPUS) -> Estimate:
    job = cases.job("llama").replace(allow=["bf16", "8-bit-states"])
    return Estimator(job, machine).estimate(plan)


def test_attention_with_a_fused_softmax_is_attention() -> None:
    """Without a mask, and with the module's scaling."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 5, 8, dtype=torch.float64) for _ in range(3))
    found, _ = published.fused_softmax_attention(
        nn.Identity().eval(), query, key, value, None, scaling=0.3, dropout=0.5
    )
    expected = nn.functional.scaled_dot_product_attention(query, key, value, scale=0.3).transpose(1, 2)
    assert torch.allclose(found, expected)


@pytest.mark.parametrize(
    ("model", "loop", "kernel"),
    [
        ({"attn_implementation": "eager"}, {"fused_softmax": True}, published.FUSED_SOFTMAX),
        ({"attn_implementation": "eager"}, {}, "eager"),
        ({"attn_implementation": "sdpa"}, {"fused_softmax": True}, "sdpa"),
    ],
)
def test_only_saved_scores_have_a_fused_softmax(model: dict[str, Any], loop: dict[str, Any], kernel: str) -> None:
    row = {"model": {**cases.SPECS["llama"], **model}, "data": {"synthetic": "tokens", "sequence_length": 16}}
    job = published.job_of({**row, "optimizer": "adamw", "batch": 4, "loop": loop})
    assert job.model.content()["attn_implementation"] == kernel


def test_a_fused_softmax_moves_fewer_bytes() -> None:
    seconds = []
    for loop in ({}, {"fused_softmax": True}):
        model = {**cases.SPECS["llama"], "attn_implementation": "eager"}
        row = {"model": model, "data": {"synthetic": "tokens", "sequence_length": 64}, "optimizer": "adamw", "batch": 8}
        seconds.append(Estimator(published.job_of({**row, "loop": loop}), GPUS).estimate(Plan()).time.memory_s)
    assert seconds[1] < seconds[0]


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16-mixed", 2)])
def test_unlimited_gathers_hold_weights_twice_and_gradients(precision: Any, width: int) -> None:
    sharded = estimate(Plan(dp_shard=8, zero=3, precision=precision))
    count = sum(one.count for one in sharded.ledger.parameters)
    assert published.blocks_of_gathers({"loop": {"unlimited_gathers": True}}, sharded) == 3 * width * count
    assert published.blocks_of_gathers({"loop": {}}, sharded) == 0
    whole = estimate(Plan(dp_replicate=8, precision=precision))
    assert published.blocks_of_gathers({"loop": {"unlimited_gathers": True}}, whole) == 0


def test_overlapped_tensor_parallelism_hides_communication() -> None:
    parallel, model = estimate(Plan(tp=2, dp_replicate=4)), CostModel(GPUS)
    assert published.saved_by_their_loop(parallel, {}, model) == 0
    saved = published.saved_by_their_loop(parallel, {"tp_overlap": True}, model)
    assert 0 < saved < parallel.time.communication_s


def test_a_fused_update_of_narrow_states_is_faster() -> None:
    job = cases.job("llama").replace(allow=["bf16", "8-bit-states"])
    wide = {**cases.SPECS["llama"], "hidden_size": 128, "intermediate_size": 256}  # large enough to be in 8 bits
    machine = Machine.named("h100-sxm")
    narrow = Estimator(job.replace(model=wide), machine).estimate(tightfit.Plan(states="8-bit"))
    saved = published.saved_by_their_loop(narrow, {"fused_low_bit": True}, CostModel(machine))
    assert 0.5 * narrow.time.optimizer_s < saved < narrow.time.optimizer_s
    same = Estimator(job, machine).estimate(tightfit.Plan())
    assert published.saved_by_their_loop(same, {"fused_low_bit": True}, CostModel(machine)) == 0
