"""Gradients below the smallest number of fp16: the loss scale keeps them in backward, and the update may not lose them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tightfit
from tests.contract import cases
from tests.pool import together
from tightfit.planner.tracing.device_emulation import emulate_device

HERE = "tests.methods.test_tiny_gradients:"
FAINT = 2.0**-24  # times the loss: gradients are about as large, and the smallest number of fp16 is 2**-24
SGD = {"optimizer": "sgd", "learning_rate": 2.0**20}
CLIPPED = {"optimizer": "sgd", "learning_rate": 2.0**24, "clip": 1e-8}
FP16 = {"precision": "fp16-true"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def faint_loss(output: Tensor, batch: list[Tensor]) -> Tensor:
    return functional.mse_loss(output, batch[1]) * FAINT


def moved(fields: dict[str, Any], train: dict[str, Any], device: str = "cpu") -> tuple[Tensor, list[float]]:
    """How far three steps move the weights, and the norms of their gradients."""
    torch.manual_seed(0)
    samples = [(torch.randn(8), 2 * torch.randn(4)) for _ in range(24)]
    settings = tightfit.Train(batch=8, steps=3, epsilon=1e-12, **train)
    job = tightfit.Job(model=model, data=samples, loss=faint_loss, train=settings, allow=cases.ALLOW)
    weights = []
    with emulate_device(device):
        for steps in (0, 3):
            run = tightfit.build(job, tightfit.Plan(**fields))
            norms = [step.gradient_norm or 0.0 for step in tightfit.train(run)] if steps else []
            weights.append(torch.cat([tensor.flatten().float() for tensor in cases.state_of(run).values()]))
    return weights[1] - weights[0], norms


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("fields", "train"),
    [
        ({}, SGD),
        ({"loss_scale": 1024.0}, SGD),
        ({"micro_batch": 3}, SGD),
        ({"micro_batch": 3}, CLIPPED),
        ({}, {"optimizer": "adamw", "learning_rate": 1e-2}),
        ({"states": "8-bit"}, {"optimizer": "adamw", "learning_rate": 1e-2}),
        ({"offload": ("gradients", "parameters"), "offload_to": "disk"}, CLIPPED),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gradients_below_fp16_move_the_weights(fields: dict[str, Any], train: dict[str, Any], device: str) -> None:
    expected, norms = moved({name: value for name, value in fields.items() if name == "micro_batch"}, train)
    arguments = {**FP16, **fields}, train, device
    # in a process of its own, because offloaded parameters are sharded over one device, in a process group
    found, found_norms = together(1, HERE + "moved", *arguments)[0] if "offload" in fields else moved(*arguments)
    assert distance(found, expected) < 0.02
    assert found_norms == pytest.approx(norms, rel=0.01)


@pytest.mark.parametrize(
    "fields", [{"zero": 1, "dp_shard": 2}, {"zero": 3, "dp_shard": 2}, {"dp_replicate": 2}], ids=str
)
def test_every_device_multiplies_its_own_gradients(fields: dict[str, Any]) -> None:
    expected, norms = moved({}, CLIPPED)
    for found, found_norms in together(2, HERE + "moved", {**FP16, **fields}, CLIPPED):
        assert distance(found, expected) < 0.02
        assert found_norms == pytest.approx(norms, rel=0.01)
