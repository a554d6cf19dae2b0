"""An iterable that divides its samples by rank itself is refused, because each device takes its share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import tightfit
from tests.pool import together
from tightfit.distributed.processes import rank
from tightfit.errors import InputError


class Numbers(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, own: bool) -> None:
        self.own = own

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(32):
            if not self.own or number % 2 == rank():
                yield torch.full((4,), float(number)), torch.tensor(number % 3)


def train_with(own: bool) -> str:
    train = tightfit.Train(batch=4, steps=1)
    job = tightfit.Job(model=lambda: nn.Linear(4, 3), data=Numbers(own), loss=nn.CrossEntropyLoss(), train=train)
    try:
        list(tightfit.train(tightfit.build(job, tightfit.Plan(dp_replicate=2))))
    except InputError as error:
        return error.found
    return "trained"


@pytest.mark.parametrize(("own", "found"), [(True, "would be divided twice"), (False, "trained")])
def test_a_stream_that_divides_itself_is_refused(own: bool, found: str) -> None:
    assert all(found in said for said in together(2, "tests.data.test_divided_streams:train_with", own))
