"""Stage boundaries: models that do more than pass a tensor from block to block.

In a pipeline they train as in plain PyTorch, or are refused with the line at which they cannot be
split.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

import tightfit
from tests.contract.cases import distance, make_case
from tests.pool import together
from tightfit.engine.checkpoint.save import newest, save
from tightfit.engine.pipeline_check import compare_split, wants_check
from tightfit.errors import InputError
from tightfit.measure.verify import observe_settled

HERE = "tests.parallel.pipeline.test_boundaries:"
WIDTH, STEPS, BATCH = 8, 3, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.inner(h))


class Plain(nn.Module):
    """Embedding, three blocks and a head; what others vary."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("positions", torch.randn(WIDTH, generator=torch.Generator().manual_seed(7)))

    def block(self) -> nn.Module:
        return Block()

    def before(self, x: Tensor) -> Tensor:
        return self.embed(x)

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.through(self.before(x), x))


class PositionsAndResidual(Plain):
    """`h = embed(x) + positions; for b in blocks: h = h + b(h)`"""

    def before(self, x: Tensor) -> Tensor:
        return self.embed(x) + self.positions

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        for block in self.blocks:
            h = h + block(h)
        return h


class InPlace(PositionsAndResidual):
    class Copies(Block):
        def forward(self, h: Tensor) -> Tensor:
            return super().forward(h * 1.0)

    def block(self) -> nn.Module:
        return self.Copies()

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        for block in self.blocks:
            h += block(h)
        return h.relu_()


class Exp(Plain):
    def before(self, x: Tensor) -> Tensor:
        return torch.exp(self.embed(x))


class View(Plain):
    """What the first block of a stage is called with is a view, and what it is a view of lives on, unused."""

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        for block in self.blocks:
            wide = torch.stack((h, h), 1)
            h = block(wide[:, 0])
        return h


class NoEmbedding(Plain):
    """The batch itself goes into the first block."""

    def before(self, x: Tensor) -> Tensor:
        return torch.cat((x, x), 1)


