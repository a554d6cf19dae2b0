"""Sequence chunks: of each sequence, the two chunks that one device of a context-parallel group works on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tightfit.errors import InputError
from tightfit.methods.run import Data, Filler
from tightfit.models.objective import IGNORED, Batch, map_tensors, next_token_targets


def cut(batch: Batch, causal: bool, piece: int, pieces: int) -> Batch:
    """Of a batch, the chunks `piece` and 2 x pieces - 1 - piece of each sequence, of 2 x pieces; padded where those are uneven.

    (samples, length) becomes (samples, 2 x chunk); labels are moved first so that each stands where it is predicted, and
    position_ids say where each token is in its sequence. Raises InputError.
    """
    if not isinstance(batch, dict) or "input_ids" not in batch or "position_ids" in batch:
        raise InputError(
            f"plan: cp={pieces}",
            "batches with position_ids of their own"
            if isinstance(batch, dict) and "position_ids" in batch
            else "batches without input_ids",
            "give input_ids and labels, one sequence in a row, or use cp: 1",
        )
    tokens = batch["input_ids"]
    samples, length = tokens.shape
    missing = -length % (2 * pieces)
    fields = dict(batch)
    if causal:
        fields["labels"] = next_token_targets(batch)
    elif missing and "attention_mask" not in fields:
        fields["attention_mask"] = torch.ones_like(tokens)  # what is padded here must not be seen
    positions = torch.arange(length + missing, device=tokens.device).expand(samples, -1)
    found = {}
    for name, value in fields.items():
        if isinstance(value, Tensor) and value.shape[:2] == tokens.shape:
            fill = IGNORED if name == "labels" else 0
            value = _chunks(functional.pad(value, (0, missing), value=fill), piece, pieces)
        found[name] = value
    return {**found, "position_ids": _chunks(positions, piece, pieces)}


def _chunks(value: Tensor, piece: int, pieces: int) -> Tensor:
    chunks = value.chunk(2 * pieces, 1)
    return torch.cat([chunks[piece], chunks[2 * pieces - 1 - piece]], 1)


@dataclass(frozen=True)
class SequenceChunks:
    """The `Data` of one device: of each sequence, its piece. The others of its ring read the same samples."""

    data: Data
    causal: bool
    piece: int
    pieces: int
    pinned: bool

    @property
    def samples(self) -> int | None:
        return self.data.samples

    @property
    def sample_items(self) -> int:
        return self.data.sample_items

    @property
    def ragged(self) -> bool:
        return self.data.ragged

    @property
    def damaged(self) -> int:
        return self.data.damaged

    @property
    def tokenizer(self) -> Any:
        return self.data.tokenizer

    def steps(self, consumed: int, until: int | None) -> Iterator[list[Batch]]:
        for micro_batches in self.data.steps(consumed, until):
            yield [self.cut(batch) for batch in micro_batches]

    def held_out(self, samples: int) -> Iterator[Batch]:
        return map(self.cut, self.data.held_out(samples))

    def example(self) -> Batch:
        return self.data.example()

    def cut(self, batch: Batch) -> Batch:
        if isinstance(batch, Filler):
            return Filler(self.cut(batch.batch))
        mine = cut(batch, self.causal, self.piece, self.pieces)
        return map_tensors(lambda tensor: tensor.pin_memory(), mine) if self.pinned else mine
