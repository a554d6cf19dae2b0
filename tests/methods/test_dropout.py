"""Dropout from 16 random bits drops the right share, scales the rest to match, and drops the same
elements in forward, backward, a recomputed forward and compiled code."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tightfit.methods import dropout
from tightfit.methods.dropout import PackedDropout
from tightfit.planner.search import search
from tightfit.runtime.dropout_noise import LANES, SLICE, dropout_noise, rounded

GPT2: dict[str, Any] = {
    "architecture": "gpt2",
    "vocab_size": 300,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 128,
}


def job(**model: Any) -> tightfit.Job:
    return tightfit.Job.parse(
        {
            "model": {**GPT2, **model},
            "data": {"synthetic": "tokens", "sequence_length": 80},
            "train": {"batch": 4, "steps": 4, "learning_rate": 1e-2, "trackers": []},
        }
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9, 1e-4])
def test_the_dropped_share_is_the_one_asked_for(probability: float, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    count = 3 * SLICE + 5  # several slices, and no whole number of lanes
    assert count % LANES
    noise = dropout_noise(torch.empty(0, dtype=dtype), [count], probability)
    factor = torch.tensor(1 / (1 - rounded(probability)), dtype=dtype)
    assert set(noise.unique().tolist()) == {0.0, factor.item()}
    share, expected = (noise == 0).double().mean().item(), rounded(probability)
    assert abs(expected - probability) <= 1 / 2**17
    assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / count)


def test_neighbours_are_dropped_independently() -> None:
    torch.manual_seed(2)
    dropped = dropout_noise(torch.empty(0), [2**18], 0.5) == 0
    for distance in (1, 2, 3, 4, 8):
        both = (dropped[distance:] & dropped[:-distance]).double().mean().item()
        assert both == pytest.approx(0.25, abs=0.005)


def test_without_training_or_with_extreme_shares_it_is_torch_s() -> None:
    x = torch.randn(3, 5)
    assert torch.equal(PackedDropout(0.3).eval()(x), x)
    assert torch.equal(PackedDropout(0.0)(x), x)
    assert torch.equal(PackedDropout(1.0)(x), torch.zeros_like(x))


@pytest.mark.parametrize("inplace", [False, True])
def test_the_gradient_has_the_mask_of_the_forward(inplace: bool) -> None:
    x = torch.randn(20, 30, requires_grad=True)
    result = PackedDropout(0.4, inplace=inplace)(x * 1)
    result.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad * x, result)
    assert 0.2 < (x.grad == 0).double().mean() < 0.6


def test_the_registered_operation_is_as_declared() -> None:
    torch.library.opcheck(
        dropout_noise,
        (torch.empty(0), [3, 7], 0.25),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_compiled_code_draws_a_mask_once() -> None:
    """A compiler that recomputed it in backward would get other numbers."""
    layer = PackedDropout(0.5)

    def twice(x: Tensor) -> Tensor:
        return torch.tanh(layer(torch.tanh(x)))

    x = torch.randn(50, 40, requires_grad=True)
    compiled = torch.compile(twice, backend="aot_eager_decomp_partition", fullgraph=True)(x)
    compiled.sum().backward()
    assert x.grad is not None
    assert torch.equal(compiled == 0, x.grad == 0)


def losses(plan: tightfit.Plan, **model: Any) -> tuple[list[float], dict[str, Tensor]]:
    run = tightfit.build(job(**model), plan)
    found = [result.loss for result in tightfit.train(run)]
    return found, {name: one.detach().clone() for name, one in run.model.named_parameters()}


@pytest.mark.parametrize("attention", ["sdpa", "blocked"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_recomputed_forward_drops_the_same_elements(recompute: str, attention: str) -> None:
    plan = tightfit.Plan.parse({"dropout": "16-bit", "attention": attention}, "plan")
    (before, weights), (after, others) = losses(plan), losses(plan.replace(recompute=recompute))
    assert after == pytest.approx(before, rel=1e-6)
    for name, weight in weights.items():
        assert torch.allclose(others[name], weight, rtol=1e-4, atol=1e-6), name


def test_it_changes_the_drawn_numbers_only() -> None:
    """Without dropout, and of a model in evaluation, nothing changes."""
    still = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    plan = tightfit.Plan.parse({"dropout": "16-bit"}, "plan")
    assert losses(plan, **still)[0] == losses(tightfit.Plan(), **still)[0]
    noisy, plain = losses(plan)[0], losses(tightfit.Plan())[0]
    assert noisy != plain
    assert noisy == pytest.approx(plain, rel=0.1)


def test_every_dropout_layer_is_replaced() -> None:
    run = tightfit.build(job(), tightfit.Plan.parse({"dropout": "16-bit"}, "plan"))
    layers = [module for module in run.model.modules() if isinstance(module, nn.Dropout)]
    assert len(layers) > 4
    assert {type(module) for module in layers} == {PackedDropout}
    assert dropout.enabled(run.plan)


@pytest.mark.slow
def test_search_draws_few_bits_where_a_model_has_dropout() -> None:
    pins = {"attention": "sdpa", "precision": "fp32"}
    still = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    assert search(job(), None, pins)[0].plan.dropout == "16-bit"
    assert search(job(**still), None, pins)[0].plan.dropout == "torch"
