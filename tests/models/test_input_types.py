"""A model that fails on the types or shapes of its inputs gets an error that names the cause: the data, the model or the precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tightfit.errors import InputError

WIDTH, CLASSES = 5, 3


class _Constant(nn.Module):
    """A layer that creates a tensor of fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        mixed: Tensor = self.layer(inputs @ torch.eye(WIDTH))
        return mixed


class _Distances(_Constant):
    """A layer with an operation that has no bf16 kernel."""

    def forward(self, inputs: Tensor) -> Tensor:
        far: Tensor = self.layer(inputs) + torch.cdist(inputs, inputs).sum()
        return far


def linear() -> nn.Module:
    return nn.Linear(WIDTH, CLASSES)


def lookup() -> nn.Module:
    return nn.Sequential(nn.Embedding(WIDTH, CLASSES), nn.Flatten(), nn.Linear(WIDTH * CLASSES, CLASSES))


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, Any], str, str]] = {
    # the model, a sample, the plan; what the error asks about, and its fix
    "fp16-data": (linear, torch.ones(WIDTH).half(), {}, "data", "float32"),
    "bf16-data": (linear, torch.ones(WIDTH).bfloat16(), {}, "data", "float32"),
    "fp64-data": (linear, torch.ones(WIDTH).double(), {}, "data", "float32"),
    "int-data": (linear, torch.ones(WIDTH, dtype=torch.int64), {}, "data", "float32"),
    "byte-data": (linear, torch.ones(WIDTH, dtype=torch.uint8), {}, "data", "float32"),
    "real-ids": (lookup, torch.ones(WIDTH), {}, "data", "long"),
    "fp64-model": (lambda: linear().double(), torch.ones(WIDTH), {}, "job: model", "float32"),
    "fp64-model-bf16": (lambda: linear().double(), torch.ones(WIDTH), {"precision": "bf16-true"}, "job: model", "float32"),
    "constant": (_Constant, torch.ones(WIDTH), {"precision": "bf16-true"}, "job: model", "x.dtype"),
    "no-kernel": (_Distances, torch.ones(WIDTH), {"precision": "bf16-true"}, "plan: precision", "fp32"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_error_names_what_has_the_wrong_type(case: str) -> None:
    model, sample, plan, asked, fix = CASES[case]
    with pytest.raises(InputError) as caught:
        list(tightfit.train(tightfit.build(_job(model, sample), plan)))
    assert caught.value.asked == asked
    assert fix in caught.value.fix


def test_data_of_a_wrong_shape_do_not_blame_the_compiler() -> None:
    run = tightfit.build(_job(linear, torch.ones(WIDTH - 1)), {"compile": "model"})
    with pytest.raises(
        InputError, match=r"an operation of the model fails on its inputs .*\[4, 4\] X \[5, 3\]"
    ) as caught:
        list(tightfit.train(run))
    assert "the data does not suit" in caught.value.fix


def test_a_model_of_doubles_trains_on_doubles() -> None:
    steps = list(tightfit.train(tightfit.build(_job(lambda: linear().double(), torch.ones(WIDTH).double()), {})))
    assert steps[-1].loss < steps[0].loss


def _job(model: Callable[[], nn.Module], sample: Tensor) -> tightfit.Job:
    train = tightfit.Train(batch=4, steps=2, trackers=())
    return tightfit.Job(model=model, data=[(sample, 1)] * 8, train=train)
