"""Models as people write them, without any knowledge of tightfit; nothing was tuned for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SAMPLES = 16


class UNet(nn.Module):
    """Two levels down and up, with skips (Ronneberger et al. 2015)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._stage(3, width), self._stage(width, 2 * width)])
        self.middle = self._stage(2 * width, 4 * width)
        self.grow = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)]
        )
        self.up = nn.ModuleList([self._stage(4 * width, 2 * width), self._stage(2 * width, width)])
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _stage(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU(), nn.Conv2d(after, after, 3, padding=1), nn.SiLU()
        )  # fmt: skip

    def forward(self, image: Tensor) -> Tensor:
        skips = []
        for stage in self.down:
            image = stage(image)
            skips.append(image)
            image = functional.max_pool2d(image, 2)
        image = self.middle(image)
        for grow, stage in zip(self.grow, self.up, strict=True):
            image = stage(torch.cat([grow(image), skips.pop()], 1))
        return self.head(image)


class Experts(nn.Module):
    """A mixture whose tokens are sent to their two best experts by weights that are mostly zero (no gather)."""

    def __init__(self, width: int = 64, experts: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        scores = functional.softmax(self.router(hidden), -1)
        best, which = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(-1, which, best)
        mixed = torch.stack([expert(hidden) for expert in self.experts], -1) @ weights.unsqueeze(-1)
        return self.head(hidden + mixed.squeeze(-1))


class GatheringExperts(Experts):
    """The same, but each expert is given the tokens that chose it: how many is known when it runs."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens).flatten(0, 1)
        best, which = functional.softmax(self.router(hidden), -1).topk(2, -1)
        mixed = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(which == number)
            weighted = expert(hidden[rows]) * best[rows, place].unsqueeze(-1)
            mixed = mixed.index_add(0, rows, weighted.to(mixed.dtype))  # in low precision, too
        return self.head(hidden + mixed).unflatten(0, tokens.shape)


class Recurrent(nn.Module):
    """Two layers of LSTM."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens))[0])


class Scan(nn.Module):
    """A state-space layer in the manner of Mamba (Gu & Dao 2023), its recurrence a loop over time."""

    def __init__(self, width: int = 48, states: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.into = nn.Linear(width, 2 * width)
        self.step, self.read, self.write = (nn.Linear(width, size) for size in (width, states, states))
        self.decay = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(width, 1))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        values, gate = self.into(self.embedding(tokens)).chunk(2, -1)
        step, read, write = functional.softplus(self.step(values)), self.read(values), self.write(values)
        state = values.new_zeros(values.shape[0], values.shape[-1], read.shape[-1])
        outputs = []
        for time in range(values.shape[1]):
            kept = torch.exp(-step[:, time, :, None] * self.decay.exp())
            state = kept * state + step[:, time, :, None] * write[:, time, None, :] * values[:, time, :, None]
            outputs.append((state * read[:, time, None, :]).sum(-1))
        return self.head(torch.stack(outputs, 1) * functional.silu(gate))


class DropsPaths(nn.Module):
    """Blocks skipped for some samples, each with its share, asked of a tensor; the first with none. A number scales the output."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.ModuleList(), nn.ModuleList()
        for blocks, rates in zip(
            (self.early, self.late), torch.linspace(0, 0.0, 4, device="cpu").split([2, 2]), strict=True
        ):
            blocks.extend(Skipped(rate) for rate in rates.tolist())
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(256, 7)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.early, *self.late):
            x = block(x)
        return self.temperature * self.head(x)


class Skipped(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.inner = rate, nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        changed = torch.tanh(self.inner(x))
        if self.rate:
            changed = changed * (torch.rand_like(changed) > self.rate) / (1 - self.rate)
        return x + changed


class TwoTowers(nn.Module):
    """Users and items embedded apart, each from several inputs, and compared (Covington et al. 2016)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(5000, width), nn.EmbeddingBag(3000, width, mode="sum")
        self.user_tower = nn.Sequential(nn.Linear(width + 8, 256), nn.ReLU(), nn.Linear(256, width))
        self.item_tower = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, width))

    def forward(self, user: Tensor, traits: Tensor, words: Tensor) -> Tensor:
        left = self.user_tower(torch.cat([self.users(user), traits], -1))
        right = self.item_tower(self.items(words))
        return functional.normalize(left, dim=-1) @ functional.normalize(right, dim=-1).t()


def mean_cross_entropy(output: Tensor, batch: Any) -> Tensor:
    """Over classes in dim 1 of images, or the last dim of sequences."""
    labels = batch[1]
    return functional.cross_entropy(
        output if output.dim() == 4 else output.flatten(0, -2), labels if labels.dim() == 3 else labels.flatten()
    )


def in_batch(output: Tensor, batch: Any) -> Tensor:
    """Each user's item among those of the batch."""
    return functional.cross_entropy(output * 20.0, torch.arange(len(output), device=output.device))


def images() -> list[Any]:
    return [(torch.randn(3, 32, 32), torch.randint(0, 2, (32, 32))) for _ in range(SAMPLES)]


def sequences() -> list[Any]:
    return [(torch.randint(0, 256, (32,)), torch.randint(0, 256, (32,))) for _ in range(SAMPLES)]


def rows() -> list[Any]:
    return [(torch.randn(9, 256), torch.randint(0, 7, (9,))) for _ in range(SAMPLES)]


def visits() -> list[Any]:
    return [
        {"user": torch.tensor(number), "traits": torch.randn(8), "words": torch.randint(0, 3000, (12,))}
        for number in range(SAMPLES)
    ]


# name: (model, samples, loss)
STRANGERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Any]], Callable[[Tensor, Any], Tensor]]] = {
    "unet": (UNet, images, mean_cross_entropy),
    "experts": (Experts, sequences, mean_cross_entropy),
    "gathering-experts": (GatheringExperts, sequences, mean_cross_entropy),
    "lstm": (Recurrent, sequences, mean_cross_entropy),
    "scan": (Scan, sequences, mean_cross_entropy),
    "drops-paths": (DropsPaths, rows, mean_cross_entropy),
    "two-towers": (TwoTowers, visits, in_batch),
}
