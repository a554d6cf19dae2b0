"""Attention under a causal mask: half of its pairs take time, all of them count as model FLOPs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import tightfit
from tests.planner import cases
from tightfit.cost.recorded_step import BatchLinear, Operation
from tightfit.machine import Figure, Machine
from tightfit.methods.attention import blocked_attention, causal_pairs
from tightfit.planner.estimator import Estimator
from tightfit.planner.operation_kinds import KIND
from tightfit.planner.time_model import TimeModel
from tightfit.planner.tracing import plain_data
from tightfit.planner.tracing.recorder import record_step

LENGTH, WIDTH = 128, 16


class Attention(nn.Module):
    def __init__(self, causal: bool, blocked: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.causal, self.blocked = causal, blocked

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        states = batch["states"] * self.weight
        if self.blocked:
            return blocked_attention(states, states, states, None, self.causal)[0].sum()
        return functional.scaled_dot_product_attention(states, states, states, is_causal=self.causal).sum()


def traced(causal: bool, blocked: bool = False) -> list[Operation]:
    """The two kernels of attention, forward and backward, of 2 samples with 3 heads."""
    with FakeTensorMode():
        model = Attention(causal, blocked)
        segments = record_step(model, model, {"states": torch.ones(2, 3, LENGTH, WIDTH)}, [])
    found = [one for segment in segments for one in segment.timeline.operations]
    return [one for one in found if "attention" in KIND.get(one.name, "")]


def test_pairs_left_by_a_causal_mask_are_counted() -> None:
    for queries, keys in ((4, 4), (2, 5), (5, 2), (1, 1)):
        assert causal_pairs(queries, keys) == torch.ones(queries, keys).tril().sum().item()


@pytest.mark.parametrize("blocked", [False, True])
def test_flops_count_all_pairs_but_only_unmasked_are_computed(blocked: bool) -> None:
    full, causal = traced(False, blocked), traced(True, blocked)
    assert len(full) == len(causal) == 2
    forward = 4 * 2 * 3 * LENGTH**2 * WIDTH
    for one, other in zip(full, causal, strict=True):
        assert one.flops == other.flops
        assert one.flops.at(1) >= forward
        left = (64 * 64 + 64 * 128) / LENGTH**2 if blocked else (LENGTH + 1) / (2 * LENGTH)
        assert (one.computed_share, other.computed_share) == (1.0, pytest.approx(left))


def machine(rates: dict[str, float]) -> Machine:
    memory = Figure(value=2**34, source="system")
    fast = Figure(value=1e15, source="measured")
    return Machine(
        name="here",
        device="cuda",
        memory_bytes=memory,
        host_memory_bytes=memory,
        memory_bytes_per_s=fast,
        matrix_flops_per_s={"fp32": fast},
        rates={f"{kind}/float32": {1: rate} for kind, rate in rates.items()},
    )


def test_time_follows_computed_pairs_and_their_kernel_s_rate() -> None:
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    flops = BatchLinear(1e12)
    full, half = (Operation(name, "float32", flops, BatchLinear(1.0), computed_share=share) for share in (1.0, 0.5))
    clock = TimeModel(machine({"attention": 1e12}))
    assert clock.operation_s(half, 1) == pytest.approx(0.5 * clock.operation_s(full, 1))
    slower = TimeModel(machine({"attention": 1e12, "causal attention": 5e11}))
    assert slower.operation_s(half, 1) == pytest.approx(slower.operation_s(full, 1)) == pytest.approx(1.0)


def test_a_cpu_computes_whole_blocks_of_queries() -> None:
    """145 queries take as long as 160: 5 blocks of 32."""

    def seconds(queries: float, device: str) -> float:
        sizes = tuple(map(BatchLinear, (64.0, queries, queries, 64.0)))
        name, flops = "aten._scaled_dot_product_flash_attention_for_cpu", BatchLinear(1e9 * queries)
        here = machine({"attention": 1e12}).replace(device=device)
        return TimeModel(here).operation_s(Operation(name, "float32", flops, BatchLinear(1.0), sizes), 1)

    assert seconds(145, "cpu") == pytest.approx(seconds(160, "cpu"))
    assert seconds(129, "cpu") == pytest.approx(seconds(160, "cpu"))
    assert seconds(128, "cpu") == pytest.approx(0.8 * seconds(160, "cpu"))


def test_causal_attention_is_faster_with_the_same_flops() -> None:
    """GPT-2 with the mask that its kernel knows, and the same work without one."""
    estimator = Estimator(cases.job("gpt2"), Machine.named("l4"))
    estimate = estimator.estimate(tightfit.Plan())
    attention = [one for _, _, one, _ in estimate.ledger.operations() if KIND.get(one.name) == "attention"]
    assert attention
    assert all(0.5 < one.computed_share < 0.6 for one in attention)
    kept = plain_data.to_content(estimator.profiler.recorded_step(tightfit.Plan(), 8)[0])
    assert len({row[-3] for row in kept["operations"]}) == 2  # what is kept on disk says so, too
    assert plain_data.to_content(plain_data.from_content(kept)) == kept
