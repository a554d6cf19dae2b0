"""verify: a plan beside the reference plan on the job itself. Losses, gradients and weights must agree.

The reference is fp32, one device, no method. Both runs start from the same seed and see the same samples.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tightfit.engine.build import build
from tightfit.engine.loop import train
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.methods.run import Run
from tightfit.plan import Plan

TOLERANCE = {"fp32": 1e-4, "tf32": 2e-2, "bf16-mixed": 1e-1, "fp16-mixed": 3e-2, "bf16-true": 2e-1, "fp16-true": 1e-1}
"""Largest relative error allowed, by precision: about 2^-8 (bf16) or 2^-11 (fp16, tf32) times what a few layers and
steps make of one rounding. Gradients are the worst of the three; losses and weights agree much more closely."""

STATES_TOLERANCE = {"fp32": 0.0, "bf16": 2e-2, "8-bit": 5e-2, "4-bit": 2e-1}
"""What narrow optimizer states add: they touch the weights only."""


@dataclass(frozen=True)
class Verification:
    """Largest relative differences between a plan and the reference over the steps taken, and whether they are allowed.

    loss is |a - b| / |b| of the worst step; gradients and weights are norms of the difference over norms of the
    reference's, whole-model, gradients of the first step and weights after the last.
    """

    loss: float
    gradients: float
    weights: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return max(self.loss, self.gradients, self.weights) <= self.tolerance

    def content(self) -> dict[str, object]:
        errors = {"loss": self.loss, "gradients": self.gradients, "weights": self.weights}
        return {"max_relative_error": errors, "tolerance": self.tolerance, "passed": self.passed}


def verify(job: Job, plan: Plan, machine: Machine | None = None, steps: int = 3) -> Verification:
    """Run the reference and then `plan` for `steps` optimizer steps of `job` and compare them."""
    if job.train.steps is None or job.train.steps < steps:
        job = job.replace(train=job.train.replace(steps=steps, epochs=None, warmup=min(job.train.warmup, steps)))
    expected = observe(build(job, Plan(), machine), steps)
    found = observe(build(job, plan, machine), steps)
    loss = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found.losses, expected.losses, strict=True))
    tolerance = TOLERANCE[plan.precision] + STATES_TOLERANCE[plan.states]
    return Verification(
        loss, difference(found.gradients, expected.gradients), difference(found.weights, expected.weights), tolerance
    )


@dataclass(frozen=True)
class Observed:
    """Losses of each step, gradients of the first, weights after the last; fp32 on the host, by parameter name."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def observe(run: Run, steps: int) -> Observed:
    """Train `steps` steps, seeing the gradients of the first as they arrive, whatever the plan does with them."""
    gradients: dict[str, Tensor] = {}
    hooks = [
        parameter.register_hook(_adder(gradients, name))
        for name, parameter in run.model.named_parameters()
        if parameter.requires_grad
    ]
    scale = run.loss_scale.value if run.loss_scale else 1.0
    losses = []
    for result in itertools.islice(train(run), steps):
        losses.append(result.loss)
        for hook in hooks:
            hook.remove()
    gradients = {name: gradient / scale for name, gradient in gradients.items()}
    return Observed(losses, gradients, weights_of(run.model))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().float().cpu().clone() for name, parameter in model.named_parameters()}


def _adder(gradients: dict[str, Tensor], name: str):  # type: ignore[no-untyped-def]
    def add(gradient: Tensor) -> None:
        part = gradient.detach().float().cpu()
        gradients[name] = gradients[name] + part if name in gradients else part.clone()

    return add


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm of what was expected, over all tensors together."""
    distance = torch.stack([(found[name] - value).double().square().sum() for name, value in expected.items()]).sum()
    size = torch.stack([value.double().square().sum() for value in expected.values()]).sum()
    return float((distance / size.clamp_min(1e-30)).sqrt())
