"""Nets of four blocks as people write them, each with a feature that is hard for some method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.zoo.entry import CLASSES, VOCABULARY

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


class Double(Net):
    """Blocks in float64, between an embedding and a head in float32."""

    class Wide(Block):
        def __init__(self) -> None:
            super().__init__()
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.double()).to(x.dtype)

    block = Wide


class Fourier(Net):
    """Complex numbers inside, none as parameters."""

    class Mix(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.fft.fft2(x).real / 8)

    block = Mix


class Dropping(Net):
    class Drops(Block):
        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(super().forward(x), 0.2, self.training)

    block = Drops


class LeavesReturned(Net):
    """Each block appends what it returns to a list of the model's, from which the model takes some of it in the end."""

    class Leaving(Block):
        left: list[Tensor]

        def forward(self, x: Tensor) -> Tensor:
            self.left.append(super().forward(x))
            return self.left[-1]

    block = Leaving

    def __init__(self) -> None:
        super().__init__()
        self.left: list[Tensor] = []
        for block in self.blocks:
            block.left = self.left

    def forward(self, tokens: Tensor) -> Any:
        self.left.clear()
        hidden = self.before(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.after(hidden + self.left[1])


class KeepsReturned(Net):
    """Each block stores what it returns on itself."""

    class Keeping(Block):
        returned: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.returned = super().forward(x)
            return self.returned

    block = Keeping

    def after(self, hidden: Tensor) -> Any:
        return super().after(hidden + self.blocks[1].returned.relu())


class WideBuffer(Net):
    """A buffer in fp64 and one of truths, read in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("wide", torch.linspace(0, 1, WIDTH, dtype=torch.float64))
        self.register_buffer("some", torch.arange(WIDTH) % 3 > 0)
        self.register_buffer("hidden", torch.ones(WIDTH), persistent=False)

    def before(self, tokens: Tensor) -> Tensor:
        return (self.embed(tokens) + self.wide.float() * self.hidden) * self.some


class TwoHeads(Net):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = nn.Linear(WIDTH, 1)

    def after(self, hidden: Tensor) -> Any:
        return super().after(hidden), self.sizes(hidden.mean(1)).squeeze(-1)
