"""Lion follows the algorithm of its paper."""

import pytest
import torch

from tests.optim.common import gradients, run
from tightfit.optim.lion import Lion


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
    ours = run(Lion, start, grads, lr=0.01, betas=(0.9, 0.99), weight_decay=decay)
    torch.testing.assert_close(ours, w, rtol=1e-12, atol=1e-12)


def test_every_element_moves_by_the_learning_rate() -> None:
    start, grads = torch.ones(5, 7, dtype=torch.float64), gradients((5, 7))
    moved = run(Lion, start, grads[:1], lr=0.01) - start
    torch.testing.assert_close(moved.abs(), torch.full_like(start, 0.01), rtol=1e-12, atol=0)
