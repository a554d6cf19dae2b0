"""A mixture of experts is explained, trained and measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

import tightfit
from tests.contract import cases
from tests.pool import together
from tests.sweeps import spread
from tightfit.engine.build import build
from tightfit.engine.step import take_step
from tightfit.measure.memory import sample_step
from tightfit.planner.dry_run import dry_run
from tightfit.planner.estimator import estimate

HERE = "tests.journeys.test_moe:"
MIXTRAL: dict[str, Any] = {
    "architecture": "mixtral",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
LENGTH, BATCH, STEPS = 16, 8, 4
SETTINGS: dict[str, Any] = {"batch": BATCH, "steps": STEPS, "learning_rate": 1e-2, "epsilon": cases.EPSILON}


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 128, (LENGTH,), generator=generator) for _ in range(BATCH * STEPS)]


def job(**model: Any) -> tightfit.Job:
    data = [{"input_ids": row, "labels": row.clone()} for row in rows()]
    return tightfit.Job(model={**MIXTRAL, **model}, data=data, train=tightfit.Train(**SETTINGS))


def trained(fields: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    run = tightfit.build(job(), tightfit.Plan(**fields))
    return [step.loss for step in tightfit.train(run)], cases.state_of(run)


def trained_plainly() -> tuple[list[float], dict[str, Tensor]]:
    """The same training by a loop of plain PyTorch around transformers' own model."""
    run = tightfit.build(job())  # for the initial weights and the order of the samples
    model = MixtralForCausalLM(MixtralConfig(**{key: value for key, value in MIXTRAL.items() if key != "architecture"}))
    model.load_state_dict(run.model.state_dict())
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=cases.EPSILON, weight_decay=0.0)
    losses = []
    for _, (batch,) in zip(range(STEPS), run.data.steps(0, None), strict=False):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, cases.state(model)


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"micro_batch": 2, "recompute": "full"},
        {"dp_replicate": 2},
        {"zero": 1, "dp_shard": 2},
        {"zero": 2, "dp_shard": 2, "micro_batch": 2},
        {"zero": 3, "dp_shard": 2},
    ],
    ids=str,
)
def test_it_trains_as_plain_pytorch_does(fields: dict[str, Any]) -> None:
    losses, weights = trained_plainly()
    devices = tightfit.Plan(**fields).devices
    results = [trained(fields)] if devices == 1 else together(devices, HERE + "trained", fields)
    for found, others in results:
        assert found == pytest.approx(losses, rel=2e-6)
        assert cases.distance(others, weights) <= 1e-6


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("implementation", "fields"),
    spread(["grouped_mm", "eager"], [{}, {"micro_batch": 2}, {"recompute": "full"}, {"precision": "bf16-mixed"}], 2),
)
def test_its_peak_is_predicted(fields: dict[str, Any], implementation: str) -> None:
    """Whether its experts use grouped products or a loop."""
    sample, plan = job(experts_implementation=implementation), tightfit.Plan(**fields)
    run = build(sample, plan)
    assert run.model.config._experts_implementation == implementation  # type: ignore[union-attr]
    steps = run.data.steps(0, None)
    take_step(run, next(steps), 0)
    _, measured = sample_step(run, next(steps), 1)
    predicted = estimate(sample, plan).peak
    tensors = predicted.total - predicted.rows["runtime"] - predicted.rows["allocator"]
    assert tensors == pytest.approx(measured.total, rel=0.05)
    assert dry_run(sample, plan).total == pytest.approx(measured.total, rel=0.05)


@pytest.mark.slow
def test_explain_states_how_tokens_are_spread() -> None:
    machine, skewed = tightfit.Machine.named("rtx-4090"), tightfit.Train(**SETTINGS, expert_imbalance=1.5)
    said = tightfit.explain(job(), tightfit.Plan(), machine)
    assert "experts  2 of 4 for each token; predicted for tokens that are spread evenly" in said
    said = tightfit.explain(job().replace(train=skewed), tightfit.Plan(), machine)
    assert "spread with 1.5 times the mean for the busiest expert" in said
