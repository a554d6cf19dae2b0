"""Modules of other shapes than a row of blocks: experts, recurrences, convolutions, towers, as
people write them."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.entry import CLASSES, VOCABULARY
from tests.zoo.nets import BLOCKS, WIDTH, Block


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
