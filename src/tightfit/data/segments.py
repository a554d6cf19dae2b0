"""Makes samples for causal-lm from segments: conversations, texts or parts of long texts, which are
slices of a token file.

A sequence holds one segment, or several that do not attend to one another (packing). Several
segments are kept apart by their position ids, which start at 0 in each segment: if a batch has such
position ids and no attention mask, transformers masks attention between the segments. In
conversations, only some tokens count in the loss.

Source  packing by best-fit decreasing: Johnson 1973; Ding et al. 2024, arXiv:2404.10830.
"""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightfit.data.cache import cached_folder
from tightfit.data.order import Integers
from tightfit.data.sequences import CausalSamples
from tightfit.data.tokens import Mask, TokenFile
from tightfit.models.batches import IGNORED


@dataclass(frozen=True)
class SegmentRows:
    """TokenSequences that consist of segments: slices of a token file, such as conversations.

    tokens         the token file
    starts, stops  (segments,): segment i is tokens.ids[starts[i] : stops[i]]
    firsts         (sequences + 1,): sequence i holds the segments firsts[i] to firsts[i + 1] - 1
    length         the most tokens of a sequence
    pad            the id of the padding token
    masked         True if only the tokens that `tokens.counted` marks count in the loss; False if
                   all count
    separate       True if a sequence may hold several segments. All sequences are then padded to
                   `length`; otherwise only to the longest sequence of the batch
    """

    tokens: TokenFile
    starts: Integers
    stops: Integers
    firsts: Integers
    length: int
    pad: int
    masked: bool
    separate: bool

    def __len__(self) -> int:
        return len(self.firsts) - 1

    @property
    def ragged(self) -> bool:
        return not self.separate

    def gather(self, indices: Integers) -> tuple[Integers, Mask]:
        """Return (the token ids (B, L) of the sequences at `indices`, a mask (B, L) that is False
        at padding)."""
        ids, _, positions = self.read(indices)
        lengths = [self._segment_lengths(index).sum() for index in indices]
        return ids, np.arange(positions.shape[1]) < np.array(lengths)[:, None]

    def read(self, indices: Integers) -> tuple[Integers, Integers, Integers]:
        """Return (token ids, labels, position ids) of the sequences at `indices`, each (B, L)
        int64.

        The label of a token is its own id if the token counts in the loss, else IGNORED (-100). The
        first token of a segment never counts, because no earlier token of the segment predicts it.
        The position ids start at 0 in each segment. Padding is like a last segment without labels.
        """
        return stack_segments(map(self._row, indices), self.length if self.separate else None, self.pad)

    def _row(self, index: int) -> tuple[Integers, Mask, Integers]:
        chosen = slice(self.firsts[index], self.firsts[index + 1])
        token_indices = [
            np.arange(begin, end) for begin, end in zip(self.starts[chosen], self.stops[chosen], strict=True)
        ]
        at = np.concatenate(token_indices)
        positions = np.concatenate([indices - indices[0] for indices in token_indices])
        counted = self.tokens.counted[at] if self.masked else np.ones(len(at), dtype=bool)
        return self.tokens.ids[at].astype(np.int64), counted & (positions > 0), positions

    def _segment_lengths(self, index: int) -> Integers:
        chosen = slice(self.firsts[index], self.firsts[index + 1])
        return self.stops[chosen] - self.starts[chosen]


def stack_segments(
    rows: Iterable[tuple[Integers, Mask, Integers]], length: int | None, pad: int
) -> tuple[Integers, Integers, Integers]:
    """Return (token ids, labels, position ids), each (B, L) int64, of rows of different lengths.

    rows    (token ids, which of them count, position ids) of each row
    length  L; None for that of the longest row

    The label of a token is its id if it counts, else IGNORED. The padding continues as a segment of
    its own, without labels.
    """
    rows = list(rows)
    length = max(len(ids) for ids, _, _ in rows) if length is None else length
    ids = np.full((len(rows), length), pad, dtype=np.int64)
    labels = np.full((len(rows), length), IGNORED, dtype=np.int64)
    positions = np.empty((len(rows), length), dtype=np.int64)
    for number, (row, counted, row_positions) in enumerate(rows):
        ids[number, : len(row)] = row
        labels[number, : len(row)] = np.where(counted, row, IGNORED)
        positions[number, : len(row)] = row_positions
        positions[number, len(row) :] = np.arange(length - len(row))
    return ids, labels, positions


@dataclass(frozen=True)
class SegmentSamples(CausalSamples):
    """Samples for causal-lm from segments. A batch is {"input_ids", "labels"} and, if sequences may
    hold several segments, "position_ids", all (B, L) int64. The labels are the input ids, not
    shifted, and IGNORED (-100) where a token does not count in the loss."""

    rows: SegmentRows  # type: ignore[assignment]

    def batch(self, indices: Integers, epochs: Integers) -> dict[str, Tensor]:
        ids, labels, positions = map(torch.from_numpy, self.rows.read(indices))
        found = {"input_ids": ids, "labels": labels}
        return {**found, "position_ids": positions} if self.rows.separate else found


