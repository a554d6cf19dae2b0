"""Hooks on gradients that are not linear get the gradient of a whole batch, or the plan is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tightfit.errors import InputError
from tightfit.models.hook_linearity import nonlinear_hook

MASK = torch.tensor([[1.0], [0.0], [1.0]])


def fails(gradient: Tensor) -> Tensor:
    raise ValueError("not now")


HOOKS: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "scales": (lambda gradient: 0.5 * gradient, True),
    "masks": (lambda gradient: gradient * MASK, True),
    "watches": (lambda gradient: None, True),
    "fails": (fails, True),
    "clips": (lambda gradient: gradient.clamp(-0.01, 0.01), False),
    "clips large ones": (lambda gradient: gradient.clamp(-50, 50), False),
    "drops small ones": (lambda gradient: gradient * (gradient.abs() > 1e-3), False),
    "normalises": (lambda gradient: gradient / gradient.norm(), False),
    "adds noise": (lambda gradient: gradient + torch.randn_like(gradient), False),
}


def model(hook: Callable[[Tensor], Any], accumulated: bool, dtype: torch.dtype = torch.float32) -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 3, dtype=dtype))
    weight = made[0].weight
    if accumulated:

        def change(parameter: Tensor) -> None:
            returned = hook(parameter.grad)  # type: ignore[arg-type]
            if returned is not None:
                parameter.grad.copy_(returned)  # type: ignore[union-attr]

        weight.register_post_accumulate_grad_hook(change)
    else:
        weight.register_hook(hook)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("accumulated", [False, True], ids=["each", "accumulated"])
@pytest.mark.parametrize("name", HOOKS)
def test_which_hooks_are_linear(name: str, accumulated: bool, dtype: torch.dtype) -> None:
    hook, is_linear = HOOKS[name]
    made = model(hook, accumulated, dtype)
    assert nonlinear_hook(made) == ("" if is_linear else "0.weight")
    assert made[0].weight.grad is None  # type: ignore[index]


@pytest.mark.parametrize("name", ["masks", "clips"])
@pytest.mark.parametrize(
    ("fields", "fix"),
    [({"micro_batch": 2}, "micro_batch: null"), ({"precision": "fp16-mixed", "loss_scale": "dynamic"}, "bf16-mixed")],
    ids=["micro-batches", "loss scale"],
)
def test_split_batches_refuse_hooks_that_are_not_linear(name: str, fields: dict[str, Any], fix: str) -> None:
    hook, is_linear = HOOKS[name]
    data = [(torch.randn(4), number % 3) for number in range(8)]
    train = tightfit.Train(batch=4, steps=2)
    job = tightfit.Job(model=lambda: model(hook, False), data=data, train=train, allow=["fp16"])
    tightfit.build(job, tightfit.Plan())
    if is_linear:
        tightfit.build(job, tightfit.Plan(**fields))
    else:
        with pytest.raises(InputError, match=rf"hook on the gradient of 0.weight is not linear(.|\n)*{fix}"):
            tightfit.build(job, tightfit.Plan(**fields))
