"""LAMB follows the algorithm of its paper."""

import math

import pytest
import torch
from torch import Tensor

from tightfit.optim.lamb import LAMB


def gradients(shape: tuple[int, ...], steps: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)]


def run(start: Tensor, grads: list[Tensor], **options: object) -> Tensor:
    weight = torch.nn.Parameter(start.clone())
    optimizer = LAMB([weight], **options)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    return weight.detach()


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
    ours = run(start, grads, lr=0.05, betas=(0.9, 0.99), eps=1e-6, weight_decay=decay, clamp=(low, high))
    torch.testing.assert_close(ours, paper(start, grads, 0.05, 1e-6, decay, low, high), rtol=1e-12, atol=1e-12)


def test_vector_takes_adam_s_step_without_decay() -> None:
    start, grads = torch.linspace(-1, 2, 9, dtype=torch.float64), gradients((9,))
    ours = run(start, grads, lr=0.05, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
    adam = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Adam([adam], lr=0.05, betas=(0.9, 0.99), eps=1e-6)
    for grad in grads:
        adam.grad = grad
        optimizer.step()
    torch.testing.assert_close(ours, adam.detach(), rtol=1e-12, atol=1e-12)


def test_step_length_is_the_weight_norm_at_any_gradient_scale() -> None:
    start, grads = torch.linspace(-1, 2, 35, dtype=torch.float64).view(5, 7), gradients((5, 7))
    ours = run(start, grads, lr=0.05, eps=1e-30)
    scaled = run(start, [1000 * grad for grad in grads], lr=0.05, eps=1e-30)
    torch.testing.assert_close(ours, scaled, rtol=1e-12, atol=1e-12)
    first = run(start, grads[:1], lr=0.05) - start
    torch.testing.assert_close(first.norm(), 0.05 * start.norm(), rtol=1e-12, atol=0)


def test_zero_weights_move_and_zero_gradients_are_safe() -> None:
    zeros, grads = torch.zeros(3, 4, dtype=torch.float64), gradients((3, 4), 1)
    assert run(zeros, grads, lr=0.05).abs().min() > 0.04  # ratio 1: Adam's first step, lr times the sign
    ones = torch.ones(3, 4, dtype=torch.float64)
    torch.testing.assert_close(run(ones, [zeros], lr=0.05), ones)


def test_closure_is_called_and_missing_gradients_are_skipped() -> None:
    used, unused = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2, 2))
    optimizer = LAMB([used, unused], lr=0.1)

    def closure() -> float:
        loss = used.sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 4.0
    assert (used < 1).all()
    assert (unused == 1).all()
    assert unused not in optimizer.state