def padded_rows(tokens: TokenFile, chosen: Integers, length: int, pad: int) -> SegmentRows:
    """Return one sequence for each chosen conversation: its first `length` tokens.

    tokens  the token file of the conversations
    chosen  the indices of the conversations to use
    pad     the id of the padding token
    """
    starts, stops = _truncated(tokens, chosen, length)
    return SegmentRows(tokens, starts, stops, np.arange(len(chosen) + 1), length, pad, masked=True, separate=False)


def separate_rows(tokens: TokenFile, chosen: Integers | None, length: int, pad: int) -> SegmentRows:
    """Return sequences that hold several segments each, at most `length` tokens in all.

    tokens  the token file
    chosen  the indices of the conversations to use; the first `length` tokens of each are a
            segment. None uses all texts instead; each is cut into segments of `length` tokens, the
            last of which may be shorter
    pad     the id of the padding token

    Segments are placed from the longest to the shortest, each in the sequence with the least free
    space that is enough. The placement is cached. It depends only on the tokens and `length`.
    """
    starts, stops = _parts(tokens.offsets, length) if chosen is None else _truncated(tokens, chosen, length)

    def make(folder: Path) -> None:
        order, firsts = pack(stops - starts, length)
        np.save(folder / "order.npy", order)
        np.save(folder / "firsts.npy", firsts)

    facts = json.loads((tokens.folder / "facts.json").read_text())
    folder = cached_folder("packing", [tokens.folder.name, facts, length, chosen is None], make)
    order, firsts = np.load(folder / "order.npy"), np.load(folder / "firsts.npy")
    masked = chosen is not None
    return SegmentRows(tokens, starts[order], stops[order], firsts, length, pad, masked, separate=True)


def _truncated(tokens: TokenFile, chosen: Integers, length: int) -> tuple[Integers, Integers]:
    starts = tokens.offsets[chosen]
    return starts, np.minimum(tokens.offsets[chosen + 1], starts + length)


def _parts(offsets: Integers, length: int) -> tuple[Integers, Integers]:
    """Cut all texts of a token file into parts of `length` tokens, of which the last of each text
    may be shorter. Return (where each part starts, where it stops), as indices of tokens.

    offsets: (texts + 1,); text i consists of the tokens offsets[i] to offsets[i + 1] - 1. Example:
    offsets [0, 5, 7] and length 3 give ([0, 3, 5], [3, 5, 7]).
    """
    counts = -(-np.diff(offsets) // length)
    ends = np.repeat(offsets[1:], counts)
    indices = np.arange(len(ends)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(offsets[:-1], counts) + indices * length
    return starts, np.minimum(starts + length, ends)


def pack(lengths: Integers, capacity: int) -> tuple[Integers, Integers]:
    """Place segments in sequences of at most `capacity` tokens by best-fit decreasing: the longest
    segment first, each in the sequence with the least free space that is enough.

    lengths: the number of tokens of each segment, at most `capacity`. Return two arrays, `order`
    and `firsts`: sequence i holds the segments order[firsts[i] : firsts[i + 1]].

    Example: lengths [3, 5, 2] and capacity 5 give the sequences (1) and (0, 2), as the order
    [1, 0, 2] and the firsts [0, 1, 3].
    """
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # free tokens -> the rows that have so many
    spaces: list[int] = []  # the keys of open_rows, sorted
    for segment in np.argsort(-lengths, kind="stable").tolist():
        size = int(lengths[segment])
        at = bisect_left(spaces, size)
        if at < len(spaces):
            space = spaces[at]
            row = open_rows[space].pop()
            if not open_rows[space]:
                del open_rows[space], spaces[at]
            rows[row].append(segment)
        else:
            space, row = capacity, len(rows)
            rows.append([segment])
        left = space - size
        if left:
            if left not in open_rows:
                open_rows[left] = []
                insort(spaces, left)
            open_rows[left].append(row)
    order = np.array([segment for row in rows for segment in sorted(row)], dtype=np.int64)
    return order, np.cumsum([0, *map(len, rows)], dtype=np.int64)


def in_separate_segments(position_ids: Any) -> bool:
    """Return whether some row of position ids, (B, L), holds several segments: whether they do not
    always increase by 1, as in 0 1 2 0 1."""
    return bool((position_ids[:, 1:] - position_ids[:, :-1] != 1).any())


__all__ = [
    "SegmentRows",
    "SegmentSamples",
    "in_separate_segments",
    "pack",
    "padded_rows",
    "separate_rows",
    "stack_segments",
]
