"""Makes the batches of each text task (causal-lm, masked-lm, seq2seq-lm, classification) from token
sequences, with the keys and shapes that transformers' models expect.

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

from tightfit.data.order import Integers, random_numbers, uniform
from tightfit.data.samples import one_sample
from tightfit.data.tokenizer import SpecialTokens
from tightfit.data.tokens import Mask, TokenSequences
from tightfit.models.batches import IGNORED

_MEAN_SPAN = 3  # mean length of a corrupted span, in tokens


@dataclass(frozen=True)
class CausalSamples:
    """Samples for causal-lm. A batch is {"input_ids", "labels"}, both (B, L) int64. The labels are
    the input ids, not shifted, and IGNORED (-100) at padding.

    A batch needs no attention mask: padding is on the right, so no token before it attends to it,
    and it has no labels.

    rows       the token sequences; sample i is sequence i
    tokenizer  the transformers tokenizer that made the tokens, or None
    damaged    how many documents were left out because they are damaged
    """

    rows: TokenSequences
    tokenizer: Any = field(default=None, repr=False)
    damaged: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return one_sample(self, index)

    def __getstate__(self) -> dict[str, Any]:
        # worker processes need no tokenizer, and importing transformers costs memory
        return {**self.__dict__, "tokenizer": None}

    @property
    def sample_items(self) -> int:
        return self.rows.length

    @property
    def ragged(self) -> bool:
        return self.rows.ragged

    def batch(self, indices: Integers, epochs: Integers) -> dict[str, Tensor]:
        ids, mask = self.rows.gather(indices)
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(np.where(mask, ids, IGNORED))}


@dataclass(frozen=True, kw_only=True)
class MaskedSamples(CausalSamples):
    """Samples for masked-lm. A batch is {"input_ids", "labels"} and, if sequences differ in length,
    "attention_mask", all (B, L) int64.

    Each token that is not a special token is chosen with probability `probability`. A chosen token
    gets its id as label; the labels of all other tokens are IGNORED (-100). In the input, 80 % of
    the chosen tokens are replaced by the mask token, 10 % by a random token, and 10 % are
    unchanged. The choice depends only on the seed, the sample and the epoch.
    """

    special: SpecialTokens
    probability: float
    seed: int

    def batch(self, indices: Integers, epochs: Integers) -> dict[str, Tensor]:
        ids, mask = self.rows.gather(indices)
        numbers = random_numbers(self.seed, _sample_keys(indices, epochs), 2 * ids.shape[1])
        chance, other = uniform(numbers[:, ::2]), numbers[:, 1::2] % np.uint64(self.special.vocabulary)
        chosen = mask & (chance < self.probability) & ~np.isin(ids, self.special.all)
        corrupted = np.where(chosen & (chance < 0.9 * self.probability), other.astype(np.int64), ids)
        assert self.special.mask is not None
        corrupted = np.where(chosen & (chance < 0.8 * self.probability), self.special.mask, corrupted)
        batch = {"input_ids": corrupted, "labels": np.where(chosen, ids, IGNORED)}
        return _tensors({**batch, "attention_mask": mask} if self.ragged else batch)


@dataclass(frozen=True, kw_only=True)
class LabelledSamples(CausalSamples):
    """Samples for the classification of texts. A batch is {"input_ids", "attention_mask", "labels"}
    of shapes (B, L), (B, L) and (B,), all int64.

    labels       the class of each text of the data
    class_names  the names of the classes, by their numbers; empty if the data has none
    """

    labels: Integers
    class_names: tuple[str, ...] = ()

    def batch(self, indices: Integers, epochs: Integers) -> dict[str, Tensor]:
        ids, mask = self.rows.gather(indices)
        return _tensors({"input_ids": ids, "attention_mask": mask, "labels": self.labels[indices]})


@dataclass(frozen=True, kw_only=True)
class PairSamples(CausalSamples):
    """Samples for seq2seq-lm from pairs of a text and a target text. A batch is {"input_ids",
    "attention_mask", "labels"} of shapes (B, L), (B, L) and (B, M), all int64: L and M are the
    padded lengths of the texts and of the target texts. The labels are the token ids of the target
    texts, and IGNORED (-100) at padding.

    targets: the token sequences of the target texts, in the order of the texts in `rows`
    """

    targets: TokenSequences

    @property
    def sample_items(self) -> int:
        return self.rows.length + self.targets.length

    def batch(self, indices: Integers, epochs: Integers) -> dict[str, Tensor]:
        ids, mask = self.rows.gather(indices)
        targets, target_mask = self.targets.gather(indices)
        return _tensors({"input_ids": ids, "attention_mask": mask, "labels": np.where(target_mask, targets, IGNORED)})


@dataclass(frozen=True, kw_only=True)
class SpanSamples(CausalSamples):
    """Samples for seq2seq-lm by span corruption (T5). A batch is {"input_ids", "attention_mask",
    "labels"} of shapes (B, L), (B, L) and (B, M), all int64.

    A share `probability` of each row's tokens is removed, in spans of 3 tokens on average. In the
    input, a sentinel token replaces each span. In the labels, the same sentinel token precedes the
    tokens of the span. The spans depend only on the seed, the sample and the epoch.

    Example: the row a b c d e f without the span c d has the input a b <0> e f <end> and the labels
    <0> c d <end>.
    """

    special: SpecialTokens
    probability: float
    seed: int

    @property
    def sample_items(self) -> int:
        return self.rows.length + 2 * corruption(self.rows.length, self.probability)[1] + 2

    def batch(self, indices: Integers, epochs: Integers) -> dict[str, Tensor]:
        ids, mask = self.rows.gather(indices)
        numbers = random_numbers(self.seed, _sample_keys(indices, epochs), 2 * ids.shape[1])
        rows = [row[:length] for row, length in zip(ids, mask.sum(1), strict=True)]
        pairs = [self._corrupt(row, draw) for row, draw in zip(rows, numbers, strict=True)]
        inputs, mask = _pad_rows([left for left, _ in pairs], self.special.pad)
        labels, _ = _pad_rows([right for _, right in pairs], IGNORED)
        return _tensors({"input_ids": inputs, "attention_mask": mask, "labels": labels})

    def _corrupt(self, row: Integers, numbers: NDArray[np.uint64]) -> tuple[Integers, Integers]:
        """Return (the token ids of the input, the labels) for one row of L tokens: the input has
        sentinel tokens in place of random spans, and the labels have the removed spans.

        numbers: at least 2 L random numbers, which select the spans
        """
        removed_count, spans = corruption(len(row), self.probability)
        kept_lengths = _random_lengths(len(row) - removed_count, spans, numbers[::2])
        removed_lengths = _random_lengths(removed_count, spans, numbers[1::2])
        left, right, at = [], [], 0
        for kept_count, removed, sentinel in zip(kept_lengths, removed_lengths, self.special.sentinels, strict=False):
            left += [*row[at : at + kept_count], sentinel]
            right += [sentinel, *row[at + kept_count : at + kept_count + removed]]
            at += kept_count + removed
        return np.array([*left, *row[at:], self.special.end]), np.array([*right, self.special.end])


def corruption(length: int, probability: float) -> tuple[int, int]:
    """Return (how many tokens span corruption removes from a row of `length` tokens, in how many
    spans). probability: the share of the tokens to remove.

    Example: corruption(100, 0.15) is (15, 5).
    """
    removed_count = min(max(round(length * probability), 1), length - 1)
    return removed_count, min(max(round(removed_count / _MEAN_SPAN), 1), removed_count, length - removed_count)


def row_length(input_length: int, probability: float) -> int:
    """Return how many tokens a row can have so that its input after span corruption has at most
    `input_length` tokens, including sentinel tokens and the end-of-text token.

    probability: the share of the row's tokens that is removed. Example: row_length(512, 0.15) is
    568, as in T5.
    """
    # length of the input / length of the row, except for rounding: the tokens that are not removed,
    # and one sentinel for each span
    shortened = (1 - probability) + min(probability / _MEAN_SPAN, 1 - probability)
    length = max(int((input_length - 6) / shortened) - 2, 2)
    while True:
        removed_count, spans = corruption(length + 1, probability)
        if length + 1 - removed_count + spans + 1 > input_length:
            return length
        length += 1


def _random_lengths(total: int, parts: int, numbers: NDArray[np.uint64]) -> list[int]:
    """Return `parts` random lengths, each at least 1, whose sum is `total`.

    numbers: at least `total` - 1 random numbers, which select the lengths
    """
    if parts == 0:
        return []
    cuts = np.sort(np.argsort(numbers[: total - 1], kind="stable")[: parts - 1]) + 1
    return np.diff([0, *cuts.tolist(), total]).tolist()


def _pad_rows(rows: list[Integers], fill: int) -> tuple[Integers, Mask]:
    """Stack B rows of different lengths, each padded on the right with `fill` to the longest.
    Return (the stacked rows (B, L), a mask (B, L) that is False at padding)."""
    mask = np.arange(max(map(len, rows))) < np.array([[len(row)] for row in rows])
    stacked = np.full(mask.shape, fill, dtype=np.int64)
    stacked[mask] = np.concatenate(rows)
    return stacked, mask


def _sample_keys(indices: Integers, epochs: Integers) -> Integers:
    """Return a number for each pair of a sample's index and an epoch, (B,). Different pairs have
    different numbers, and so different random numbers."""
    return epochs << 40 | indices


def _tensors(arrays: dict[str, NDArray[Any]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)) for name, array in arrays.items()}
