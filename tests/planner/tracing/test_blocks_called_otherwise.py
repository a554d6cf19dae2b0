"""Blocks of one kind of which the model calls some without gradients, or under a checkpoint of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tightfit
from tightfit.planner.dry_run import dry_run

WIDTH, BLOCKS, FIRST = 32, 9, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 4)

    def begin(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = self.begin(block, x) if number < FIRST else block(x)
        return self.head(x.mean(1))


class WithoutGradients(Net):
    def begin(self, block: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            return block(x)


class Checkpointed(Net):
    def begin(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)


class Longer(Net):
    def begin(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x) if block is not self.blocks[2] else block(x).repeat(1, 2, 1)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("model", [Net, WithoutGradients, Checkpointed, Longer])
def test_blocks_are_traced_as_they_are_called(model: Any) -> None:
    data = [(torch.zeros(256, WIDTH), torch.zeros(4)) for _ in range(16)]
    job = tightfit.Job(model=model, data=data, loss=nn.MSELoss(), train=tightfit.Train(batch=16, steps=1), allow=())
    estimate = tightfit.estimate(job, tightfit.Plan(), "l4")
    tensors = sum(bytes for row, bytes in estimate.peak.rows.items() if row not in ("runtime", "allocator"))
    assert tensors == pytest.approx(dry_run(job, tightfit.Plan(), "cuda").total, rel=0.02)
