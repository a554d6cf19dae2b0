"""LARS follows the algorithm of its paper."""

import pytest
import torch
from torch import Tensor

from tests.optim.common import gradients, run
from tightfit.optim.lars import LARS


def paper(w: Tensor, grads: list[Tensor], lr: float, momentum: float, decay: float, eta: float) -> Tensor:
    """Algorithm 1 of the paper, line by line."""
    v = torch.zeros_like(w)
    for g in grads:
        w_norm, g_norm = float((w**2).sum()) ** 0.5, float((g**2).sum()) ** 0.5
        rate = eta * w_norm / (g_norm + decay * w_norm)
        v = momentum * v + lr * rate * (g + decay * w)
        w = w - v
    return w


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_matrix_follows_the_paper_s_algorithm(decay: float) -> None:
    start, grads = torch.linspace(-1, 2, 35, dtype=torch.float64).view(5, 7), gradients((5, 7))
    ours = run(LARS, start, grads, lr=2.0, momentum=0.8, weight_decay=decay, trust=0.02)
    torch.testing.assert_close(ours, paper(start, grads, 2.0, 0.8, decay, 0.02), rtol=1e-12, atol=1e-12)


def test_vector_takes_momentum_sgd_without_decay() -> None:
    start, grads = torch.linspace(-1, 2, 9, dtype=torch.float64), gradients((9,))
    ours = run(LARS, start, grads, lr=0.05, momentum=0.8, weight_decay=0.1)
    other = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([other], lr=0.05, momentum=0.8)
    for grad in grads:
        other.grad = grad
        optimizer.step()
    torch.testing.assert_close(ours, other.detach(), rtol=1e-12, atol=1e-12)


def test_weight_of_zeros_moves() -> None:
    zeros, grads = torch.zeros(3, 4, dtype=torch.float64), gradients((3, 4), 1)
    torch.testing.assert_close(run(LARS, zeros, grads, lr=0.5), -0.5 * grads[0])
