"""Recomputed blocks whose buffers begin to change after the first step: each changes once per forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tightfit
from tightfit.errors import InputError
from tightfit.runtime.recomputation import SMALL_BUFFER

STEPS, BEGIN = 6, 3
WIDTH = 8


class LateAverage(nn.Module):
    """Reads a moving average of its inputs, which begins after some forwards. `wide` numbers lie beside it in memory."""

    def __init__(self, wide: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(WIDTH + wide))

    def forward(self, states: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.count += 1
                if self.count > BEGIN:
                    self.average[:WIDTH].mul_(0.9).add_(states.mean(0), alpha=0.1)
        return states + torch.tanh(self.linear(states - self.average[:WIDTH]))


class LateNorm(nn.Module):
    """A norm that random depth skips in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, states: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            if self.count == 1:
                return states
        return states + functional.relu(self.norm(self.linear(states)))


class LateStatistics(LateAverage):
    """Statistics that no module of a norm holds: batch_norm changes them without counting a version."""

    def forward(self, states: Tensor) -> Tensor:
        self.count += self.training
        live = self.training and bool(self.count > BEGIN)
        return states + functional.batch_norm(self.linear(states), self.average, self.average + 1, training=live)


class Blocks(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks, self.head = nn.ModuleList([kind(**options) for _ in range(4)]), nn.Linear(WIDTH, WIDTH)

    def forward(self, states: Tensor) -> Tensor:
        for block in self.blocks:
            states = block(states)
        return self.head(states)


def trained(kind: Any, options: dict[str, Any] | None = None, **fields: Any) -> tuple[list[float], dict[str, Tensor]]:
    random = torch.Generator().manual_seed(4)
    job = tightfit.Job(
        model=lambda: Blocks(kind, **(options or {})),
        data=[(torch.randn(WIDTH, generator=random), torch.randn(WIDTH, generator=random)) for _ in range(4 * STEPS)],
        loss=nn.MSELoss(),
        train={"batch": 4, "steps": STEPS, "learning_rate": 1e-2, "trackers": []},
    )
    run = tightfit.build(job, tightfit.Plan(**fields))
    return [step.loss for step in tightfit.train(run)], {
        name: state.clone() for name, state in run.model.state_dict().items()
    }


@pytest.mark.filterwarnings("ignore:.*reads the value of a tensor")
@pytest.mark.parametrize("recompute", ["full", "selective", "sqrt", "every-2"])
@pytest.mark.parametrize("kind", [LateAverage, LateNorm, LateStatistics])
def test_a_buffer_changes_once_per_forward(kind: Any, recompute: str) -> None:
    expected_losses, expected = trained(kind)
    losses, found = trained(kind, recompute=recompute)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    for name, state in expected.items():
        torch.testing.assert_close(found[name], state, rtol=1e-5, atol=1e-6)
    assert int(found["blocks.0.count"]) == STEPS


def test_a_large_buffer_that_changes_later_is_refused() -> None:
    """Copies of large constant buffers, such as masks, would take memory."""
    options = {"wide": SMALL_BUFFER // 4}
    with pytest.raises(
        InputError, match="LateAverage changes its buffer average, which its first forward did not change"
    ):
        trained(LateAverage, options, recompute="full")
    trained(LateAverage, options)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["block", "model"])
def test_a_compiled_block_that_changes_one_later_is_refused(compiled: str) -> None:
    class Late(LateAverage):
        """As LateAverage, without a buffer that changes from the first forward on."""

        def forward(self, states: Tensor) -> Tensor:
            if self.training and states.abs().sum() > self.bound:
                with torch.no_grad():
                    self.average.mul_(0.9).add_(states.mean(0), alpha=0.1)
            return states + torch.tanh(self.linear(states - self.average))

        bound = float("inf")

    run = tightfit.build(
        tightfit.Job(
            model=lambda: Blocks(Late),
            data=[(torch.ones(WIDTH), torch.ones(WIDTH)) for _ in range(16)],
            loss=nn.MSELoss(),
            train={"batch": 4, "steps": 4, "learning_rate": 1e-2, "trackers": []},
        ),
        tightfit.Plan(compile=compiled, recompute="full"),
    )
    steps = tightfit.train(run)
    next(steps)
    Late.bound = 0.0
    with pytest.raises(InputError, match=r"forward changes the buffer blocks\.0\.average"):
        next(steps)


class Queue(Blocks):
    """Runs with batches of one size only, as a model with a queue of MoCo does."""

    def forward(self, states: Tensor) -> Tensor:
        if len(states) != 4:
            raise RuntimeError(f"{len(states)} is another number of samples")
        return super().forward(states)


@pytest.mark.parametrize("recompute", ["none", "full", "sqrt"])
def test_a_model_for_one_number_of_samples_is_checked_with_it(recompute: str) -> None:
    """Without a warning that it could not be checked."""
    job = tightfit.Job(
        model=lambda: Queue(LateNorm),
        data=[(torch.ones(WIDTH), torch.ones(WIDTH)) for _ in range(8)],
        loss=nn.MSELoss(),
        train={"batch": 4, "steps": 1, "learning_rate": 1e-2, "trackers": []},
    )
    assert len(list(tightfit.train(tightfit.build(job, tightfit.Plan(recompute=recompute))))) == 1
