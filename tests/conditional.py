"""Models of which each sample uses only some modules, and their training in plain PyTorch: whole
batch, one device, no plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import tightfit
from tests.contract import cases
from tightfit.models import model_factory
from tightfit.optim import make_optimizer

WIDTH, CLASSES, SAMPLES, BATCH, STEPS = 9, 3, 32, 8, 4


class Routed(nn.Module):
    """A residual block whose samples go through the expert that their channel 0 names, and one expert that no sample names.

    An expert without samples is not called, so it has no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH - 1)
        self.experts = nn.ModuleList(nn.Linear(WIDTH - 1, WIDTH - 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        values = self.norm(x[:, 1:])
        out = torch.zeros_like(values)
        for number, expert in enumerate(self.experts):
            rows = (x[:, 0] == number).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, torch.tanh(expert(values[rows])).to(out.dtype))
        return x + functional.pad(out, (1, 0))


class Skipped(nn.Module):
    """A residual block that the samples of one route go through; where there is none it is not called."""

    def __init__(self, route: int) -> None:
        super().__init__()
        self.route = route
        self.inner, self.outer = nn.Linear(WIDTH - 1, 12), nn.Linear(12, WIDTH - 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] == self.route).nonzero().squeeze(1)
        if not len(rows):
            return x
        out = self.outer(torch.relu(self.inner(x[rows, 1:]))).to(x.dtype)
        return x.index_add(0, rows, functional.pad(out, (1, 0)))


class Conditional(nn.Module):
    """Blocks with experts, and parameters that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH - 1, WIDTH - 1)
        self.blocks = nn.ModuleList([Routed(), Skipped(1), Routed(), Skipped(2)])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.unused = nn.Linear(5, 7)
        self.unused_vector = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x[:, :1], self.stem(x[:, 1:])], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def samples() -> list[tuple[Tensor, int]]:
    """Most samples name expert 0, few name expert 1, one names expert 2."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for number in range(SAMPLES):
        x = torch.randn(WIDTH, generator=generator)
        x[0] = 2 if number == 11 else 1 if number % 8 == 3 else 0
        found.append((x, number % CLASSES))
    return found


def job(model: Any = Conditional, **train: Any) -> tightfit.Job:
    settings = {
        "batch": BATCH,
        "steps": STEPS,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "epsilon": cases.EPSILON,
        **train,
    }
    allow = [*cases.ALLOW, "asynchronous"]
    return tightfit.Job(model=model, data=samples(), train=tightfit.Train(**settings), allow=allow)


def plain(wanted: tightfit.Job) -> tuple[list[float], dict[str, Tensor], dict[str, list[bool]]]:
    """Losses, weights, and by parameter whether it had a gradient in each step: the loop that anyone would write."""
    batches = tightfit.build(wanted).data.steps(0, None)
    torch.manual_seed(wanted.train.seed)
    model = model_factory(wanted.model)()
    optimizer = make_optimizer(model, wanted.train)
    losses, had = [], {name: [] for name, _ in model.named_parameters()}  # type: dict[str, list[bool]]
    for _, (batch,) in zip(range(wanted.train.steps or 0), batches, strict=False):
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        for name, parameter in model.named_parameters():
            had[name].append(parameter.grad is not None)
        if wanted.train.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), wanted.train.clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, cases.state(model), had


def trained(fields: dict[str, Any], model: Any = Conditional, **train: Any) -> tuple[list[float], dict[str, Tensor]]:
    run = tightfit.build(job(model, **train), tightfit.Plan(**fields))
    return [step.loss for step in tightfit.train(run)], cases.state_of(run)


class Chosen(Conditional):
    """Calls a block only where a sample takes its route, so whole layers are passed by."""

    def layers(self, routes: set[int]) -> list[nn.Module]:
        return [block for block in self.blocks if not isinstance(block, Skipped) or block.route in routes]

    def forward(self, x: Tensor) -> Tensor:
        layers = self.layers({int(route) for route in x[:, 0]})
        x = torch.cat([x[:, :1], self.stem(x[:, 1:])], 1)
        for layer in layers:
            x = layer(x)
        return self.head(x)


class OtherOrder(Chosen):
    """Calls two blocks of equal size in an order that the samples choose."""

    def layers(self, routes: set[int]) -> list[nn.Module]:
        first, second, third, fourth = self.blocks
        return [third, second, first, fourth] if 2 in routes else [first, second, third, fourth]


class Repeats(Chosen):
    """A block that is called again where a sample takes its route."""

    def layers(self, routes: set[int]) -> list[nn.Module]:
        return [*self.blocks, *[self.blocks[0]] * (2 in routes)]


class LastOfAll(Chosen):
    """Its last block is passed by, so that a device is at the end of its forward while another is not."""

    def layers(self, routes: set[int]) -> list[nn.Module]:
        return [*self.blocks][: 4 if 2 in routes else 3]


class OutOfUse(Chosen):
    """All blocks are called, and what the last one made is used for some samples only: they have other backwards."""

    def forward(self, x: Tensor) -> Tensor:
        used = bool((x[:, 0] == 2).any())
        x = torch.cat([x[:, :1], self.stem(x[:, 1:])], 1)
        for layer in self.blocks:
            before, x = x, layer(x)
        return self.head(x if used else before)


class SameForAll(Chosen):
    """Blocks in another order than they are defined, one twice and one never, the same for all samples."""

    def layers(self, routes: set[int]) -> list[nn.Module]:
        first, second, third, _ = self.blocks
        return [third, second, first, second]


class DroppedByChance(Chosen):
    """Layers that are dropped by chance in training, on each device by its own."""

    def layers(self, routes: set[int]) -> list[nn.Module]:
        return [block for block in self.blocks if torch.rand(()) < 0.5]
