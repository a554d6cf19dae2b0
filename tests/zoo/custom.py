"""Modules as people write them, each with something that a method may trip over. Nothing in them knows of tightfit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import tightfit
from tests.zoo.entry import CLASSES, SAMPLES, VOCABULARY, Entry, images, pair, sequences, summed, token_pairs, vectors

WIDTH, BLOCKS = 16, 4


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Change(Block):
    """Without the residual: the model adds it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tokens in, classes of each out, through four blocks: what the others change a part of."""

    block: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def before(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)

    def after(self, hidden: Tensor) -> Any:
        return self.head(self.norm(hidden))

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.before(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.after(hidden)


class PositionsBuffer(Net):
    block = Change

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.positions
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.after(hidden)


class Exponential(Net):
    def before(self, tokens: Tensor) -> Tensor:
        return torch.exp(self.embed(tokens) / 4)


class SkipFromEmbedding(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        first = hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.after(hidden + first)


class SkipFromInput(Net):
    """The output is masked by the input."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * (1 + tokens.unsqueeze(-1) / VOCABULARY)


class SumOfBlocks(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        total = torch.zeros_like(hidden)
        for block in self.blocks:
            hidden = block(hidden)
            total = total + hidden
        return self.after(total)


class FirstIntoEach(Net):
    """Each block is given the embedding beside what the one before made."""

    class Both(Block):
        def forward(self, x: Tensor, first: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) + torch.tanh(first)

    block = Both

    def forward(self, tokens: Tensor) -> Tensor:
        first = hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden, first)
        return self.after(hidden)


class Dense(Net):
    """Each block reads the mean of all earlier outputs (Huang et al. 2017)."""

    def forward(self, tokens: Tensor) -> Tensor:
        outputs = [self.embed(tokens)]
        for block in self.blocks:
            outputs.append(block(torch.stack(outputs).mean(0)))
        return self.after(outputs[-1])


class Horseshoe(Net):
    """A U-Net of blocks: the last ones are given what the first ones made."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, kept = self.embed(tokens), []
        for number, block in enumerate(self.blocks):
            if number < BLOCKS // 2:
                hidden = block(hidden)
                kept.append(hidden)
            else:
                hidden = block(hidden + kept.pop())
        return self.after(hidden)


class BetweenBlocks(Net):
    """Something happens to what goes from one block to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, BLOCKS))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            hidden = functional.normalize(block(hidden) * self.scales[number] + 0.1, dim=-1)
        return self.after(hidden)


class NormalisedWeight(Net):
    def before(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, functional.normalize(self.embed.weight, dim=-1))

    def after(self, hidden: Tensor) -> Tensor:
        return functional.linear(self.norm(hidden), functional.normalize(self.head.weight, dim=-1), self.head.bias)


class SharedBlocks(Net):
    """Two modules, each twice in the list."""

    def __init__(self) -> None:
        super().__init__()
        one, other = Block(), Block()
        self.blocks = nn.ModuleList([one, other, one, other])


class TiedWeights(Net):
    """Modules of their own with a weight in common."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class CalledTwice(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for _ in range(2):
            for block in self.blocks:
                hidden = block(hidden)
        return self.after(hidden)


class EachTwice(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(block(hidden))
        return self.after(hidden)


class Reversed(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in reversed(self.blocks):
            hidden = block(hidden)
        return self.after(hidden)


class HeadFirst(nn.Module):
    """Defines its head before its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.embed = nn.Linear(WIDTH, CLASSES), nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Frozen(Net):
    """The embedding and the first half do not train."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        for block in self.blocks[: BLOCKS // 2]:
            block.requires_grad_(False)


class FrozenNorms(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm.requires_grad_(False)


class Unused(Net):
    """A module and a parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.nothing = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(3, 3))


