"""Models whose constructors compute sizes with tensors are the same without values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tightfit._torch.fake import FakeTensorMode
from tightfit.models.functions import function_factory
from tightfit.models.known_values import MOST_ELEMENTS, KnownValues, known_values


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


def test_large_tensors_are_not_computed() -> None:
    def outer(size: int) -> Tensor:
        line = torch.arange(size)
        return line[:, None] * line

    with FakeTensorMode(), KnownValues():
        assert known_values(outer(8)) is not None
        assert known_values(outer(int(MOST_ELEMENTS**0.5) + 1)) is None
        assert known_values(torch.zeros(MOST_ELEMENTS + 1)) is None
