"""Blocks that are called twice under a reentrant checkpoint complete their gradients twice in a backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tightfit
from tests.pool import together
from tightfit.errors import InputError

HERE, WIDTH = "tests.parallel.test_reentrant:", 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Looped(nn.Module):
    def __init__(self, reentrant: bool, times: int) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.reentrant, self.times = reentrant, times

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for _ in range(self.times):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def trained(reentrant: bool, times: int, fields: dict[str, Any]) -> list[float] | str:
    data = [(torch.randn(WIDTH, generator=torch.Generator().manual_seed(one)), one % WIDTH) for one in range(16)]
    train = tightfit.Train(batch=4, steps=3, learning_rate=1e-2, trackers=())
    job = tightfit.Job(model=lambda: Looped(reentrant, times), data=data, train=train)
    try:
        return [step.loss for step in tightfit.train(tightfit.build(job, tightfit.Plan(**fields)))]
    except InputError as error:
        return str(error)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("more", [{}, {"micro_batch": 1}, {"micro_batch": 1, "gradient_sync": "step"}], ids=str)
def test_only_twice_called_reentrant_blocks_are_refused(more: dict[str, Any]) -> None:
    fields = {"zero": 3, "dp_shard": 2, **more}
    assert "completes the gradient of a parameter" in together(2, HERE + "trained", True, 2, fields)[0]
    for reentrant, times in ((True, 1), (False, 2)):
        expected = trained(reentrant, times, {})
        assert together(2, HERE + "trained", reentrant, times, fields)[0] == pytest.approx(expected, rel=1e-5)