class UnusedInBlocks(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.spare = nn.Linear(WIDTH, WIDTH)


class UnusedBlock(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            if number != 1:
                hidden = block(hidden)
        return self.after(hidden)


class UsedTwice(Net):
    """A parameter of the model that each block is scaled by, and the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + self.scale * block(hidden)
        return self.after(hidden * self.scale)


class HeadOfEmbedding(Net):
    """The head is the embedding's own weight, by a function."""

    def after(self, hidden: Tensor) -> Tensor:
        return functional.linear(self.norm(hidden), self.embed.weight[:CLASSES]) + 0 * self.head.bias


class Routed(nn.Module):
    """Each expert is given the tokens that chose it; some get none."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 8)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(0, -2)
            best, which = functional.softmax(4 * self.router(flat), -1).max(-1)
            mixed = torch.zeros_like(flat)
            for number, expert in enumerate(self.experts):
                rows = torch.where(which == number)[0]
                if len(rows):
                    mixed = mixed.index_add(0, rows, expert(flat[rows]) * best[rows].unsqueeze(-1))
            return x + mixed.view_as(x)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(self.Experts() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Conditional(Net):
    """A block that runs only where a sample asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = Block()

    def after(self, hidden: Tensor) -> Tensor:
        asked = hidden.mean((1, 2)) > 0.02
        if asked.any():
            hidden = torch.where(asked[:, None, None], self.extra(hidden), hidden)
        return super().after(hidden)


class Evaluated(Net):
    """Other code in training than in evaluation."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = super().forward(tokens)
        return hidden * 2 if self.training else hidden


class WeightNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            parametrizations.weight_norm(block.up)


class SpectralNorm(Net):
    """Each forward takes a step of the power iteration and writes it into buffers."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            parametrizations.spectral_norm(block.up)


class Counts(Net):
    """Writes buffers in its forward that it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ones", torch.ones(WIDTH))
        self.register_buffer("largest", torch.zeros(()))

    def before(self, tokens: Tensor) -> Tensor:
        self.largest.copy_(torch.full_like(self.largest, 7.0))
        return self.embed(tokens) * self.ones


class RunningMean(Net):
    """Reads a buffer that it has written in the forward before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def before(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        shifted = hidden - self.mean
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean((0, 1))
        return shifted


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, scale = ctx.saved_tensors
        return 2 * x * scale * gradient, (gradient * x * x).sum_to_size(scale.shape)


class OwnFunction(Net):
    class Squares(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x + 0.1 * Squared.apply(super().forward(x), self.scale)

    block = Squares


class DictOutput(Net):
    def after(self, hidden: Tensor) -> Any:
        return {"scores": super().after(hidden), "hidden": hidden}


@dataclass
class Found:
    logits: Tensor
    hidden: Tensor


class DataclassOutput(Net):
    def after(self, hidden: Tensor) -> Any:
        return Found(super().after(hidden), hidden)


class TupleBlocks(Net):
    """Blocks return a pair, whose second part is added up beside."""

    class Pair(Block):
        def forward(self, x: Tensor) -> Any:
            found = super().forward(x)
            return found, found.square().mean((1, 2))

    block = Pair

    def forward(self, tokens: Tensor) -> Any:
        hidden, aside = self.embed(tokens), torch.zeros(len(tokens))
        for block in self.blocks:
            hidden, more = block(hidden)
            aside = aside + more
        return self.after(hidden), aside


class DictBlocks(Net):
    class Named(Block):
        def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
            return {"hidden": super().forward(x["hidden"]), "mask": x["mask"]}

    block = Named

    def forward(self, tokens: Tensor) -> Any:
        state = {"hidden": self.embed(tokens), "mask": tokens > 8}
        for block in self.blocks:
            state = block(state)
        return self.after(state["hidden"] * state["mask"].unsqueeze(-1))


class MaskByName(Net):
    """Blocks are given a mask by name, a tensor without gradient."""

    class Masked(Block):
        def forward(self, x: Tensor, *, mask: Tensor, scale: float = 1.0) -> Tensor:  # type: ignore[override]
            return torch.where(mask.unsqueeze(-1), super().forward(x) * scale, x)

    block = Masked

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden, mask=tokens > 20, scale=0.5)
        return self.after(hidden)


class InPlace(Net):
    """What a block is given is changed in place, and so is what it returns."""

    class Adds(Change):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            found += x
            return found.relu_()

    block = Adds

    def before(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens).mul_(2.0)


class Detached(Net):
    """No gradient passes the middle."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden.detach() if number == 2 else hidden)
        return self.after(hidden)


class Checkpointed(Net):
    """Recomputes by itself."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)  # type: ignore[assignment]
        return self.after(hidden)


class Caches(Net):
    """Keeps a tensor from its first forward."""

    cached: Tensor | None = None

    def before(self, tokens: Tensor) -> Tensor:
        if self.cached is None or len(self.cached) != tokens.shape[1]:
            self.cached = torch.linspace(0, 1, tokens.shape[1])
        return self.embed(tokens) + self.cached.unsqueeze(-1)


class Complex(Net):
    """Filters of frequencies: complex parameters (Lee-Thorp et al. 2021; Rao et al. 2021)."""

    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(5, WIDTH, dtype=torch.complex64) * 0.2)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.fft.irfft(torch.fft.rfft(self.norm(x), dim=1) * self.filter, n=8, dim=1)

    block = Filter


class Fourier(Net):
    """Complex numbers inside, none as parameters."""

    class Mix(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.fft.fft2(x).real / 8)

    block = Mix


class Recurrent(nn.Module):
    cell: Any = nn.LSTM

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = self.cell(WIDTH, WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens))[0])


