"""A GAN in a loop of your own: two models and two optimizers, fitted to a plan.

    python examples/own_loop/gan.py
    torchrun --standalone --nproc-per-node 2 examples/own_loop/gan.py --zero 2

The generator learns to draw points of a ring. The memory of a step is predicted first.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import tightfit

BATCH, NOISE, WIDTH = 256, 8, 128


def net(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, outputs)
    )


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3, betas=(0.5, 0.99))


def loop(plan: tightfit.Plan) -> Callable[[Tensor, Tensor], Tensor]:
    """Prepare both models, and return the step of the loop."""
    generator = tightfit.prepare(lambda: net(NOISE, 2), adam, plan)
    critic = tightfit.prepare(lambda: net(2, 1), adam, plan)

    def step(real: Tensor, noise: Tensor) -> Tensor:
        fake = generator(noise)
        critic.zero_grad()  # the generator's loss has left gradients in the critic
        critic.backward(functional.softplus(critic(fake.detach())).mean() + functional.softplus(-critic(real)).mean())
        critic.step()
        loss = functional.softplus(-critic(fake)).mean()
        generator.backward(loss)
        generator.step()
        return fake.detach()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GAN in a loop of your own.")
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--steps", type=int, default=500)
    given = parser.parse_args()
    processes, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    sharded = {"zero": given.zero, "dp_shard": processes} if given.zero else {"dp_replicate": processes}
    plan, share = tightfit.Plan(**sharded), BATCH // processes
    if rank == 0:
        print(tightfit.explain_loop(loop, plan, [torch.empty(share, 2), torch.empty(share, NOISE)]))
    step = loop(plan)
    torch.manual_seed(rank)  # each process draws its own share of a batch
    for number in range(given.steps):
        angle = 2 * math.pi * torch.rand(share)
        fake = step(torch.stack([angle.cos(), angle.sin()], -1), torch.randn(share, NOISE))
        if rank == 0 and (number + 1) % 100 == 0:
            radius = fake.norm(dim=-1)
            print(f"step {number + 1}: radius {radius.mean():.3f} +- {radius.std():.3f}", flush=True)


if __name__ == "__main__":
    main()