class BatchGoesIn(Plain):
    def __init__(self) -> None:
        super().__init__()
        del self.embed

    def before(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        h = self.through(x, x)
        return self.head(h + x)  # the input is there on each stage


class ByName(Plain):
    class Named(Block):
        def forward(self, h: Tensor, *, mask: Tensor, scale: float = 1.0) -> Tensor:  # type: ignore[override]
            return torch.tanh(self.inner(h)) * mask * scale

    def block(self) -> nn.Module:
        return self.Named()

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        mask = (x.sum(1, keepdim=True) > 0).float() + 0.5
        for block in self.blocks:
            h = block(mask=mask, h=h, scale=0.5)
        return h


class Tuples(Plain):
    """Blocks hand on two tensors that both have gradients, and one that has none, in a dict in a tuple."""

    class Two(Block):
        def forward(self, pair: Any) -> Any:
            h, rest = pair
            new = torch.tanh(self.inner(h))
            return new, {"other": rest["other"] * new.mean(), "count": rest["count"] + 1}

    def block(self) -> nn.Module:
        return self.Two()

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        pair: Any = h, {"other": h * 2, "count": torch.zeros(len(x), dtype=torch.int64)}
        for block in self.blocks:
            pair = block(pair)
        h, rest = pair
        return h + rest["other"] * rest["count"][:, None]


class Relative(Plain):
    """What comes from a parameter before the blocks goes into each of them, as DeBERTa's relative embeddings do."""

    class Biased(Block):
        def forward(self, h: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
            return torch.tanh(self.inner(h) + bias)

    def __init__(self, blocks: int = 3) -> None:
        super().__init__(blocks)
        self.relative = nn.Embedding(2, WIDTH)  # defined behind the blocks
        self.norm = nn.LayerNorm(WIDTH)

    def block(self) -> nn.Module:
        return self.Biased()

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        bias = self.norm(self.relative.weight).sum(0)
        for block in self.blocks:
            h = block(h, bias)
        return h


class FromBlock0(Relative):
    """What block 0's output gives goes into all later ones, as T5's relative positions do."""

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        h = self.blocks[0](h, self.norm(self.relative.weight).sum(0))
        bias = h.mean(0, keepdim=True).exp()
        for block in self.blocks[1:]:  # type: ignore[index]
            h = block(h, bias)
        return h


class HeadFirst(Plain):
    """What is used behind the blocks is defined before them, as OPT's last norm is."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.LayerNorm(WIDTH)
        self.blocks = self._modules.pop("blocks")  # type: ignore[assignment]

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        return self.last(super().through(h, x))


class Between(Plain):
    """A norm that all use between blocks has no weights; one between the first two has."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.LayerNorm(WIDTH)

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            h = functional.layer_norm(block(h), (WIDTH,))
            h = self.middle(h) if number == 0 else h
        return h


class Attributes(Plain):
    """The model asks its blocks for what they hold."""

    class Scaled(Block):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale, self.kinds = scale, ("even", "odd")

    def block(self) -> nn.Module:
        return self.Scaled(0.5)

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h) * block.scale * len(block.kinds)  # type: ignore[arg-type]
        return h


class Shrinks(Plain):
    """Blocks change the shape of what they are given, as Swin's do."""

    class Halves(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner = nn.Linear(width, width // 2)

        def forward(self, h: Tensor) -> Tensor:
            return torch.tanh(self.inner(h))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Halves(width) for width in (8, 4, 2))
        self.head = nn.Linear(1, 3)


class Routed(Plain):
    """Blocks read values: which samples go to which expert."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 2)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, h: Tensor) -> Tensor:
            shares = self.router(h).softmax(-1)
            best = shares.argmax(-1)
            out = torch.zeros_like(h)
            for number, expert in enumerate(self.experts):
                mine = torch.where(best == number)[0]
                out = out.index_add(0, mine, expert(h[mine]) * shares[mine, number, None])
            out = out + h[best == 1].sum()
            if bool((best == 0).all()):
                out = out * 1.0
            return out

    def block(self) -> nn.Module:
        return self.Experts()


class TiedAcross(Plain):
    """The head uses the embedding's weight."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.through(self.before(x), x)
        return functional.linear(h, self.embed.weight.t())[:, :3] + self.head(h)


class NormInStem(Plain):
    """Statistics before the blocks and behind them: each is right where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.final = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.final(self.through(self.first(self.embed(x)), x)))


class ReplacesBuffer(Plain):
    """Its buffer is another tensor after each forward, made before the blocks; the next forward begins with it."""

    def before(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        shifted = h - self.positions
        self.positions = 0.9 * self.positions + 0.1 * h.detach().mean(0)
        return shifted


class ReplacesBufferBehind(Plain):
    """The same behind the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.through(self.before(x), x)
        shifted = h - self.positions
        self.positions = 0.9 * self.positions + 0.1 * h.detach().mean(0)
        return self.head(shifted)


class ReplacesBufferInBlock(Plain):
    """Its last layer reads, from the second forward on, what the first block left in the forward before."""

    class Keeps(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.ones(WIDTH))

        def forward(self, h: Tensor) -> Tensor:
            self.seen = 0.5 * self.seen + h.detach().mean(0)
            return super().forward(h)

    block = Keeps

    def forward(self, x: Tensor) -> Tensor:
        seen = self.blocks[0].seen
        return self.head(self.through(self.before(x), x) * seen)


class FrozenTable(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def before(self, x: Tensor) -> Tensor:
        return self.embed(x) + self.table


class UnderNoGrad(Plain):
    """The first blocks are run without gradients."""

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.blocks[1](self.blocks[0](h))
        return self.blocks[2](h)


class DecidesByBatch(Plain):
    """A branch that depends on the batch, which all stages have, and leads to no more than what they have."""

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        factor = 2.0 if bool((x.abs() > 100).any()) else 0.5
        for block in self.blocks:
            h = block(h) * factor
        return h


class DirectCalls(Plain):
    """`block.forward(h)`, which runs no hooks."""

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        for block in self.blocks:
            h = block.forward(h)  # type: ignore[operator]
        return h


class Collects(Plain):
    """Hooks collect what blocks are given and return; the model takes some of it by number."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Tensor] = []
        self.returned: list[Tensor] = []
        if type(self) is Collects:
            self.install()

    def install(self) -> None:
        for block in self.blocks:
            block.register_forward_pre_hook(lambda module, args: self.given.append(args[0]))
            block.register_forward_hook(lambda module, args, output: self.returned.append(output))

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        self.given.clear()
        self.returned.clear()
        super().through(h, x)
        return self.returned[1] + self.given[2] + self.returned[-1]


# ---- what is refused -----------------------------------------------------------------------------------------------


class SkipFromEmbedding(Plain):
    def forward(self, x: Tensor) -> Tensor:
        h = first = self.embed(x)
        h = self.through(h, x)
        return self.head(h + first)


class NormOutside(Plain):
    """Around the block goes another tensor than the one that it is called with."""

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        for block in self.blocks:
            h = h + block(functional.layer_norm(h, (WIDTH,)))
        return h


class SumOfAll(Plain):
    def through(self, h: Tensor, x: Tensor) -> Tensor:
        total: Any = 0
        for block in self.blocks:
            h = block(h)
            total = total + h
        return total


class NormalisedWeight(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.direction / self.direction.norm(dim=1, keepdim=True)
        return functional.linear(self.through(self.before(x), x), weight)


class OtherView(Plain):
    def through(self, h: Tensor, x: Tensor) -> Tensor:
        for block in self.blocks:
            alias = h.view(-1)
            h = block(h) + alias.view(h.shape)
        return h


class LeftBehind(Plain):
    """A block leaves a loss of its own behind, which the model adds in the end."""

    class Leaving(Block):
        extra: Any = None

        def forward(self, h: Tensor) -> Tensor:
            self.extra = h.square().mean()
            return super().forward(h)

    def block(self) -> nn.Module:
        return self.Leaving()

    def forward(self, x: Tensor) -> Tensor:
        h = self.through(self.before(x), x)
        return self.head(h) + sum(block.extra for block in self.blocks)  # type: ignore[misc]


class Remembers(Plain):
    """What is written behind the blocks is read before them in the next forward."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.through(self.embed(x) + self.positions, x)
        self.positions.copy_(h.detach().mean(0))
        return self.head(h)


class Counts(Plain):
    """A number that each forward changes."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.through(self.embed(x) / (1 + self.calls), x)
        self.calls += 1
        return self.head(h)


class Noise(Plain):
    """The loss is against noise drawn before the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        return self.head(self.through(self.embed(x + noise), x)) + noise[:, :3]


class DecidesByHidden(Plain):
    def through(self, h: Tensor, x: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
            h = h * 2 if bool(h.sum() > 0) else h
        return h


class TwoLists(Plain):
    """Two rows of blocks, one after the other in turns: they are called in another order than they are defined in."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleList(Block() for _ in range(3))

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        for block, other in zip(self.blocks, self.others, strict=True):
            h = other(block(h))
        return h


class LeavesInList(Plain):
    """Blocks leave what they do not return in a list, in which a stage finds less than the whole model does."""

    class Leaving(Block):
        def forward(self, h: Tensor, left: list[Tensor]) -> Tensor:  # type: ignore[override]
            left.append(h.square())
            return super().forward(h)

    def block(self) -> nn.Module:
        return self.Leaving()

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        left: list[Tensor] = []
        for block in self.blocks:
            h = block(h, left)
        return h + left[-1]


class LeavesReturnedInList(Plain):
    """Blocks leave what they return in a list, in which a stage would find another one by the number."""

    class Leaving(Block):
        def forward(self, h: Tensor, left: list[Tensor]) -> Tensor:  # type: ignore[override]
            left.append(super().forward(h))
            return left[-1]

    def block(self) -> nn.Module:
        return self.Leaving()

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        left: list[Tensor] = []
        for block in self.blocks:
            h = block(h, left)
        return h + left[1]


class LeavesReturnedOnSelf(Plain):
    """The block before a stage's first one stores what it returns, where the stage does not find it."""

    class Leaving(Block):
        returned: Any = None

        def forward(self, h: Tensor) -> Tensor:
            self.returned = super().forward(h)
            return self.returned

    def block(self) -> nn.Module:
        return self.Leaving()

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        return super().through(h, x) + self.blocks[1].returned  # type: ignore[operator]


class CollectsLater(Collects):
    """The first forward installs the hooks."""

    is_first = True

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        if self.is_first:
            self.is_first = False
            self.install()
        return super().through(h, x)


class Skip(Plain):
    """The last of four blocks is given what the first returned: one stage has both on three devices, and not on two."""

    def __init__(self) -> None:
        super().__init__(4)

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        kept = []
        for number, block in enumerate(self.blocks):
            h = block(h + kept[0] if number == 3 else h)
            kept.append(h)
        return h


class WrittenInBlock(Plain):
    """A block overwrites what belongs to all of them."""

    class Writing(Block):
        def forward(self, h: Tensor, shared: Tensor) -> Tensor:  # type: ignore[override]
            out = torch.tanh(self.inner(h)) + shared.mean()
            shared.add_(1.0)
            return out

    def block(self) -> nn.Module:
        return self.Writing()

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        shared = torch.zeros(WIDTH)
        for block in self.blocks:
            h = block(h, shared)
        return h + shared


WORK = (
    Plain, PositionsAndResidual, InPlace, Exp, View, NoEmbedding, ByName, Tuples, Relative, FromBlock0, HeadFirst,
    Between, Attributes, Shrinks, Routed, TiedAcross, NormInStem, FrozenTable, UnderNoGrad, DecidesByBatch, WrittenInBlock,
    DirectCalls, Collects, ReplacesBuffer, ReplacesBufferBehind,
)  # fmt: skip
REFUSED: dict[type[nn.Module], str] = {
    SkipFromEmbedding: "self.head(h + first)",
    NormOutside: "h = h + block(functional.layer_norm(h, (WIDTH,)))",
    SumOfAll: "total = total + h",
    NormalisedWeight: "functional.linear(self.through(self.before(x), x), weight)",
    OtherView: "alias.view(h.shape)",
    LeftBehind: "another stage",
    Remembers: "self.embed(x) + self.positions",
    Counts: "each forward changes calls",
    Noise: "noise",
    DecidesByHidden: "reads (in Python) a value that its stage",
    TwoLists: "once, in order",
    CollectsLater: "registers a hook on blocks.0",
    LeavesInList: "block 2 uses a value that an earlier block stored instead of returning",
    LeavesReturnedInList: "block 2 uses a value that an earlier block stored instead of returning",
    LeavesReturnedOnSelf: "self.blocks[1].returned",
    ReplacesBufferInBlock: "self.through(self.before(x), x) * seen",
}
MODELS = {model.__name__: model for model in (*WORK, *REFUSED)}


def samples() -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(4, generator=generator), n % 3) for n in range(STEPS * BATCH)]


def job_of(model: Callable[[], nn.Module], **train: Any) -> tightfit.Job:
    settings = {"batch": BATCH, "steps": STEPS, "optimizer": "sgd", "learning_rate": 0.3, "momentum": 0.0, "seed": 5}
    return tightfit.Job(
        model=model, data=samples(), train=tightfit.Train(**{**settings, **train}), allow=["asynchronous"]
    )


def plain_training(job: tightfit.Job, micro_batch: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights by nothing but PyTorch."""
    run = tightfit.build(job)  # for its initial weights and the order of its samples
    model, losses = run.model, []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.3)
    for _, (batch,) in zip(range(STEPS), run.data.steps(0, None), strict=False):
        total = 0.0
        for x, y in zip(batch[0].split(micro_batch), batch[1].split(micro_batch), strict=True):
            loss = functional.cross_entropy(model(x), y, reduction="sum") / BATCH
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_stage(name: str, fields: dict[str, Any]) -> Any:
    """In each process: losses and this device's weights, or what the plan was refused with."""
    random.seed(0)
    try:
        run = tightfit.build(job_of(MODELS[name]), tightfit.Plan(**fields))
    except InputError as error:
        return str(error)
    losses = [step.loss for step in tightfit.train(run)]
    own = {n: v.detach().clone() for n, v in run.model.state_dict().items() if n not in run.executor.stale_buffers}  # type: ignore[union-attr]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return losses, everyones


def check(name: str, fields: dict[str, Any], micro_batch: int = 2) -> None:
    found = together(fields["pp"], HERE + "train_stage", name, {"micro_batch": micro_batch, **fields})
    assert not isinstance(found[0], str), found[0]
    losses, weights = plain_training(job_of(MODELS[name]), micro_batch)
    floating = {n: v for n, v in weights.items() if v.is_floating_point() and "running" not in n}
    for own_losses, everyones in found:
        assert own_losses == pytest.approx(losses, rel=2e-6)
        merged = {n: v for one in everyones for n, v in one.items()}
        assert distance({n: merged[n] for n in floating}, floating) < 1e-6
        for one in everyones:
            assert all(
                torch.allclose(value, merged[n], rtol=1e-6, atol=1e-7) for n, value in one.items() if n in floating
            )


ON_THREE = (
    PositionsAndResidual,
    InPlace,
    View,
    Tuples,
    Relative,
    FromBlock0,
    HeadFirst,
    Shrinks,
    TiedAcross,
    UnderNoGrad,
)


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("name", "pp"), [*((m.__name__, 2) for m in WORK), *((m.__name__, 3) for m in ON_THREE)])
def test_complex_stage_boundaries_train_like_plain_pytorch(name: str, pp: int) -> None:
    """The models do more than pass one tensor from block to block."""
    check(name, {"pp": pp})


class FourTuples(Tuples):
    def __init__(self) -> None:
        super().__init__(4)


class FourRelative(Relative):
    def __init__(self) -> None:
        super().__init__(4)


FOUR = (FourTuples, FourRelative)
MODELS.update({model.__name__: model for model in (*FOUR, Skip)})


def test_a_skip_is_refused_only_if_it_leaves_a_stage() -> None:
    check("Skip", {"pp": 3})
    for found in together(2, HERE + "train_stage", "Skip", {"pp": 2}):
        assert "h + kept[0]" in found


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", [model.__name__ for model in FOUR])
@pytest.mark.parametrize(
    "fields",
    [
        {"schedule": "gpipe"},
        {"schedule": "zero-bubble"},
        {"schedule": "naive", "micro_batch": 4},
        {"schedule": "interleaved", "virtual_stages": 2},
        {"recompute": "full", "split": [1, 3]},
    ],
    ids=str,
)
def test_every_schedule_trains_like_plain_pytorch(name: str, fields: dict[str, Any]) -> None:
    check(name, {"pp": 2, **fields}, fields.get("micro_batch", 2))


class Detached(Plain):
    """No gradient passes the middle, so that what is before it stays without one, and without weight decay."""

    def __init__(self) -> None:
        super().__init__(4)

    def through(self, h: Tensor, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            h = block(h.detach() if number == 2 else h)
        return h


def with_decay(fields: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    run = tightfit.build(job_of(Detached, weight_decay=0.1), tightfit.Plan(**fields))
    losses = [step.loss for step in tightfit.train(run)]
    own = {name: value.detach().clone() for name, value in run.model.state_dict().items()}
    return losses, own


@pytest.mark.parametrize(
    "fields",
    [
        {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "micro_batch": 2},
        {"pp": 4, "micro_batch": 2},
        {"pp": 4, "micro_batch": 1, "schedule": "zero-bubble"},
        {"pp": 4, "micro_batch": 2, "schedule": "gpipe"},
    ],
    ids=lambda fields: f"{fields['pp']}-{fields.get('schedule', '1f1b')}",
)
def test_weights_not_in_the_loss_get_no_gradient_on_any_stage(fields: dict[str, Any]) -> None:
    losses, weights = with_decay({})
    begun = tightfit.build(job_of(Detached)).model.state_dict()
    assert torch.equal(weights["blocks.0.inner.weight"], begun["blocks.0.inner.weight"])
    for rank, (found, own) in enumerate(together(fields["pp"], HERE + "with_decay", fields)):
        assert found == pytest.approx(losses, rel=2e-6)
        for number in range(rank, 4, fields["pp"]):  # the blocks of a device
            name = f"blocks.{number}.inner.weight"
            torch.testing.assert_close(own[name], weights[name], rtol=1e-6, atol=1e-7, msg=name)


def saved_stage(name: str, fields: dict[str, Any], folder: str) -> None:
    run = tightfit.build(job_of(MODELS[name]), tightfit.Plan(**fields))
    list(tightfit.train(run))
    save(run, folder, STEPS)


@pytest.mark.filterwarnings("ignore:the training depends on how a batch is split")
@pytest.mark.filterwarnings("ignore:the forward changes")
@pytest.mark.parametrize("name", ["NormInStem", "ReplacesBuffer", "ReplacesBufferBehind"])
def test_a_checkpoint_has_the_statistics_of_the_owning_stage(tmp_path: Path, name: str) -> None:
    """What lies outside of the blocks runs on every stage, and on all but one with values without meaning."""
    together(2, HERE + "saved_stage", name, {"pp": 2, "micro_batch": 2}, str(tmp_path))
    saved: dict[str, Tensor] = {}
    for file in newest(tmp_path).glob("model*.safetensors"):
        saved |= load_file(file)
    alone = tightfit.build(job_of(MODELS[name]), tightfit.Plan(micro_batch=2))
    list(tightfit.train(alone))
    expected = alone.model.state_dict()
    assert saved.keys() == expected.keys()
    for buffer, value in expected.items():
        torch.testing.assert_close(saved[buffer], value, rtol=1e-5, atol=1e-6, msg=buffer)


def test_a_stage_creates_only_its_own_parameters() -> None:
    check("PositionsAndResidual", {"pp": 2, "materialize": "device"})
    for found in together(2, HERE + "train_stage", "Relative", {"pp": 2, "materialize": "device"}):
        assert "relative.weight is used on another pipeline stage than the stage that creates it" in found


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", [model.__name__ for model in REFUSED])
def test_all_devices_refuse_an_uncuttable_model_with_its_line(name: str) -> None:
    pp = 2
    for found in together(pp, HERE + "train_stage", name, {"pp": pp, "micro_batch": 2}):
        assert isinstance(found, str)
        assert REFUSED[MODELS[name]] in found
        assert "use pp: 1" in found
    with pytest.raises(InputError, match=r"plan: pp"):
        tightfit.estimate(
            job_of(MODELS[name]), tightfit.Plan(pp=pp, micro_batch=2), tightfit.Machine.named(f"a100-80gb:{pp}")
        )


# ---- the stages against the undivided model -------------------------------------------------------------------------


class Owned(Plain):
    """The model computes with a number that it reads off its parameters in Python, which no tensor shows."""

    def forward(self, x: Tensor) -> Tensor:
        trained = sum(1 for _ in self.parameters())
        return self.head(self.through(self.before(x), x) * (trained / 10))


MODELS["Owned"] = Owned


def checked_stage(name: str, fields: dict[str, Any], train: dict[str, Any]) -> Any:
    """In each process: what the comparison found, and whether the run then goes on as one that was not compared."""
    job = job_of(MODELS[name])
    plain = [step.loss for step in tightfit.train(tightfit.build(job, tightfit.Plan(**fields)))]
    run = tightfit.build(job.replace(train=job.train.replace(**train)), tightfit.Plan(**fields))
    try:
        found = compare_split(run)
        losses = [step.loss for step in tightfit.train(run)]
    except InputError as error:
        return str(error)
    assert found is not None
    return found, losses == plain


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("NormInStem", {"pp": 2}),
        ("Relative", {"pp": 2, "schedule": "pipedream"}),
        ("FourTuples", {"pp": 2, "schedule": "interleaved", "virtual_stages": 2}),
        ("Tuples", {"pp": 2, "schedule": "zero-bubble"}),
        ("TiedAcross", {"pp": 2, "dp_replicate": 2}),
        ("PositionsAndResidual", {"pp": 2, "dp_shard": 2, "zero": 2}),
        ("PositionsAndResidual", {"pp": 2, "dp_shard": 2, "zero": 3}),
    ],
    ids=str,
)
def test_stages_are_checked_against_the_whole_model(name: str, fields: dict[str, Any]) -> None:
    devices = tightfit.Plan(**fields).devices
    for found, same_after in together(
        devices, HERE + "checked_stage", name, {**fields, "micro_batch": 2}, {"check_split": "always"}
    ):
        assert found.loss == pytest.approx(found.expected_loss, rel=1e-5)
        assert found.norm == pytest.approx(found.expected_norm, rel=1e-5)
        assert found.expected_norm > 0
        assert same_after


def verified_stage(name: str, fields: dict[str, Any]) -> Any:
    try:
        return observe_settled(job_of(MODELS[name]), tightfit.Plan(**fields), None, 2)
    except InputError as error:
        return str(error)


def test_verify_always_checks_the_stages() -> None:
    for said in together(2, HERE + "verified_stage", "Owned", {"pp": 2}):
        assert "the stages compute something else than the undivided model" in said
    for found in together(2, HERE + "verified_stage", "Plain", {"pp": 2}):
        assert len(found.losses) == 2


@pytest.mark.parametrize(
    ("asked", "steps", "wanted"), [("auto", 1, False), ("auto", 200, True), ("never", 200, False), ("always", 1, True)]
)
def test_stages_are_checked_when_the_plan_asks_for_it(asked: str, steps: int, wanted: bool) -> None:
    for found in together(2, HERE + "wants", asked, steps):
        assert found is wanted


def wants(asked: str, steps: int) -> bool:
    return wants_check(tightfit.build(job_of(Plain, check_split=asked), tightfit.Plan(pp=2, micro_batch=2)), steps)


class Branching(Plain):
    """Uses a layer before the blocks only if its data are finite. On tensors without values, it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)

    def before(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        if x.isfinite().all():
            h = self.extra(h)
        return h


def test_models_that_branch_on_data_are_checked_in_short_runs() -> None:
    expected = [step.loss for step in tightfit.train(tightfit.build(job_of(Branching)))]
    for losses, said in together(2, HERE + "refused_training", "Branching", {"pp": 2, "micro_batch": 2}):
        assert "the stages compute something else" in said or losses == pytest.approx(expected, rel=1e-5)


def refused_training(name: str, fields: dict[str, Any]) -> tuple[list[float], str]:
    """Train a model, and return its losses and why it is refused."""
    run = tightfit.build(job_of(globals()[name]), tightfit.Plan(**fields))
    try:
        return [step.loss for step in tightfit.train(run)], ""
    except InputError as error:
        return [], str(error)


def test_wrong_stages_are_refused_before_the_first_update() -> None:
    for said in together(2, HERE + "checked_stage", "Owned", {"pp": 2, "micro_batch": 2}, {"check_split": "always"}):
        assert "the stages compute something else than the undivided model" in said
        assert "use pp: 1" in said


# ---- transformers, the planner and the command line -----------------------------------------------------------------

TEXT = {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "opt": {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 16, "dropout": 0.0},
    "deberta-v2": {
        **TEXT, "intermediate_size": 64, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
        "max_relative_positions": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
    "mixtral": {
        **TEXT, "intermediate_size": 64, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "swin": {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
        "num_labels": 10, "hidden_dropout_prob": 0.0, "drop_path_rate": 0.0,
    },
    "beit": {  # keeps indices of positions for the whole process
        "image_size": 32, "patch_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 10,
        "intermediate_size": 64, "use_relative_position_bias": True, "hidden_dropout_prob": 0.0, "drop_path_rate": 0.0,
    },
}  # fmt: skip


def architecture_job(name: str) -> tightfit.Job:
    generator = torch.Generator().manual_seed(3)
    data: list[dict[str, Any]] = []
    for number in range(STEPS * BATCH):
        tokens = torch.randint(2, 160, (12,), generator=generator)
        pixels = torch.randn(3, 32, 32, generator=generator)
        data.append(
            {"pixel_values": pixels, "labels": number % 10}
            if name in ("swin", "beit")
            else {"input_ids": tokens, "labels": tokens}
        )
    train = tightfit.Train(batch=BATCH, steps=2, optimizer="sgd", momentum=0.0, learning_rate=0.1, seed=5)
    task = {"task": "masked-lm"} if name == "deberta-v2" else {}
    return tightfit.Job(model={"architecture": name, **ARCHITECTURES[name], **task}, data=data, train=train)


def trained_architecture(name: str, fields: dict[str, Any]) -> list[float]:
    return [step.loss for step in tightfit.train(tightfit.build(architecture_job(name), tightfit.Plan(**fields)))]


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_architectures_that_pass_several_tensors_train_the_same(name: str) -> None:
    expected = trained_architecture(name, {"micro_batch": 2})
    for losses in together(2, HERE + "trained_architecture", name, {"pp": 2, "micro_batch": 2}):
        assert losses == pytest.approx(expected, rel=2e-6)


@pytest.mark.slow
def test_a_search_skips_pipelines_that_would_be_refused() -> None:
    machine = tightfit.Machine.named("a100-80gb:2")
    found = tightfit.search(job_of(SkipFromEmbedding), machine, {})
    assert found[0].plan.pp == 1
    with pytest.raises(InputError, match=r"self.head\(h \+ first\)"):
        tightfit.search(job_of(SkipFromEmbedding), machine, {"pp": 2})


@pytest.mark.slow
def test_a_refused_pipedream_ends_in_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    content = {
        "model": {
            "architecture": "gpt2",
            "vocab_size": 300,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 32,
        },
        "data": {"synthetic": "tokens", "sequence_length": 16, "samples": 20},
        "train": {"batch": 4, "steps": 2, "trackers": []},
        "allow": ["asynchronous"],
        "plan": {"pp": 2, "schedule": "pipedream", "micro_batch": 2},
    }
    path.write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "tightfit", "train", str(path), "--nproc", "2", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr
    assert "is used by the first and the last device, which update it at different times" in done.stderr
    assert "terminate called" not in done.stderr


@pytest.mark.parametrize("precision", ["bf16-true", "fp16-true"])
def test_boundaries_are_traced_in_the_type_of_the_weights(precision: str) -> None:
    """The inputs of this model are numbers in fp32, which training casts to the type of the weights."""
    plan = tightfit.Plan(pp=2, micro_batch=2, precision=precision)
    assert tightfit.dry_run(make_case("batchnorm").job, plan, "cuda").total > 0