class Gated(Recurrent):
    cell = nn.GRU


class Cells(nn.Module):
    """A list of recurrent layers, each with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Gates() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = torch.zeros_like(x[:, 0]), []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(state)
        return x + torch.stack(outputs, 1)


class Convolution(nn.Module):
    """Residual blocks with a norm of the channels."""

    norm: Any = nn.BatchNorm2d

    class Residual(nn.Module):
        def __init__(self, norm: Any) -> None:
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), norm(8)

        def forward(self, x: Tensor) -> Tensor:
            return x + functional.silu(self.norm(self.convolution(x)))

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(self.Residual(type(self).norm) for _ in range(BLOCKS)))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Grouped(Convolution):
    norm = partial(nn.GroupNorm, 2)


class UNet(nn.Module):
    """Down and up, with a skip (Ronneberger et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        stage = lambda a, b: nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.SiLU())  # noqa: E731
        self.down, self.middle, self.up = stage(3, 8), stage(8, 8), stage(16, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down(x)
        low = functional.interpolate(self.middle(functional.max_pool2d(first, 2)), scale_factor=2)
        return self.head(self.up(torch.cat([first, low], 1)).mean((2, 3)))


class Dropping(Net):
    class Drops(Block):
        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(super().forward(x), 0.2, self.training)

    block = Drops


class Attention(nn.Module):
    """torch's own encoder, a mask included."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True, norm_first=True)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.encoder(self.embed(tokens), mask=mask, is_causal=True))


class Perceptron(nn.Sequential):
    """Nothing but layers of torch."""

    def __init__(self) -> None:
        widths = [WIDTH, 24, 24, CLASSES]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.Tanh()]
        super().__init__(*layers[:-1])


class Widths(nn.Module):
    """Blocks of other widths."""

    class Grow(nn.Module):
        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(before, after), nn.LayerNorm(after)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.norm(self.linear(x)))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Grow(a, b) for a, b in ((16, 20), (20, 12), (12, 28), (28, 8)))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class OddParameters(nn.Module):
    """A number, a parameter in a list and in a dict, one of an odd size, one with a dim of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(3)])
        self.named = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(1, WIDTH)), "odd": nn.Parameter(torch.ones(7))})
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight + self.named["bias"])
        return self.head(x) * self.temperature * self.named["odd"].mean()


