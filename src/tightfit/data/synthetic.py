"""Synthetic samples: a function of the seed and the index, with something in them to learn, so that a loss can fall."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightfit.data.images import normalise
from tightfit.data.order import Integers, draws, uniform
from tightfit.data.samples import single
from tightfit.data.tokens import Mask

_NOISE = 0.1  # share of the tokens that follow no rule
_STEPS = 8  # rules there are
_TEXTURES = 16  # different noises that images share: more would only take time to draw
_TILE = 8  # rows and columns of the pattern that tells a class


@dataclass(frozen=True)
class SyntheticRows:
    """Sequences that count up from a random token by a random step below 8, with a tenth of the tokens at random."""

    count: int
    length: int
    vocabulary: int
    seed: int
    ragged: bool = False

    def __len__(self) -> int:
        return self.count

    def gather(self, indices: Integers) -> tuple[Integers, Mask]:
        numbers = draws(self.seed, indices, self.length + 2)
        starts, rules, others = numbers[:, :1] >> np.uint64(1), numbers[:, 1:2] % np.uint64(_STEPS), numbers[:, 2:]
        counted = starts + (rules + np.uint64(1)) * np.arange(self.length, dtype=np.uint64)
        ids = np.where(uniform(others) < _NOISE, others, counted) % np.uint64(self.vocabulary)
        return ids.astype(np.int64), np.ones(ids.shape, dtype=bool)

    def rules(self, indices: Integers) -> Integers:
        """(B,) which of the 8 steps each sequence counts by."""
        return (draws(self.seed, indices, 2)[:, 1] % np.uint64(_STEPS)).astype(np.int64)


@dataclass(frozen=True)
class SyntheticImages:
    """{"pixel_values" float32 (B, C, H, W), "labels" int64 (B,)}: each class has a pattern, each image noise on it."""

    count: int
    classes: int
    channels: int
    size: int
    seed: int
    sample_items: int = 1
    ragged: bool = False
    damaged: int = 0
    tokenizer: Any = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return single(self, index)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_textures"}

    @cached_property
    def _textures(self) -> Tensor:
        """(textures, C, H, W) of fractions below 1."""
        pixels = self.channels * self.size * self.size
        drawn = uniform(draws(self.seed, np.arange(_TEXTURES), pixels)).astype(np.float32)
        return torch.from_numpy(drawn).view(_TEXTURES, self.channels, self.size, self.size)

    def batch(self, indices: Integers, epochs: Integers) -> dict[str, Tensor]:
        numbers = draws(self.seed + 1, indices, 2)
        labels = (numbers[:, 0] % np.uint64(self.classes)).astype(np.int64)
        noise = self._textures[torch.from_numpy((numbers[:, 1] % np.uint64(_TEXTURES)).astype(np.int64))]
        tiles = uniform(draws(self.seed + 2, labels, self.channels * _TILE * _TILE)).astype(np.float32)
        pattern = torch.from_numpy(tiles).view(-1, self.channels, _TILE, _TILE)
        pattern = torch.nn.functional.interpolate(pattern, (self.size, self.size))
        return {"pixel_values": normalise((noise + pattern) / 2), "labels": torch.from_numpy(labels)}
