"""An optimizer of the user's own may divide parameters by their shapes and their order, on any number of devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tests.pool import together
from tightfit.machine import Machine
from tightfit.planner.estimator import Estimator

HERE = "tests.optim.test_own_groups:"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _by_size(parameters: Any) -> torch.optim.Optimizer:
    large = [one for one in parameters if one.numel() >= 256]
    small = [one for one in parameters if one.numel() < 256]
    return torch.optim.SGD([{"params": large, "lr": 0.2}, {"params": small, "lr": 0.02}])


def _by_position(parameters: Any) -> torch.optim.Optimizer:
    each = list(parameters)
    return torch.optim.SGD([{"params": each[:-2], "lr": 0.02}, {"params": each[-2:], "lr": 0.2}])


FUNCTIONS = {"size": _by_size, "position": _by_position}


def trained(kind: str, fields: dict[str, Any]) -> tuple[list[float], list[float]]:
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(8, generator=generator), number % 4) for number in range(16)]
    train = tightfit.Train(optimizer=FUNCTIONS[kind], batch=8, steps=4)
    run = tightfit.build(tightfit.Job(model=Net, data=data, train=train), tightfit.Plan(**fields))
    losses = [step.loss for step in tightfit.train(run)]
    return losses, [float(group["lr"]) for group in run.optimizer.param_groups]


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize(
    "fields",
    [
        {"dp_shard": 2, "zero": 1},
        {"dp_shard": 2, "zero": 2},
        {"dp_shard": 2, "zero": 3},
        {"pp": 2, "micro_batch": 4},
    ],
    ids=str,
)
def test_groups_are_those_of_the_whole_model(kind: str, fields: dict[str, Any]) -> None:
    expected, rates = trained(kind, {})
    for losses, own_rates in together(2, HERE + "trained", kind, fields):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert own_rates == rates


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize(
    "optimizer",
    [lambda p: torch.optim.Muon(p, lr=0.01), lambda p: torch.optim.NAdam(p, lr=0.01)],
    ids=["muon", "nadam"],
)
def test_optimizers_of_matrices_and_with_counted_products_train(optimizer: Any) -> None:
    data = [(torch.randn(8), number % 4) for number in range(8)]
    job = tightfit.Job(model=Matrices, data=data, train=tightfit.Train(optimizer=optimizer, batch=8, steps=3))
    estimate = Estimator(job, Machine.detect()).estimate(tightfit.Plan())
    run = tightfit.build(job)
    losses = [step.loss for step in tightfit.train(run)]
    model = Matrices()
    model.load_state_dict(tightfit.build(job).model.state_dict())
    plain = optimizer(list(model.parameters()))
    inputs, labels = torch.stack([x for x, _ in data]), torch.tensor([label for _, label in data])
    expected = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        plain.zero_grad()
        loss.backward()
        plain.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)
    measured = sum(value.nbytes for state in run.optimizer.state.values() for value in state.values())
    assert estimate.peak.rows["optimizer"] == measured
