"""Blocks that draw random numbers from Python or NumPy, and blocks that compute gradients in their forward, train with
recompute as they do without it, or are refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import tightfit
from tightfit.errors import InputError
from tightfit.runtime.recomputed_draws import GlobalGenerators, SameDraws

WIDTH, LAYERS, BATCH = 8, 5, 8


class Block(nn.Module):
    """Multiplies by a tensor, because backward keeps a plain number from the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def scale(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * torch.tensor(self.scale())


class PythonDraw(Block):
    def scale(self) -> float:
        return random.random()


class StoredPythonNormal(Block):
    """gauss makes two numbers at a time and stores the second, which the next block takes."""

    def scale(self) -> float:
        return random.gauss(1.0, 1.0)


class NumPyDraw(Block):
    def scale(self) -> float:
        return numpy.random.rand()


class StoredNumPyNormal(Block):
    """The same with NumPy: every second block takes a stored number, and the generator's bits do not change."""

    def scale(self) -> float:
        return numpy.random.randn()


class DropPath(Block):
    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.5:
            return x
        return super().forward(x)


class DrawsAndGradients(Block):
    """Computes a gradient in its forward, between two draws. This recomputes a part of the block."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            out = super().forward(x if x.requires_grad else x.detach().requires_grad_()) * torch.tensor(random.random())
            (slope,) = torch.autograd.grad(out.sum(), self.linear.weight, create_graph=True)
        return out + slope.square().mean() * torch.tensor(random.random())


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(block: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return Net(block)


def trained(block: Callable[[], nn.Module], **plan: Any) -> list[Any]:
    """Return the losses of some steps, the weights after them, and the next numbers of the generators."""
    torch.manual_seed(1)
    samples = [(torch.randn(WIDTH), number % 3) for number in range(4 * BATCH)]
    train = tightfit.Train(optimizer=partial(torch.optim.SGD, lr=0.5), batch=BATCH, steps=3, trackers=[])
    random.seed(2)
    numpy.random.seed(2)
    run = tightfit.build(tightfit.Job(model=partial(make, block), data=samples, train=train), tightfit.Plan(**plan))
    losses = [result.loss for result in tightfit.train(run)]
    weights = [weight for parameter in run.model.parameters() for weight in parameter.flatten().tolist()]
    return [*losses, *weights, random.gauss(0, 1), random.random(), numpy.random.randn(), numpy.random.rand()]


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    """Leaves the global generators as they were."""
    states = random.getstate(), numpy.random.get_state()
    yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])


@pytest.mark.sweep(12)
@pytest.mark.parametrize("recompute", ["full", "selective", "selective-2", "every-2", "first-3", "sqrt"])
@pytest.mark.parametrize("block", [PythonDraw, StoredPythonNormal, NumPyDraw, StoredNumPyNormal, DropPath])
def test_a_recomputed_block_draws_the_same_numbers_again(block: type[nn.Module], recompute: str) -> None:
    assert trained(block, recompute=recompute) == trained(block)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_a_block_that_cannot_be_compiled_draws_the_same() -> None:
    """Compiled code cannot draw from these generators, so torch runs the checkpoint of such a block uncompiled."""
    expected = trained(DropPath, compile="block")
    assert trained(DropPath, compile="block", recompute="full") == pytest.approx(expected, abs=1e-5)


def test_a_forward_with_gradients_draws_the_same_again() -> None:
    assert trained(DrawsAndGradients, recompute="full") == trained(DrawsAndGradients)


@pytest.mark.parametrize("recompute", ["selective", "selective-2"])
def test_selective_refuses_gradients_in_a_forward(recompute: str) -> None:
    with pytest.raises(
        InputError, match=rf"plan: recompute={recompute}: a block has to be recomputed twice"
    ) as refused:
        trained(DrawsAndGradients, recompute=recompute)
    assert "use recompute: full" in str(refused.value)


def test_selective_recomputes_twice_if_nothing_is_saved() -> None:
    """Its blocks compute no product, so that a second recomputation needs no saved output."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                out = torch.tanh(x * self.weight)
                (slope,) = torch.autograd.grad(out.sum(), self.weight, create_graph=True)
            return out + slope.square().mean()

    assert trained(Scaled, recompute="selective") == trained(Scaled)


def test_numpy_s_state_is_copied_only_if_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, get_state = [], numpy.random.get_state

    def counted(*arguments: Any, **options: Any) -> Any:
        copies.append(1)
        return get_state(*arguments, **options)

    numpy.random.seed(3)
    monkeypatch.setattr(numpy.random, "get_state", counted)
    shared = GlobalGenerators()
    for _ in range(4):
        call = SameDraws(lambda: None, shared)
        call.run()
        call.run()
    assert len(copies) == 1
    call = SameDraws(numpy.random.rand, shared)
    assert call.run() == call.run()
    assert len(copies) == 2


def test_a_replaced_bit_generator_is_rewound_too() -> None:
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(5))
    try:
        call = SameDraws(numpy.random.rand, GlobalGenerators())
        first, after = call.run(), numpy.random.get_state(legacy=False)
        assert call.run() == first
        assert numpy.random.get_state(legacy=False) == after
    finally:
        numpy.random.set_bit_generator(before)
