"""Lion follows the algorithm of its paper."""

import pytest
import torch
from torch import Tensor

from tightfit.optim.lion import Lion


def gradients(shape: tuple[int, ...], steps: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)]


def run(start: Tensor, grads: list[Tensor], **options: object) -> Tensor:
    weight = torch.nn.Parameter(start.clone())
    optimizer = Lion([weight], **options)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("shape", [(5, 7), (9,), ()])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_follows_the_paper_s_algorithm(shape: tuple[int, ...], decay: float) -> None:
    grads = gradients(shape)
    w = start = torch.full(shape, 0.5, dtype=torch.float64)
    m = torch.zeros_like(w)
    for g in grads:
        c = 0.9 * m + (1 - 0.9) * g
        w = w - 0.01 * (torch.sign(c) + decay * w)
        m = 0.99 * m + (1 - 0.99) * g
    ours = run(start, grads, lr=0.01, betas=(0.9, 0.99), weight_decay=decay)
    torch.testing.assert_close(ours, w, rtol=1e-12, atol=1e-12)


def test_every_element_moves_by_the_learning_rate() -> None:
    """The scale of the gradients does not matter."""
    start, grads = torch.ones(5, 7, dtype=torch.float64), gradients((5, 7))
    moved = run(start, grads[:1], lr=0.01) - start
    torch.testing.assert_close(moved.abs(), torch.full_like(start, 0.01), rtol=1e-12, atol=0)
    scaled = run(start, [1000 * grad for grad in grads], lr=0.01)
    torch.testing.assert_close(run(start, grads, lr=0.01), scaled, rtol=1e-12, atol=0)


def test_closure_is_called_and_missing_gradients_are_skipped() -> None:
    used, unused = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2, 2))
    optimizer = Lion([used, unused], lr=0.1)

    def closure() -> float:
        loss = used.sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 4.0
    assert (used < 1).all()
    assert (unused == 1).all()
    assert unused not in optimizer.state
