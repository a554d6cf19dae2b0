"""What the tests of several optimizers use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def gradients(shape: tuple[int, ...], steps: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)]


def run(kind: type[Optimizer], start: Tensor, grads: list[Tensor], **options: Any) -> Tensor:
    """The weight after an update with each gradient."""
    weight = torch.nn.Parameter(start.clone())
    optimizer = kind([weight], **options)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    return weight.detach()
