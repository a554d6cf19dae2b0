"""A Wasserstein GAN with gradient penalty, two optimizers and a moving average of the generator, in
a loop of the user's own: under ZeRO-2 on two processes it trains as in plain PyTorch, and its memory
is explained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tests.contract.cases import distance
from tests.pool import together
from tightfit.plan import Plan

BATCH, NOISE, PIXELS, WIDTH, STEPS, CRITIC_STEPS = 128, 8, 48, 128, 3, 2
DECAY, PENALTY = 0.9, 10.0


def make_generator() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(NOISE, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, PIXELS)
    )


def make_critic() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=2e-3, betas=(0.5, 0.9), eps=1e-3)


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Noise, real samples and the weights that mix them, for the whole batch of a step."""
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(BATCH, NOISE, generator=generator),
        torch.randn(BATCH, PIXELS, generator=generator).tanh(),
        torch.rand(BATCH, 1, generator=generator),
    )


def critic_loss(critic: Callable[[Tensor], Tensor], real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
    """The critic's loss of Gulrajani et al. 2017, arXiv:1704.00028."""
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (gradient.norm(dim=1) - 1).square().mean()
    return critic(fake).mean() - critic(real).mean() + PENALTY * penalty


def average(mean: list[Tensor], model: nn.Module) -> None:
    with torch.no_grad():
        for kept, now in zip(mean, model.parameters(), strict=True):
            kept.lerp_(now, 1 - DECAY)


def gan(plan: Plan) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Prepare both models, and return the step of the loop."""
    generator = tightfit.prepare(make_generator(), adam, plan)
    critic = tightfit.prepare(make_critic(), adam, plan)
    mean = [parameter.detach().clone() for parameter in generator.model.parameters()]

    def step(noise: Tensor, real: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(CRITIC_STEPS):
            critic.zero_grad()  # the generator's loss has left gradients here
            loss = critic_loss(critic, real, generator(noise).detach(), mix)
            critic.backward(loss)
            critic.step()
        score = -critic(generator(noise)).mean()
        generator.backward(score)
        generator.step()
        average(mean, generator.model)
        return loss.detach(), score.detach()

    step.models = generator, critic  # type: ignore[attr-defined]
    step.mean = mean  # type: ignore[attr-defined]
    return step


def plain() -> tuple[list[float], dict[str, Tensor]]:
    """The same GAN by nothing but PyTorch, on whole batches: losses, and all weights at the end."""
    generator, critic = make_generator(), make_critic()
    optimizers = adam(generator.parameters()), adam(critic.parameters())
    mean = [parameter.detach().clone() for parameter in generator.parameters()]
    losses = []
    for number in range(STEPS):
        noise, real, mix = batch(number)
        for _ in range(CRITIC_STEPS):
            optimizers[1].zero_grad()
            loss = critic_loss(critic, real, generator(noise).detach(), mix)
            loss.backward()
            optimizers[1].step()
        optimizers[0].zero_grad()
        score = -critic(generator(noise)).mean()
        score.backward()
        optimizers[0].step()
        average(mean, generator)
        losses += [float(loss.detach()), float(score.detach())]
    return losses, weights_of(generator, critic, mean)


def weights_of(generator: nn.Module, critic: nn.Module, mean: list[Tensor]) -> dict[str, Tensor]:
    found = {
        f"{kind}.{name}": p for kind, one in (("g", generator), ("c", critic)) for name, p in one.named_parameters()
    }
    found |= {f"mean.{number}": one for number, one in enumerate(mean)}
    return {name: one.detach().clone() for name, one in found.items()}


def train(plan: Plan) -> tuple[list[float], dict[str, Tensor]]:
    """On this process: the mean losses of its share of each batch, and all weights at the end."""
    step: Any = gan(plan)
    rank, ranks = step.models[0].data_rank, step.models[0].data_ranks
    losses: list[float] = []
    for number in range(STEPS):
        losses += map(float, step(*(one.chunk(ranks)[rank] for one in batch(number))))
    return losses, weights_of(step.models[0].model, step.models[1].model, step.mean)


def measure(plan: Plan) -> tuple[int, dict[str, int]]:
    """The lowest peak of several runs: gloo's threads sometimes hold a bucket of gradients for some
    microseconds after its all-reduce has ended."""
    inputs = [one.chunk(plan.devices)[0] for one in batch(0)]
    found = min((tightfit.measure_loop(gan, plan, inputs) for _ in range(5)), key=lambda one: one.total)
    return found.total, found.peak.rows


PLANS = [Plan(zero=2, dp_shard=2), Plan(dp_replicate=2), Plan(zero=1, dp_shard=2)]


@pytest.mark.parametrize("plan", [Plan(), *PLANS], ids=str)
def test_a_gan_trains_as_in_plain_pytorch(plan: Plan) -> None:
    expected_losses, expected = plain()
    results = together(plan.devices, "tests.journeys.test_gan:train", plan) if plan.devices > 1 else [train(plan)]
    for _, weights in results:
        assert distance(weights, expected) <= 1e-6
    means = [sum(losses) / len(results) for losses in zip(*(losses for losses, _ in results), strict=True)]
    assert means == pytest.approx(expected_losses, rel=1e-5)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("plan", [Plan(), *PLANS], ids=str)
def test_the_memory_of_a_gan_is_explained(plan: Plan) -> None:
    explained = tightfit.explain_loop(gan, plan, [one.chunk(plan.devices)[0] for one in batch(0)])
    measured = together(plan.devices, "tests.journeys.test_gan:measure", plan) if plan.devices > 1 else [measure(plan)]
    for total, rows in measured:
        assert explained.total == pytest.approx(total, rel=0.05)
        assert explained.peak.rows["optimizer"] == pytest.approx(rows["optimizer"], rel=0.05)


def test_the_allocator_agrees_with_the_explanation() -> None:
    """The measure above counts tensors; torch's profiler counts what the allocator gives out."""
    explained = tightfit.explain_loop(gan, Plan(), batch(0))
    step: Any = gan(Plan())
    inputs = batch(0)
    step(*inputs)
    step.models[1].zero_grad()  # the step begins so, and the profiler does not see what is freed of earlier memory
    models = [one.run for one in step.models]
    states = [one for run in models for state in run.optimizer.state.values() for one in state.values()]
    held = [*inputs, *step.mean, *states, *(p for run in models for p in run.model.parameters())]
    now = most = sum(one.nbytes for one in held)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        step(*inputs)
    results: Any = profiler.profiler and profiler.profiler.kineto_results
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    assert explained.total == pytest.approx(most, rel=0.05)
