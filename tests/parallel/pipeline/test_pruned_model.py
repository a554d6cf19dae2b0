"""Weights that a model uses several times in one forward: their gradients are sums, whenever the
parts are computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tightfit
from tests.contract.cases import distance
from tests.pool import together
from tightfit.errors import InputError

HERE = "tests.parallel.pipeline.test_pruned_model:"
WIDTH, BATCH, STEPS = 8, 8, 2


class Mixer(nn.Module):
    """One linear layer along two dims of its input, and its weight once more by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        across = self.mix(torch.tanh(self.mix(x)).transpose(1, 2)).transpose(1, 2)
        return x + self.out(across) + 0.1 * functional.linear(x, self.mix.weight)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Mixer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(torch.tanh(self.head(h))).mean(1)[:, :3]


class Reentrant(nn.Module):
    """A layer in two parts of the model, each computed again by a backward of its own within the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.both, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for _ in range(2):
            h = checkpoint(self.both, torch.tanh(h), use_reentrant=True)
        return self.head(h).mean(1)


def job(model: Any) -> tightfit.Job:
    generator = torch.Generator().manual_seed(3)
    samples: list[Any] = [(torch.randn(WIDTH, 4, generator=generator), n % 3) for n in range(STEPS * BATCH)]
    settings = {"batch": BATCH, "steps": STEPS, "optimizer": "sgd", "learning_rate": 0.3, "momentum": 0.0}
    return tightfit.Job(model=model, data=samples, train=tightfit.Train(**settings))


def train(model: Any, fields: dict[str, Any]) -> Any:
    """Losses and weights of all stages, or what the plan was refused with before the first update."""
    run = tightfit.build(job(model), tightfit.Plan(**fields))
    losses = []
    try:
        losses = [step.loss for step in tightfit.train(run)]
    except InputError as error:
        assert not losses
        return str(error)
    own = {name: value.detach().clone() for name, value in run.model.state_dict().items()}
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return losses, everyones


def plain_training(model: Any, micro_batch: int) -> tuple[list[float], dict[str, Tensor]]:
    run = tightfit.build(job(model))  # for its initial weights and the order of its samples
    optimizer, losses = torch.optim.SGD(run.model.parameters(), 0.3), []
    for _, (batch,) in zip(range(STEPS), run.data.steps(0, None), strict=False):
        total = 0.0
        for x, y in zip(batch[0].split(micro_batch), batch[1].split(micro_batch), strict=True):
            loss = functional.cross_entropy(run.model(x), y, reduction="sum") / BATCH
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach().clone() for name, value in run.model.state_dict().items()}


@pytest.mark.parametrize("fields", [{"dp_replicate": 2}, {"dp_shard": 2, "zero": 1, "recompute": "full"}], ids=str)
def test_deferred_weight_gradients_are_summed(fields: dict[str, Any]) -> None:
    plan = {"pp": 2, "schedule": "zero-bubble", "micro_batch": 2, **fields}
    losses, weights = plain_training(Rows, 2)
    for found, everyones in together(4, HERE + "train", Rows, plan):
        assert found == pytest.approx(losses, rel=2e-6)
        for one in everyones:
            mine = {name: value for name, value in weights.items() if name in one}
            assert distance({name: one[name] for name in mine}, mine) < 1e-6
        assert {name for one in everyones for name in one} == weights.keys()


def test_a_gradient_completed_twice_in_one_backward_is_refused() -> None:
    """The gradient that was completed first may have been sent, and a nested backward would add to
    it unnoticed."""
    for found in together(2, HERE + "train", Reentrant, {"dp_replicate": 2}):
        assert isinstance(found, str)
        assert "use_reentrant=False" in found
