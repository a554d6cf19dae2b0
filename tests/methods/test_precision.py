"""The rules of the loss scale, and the types that layers and loss receive."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tests import tiny
from tightfit.machine import Machine
from tightfit.methods.precision import LossScaler, advice
from tightfit.plan import Plan


def optimizer_with(*gradients: float) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.zeros(3)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.full((3,), gradient)
    return torch.optim.SGD([*parameters, nn.Parameter(torch.zeros(2))])  # the last has no gradient


@pytest.mark.parametrize(
    ("gradients", "finite"), [((8.0, 16.0), True), ((8.0, float("inf")), False), ((float("nan"),), False), ((), True)]
)
def test_unscale_divides_and_reports_overflow(gradients: tuple[float, ...], finite: bool) -> None:
    optimizer = optimizer_with(*gradients)
    assert LossScaler(4.0, dynamic=True).unscale(optimizer.param_groups[0]["params"]) == (finite, None)
    found = [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
    if finite:
        assert [float(gradient[0]) for gradient in found] == [gradient / 4 for gradient in gradients]


def test_unscale_leaves_fp16_gradients_to_the_update() -> None:
    """Divided in fp16, the smallest would be 0."""
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    for gradient, finite in ((6e4, True), (float("inf"), False)):
        parameter.grad = torch.full((3,), gradient, dtype=torch.float16)
        assert LossScaler(2.0**10, dynamic=True).unscale([parameter]) == (finite, 2.0**-10)
        assert float(parameter.grad[0]) == torch.tensor(gradient, dtype=torch.float16).item()


def test_a_dynamic_scale_doubles_slowly_and_halves_at_once() -> None:
    scaler, values = LossScaler(8.0, dynamic=True, patience=3), []
    for finite in (True, True, True, True, True, False, True, True, True):
        scaler.update(finite)
        values.append(scaler.value)
    assert values == [8, 8, 16, 16, 16, 8, 8, 8, 16]
    assert scaler.skipped == 1


def test_scales_stay_at_least_one_and_fixed_ones_constant() -> None:
    falling, fixed = LossScaler(2.0, dynamic=True), LossScaler(2.0, dynamic=False, patience=1)
    for _ in range(3):
        falling.update(False)
        fixed.update(False)
    fixed.update(True)
    assert (falling.value, fixed.value) == (1.0, 2.0)
    assert falling.skipped == fixed.skipped == 3


def test_a_loss_scale_resumes_from_its_state() -> None:
    scaler, other = LossScaler(8.0, dynamic=True, patience=3), LossScaler(1.0, dynamic=True, patience=3)
    for finite in (False, True, True):
        scaler.update(finite)
    other.load_state_dict(scaler.state_dict())
    scaler.update(True)
    other.update(True)
    assert other.state_dict() == scaler.state_dict() == {"value": 8.0, "skipped": 1, "finite_steps": 0}


def test_one_overflow_skips_one_step_and_training_goes_on() -> None:
    run = tightfit.build(tiny.job(steps=4, clip=1.0), tightfit.Plan(precision="fp16-mixed", loss_scale=128.0))
    weights, skipped = [run.model.lm_head.weight.detach().clone()], []
    plain = run.loss_sum
    for step in tightfit.train(run):
        weights.append(run.model.lm_head.weight.detach().clone())
        skipped.append(step.skipped)
        overflow = float("inf") if step.step == 0 else 1.0  # the gradients of the second step
        object.__setattr__(run, "loss_sum", lambda batch, factor=overflow: plain(batch) * factor)
    assert skipped == [False, True, False, False]
    assert [torch.equal(a, b) for a, b in pairwise(weights)] == skipped
    assert run.loss_scale is not None
    assert run.loss_scale.skipped == 1


class Seer(nn.Module):
    """Remembers the types it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.types: list[torch.dtype] = []

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        output = self.linear(x)
        self.types = [x.dtype, index.dtype, self.linear.weight.dtype, output.dtype]
        return output


def seen_by_loss(output: Tensor, batch: Any) -> Tensor:
    return output.float().square().mean()


F32, F16, B16, I64 = torch.float32, torch.float16, torch.bfloat16, torch.int64


@pytest.mark.parametrize(
    ("precision", "types"),
    [
        ("fp32", [F32, I64, F32, F32]),
        ("bf16-mixed", [F32, I64, F32, B16]),
        ("fp16-mixed", [F32, I64, F32, F16]),
        ("bf16-true", [B16, I64, B16, B16]),
        ("fp16-true", [F16, I64, F16, F16]),
    ],
)
def test_layers_and_loss_get_the_plan_s_types(precision: str, types: list[torch.dtype]) -> None:
    samples = [{"x": torch.randn(4), "index": torch.tensor(index)} for index in range(4)]
    train = tightfit.Train(batch=2, steps=1)
    job = tightfit.Job(model=Seer, data=samples, loss=seen_by_loss, train=train, allow=["bf16", "fp16"])
    run = tightfit.build(job, tightfit.Plan(precision=precision))
    (step,) = tightfit.train(run)
    assert run.model.types == types
    assert step.loss > 0


@pytest.mark.parametrize(
    ("machine", "allow", "precision", "hints"),
    [
        ("t4", None, "fp32", 1),
        ("v100-32gb", ["bf16", "offload"], "fp32", 1),
        ("t4", ["bf16", "fp16"], "fp16-mixed", 0),
        ("t4", ["bf16", "fp16"], "fp32", 0),  # the user chose it
        ("t4", [], "fp32", 0),  # the user wants fp32
        ("a100-80gb", None, "fp32", 0),  # bf16 is allowed, and fast
    ],
)
def test_a_gpu_without_bf16_gets_the_advice_of_fp16(
    machine: str, allow: list[str] | None, precision: str, hints: int
) -> None:
    job = tiny.job().replace(allow=allow)
    said = advice(Plan(precision=precision), job, Machine.named(machine))
    assert len(said) == hints
    assert all("add fp16 to `allow`" in hint and "times as fast" in hint for hint in said)


def test_the_advice_of_fp16_needs_no_rates() -> None:
    machine = Machine.named("t4")
    for rates in ({}, {"fp32": machine.matrix_flops_per_s["fp32"]}):
        (said,) = advice(Plan(), tiny.job().replace(allow=None), machine.replace(matrix_flops_per_s=rates))
        assert said.endswith("to use its fp16")
