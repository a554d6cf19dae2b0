"""Under tensor parallelism, labels and token ids that no device has are refused."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tightfit
from tests import tiny
from tests.pool import together
from tightfit.errors import InputError
from tightfit.models.batches import IGNORED
from tightfit.parallel.tensor.vocab_cross_entropy import in_range


def test_numbers_out_of_range_are_refused() -> None:
    right = torch.tensor([0, 9, IGNORED])
    assert in_range(right, 10, "a label", IGNORED) is right
    for wrong in (10, -1):
        with pytest.raises(InputError, match=f"contains a label of {wrong}, and the model has 10 classes or tokens"):
            in_range(torch.tensor([3, wrong]), 10, "a label", IGNORED)
    with pytest.raises(InputError, match=f"a token id of {IGNORED}"):
        in_range(right, 10, "a token id")
    with FakeTensorMode():
        in_range(torch.tensor([77]), 10, "a label")


def train_with(wrong_field: str, chunked: int | None) -> str:
    ids = torch.arange(8)
    wrong = torch.where(ids == 3, tiny.LLAMA["vocab_size"], ids)
    sample = {"input_ids": ids, "labels": ids, wrong_field: wrong}
    job = tightfit.Job(model=tiny.LLAMA, data=[sample] * 4, train=tightfit.Train(batch=2, steps=1))
    try:
        list(tightfit.train(tightfit.build(job, tightfit.Plan(tp=2, chunked_loss=chunked))))
    except InputError as error:
        return error.found
    return ""


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("labels", "contains a label of 300, and the model has 300 classes or tokens"),
        ("input_ids", "has the token id 300, but the model's vocabulary has 300 tokens"),
    ],
)
@pytest.mark.parametrize("chunked", [None, 4])
def test_devices_refuse_what_none_of_them_has(field: str, said: str, chunked: int | None) -> None:
    for found in together(2, "tests.parallel.tensor.test_ranges:train_with", field, chunked):
        assert said in found