class WideBuffer(Net):
    """A buffer in fp64 and one of truths, read in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("wide", torch.linspace(0, 1, WIDTH, dtype=torch.float64))
        self.register_buffer("some", torch.arange(WIDTH) % 3 > 0)
        self.register_buffer("hidden", torch.ones(WIDTH), persistent=False)

    def before(self, tokens: Tensor) -> Tensor:
        return (self.embed(tokens) + self.wide.float() * self.hidden) * self.some


class Towers(nn.Module):
    """Two lists of blocks over two inputs, compared at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(VOCABULARY, WIDTH), nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean")
        self.left = nn.ModuleList(Block() for _ in range(2))
        self.right = nn.ModuleList(Block() for _ in range(2))

    def forward(self, user: Tensor, words: Tensor) -> Tensor:
        left, right = self.users(user), self.items(words)
        for block in self.left:
            left = block(left)
        for block in self.right:
            right = block(right)
        return (left * right).sum(-1)


class Scan(nn.Module):
    """State-space blocks in the manner of Mamba (Gu & Dao 2023), the recurrence a loop over time."""

    class Layer(nn.Module):
        def __init__(self, states: int = 4) -> None:
            super().__init__()
            self.into, self.step = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.read, self.write = nn.Linear(WIDTH, states), nn.Linear(WIDTH, states)
            self.decay = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(WIDTH, 1))

        def forward(self, x: Tensor) -> Tensor:
            values, gate = self.into(x).chunk(2, -1)
            step, read, write = functional.softplus(self.step(values)), self.read(values), self.write(values)
            state, outputs = values.new_zeros(len(x), WIDTH, read.shape[-1]), []
            for time in range(x.shape[1]):
                kept = torch.exp(-step[:, time, :, None] * self.decay.exp())
                state = kept * state + step[:, time, :, None] * write[:, time, None, :] * values[:, time, :, None]
                outputs.append((state * read[:, time, None, :]).sum(-1))
            return x + torch.stack(outputs, 1) * functional.silu(gate)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(self.Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class TwoHeads(Net):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = nn.Linear(WIDTH, 1)

    def after(self, hidden: Tensor) -> Any:
        return super().after(hidden), self.sizes(hidden.mean(1)).squeeze(-1)


# Losses ---------------------------------------------------------------------------------------------------------------


def of_classes(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over samples of each one's sum: a loss of the job's own."""
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum") / len(labels)


def of_dict(output: Any, batch: Any) -> Tensor:
    return of_classes(output["scores"], batch[1]) + 0.01 * output["hidden"].square().mean()


def plain_of_dict(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    output = model(batch[0])
    loss = functional.cross_entropy(output["scores"].flatten(0, 1), batch[1].flatten(), reduction="sum")
    return loss + 0.01 * output["hidden"].square().mean() * len(batch[0]), len(batch[0])


def of_pair(output: Any, batch: Any) -> Tensor:
    return of_classes(output[0], batch[1]) + 0.1 * output[1].mean()


def plain_of_pair(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    logits, aside = model(batch[0])
    loss = functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum")
    return loss + 0.1 * aside.sum(), len(batch[0])


def several(model: nn.Module, batch: Any) -> Tensor:
    """Two losses, summed over the labels that count: the second shares each sample's part among them."""
    logits, sizes = model(batch[0])
    labels = batch[1]
    counts = (labels != -100).sum(1)
    return (
        functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        + (counts * (sizes - labels.clamp_min(0).float().mean(1)).square()).sum()
    )


def plain_several(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    logits, sizes = model(batch[0])
    loss, count = summed(logits, batch[1])
    counts = (batch[1] != -100).sum(1)
    return loss + (counts * (sizes - batch[1].clamp_min(0).float().mean(1)).square()).sum(), count


def counted(batch: Any) -> int:
    return int((batch[1] != -100).sum())


def plain_logits(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return summed(model(batch[0]).logits, batch[1])


def of_towers(output: Tensor, batch: Any) -> Tensor:
    return functional.binary_cross_entropy_with_logits(output, batch["labels"].float())


def plain_towers(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    output = model(batch["user"], batch["words"])
    return functional.binary_cross_entropy_with_logits(output, batch["labels"].float(), reduction="sum"), len(output)


def squares(output: Tensor, batch: Any) -> Tensor:
    return (output - batch[1]).square().mean()


def plain_squares(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    loss = (model(batch[0]) - batch[1]).square()
    return loss.mean((1, 2)).sum(), len(loss)


# Samples --------------------------------------------------------------------------------------------------------------


def uneven() -> list[Any]:
    """Most labels of some samples do not count, all of one."""
    found = []
    for number, (tokens, labels) in enumerate(token_pairs()):
        labels = labels.clone()
        labels[: number % 9] = -100
        found.append((tokens, labels))
    return found


def visits() -> list[Any]:
    return [
        {"user": tokens[0], "words": tokens[1:6], "labels": number % 2}
        for number, (tokens, _) in enumerate(token_pairs())
    ]


def targets() -> list[Any]:
    generator = torch.Generator().manual_seed(20)
    return [(tokens, torch.randn(8, CLASSES, generator=generator)) for tokens, _ in token_pairs()[:SAMPLES]]


def module(name: str, made: Any, samples: Any = token_pairs, plain: Any = pair, **own: Any) -> Entry:
    return Entry(name, "custom", partial(_itself, made), samples, plain, **own)


def _itself(made: Any) -> Any:
    return made


CUSTOM = [
    module("net", Net),
    module("positions-buffer", PositionsBuffer),
    module("exponential", Exponential),
    module("skip-from-embedding", SkipFromEmbedding),
    module("skip-from-input", SkipFromInput),
    module("sum-of-blocks", SumOfBlocks),
    module("first-into-each", FirstIntoEach),
    module("dense", Dense),
    module("horseshoe", Horseshoe),
    module("between-blocks", BetweenBlocks),
    module("normalised-weight", NormalisedWeight),
    module("shared-blocks", SharedBlocks),
    module("tied-weights", TiedWeights),
    module("called-twice", CalledTwice),
    module("each-twice", EachTwice),
    module("reversed", Reversed),
    module("head-first", HeadFirst),
    module("frozen", Frozen),
    module("frozen-norms", FrozenNorms),
    module("unused", Unused),
    module("unused-in-blocks", UnusedInBlocks),
    module("unused-block", UnusedBlock),
    module("used-twice", UsedTwice),
    module("head-of-embedding", HeadOfEmbedding),
    module("routed", Routed),
    module("conditional", Conditional),
    module("evaluated", Evaluated),
    module("weight-norm", WeightNorm),
    module("spectral-norm", SpectralNorm, together=True),
    module("counts", Counts),
    module("running-mean", RunningMean, together=True),
    module("own-function", OwnFunction),
    module("dict-output", DictOutput, plain=plain_of_dict, loss=of_dict),
    module("dataclass-output", DataclassOutput, plain=plain_logits),
    module("tuple-blocks", TupleBlocks, plain=plain_of_pair, loss=of_pair),
    module("dict-blocks", DictBlocks),
    module("mask-by-name", MaskByName),
    module("in-place", InPlace),
    module("detached", Detached),
    module("checkpointed", Checkpointed),
    module("caches", Caches),
    module("complex", Complex),
    module("fourier", Fourier),
    module("lstm", Recurrent),
    module("gru", Gated),
    module("recurrent-cells", Cells),
    module("batch-norm", Convolution, images, together=True),
    module("group-norm", Grouped, images),
    module("u-net", UNet, images),
    module("dropout", Dropping, random=True),
    module("torch-encoder", Attention),
    module("perceptron", Perceptron, vectors),
    module("widths", Widths, sequences),
    module("odd-parameters", OddParameters, vectors),
    module("wide-buffer", WideBuffer),
    module("towers", Towers, visits, plain_towers, loss=of_towers),
    module("scan", Scan),
    module("uneven-labels", Net, uneven),
    module("several-losses", TwoHeads, uneven, plain_several, loss=tightfit.Objective(several, counted, "tokens")),
    module("squares", Net, targets, plain_squares, loss=squares),
]
