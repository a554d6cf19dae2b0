"""Parameters that cannot be gathered with their block are refused before training; a search skips
such plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tests.contract import cases
from tests.pool import together
from tightfit.errors import InputError
from tightfit.machine import Machine
from tightfit.planner.estimator import Estimator
from tightfit.planner.search import search

HERE = "tests.parallel.fsdp.test_fully_shard:"
WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Scaled(Net):
    """Has a single number, as CLIP has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].inner.weight = self.blocks[0].inner.weight  # type: ignore[union-attr]


class Hooked(Net):
    """Keeps a row of its head as it is."""

    def __init__(self) -> None:
        super().__init__()
        kept = torch.ones(5, 1)
        kept[0] = 0
        self.head.weight.register_hook(lambda gradient: gradient * kept)


class DirectCalls(Net):
    """`block.forward(x)`, which runs no hooks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)  # type: ignore[operator]
        return self.head(x)


class UsedOutside(Net):
    """Takes the weight of a layer without calling the layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.blocks[0].inner.weight)  # type: ignore[union-attr]


MODELS = {"scaled": Scaled, "tied": Tied, "hooked": Hooked, "direct": DirectCalls, "outside": UsedOutside}


def job_of(name: str) -> tightfit.Job:
    samples = [(torch.full((WIDTH,), number / 8), number % 5) for number in range(16)]
    train = tightfit.Train(optimizer="sgd", learning_rate=0.1, batch=8, steps=2, trackers=())
    return tightfit.Job(model=MODELS[name], data=samples, train=train)


def refused(name: str, fields: dict[str, Any]) -> str:
    try:
        tightfit.build(job_of(name), tightfit.Plan(**fields))
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("materialize", ["host", "device"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("scaled", "scale is a single number"),
        ("tied", "blocks.0.inner.weight is used by several blocks"),
        ("hooked", "head.weight has a hook on its gradient"),
    ],
)
def test_models_that_cannot_be_gathered_by_block_are_refused(name: str, said: str, materialize: str) -> None:
    for error in together(2, HERE + "refused", name, {"dp_shard": 2, "zero": 3, "materialize": materialize}):
        assert said in error


def trained(name: str, fields: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]] | str:
    run = tightfit.build(job_of(name), tightfit.Plan(**fields))
    try:
        losses = [step.loss for step in tightfit.train(run)]
    except InputError as error:
        return str(error)
    return losses, cases.state_of(run)


@pytest.mark.parametrize(
    "fields",
    [
        {"dp_shard": 2, "zero": 3, "micro_batch": 2},
        {"dp_shard": 2, "zero": 3, "recompute": "full"},
        {"pp": 2, "dp_shard": 2, "zero": 3, "micro_batch": 2},
    ],
    ids=str,
)
def test_blocks_called_through_forward_are_gathered(fields: dict[str, Any]) -> None:
    expected, weights = trained("direct", {})
    for losses, found in together(tightfit.Plan(**fields).devices, HERE + "trained", "direct", fields):
        assert losses == pytest.approx(expected, rel=2e-6)
        mine = {name: value for name, value in weights.items() if name in found}
        assert mine.keys() == weights.keys() or "pp" in fields
        assert cases.distance({name: found[name] for name in mine}, mine) < 1e-6


def test_parameters_used_outside_their_layer_are_refused() -> None:
    """The error names the line."""
    for said in together(2, HERE + "trained", "outside", {"dp_shard": 2, "zero": 3}):
        assert "x @ self.blocks[0].inner.weight" in said
        assert "use zero: 2" in said


def changed_rows(fields: dict[str, Any]) -> Tensor:
    run = tightfit.build(job_of("hooked"), tightfit.Plan(**fields))
    before = run.model.head.weight.detach().clone()  # type: ignore[union-attr, operator]
    for _ in tightfit.train(run):
        pass
    return (run.model.head.weight.detach() - before).abs().sum(1)  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("fields", [{"dp_replicate": 2}, {"dp_shard": 2, "zero": 2}], ids=str)
def test_gradient_hooks_work_while_gradients_are_unsharded(fields: dict[str, Any]) -> None:
    for changed in together(2, HERE + "changed_rows", fields):
        assert changed[0] == 0
        assert changed[1] > 0


@pytest.mark.slow
def test_a_search_skips_plans_that_the_model_refuses() -> None:
    job, machine = job_of("scaled"), Machine.named("a100-80gb:2")
    with pytest.raises(InputError, match="single number"):
        Estimator(job, machine).estimate(tightfit.Plan(dp_shard=2, zero=3))
    assert search(job, machine)[0].plan.zero < 3
    with pytest.raises(InputError, match="single number"):
        search(job, machine, {"zero": 3, "dp_shard": 2})
