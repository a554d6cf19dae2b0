"""Blocks that read state which changes after their forward: a recomputation would train something else."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tightfit
from tests.pool import together
from tightfit.errors import InputError
from tightfit.models.block_state import changed_after_forward

HERE = "tests.models.test_block_state:"
WIDTH = 16
GLOBAL = {"scale": 1.0}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.domain, self.calls, self.shift = 0, 0, None

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(self.norms[self.domain](x)))


class Net(nn.Module):
    """A model of blocks without such state."""

    block: Any = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 4)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(x))


class Averaged(Net):
    """Its norms count their calls, and average over all of them."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.BatchNorm1d(WIDTH, momentum=None)])


class Drifting(Net):
    """The model changes a buffer of its blocks after they have read it."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.get_buffer("center").cos().numpy().sum())

    def forward(self, x: Tensor) -> Tensor:
        output = self.head(self.run(x))
        with torch.no_grad():
            for block in self.blocks:
                block.get_buffer("center").add_(1)
        return output


class Domains(Net):
    """Two passes, each with norms of its own, chosen by an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for domain in range(2):
            for block in self.blocks:
                block.domain = domain
            outputs.append(self.run(x))
        return self.head(outputs[0] + outputs[1])


class Substituted(Net):
    """Biases of the blocks that another layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.made = nn.Parameter(torch.randn(4, 8)), nn.Linear(8, WIDTH)

    def run(self, x: Tensor) -> Tensor:
        for code, block in zip(self.codes, self.blocks, strict=True):
            x = functional_call(block, {"linear.bias": block.linear.bias + self.made(code)}, (x,))
        return x


class ShiftedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


class Shifted(Net):
    """A tensor as an attribute, which is cleared after the pass."""

    block = ShiftedBlock

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.shift = x.mean()
        x = super().run(x)
        for block in self.blocks:
            block.shift = x.sum()
        return x


class CountingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class Counting(Net):
    block = CountingBlock


class GlobalBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * GLOBAL["scale"]


class Globals(Net):
    block = GlobalBlock

    def run(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            GLOBAL["scale"] = 1 / (number + 1)
            x = block(x)
        return x


class TableBlock(Block):
    """Computes a table once, makes a constant each time, and draws numbers."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.table = torch.arange(WIDTH) * 2.0
        x = super().forward(x) + self.table * torch.tensor([0.5]) + torch.rand(WIDTH)
        return x * (1 + random.random()) if random.random() < 0.5 else x


class Tables(Net):
    block = TableBlock


class ClampedBlock(Block):
    """Sets its weight to other memory in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data = self.linear.weight.data.clamp(-0.1, 0.1)
        return super().forward(x)


class Clamped(Net):
    block = ClampedBlock


class Checkpointed(Net):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Cast(Net):
    def run(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().run(x).float()


def loss(output: Tensor, batch: Any) -> Tensor:
    return functional.mse_loss(output, batch[1])


def job(model: Any) -> tightfit.Job:
    data = [(torch.randn(WIDTH), torch.randn(4)) for _ in range(16)]
    return tightfit.Job(model=model, data=data, loss=loss, train=tightfit.Train(batch=8, steps=1))


def said(model: Any) -> str:
    batch = torch.randn(8, WIDTH), torch.randn(8, 4)
    return changed_after_forward(model, lambda made, batch: loss(made(batch[0]), batch), batch, None).changed


@pytest.mark.parametrize("model", [Domains, Substituted, Shifted, Counting, Globals, Drifting])
def test_state_that_changes_is_found(model: Any) -> None:
    assert "blocks.0 computes something else" in said(model)
    assert "test_block_state.py, line" in said(model)


@pytest.mark.parametrize("model", [Net, Tables, Cast, Clamped, Checkpointed, Averaged])
def test_blocks_without_such_state_are_not_named(model: Any) -> None:
    assert said(model) == ""


@pytest.mark.parametrize("recompute", ["full", "selective", "first-1", "sqrt"])
def test_recomputation_of_such_blocks_is_refused(recompute: str) -> None:
    with pytest.raises(InputError, match="computes something else when it runs again"):
        tightfit.build(job(Domains), tightfit.Plan(recompute=recompute))
    tightfit.build(job(Net), tightfit.Plan(recompute=recompute))


MACHINE = tightfit.Machine.named("l4")
PLAN = tightfit.Plan(materialize="device")
PINS = {name: getattr(PLAN, name) for name in tightfit.Plan.field_names() if name != "recompute"}


def half_recomputed(model: Any) -> tightfit.Job:
    """A job with the memory halfway between what the model needs with and without recomputation."""

    def asked(**limits: Any) -> tightfit.Job:
        data = [(torch.zeros(4096, WIDTH), torch.zeros(4096, 4)) for _ in range(8)]
        settings = tightfit.Train(batch=8, steps=1)
        return tightfit.Job(model=model, data=data, loss=loss, train=settings, allow=(), **limits)

    plans = (PLAN.replace(recompute=recompute) for recompute in ("none", "full"))
    most, least = (tightfit.estimate(asked(), plan, MACHINE).peak_bytes for plan in plans)
    return asked(limits=tightfit.Limits(memory=f"{(most + least) / 2 / 2**20:.0f}MiB"))


def test_a_search_does_not_recompute_such_blocks() -> None:
    (chosen, *_) = tightfit.search(half_recomputed(Domains), MACHINE, {**PINS, "micro_batch": 1})
    assert not chosen.plan.recomputes_blocks


@pytest.mark.slow
def test_a_search_recomputes_other_blocks() -> None:
    assert tightfit.search(half_recomputed(Net), MACHINE, PINS)[0].plan.recomputes_blocks
    for pins in (PINS, {**PINS, "recompute": "none"}):
        with pytest.raises(tightfit.DoesNotFit) as refused:
            tightfit.search(half_recomputed(Domains), MACHINE, pins)
        assert ("So only plans without recompute were tried" in str(refused.value)) is (pins is PINS)
        assert "plan.recompute:" not in str(refused.value)


def refused(zero: int) -> str:
    try:
        tightfit.build(job(Substituted), tightfit.Plan(zero=zero, dp_shard=2))
    except InputError as error:
        return str(error)
    return ""


def test_substituted_weights_and_plans_that_gather_weights() -> None:
    for said in together(2, HERE + "refused", 3):
        assert "in place of its parameter blocks.0.linear.bias" in said
    assert together(2, HERE + "refused", 2) == ["", ""]
