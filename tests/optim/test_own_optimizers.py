"""What holds for every optimizer here that torch does not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from tests.optim.common import gradients, run
from tightfit.optim.lamb import LAMB
from tightfit.optim.lars import LARS
from tightfit.optim.lion import Lion


@pytest.mark.parametrize(("kind", "rate"), [(LAMB, 0.1), (LARS, 1.0), (Lion, 0.1)])
def test_closure_is_called_and_missing_gradients_are_skipped(kind: type[Optimizer], rate: float) -> None:
    used, unused = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2, 2))
    options: dict[str, Any] = {"lr": rate}
    optimizer = kind([used, unused], **options)

    def closure() -> float:
        loss = used.sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 4.0
    assert (used < 1).all()
    assert (unused == 1).all()
    assert unused not in optimizer.state


@pytest.mark.parametrize(
    ("kind", "options", "atol"),
    [
        (LAMB, {"lr": 0.05, "eps": 1e-30}, 1e-12),
        (LARS, {"lr": 2.0, "trust": 0.02}, 1e-12),
        (Lion, {"lr": 0.01}, 0.0),
    ],
)
def test_gradient_scale_does_not_matter(kind: type[Optimizer], options: dict[str, Any], atol: float) -> None:
    start, grads = torch.linspace(-1, 2, 35, dtype=torch.float64).view(5, 7), gradients((5, 7))
    scaled = run(kind, start, [1000 * grad for grad in grads], **options)
    torch.testing.assert_close(run(kind, start, grads, **options), scaled, rtol=1e-12, atol=atol)


@pytest.mark.parametrize(
    ("kind", "options", "share"), [(LAMB, {"lr": 0.05}, 0.05), (LARS, {"lr": 2.0, "trust": 0.02}, 0.04)]
)
def test_step_length_is_a_share_of_the_weights_norm(
    kind: type[Optimizer], options: dict[str, Any], share: float
) -> None:
    start = torch.linspace(-1, 2, 35, dtype=torch.float64).view(5, 7)
    moved = run(kind, start, gradients((5, 7), 1), **options) - start
    torch.testing.assert_close(moved.norm(), share * start.norm(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", [LAMB, LARS])
def test_gradient_of_zeros_does_not_break(kind: type[Optimizer]) -> None:
    ones, zeros = torch.ones(3, 4, dtype=torch.float64), torch.zeros(3, 4, dtype=torch.float64)
    torch.testing.assert_close(run(kind, ones, [zeros], lr=0.5), ones)
