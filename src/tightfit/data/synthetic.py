"""Generates synthetic samples: token sequences and images. Each sample depends only on the seed and
its index, and follows a pattern that a model can learn, so that the loss can fall."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightfit.data.images import SingleImages
from tightfit.data.order import Integers, random_numbers, uniform
from tightfit.data.tokens import Mask

_NOISE = 0.1  # share of the tokens that follow no rule
_STEPS = 8  # number of rules: the steps 1 to 8
_TEXTURES = 16  # noise images that all samples share; more would only take time to generate
_TILE = 8  # rows and columns of a class's pattern


@dataclass(frozen=True)
class SyntheticRows:
    """Synthetic TokenSequences. Each counts up from a random token id by a random step of 1 to 8,
    modulo `vocabulary`. A tenth of the tokens is replaced by random tokens.

    count   the number of sequences
    length  the number of tokens in each

    Example with step 3: 17 20 23 26 91 32 ...; the token 91 is random, in place of 29.
    """

    count: int
    length: int
    vocabulary: int
    seed: int
    ragged: bool = False

    def __len__(self) -> int:
        return self.count

    def gather(self, indices: Integers) -> tuple[Integers, Mask]:
        numbers = random_numbers(self.seed, indices, self.length + 2)
        starts, rules, others = numbers[:, :1] >> np.uint64(1), numbers[:, 1:2] % np.uint64(_STEPS), numbers[:, 2:]
        counted = starts + (rules + np.uint64(1)) * np.arange(self.length, dtype=np.uint64)
        ids = np.where(uniform(others) < _NOISE, others, counted) % np.uint64(self.vocabulary)
        return ids.astype(np.int64), np.ones(ids.shape, dtype=bool)

    def rules(self, indices: Integers) -> Integers:
        """Return the step of each sequence minus 1, (B,) int64: a number from 0 to 7, which serves
        as the sequence's class."""
        return (random_numbers(self.seed, indices, 2)[:, 1] % np.uint64(_STEPS)).astype(np.int64)


@dataclass(frozen=True)
class SyntheticImages(SingleImages):
    """Synthetic images. Each is the mean of a noise image and of the pattern of its class, which
    consists of 8 x 8 random tiles.

    A batch is {"pixel_values": (B, C, H, W) float32, "labels": (B,) int64}.

    count     the number of images
    classes   the number of classes; labels are below it
    channels  C
    size      H and W in pixels
    """

    count: int
    classes: int
    channels: int
    size: int
    seed: int

    def __len__(self) -> int:
        return self.count

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_textures"}

    @cached_property
    def _textures(self) -> Tensor:
        """The 16 noise images that all samples share, (16, C, H, W), with values in [0, 1)."""
        pixels = self.channels * self.size * self.size
        drawn = uniform(random_numbers(self.seed, np.arange(_TEXTURES), pixels)).astype(np.float32)
        return torch.from_numpy(drawn).view(_TEXTURES, self.channels, self.size, self.size)

    def batch(self, indices: Integers, epochs: Integers) -> dict[str, Tensor]:
        numbers = random_numbers(self.seed + 1, indices, 2)
        labels = (numbers[:, 0] % np.uint64(self.classes)).astype(np.int64)
        noise = self._textures[torch.from_numpy((numbers[:, 1] % np.uint64(_TEXTURES)).astype(np.int64))]
        tiles = uniform(random_numbers(self.seed + 2, labels, self.channels * _TILE * _TILE)).astype(np.float32)
        pattern = torch.from_numpy(tiles).view(-1, self.channels, _TILE, _TILE)
        pattern = torch.nn.functional.interpolate(pattern, (self.size, self.size))
        pixels = noise.add_(pattern).sub_(1)  # the mean of both, and then 0 becomes -1 and 1 becomes 1
        return {"pixel_values": pixels, "labels": torch.from_numpy(labels)}
