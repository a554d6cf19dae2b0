"""Samples of text: what each task makes of rows of tokens, named and shaped as transformers' models take them.

Source  masked-lm: Devlin et al. 2019, arXiv:1810.04805 (BERT); span corruption: Raffel et al. 2020,
        arXiv:1910.10683 (T5).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tightfit.data.order import Integers, draws, uniform
from tightfit.data.samples import single
from tightfit.data.tokenizer import SpecialTokens
from tightfit.data.tokens import Mask, Rows
from tightfit.models.objective import IGNORED

_SPAN = 3  # mean length of a corrupted span, in tokens


@dataclass(frozen=True)
class CausalSamples:
    """{"input_ids", "labels"}, both (B, L) int64; labels are not shifted, and IGNORED where no token stands.

    No attention mask: what is right of a token is not seen by a causal model, and padding has no label.
    """

    rows: Rows
    tokenizer: Any = field(default=None, repr=False)
    damaged: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return single(self, index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tokenizer": None}  # a worker needs none, and importing transformers costs memory

    @property
    def sample_items(self) -> int:
        return self.rows.length

    @property
    def ragged(self) -> bool:
        return self.rows.ragged

    def batch(self, indices: Integers, epochs: Integers) -> dict[str, Tensor]:
        ids, there = self.rows.gather(indices)
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(np.where(there, ids, IGNORED))}


@dataclass(frozen=True, kw_only=True)
class MaskedSamples(CausalSamples):
    """{"input_ids", "labels"} and, where rows are ragged, "attention_mask", all (B, L) int64.

    Each token that stands for text is chosen with `probability` and has a label; of the chosen, 80 % become the mask
    token, 10 % any token, 10 % stay. Which ones is a function of seed, sample and epoch.
    """

    special: SpecialTokens
    probability: float
    seed: int

    def batch(self, indices: Integers, epochs: Integers) -> dict[str, Tensor]:
        ids, there = self.rows.gather(indices)
        numbers = draws(self.seed, _sample_keys(indices, epochs), 2 * ids.shape[1])
        chance, other = uniform(numbers[:, ::2]), numbers[:, 1::2] % np.uint64(self.special.vocabulary)
        chosen = there & (chance < self.probability) & ~np.isin(ids, self.special.all)
        corrupted = np.where(chosen & (chance < 0.9 * self.probability), other.astype(np.int64), ids)
        assert self.special.mask is not None
        corrupted = np.where(chosen & (chance < 0.8 * self.probability), self.special.mask, corrupted)
        batch = {"input_ids": corrupted, "labels": np.where(chosen, ids, IGNORED)}
        return _tensors({**batch, "attention_mask": there} if self.ragged else batch)


@dataclass(frozen=True, kw_only=True)
class LabelledSamples(CausalSamples):
    """{"input_ids", "attention_mask"}, (B, L) int64, and "labels", (B,) int64: texts and their classes."""

    labels: Integers

    def batch(self, indices: Integers, epochs: Integers) -> dict[str, Tensor]:
        ids, there = self.rows.gather(indices)
        return _tensors({"input_ids": ids, "attention_mask": there, "labels": self.labels[indices]})


@dataclass(frozen=True, kw_only=True)
class PairSamples(CausalSamples):
    """{"input_ids", "attention_mask"}, (B, L), and "labels", (B, M), all int64: texts and the texts they become."""

    targets: Rows

    @property
    def sample_items(self) -> int:
        return self.rows.length + self.targets.length

    def batch(self, indices: Integers, epochs: Integers) -> dict[str, Tensor]:
        ids, there = self.rows.gather(indices)
        said, counts = self.targets.gather(indices)
        return _tensors({"input_ids": ids, "attention_mask": there, "labels": np.where(counts, said, IGNORED)})


@dataclass(frozen=True, kw_only=True)
class SpanSamples(CausalSamples):
    """{"input_ids", "attention_mask"}, (B, L), and "labels", (B, M), all int64: texts without spans, the spans.

    A share `probability` of each row's tokens is taken out in spans of 3 tokens on average. A sentinel stands for each
    span in the input, and before it in the labels. Which spans is a function of seed, sample and epoch.
    """

    special: SpecialTokens
    probability: float
    seed: int

    @property
    def sample_items(self) -> int:
        return self.rows.length + 2 * corruption(self.rows.length, self.probability)[1] + 2

    def batch(self, indices: Integers, epochs: Integers) -> dict[str, Tensor]:
        ids, there = self.rows.gather(indices)
        numbers = draws(self.seed, _sample_keys(indices, epochs), 2 * ids.shape[1])
        rows = [row[:length] for row, length in zip(ids, there.sum(1), strict=True)]
        pairs = [self._corrupt(row, draw) for row, draw in zip(rows, numbers, strict=True)]
        inputs, kept = _stack([left for left, _ in pairs], self.special.pad)
        labels, _ = _stack([right for _, right in pairs], IGNORED)
        return _tensors({"input_ids": inputs, "attention_mask": kept, "labels": labels})

    def _corrupt(self, row: Integers, numbers: NDArray[np.uint64]) -> tuple[Integers, Integers]:
        """Input and labels of one row (L,), from (2 L,) random numbers."""
        taken, spans = corruption(len(row), self.probability)
        kept_lengths = _segments(len(row) - taken, spans, numbers[::2])
        taken_lengths = _segments(taken, spans, numbers[1::2])
        left, right, at = [], [], 0
        for kept, gone, sentinel in zip(kept_lengths, taken_lengths, self.special.sentinels, strict=False):
            left += [*row[at : at + kept], sentinel]
            right += [sentinel, *row[at + kept : at + kept + gone]]
            at += kept + gone
        return np.array([*left, *row[at:], self.special.end]), np.array([*right, self.special.end])


def corruption(length: int, probability: float) -> tuple[int, int]:
    """How many of a row's tokens are taken out, and in how many spans."""
    taken = min(max(round(length * probability), 1), length - 1)
    return taken, min(max(round(taken / _SPAN), 1), taken, length - taken)


def row_length(input_length: int, probability: float) -> int:
    """The longest row whose corrupted input, with its sentinels and end-of-text, has at most `input_length` tokens."""
    # a row becomes about so much of itself, but for rounding: what stays, and a sentinel for each span
    shortened = (1 - probability) + min(probability / _SPAN, 1 - probability)
    length = max(int((input_length - 6) / shortened) - 2, 2)
    while True:
        taken, spans = corruption(length + 1, probability)
        if length + 1 - taken + spans + 1 > input_length:
            return length
        length += 1


def _segments(total: int, parts: int, numbers: NDArray[np.uint64]) -> list[int]:
    """`total` in `parts` random lengths of at least 1."""
    if parts == 0:
        return []
    cuts = np.sort(np.argsort(numbers[: total - 1], kind="stable")[: parts - 1]) + 1
    return np.diff([0, *cuts.tolist(), total]).tolist()


def _stack(rows: list[Integers], fill: int) -> tuple[Integers, Mask]:
    """Rows of different lengths as (B, longest), and True where they are not filled up."""
    there = np.arange(max(map(len, rows))) < np.array([[len(row)] for row in rows])
    stacked = np.full(there.shape, fill, dtype=np.int64)
    stacked[there] = np.concatenate(rows)
    return stacked, there


def _sample_keys(indices: Integers, epochs: Integers) -> Integers:
    return epochs << 40 | indices


def _tensors(arrays: dict[str, NDArray[Any]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)) for name, array in arrays.items()}
