"""Computes the order in which the training samples are read.

A training run reads a stream of samples: a random permutation of all training samples for epoch 0,
another one for epoch 1, and so on. The sample at a position of the stream depends only on the seed
and the position, and can be computed directly for any position. So workers, micro-batches and
devices, which read ranges of the stream, cannot change it, and a resumed run needs only the number
of samples read so far. The order uses only integer arithmetic, so it does not depend on the version
of any library, and no list of an epoch's samples is held in memory.

Example: with 1,000 training samples and 64 samples per step, step 20 reads positions 1280..1344 of
the stream. These are positions 280..344 of epoch 1, for any number of workers and devices.

Source  the mixer is splitmix64's (Steele et al. 2014, doi:10.1145/2660193.2660195). The permutation
        is a generalised Feistel network over two digits with cycle walking: it is applied again
        until the result is inside the range (Black and Rogaway 2002, doi:10.1007/3-540-45760-7_9).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

_MASK = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15
_FIRST_MULTIPLIER, _SECOND_MULTIPLIER = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROUNDS = 8
_CHUNK = 1024  # positions whose samples are computed together, and kept for the next steps
# used as an epoch number for the permutation that separates training from evaluation samples
_EVALUATION_SPLIT = -1


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each 64-bit number. If one input bit changes, about half of the output bits
    change. The array may have any shape except ()."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST_MULTIPLIER)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND_MULTIPLIER)
    return values ^ (values >> np.uint64(31))


def hash_numbers(*numbers: int) -> int:
    """Return a 64-bit hash of several numbers. Another order of the numbers gives another hash."""
    value = 0
    for number in numbers:
        value = (value + number + _STRIDE) & _MASK
        value = ((value ^ (value >> 30)) * _FIRST_MULTIPLIER) & _MASK
        value = ((value ^ (value >> 27)) * _SECOND_MULTIPLIER) & _MASK
        value ^= value >> 31
    return value


def random_numbers(seed: int, rows: NDArray[np.integer], columns: int) -> NDArray[np.uint64]:
    """Return random 64-bit numbers of shape (len(rows), columns). Each depends only on the seed, on
    the value in `rows`, such as the index of a sample, and on the number of its column."""
    starts = mix(rows.astype(np.uint64) * np.uint64(_STRIDE) + np.uint64(hash_numbers(seed)))
    return mix(starts[:, None] + np.arange(1, columns + 1, dtype=np.uint64)[None] * np.uint64(_STRIDE))


def uniform(numbers: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Convert random 64-bit numbers to random fractions, uniformly distributed in [0, 1)."""
    return (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permute(numbers: Integers, count: int, secret: int) -> Integers:
    """Apply a random permutation of the integers 0 to count - 1 to each element of `numbers`,
    an array of such integers, and return the result. `secret` selects the permutation, as a seed does.

    Example: permute([0, 1, 2], 3, secret) is [1, 2, 0] for some `secret`.
    """
    rows = math.isqrt(count - 1) + 1 if count > 1 else 1
    a, b = np.uint64(rows), np.uint64(-(-count // rows))
    keys = [np.uint64(hash_numbers(secret, turn)) for turn in range(_ROUNDS)]
    permuted = numbers.astype(np.uint64)
    outside = np.ones(len(permuted), dtype=bool)
    while outside.any():
        left, right = permuted[outside] // b, permuted[outside] % b
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            left = (left + mix(right + even) % a) % a
            right = (right + mix(left + odd) % b) % b
        permuted[outside] = left * b + right
        outside = permuted >= np.uint64(count)
    return permuted.astype(np.int64)


def shuffled_epochs(positions: Integers, count: int, seed: int) -> tuple[Integers, Integers]:
    """Return (numbers in [0, count), epochs) for positions of a stream of permutations of [0,
    count), one permutation for each epoch."""
    epochs, offsets = np.divmod(positions, count)
    numbers = np.empty_like(offsets)
    for epoch in np.unique(epochs).tolist():
        in_epoch = epochs == epoch
        numbers[in_epoch] = permute(offsets[in_epoch], count, hash_numbers(seed, epoch))
    return numbers, epochs


@dataclass(frozen=True)
class Order:
    """Computes which samples are held out for evaluation, and in which order the others are used
    for training.

    count  the number of samples of the data, including those that are held out
    share  the share of all samples that is held out, such as 0.01. If it is above 0, at least one
           sample is held out, unless the data has only one
    seed   the job's seed
    """

    count: int
    share: float
    seed: int

    @property
    def evaluation_count(self) -> int:
        """The number of held-out samples."""
        wanted = max(1, round(self.share * self.count)) if self.share > 0 else 0
        return min(wanted, self.count - 1)

    @property
    def training_count(self) -> int:
        """The number of training samples in one epoch."""
        return self.count - self.evaluation_count

    def training_samples(self, start: int, stop: int) -> tuple[Integers, Integers]:
        """Return which training samples are read at the positions `start` to `stop` - 1 of the run.
        Positions are counted from 0 over all epochs.

        The result is (indices, epochs), two arrays of shape (stop - start,): the index of each
        sample in the data, and the epoch in which it is read.
        """
        return in_chunks(self, start, stop)

    def compute(self, start: int, stop: int) -> tuple[Integers, Integers]:
        """Compute what `training_samples` returns."""
        return self.samples_at(np.arange(start, stop, dtype=np.int64))

    def samples_at(self, positions: Integers) -> tuple[Integers, Integers]:
        """Return (indices, epochs) like `training_samples`, for any positions, in the order of
        `positions`."""
        inner, epochs = shuffled_epochs(positions, self.training_count, self.seed)
        return self._split(inner), epochs

    def held_out(self, limit: int) -> Integers:
        """Return the indices of the first `limit` held-out samples, or of all if there are fewer:
        the same indices at every call."""
        stop = self.training_count + min(limit, self.evaluation_count)
        return self._split(np.arange(self.training_count, stop, dtype=np.int64))

    def _split(self, numbers: Integers) -> Integers:
        return (
            permute(numbers, self.count, hash_numbers(self.seed, _EVALUATION_SPLIT))
            if self.evaluation_count
            else numbers
        )


class Computed(Protocol):
    """An order whose samples `in_chunks` reads: it is hashable, and `compute(start, stop)` returns
    what `training_samples` of the same positions returns."""

    def __hash__(self) -> int: ...

    def compute(self, start: int, stop: int) -> tuple[Integers, Integers]: ...


def in_chunks(order: Computed, start: int, stop: int) -> tuple[Integers, Integers]:
    """Return what `order.compute(start, stop)` returns, from chunks of positions that are kept."""
    if stop - start >= _CHUNK:
        return order.compute(start, stop)
    first, last = start // _CHUNK, max(stop - 1, start) // _CHUNK
    chunks = [_chunk(order, number) for number in range(first, last + 1)]
    indices, epochs = chunks[0] if len(chunks) == 1 else map(np.concatenate, zip(*chunks, strict=True))
    wanted = slice(start - first * _CHUNK, stop - first * _CHUNK)
    return indices[wanted], epochs[wanted]


@functools.lru_cache(maxsize=8)
def _chunk(order: Computed, number: int) -> tuple[Integers, Integers]:
    """Return the samples of a chunk of positions: number * _CHUNK to (number + 1) * _CHUNK - 1. The
    result is cached, because computing the few samples of a step takes as long as computing a
    chunk."""
    return order.compute(number * _CHUNK, (number + 1) * _CHUNK)


def split_ranges(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Split the range from `start` to `stop` (exclusive) into consecutive ranges of `size` numbers,
    and yield each as (begin, end); `end` is exclusive. The last range may be shorter.

    Example: split_ranges(0, 10, 4) yields (0, 4), (4, 8), (8, 10).
    """
    for begin in range(start, stop, size):
        yield begin, min(begin + size, stop)
