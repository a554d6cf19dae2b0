"""LAMB follows the algorithm of its paper."""

import math

import pytest
import torch
from torch import Tensor

from tests.optim.common import gradients, run
from tightfit.optim.lamb import LAMB


def paper(w: Tensor, grads: list[Tensor], lr: float, eps: float, decay: float, low: float, high: float) -> Tensor:
    """Algorithm 2 of the paper, line by line."""
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(grads, 1):
        m = 0.9 * m + 0.1 * g
        v = 0.99 * v + 0.01 * g**2
        r = (m / (1 - 0.9**t)) / (torch.sqrt(v / (1 - 0.99**t)) + eps)
        u = r + decay * w
        phi = min(max(float((w**2).sum()) ** 0.5, low), high)
        w = w - lr * phi / float((u**2).sum()) ** 0.5 * u
    return w


@pytest.mark.parametrize(("low", "high"), [(0.0, math.inf), (0.0, 2.0), (9.0, 20.0)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_matrix_follows_the_paper_s_algorithm(low: float, high: float, decay: float) -> None:
    start, grads = torch.linspace(-1, 2, 35, dtype=torch.float64).view(5, 7), gradients((5, 7))
    ours = run(LAMB, start, grads, lr=0.05, betas=(0.9, 0.99), eps=1e-6, weight_decay=decay, clamp=(low, high))
    torch.testing.assert_close(ours, paper(start, grads, 0.05, 1e-6, decay, low, high), rtol=1e-12, atol=1e-12)


def test_vector_takes_adam_s_step_without_decay() -> None:
    start, grads = torch.linspace(-1, 2, 9, dtype=torch.float64), gradients((9,))
    ours = run(LAMB, start, grads, lr=0.05, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
    adam = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Adam([adam], lr=0.05, betas=(0.9, 0.99), eps=1e-6)
    for grad in grads:
        adam.grad = grad
        optimizer.step()
    torch.testing.assert_close(ours, adam.detach(), rtol=1e-12, atol=1e-12)


def test_weight_of_zeros_moves() -> None:
    zeros, grads = torch.zeros(3, 4, dtype=torch.float64), gradients((3, 4), 1)
    assert run(LAMB, zeros, grads, lr=0.05).abs().min() > 0.04  # ratio 1: Adam's first step, lr times the sign
