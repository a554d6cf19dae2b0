"""Models whose constructors compute sizes with tensors are the same without values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tightfit._torch.fake import FakeTensorMode
from tightfit.measure.memory import sample_step
from tightfit.models.functions import function_factory
from tightfit.models.known_values import MOST_ELEMENTS, KnownValues, known_values
from tightfit.planner.dry_run import dry_run
from tightfit.planner.estimator import Estimator


def regnet_widths() -> nn.Module:
    """Widths of stages as RegNet computes them (Radosavovic et al. 2020)."""
    widths = torch.arange(7) * 20.5 + 24
    exponents = torch.round(torch.log(widths / 24) / math.log(2.2))
    widths = torch.round(24 * torch.pow(2.2, exponents) / 8) * 8
    stages, last = len(torch.unique(widths)), int(exponents.max().item()) + 1
    layers = [nn.Linear(int(one), stages) for one in widths.tolist()]
    return nn.Sequential(*layers, nn.Linear(last, 1))


def changed_in_place() -> nn.Module:
    sizes = torch.zeros(4)
    view = sizes[1:]
    view += torch.linspace(1, 3, 3)
    sizes[0] = 5
    return nn.Linear(int(sizes.sum()), len(torch.nonzero(sizes > 2)))


def chosen_by_masks() -> nn.Module:
    numbers = torch.tensor([3, 8, 1, 9])
    kept = numbers[numbers > 2]
    if (kept > 2).all() and torch.equal(kept.sort().values, torch.tensor([3, 8, 9])):
        return nn.Linear(len(kept), int(kept.amax()))
    return nn.Linear(1, 1)


@pytest.mark.parametrize("make", [regnet_widths, changed_in_place, chosen_by_masks])
def test_sizes_computed_by_a_constructor_are_known(make: Callable[[], nn.Module]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = function_factory(make)()
    assert [weight.shape for weight in made.parameters()] == [weight.shape for weight in make().parameters()]


def test_values_written_at_random_are_not_known() -> None:
    with FakeTensorMode(), KnownValues():
        numbers = torch.arange(6.0)
        part = numbers[:3]
        assert known_values(numbers) is not None
        part.normal_()
        assert known_values(numbers) is None
        assert known_values(part) is None
        assert known_values(torch.rand(3)) is None
        assert known_values(torch.ones(3) + torch.rand(3)) is None


def test_a_view_of_known_values_follows_its_base() -> None:
    with FakeTensorMode(), KnownValues():
        numbers = torch.zeros(2, 3)
        row = numbers[1]
        numbers += 2
        value = known_values(row)
        assert value is not None
        assert value.tolist() == [2, 2, 2]


def test_real_tensors_of_the_user_are_not_written() -> None:
    numbers = torch.arange(4)
    with FakeTensorMode(allow_non_fake_inputs=True), KnownValues():
        row = numbers[1:]
        row += 5
        value = known_values(row)
        assert value is not None
        assert value.tolist() == [6, 7, 8]
    assert numbers.tolist() == [0, 1, 2, 3]


def test_large_tensors_are_not_computed() -> None:
    def outer(size: int) -> Tensor:
        line = torch.arange(size)
        return line[:, None] * line

    with FakeTensorMode(), KnownValues():
        assert known_values(outer(8)) is not None
        assert known_values(outer(int(MOST_ELEMENTS**0.5) + 1)) is None
        assert known_values(torch.zeros(MOST_ELEMENTS + 1)) is None


class Integrated(nn.Module):
    """Takes as many steps as its times ask for (Chen et al. 2018), and normalises over dimensions from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 5, 1], [1, 2, 3, 3, 0]]))
        self.field, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        times = torch.linspace(0.0, 1.0, 2)
        for _ in range(int(torch.ceil((times[1] - times[0]) / 0.25).item())):
            x = x + 0.25 * torch.tanh(self.field(x))
        x = x - x.mean(torch.arange(1, x.ndim).tolist(), keepdim=True)
        sources, targets = self.edges[:, self.edges[0] < 3]  # a mask, of which the number of edges depends
        x = x.index_add(1, targets, x[:, sources])
        return self.head(torch.repeat_interleave(x, torch.tensor([1, 2, 1, 1, 1, 3]), dim=1).mean(1))


@pytest.mark.parametrize("fields", [{}, {"recompute": "full"}], ids=str)
def test_values_that_a_forward_computes_from_numbers_are_known(fields: dict[str, str]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
            self.inner = Integrated()

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.inner(x)

    data = [(torch.randn(6, 8), number % 3) for number in range(8)]
    job = tightfit.Job(model=Model, data=data, train=tightfit.Train(batch=8, steps=3))
    estimator = Estimator(job, tightfit.Machine.detect())
    estimate = estimator.estimate(tightfit.Plan(**fields))
    assert estimate.ledger.training  # it was traced
    assert not estimator.profiler.notes  # no branch depends on data
    run = tightfit.build(job, tightfit.Plan(**fields))
    list(tightfit.train(run))
    _, peak = sample_step(run, next(run.data.steps(0, None)), 3)
    predicted = estimate.peak.total - estimate.peak.rows["runtime"]
    assert predicted == pytest.approx(peak.total, rel=0.01)
    assert dry_run(job, tightfit.Plan(**fields)).total == pytest.approx(peak.total, rel=0.005)


def test_the_values_of_a_batch_are_not_known() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.large(x) if x.abs().sum() > 0 else self.small(x)

    data = [(torch.randn(4), number % 3) for number in range(8)]
    job = tightfit.Job(model=Branching, data=data, train=tightfit.Train(batch=8, steps=3))
    estimator = Estimator(job, tightfit.Machine.detect())
    run = tightfit.build(job)
    _, peak = sample_step(run, next(run.data.steps(0, None)), 1)
    assert "reads the value of a tensor" in estimator.profiler.notes[0]
    assert dry_run(job, tightfit.Plan()).total >= peak.total
