"""LARS follows the algorithm of its paper."""

import pytest
import torch
from torch import Tensor

from tightfit.optim.lars import LARS


def gradients(shape: tuple[int, ...], steps: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)]


def run(start: Tensor, grads: list[Tensor], **options: float) -> Tensor:
    weight = torch.nn.Parameter(start.clone())
    optimizer = LARS([weight], **options)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    return weight.detach()


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
    ours = run(start, grads, lr=2.0, momentum=0.8, weight_decay=decay, trust=0.02)
    torch.testing.assert_close(ours, paper(start, grads, 2.0, 0.8, decay, 0.02), rtol=1e-12, atol=1e-12)


def test_vector_takes_momentum_sgd_without_decay() -> None:
    start, grads = torch.linspace(-1, 2, 9, dtype=torch.float64), gradients((9,))
    ours = run(start, grads, lr=0.05, momentum=0.8, weight_decay=0.1)
    other = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([other], lr=0.05, momentum=0.8)
    for grad in grads:
        other.grad = grad
        optimizer.step()
    torch.testing.assert_close(ours, other.detach(), rtol=1e-12, atol=1e-12)


def test_step_length_is_the_weight_norm_at_any_gradient_scale() -> None:
    start, grads = torch.linspace(-1, 2, 35, dtype=torch.float64).view(5, 7), gradients((5, 7))
    scaled = run(start, [1000 * grad for grad in grads], lr=2.0, trust=0.02)
    torch.testing.assert_close(run(start, grads, lr=2.0, trust=0.02), scaled, rtol=1e-12, atol=1e-12)
    first = run(start, grads[:1], lr=2.0, trust=0.02) - start
    torch.testing.assert_close(first.norm(), 0.04 * start.norm(), rtol=1e-12, atol=0)


def test_zero_weights_move_and_zero_gradients_are_safe() -> None:
    zeros, grads = torch.zeros(3, 4, dtype=torch.float64), gradients((3, 4), 1)
    torch.testing.assert_close(run(zeros, grads, lr=0.5), -0.5 * grads[0])
    ones = torch.ones(3, 4, dtype=torch.float64)
    torch.testing.assert_close(run(ones, [zeros], lr=0.5), ones)


def test_closure_is_called_and_missing_gradients_are_skipped() -> None:
    used, unused = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2, 2))
    optimizer = LARS([used, unused], lr=1.0)

    def closure() -> float:
        loss = used.sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 4.0
    assert (used < 1).all()
    assert (unused == 1).all()
    assert unused not in optimizer.state
