"""Blocks with unusual calls: several times, with another block's results, or for attributes that
they set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tests.sweeps import spread
from tightfit.engine.build import build
from tightfit.engine.step import take_step
from tightfit.machine import Machine
from tightfit.measure.memory import sample_step
from tightfit.planner.dry_run import dry_run
from tightfit.planner.estimator import estimated_ledger
from tightfit.planner.tracing.profiler import Profiler

WIDTH, SAMPLES, DEPTH = 32, 256, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


class Rectified(Block):
    """Keeps for backward what it returns, as blocks of convolutions do."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


class Tallied(Block):
    """Takes and returns a dict and a list, and keeps what it returns."""

    def forward(self, state: dict[str, Any], *, mask: Tensor) -> tuple[dict[str, Any], None]:  # type: ignore[override]
        x = super().forward(state["x"] * mask)
        return {"x": x, "seen": [*state["seen"], x.pow(2).mean(-1)]}, None


class Balanced(Block):
    """Leaves on itself what the model adds to its output, as mixtures of experts do with their auxiliary loss."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.aux = y.pow(2).mean()
        return y


class Once(nn.Module):
    block = Block

    def __init__(self) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 5)
        self.blocks = nn.ModuleList(self.block() for _ in range(DEPTH))

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.through(self.into(x)))


class Twice(Once):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.through(self.through(self.into(x))))


class InTurn(Once):
    """Each block twice in a row."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(block(x))
        return x


class RectifiedOnce(Once):
    block = Rectified


class RectifiedTwice(Twice):
    block = Rectified


class Scaled(RectifiedOnce):
    """Nobody keeps what a block returns."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = 2 * block(x)
        return x


class Tallying(Once):
    block = Tallied

    def through(self, x: Tensor) -> Tensor:
        state: dict[str, Any] = {"x": x, "seen": []}
        for block in self.blocks:
            state, _ = block(state, mask=(x[:, :1] > 0).float() + 0.5)
        return state["x"] + sum(state["seen"])[:, None]


class Balancing(Once):
    block = Balanced

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * sum(block.aux for block in self.blocks)  # type: ignore[misc]


MODELS = (Twice, InTurn, RectifiedOnce, RectifiedTwice, Scaled, Tallying, Balancing)
PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"recompute": "full"},
    {"recompute": "selective"},
    {"recompute": "selective", "precision": "bf16-mixed", "micro_batch": 128},
    {"recompute": "every-2"},
    {"recompute": "full", "precision": "bf16-mixed", "micro_batch": 128},
)


def job(model: type[nn.Module]) -> tightfit.Job:
    data = [(torch.randn(8), number % 5) for number in range(SAMPLES)]
    train = tightfit.Train(learning_rate=1e-3, batch=SAMPLES, steps=4)
    return tightfit.Job(model=model, data=data, train=train, allow=["bf16"])


@pytest.fixture(scope="module")
def profilers() -> dict[type[nn.Module], Profiler]:
    return {model: Profiler(job(model), "cpu") for model in MODELS}


@pytest.mark.sweep(16)
@pytest.mark.parametrize(("model", "fields"), spread(MODELS, PLANS, 2, lambda one: getattr(one, "__name__", str(one))))
def test_estimate_agrees_with_the_dry_run(
    model: type[nn.Module], fields: dict[str, Any], profilers: dict[type[nn.Module], Profiler]
) -> None:
    plan = tightfit.Plan(**fields)
    estimated = estimated_ledger(profilers[model], plan, Machine.detect()).peak().total
    assert estimated == pytest.approx(dry_run(job(model), plan).total, rel=0.02)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("model", MODELS)
def test_dry_run_agrees_with_the_real_run(model: type[nn.Module]) -> None:
    plan = tightfit.Plan(recompute="full")
    run = build(job(model), plan)
    steps = run.data.steps(0, None)
    take_step(run, next(steps), 0)
    _, measured = sample_step(run, next(steps), 1)
    assert dry_run(job(model), plan).total == pytest.approx(measured.total, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("model", [Twice, RectifiedTwice])
def test_segments_of_blocks_called_twice_are_estimated(
    model: type[nn.Module], profilers: dict[type[nn.Module], Profiler]
) -> None:
    plan = tightfit.Plan(recompute="sqrt")
    estimated = estimated_ledger(profilers[model], plan, Machine.detect()).peak().total
    assert estimated == pytest.approx(dry_run(job(model), plan).total, rel=0.02)


@pytest.mark.parametrize("model", [Twice, InTurn])
def test_blocks_called_twice_repeat_their_casts(model: type[nn.Module]) -> None:
    """Autocast keeps its copy of a weight for a second call, but a recomputed call makes its own.
    Then each call's gradient is widened before they are summed."""

    same = job(model)

    def losses(**fields: Any) -> list[float]:
        plan = tightfit.Plan(precision="bf16-mixed", micro_batch=SAMPLES // 2, **fields)
        return [result.loss for result in tightfit.train(build(same, plan))]

    expected = losses()
    found = losses(recompute="selective")
    assert found[0] == expected[0]
    assert found == pytest.approx(expected, rel=1e-3)
