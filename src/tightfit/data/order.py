"""The order of samples: a pure function of the seed and of how many were consumed, computed at any position at once.

The stream is one permutation of the training samples after another, one for each epoch. Workers, micro-batches and
devices read pieces of that stream and cannot change it, and a resumed run needs only a number to continue it.
Integer arithmetic alone decides, so the order outlives versions of every library, and no list of an epoch is held.

Source  the mixer is splitmix64's (Steele et al. 2014, doi:10.1145/2660193.2660195); the permutation a generalised
        Feistel network over two digits, walked until it lands inside (Black and Rogaway 2002,
        doi:10.1007/3-540-45760-7_9).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

_MASK = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROUNDS = 8
_SPLIT = -1  # stands where an epoch's number stands: the permutation that separates training from evaluation


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each 64-bit number scrambled: a change of one bit changes half of the result's. Any shape but ()."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))


def key(*numbers: int) -> int:
    """One 64-bit number from several; their order counts."""
    value = 0
    for number in numbers:
        value = (value + number + _STRIDE) & _MASK
        value = ((value ^ (value >> 30)) * _FIRST) & _MASK
        value = ((value ^ (value >> 27)) * _SECOND) & _MASK
        value ^= value >> 31
    return value


def draws(seed: int, rows: NDArray[np.integer], columns: int) -> NDArray[np.uint64]:
    """(rows, columns) random 64-bit numbers, each a function of the seed, the value in `rows` and the column."""
    starts = mix(rows.astype(np.uint64) * np.uint64(_STRIDE) + np.uint64(key(seed)))
    return mix(starts[:, None] + np.arange(1, columns + 1, dtype=np.uint64)[None] * np.uint64(_STRIDE))


def uniform(numbers: NDArray[np.uint64]) -> NDArray[np.float64]:
    """64-bit numbers as fractions in [0, 1)."""
    return (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permute(places: Integers, count: int, secret: int) -> Integers:
    """Where each of `places` (in [0, count)) goes in the permutation of `count` things that `secret` names."""
    rows = math.isqrt(count - 1) + 1 if count > 1 else 1
    a, b = np.uint64(rows), np.uint64(-(-count // rows))
    keys = [np.uint64(key(secret, turn)) for turn in range(_ROUNDS)]
    found = places.astype(np.uint64)
    outside = np.ones(len(found), dtype=bool)
    while outside.any():
        left, right = found[outside] // b, found[outside] % b
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            left = (left + mix(right + even) % a) % a
            right = (right + mix(left + odd) % b) % b
        found[outside] = left * b + right
        outside = found >= np.uint64(count)
    return found.astype(np.int64)


@dataclass(frozen=True)
class Order:
    """Which sample comes at which place.

    count  samples of the source, held-out ones included
    share  the share of them held out for evaluation: at least one where it is above 0 and there are two
    seed   the job's
    """

    count: int
    share: float
    seed: int

    @property
    def evaluation(self) -> int:
        """How many samples are held out."""
        wanted = max(1, round(self.share * self.count)) if self.share > 0 else 0
        return min(wanted, self.count - 1)

    @property
    def training(self) -> int:
        """How many samples one epoch has."""
        return self.count - self.evaluation

    def at(self, start: int, stop: int) -> tuple[Integers, Integers]:
        """Indices and epochs of the training samples at places start..stop of the stream, two arrays of that length."""
        epochs, places = np.divmod(np.arange(start, stop, dtype=np.int64), self.training)
        inner = np.empty_like(places)
        for epoch in range(start // self.training, -(-stop // self.training)):
            here = epochs == epoch
            inner[here] = permute(places[here], self.training, key(self.seed, epoch))
        return self._split(inner), epochs

    def held_out(self, limit: int) -> Integers:
        """Indices of the first `limit` held-out samples: the same ones however often they are asked for."""
        stop = self.training + min(limit, self.evaluation)
        return self._split(np.arange(self.training, stop, dtype=np.int64))

    def _split(self, places: Integers) -> Integers:
        return permute(places, self.count, key(self.seed, _SPLIT)) if self.evaluation else places


def pieces(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """start..stop cut in ranges of `size`, the last as short as it is."""
    for begin in range(start, stop, size):
        yield begin, min(begin + size, stop)
