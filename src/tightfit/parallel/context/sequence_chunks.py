"""Shard sequences for context parallelism: each device of a group gets two chunks of each sequence.

`context_parallel` wraps a run's data with `SequenceChunks`. With cp devices, a sequence has 2 x cp
chunks, and the device with rank r gets chunks r and 2 x cp - 1 - r. Under a causal mask, later
positions attend to more keys. Each device has an early and a late chunk, so all devices do the same
amount of work.

Example: cp=2 and a sequence of 8 tokens has 4 chunks of 2 tokens.

    chunk              0     1     2     3
    positions          0 1   2 3   4 5   6 7
    device             0     1     1     0
    keys of each       1 2   3 4   5 6   7 8

Device 0 has positions 0, 1, 6, 7 and 1 + 2 + 7 + 8 = 18 pairs of a query and a key. Device 1 has
positions 2, 3, 4, 5 and 3 + 4 + 5 + 6 = 18 pairs. A sequence of 10 tokens is padded to 12, with
chunks of 3.

Source  Grattafiori et al. 2024 (Llama 3), arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tightfit.errors import InputError
from tightfit.models.batches import IGNORED, Batch, map_tensors
from tightfit.models.task_logits import next_token_targets
from tightfit.runtime.run import Data, DummyMicroBatch


def shard_batch(batch: Batch, causal: bool, cp_rank: int, cp_size: int) -> Batch:
    """Return a batch with this device's two chunks of each sequence: chunks `cp_rank` and 2 x
    cp_size - 1 - cp_rank of 2 x cp_size.

    Sequences are first padded to a multiple of 2 x cp_size tokens.

    batch    a dictionary with input_ids of shape (samples, length). All other tensors whose first
             two dimensions are (samples, length) are sharded in the same way
    causal   whether the model predicts next tokens. If so, labels are shifted before they are
             sharded, so that the label of a position is the next token
    cp_rank  this device's rank among the devices that share the samples
    cp_size  the number of these devices

    The sharded tensors have shape (samples, 2 x chunk length, ...). The returned batch also has
    position_ids, the position of each token in its full sequence. If `causal` is False and there is
    padding, it has an attention_mask that hides the padding.

    Raises InputError if the batch has position_ids, or has no input_ids.
    """
    if not isinstance(batch, dict) or "input_ids" not in batch or "position_ids" in batch:
        raise InputError(
            f"plan: cp={cp_size}",
            "the batches have position_ids, which context parallelism computes itself"
            if isinstance(batch, dict) and "position_ids" in batch
            else "the batches have no input_ids",
            "give batches with input_ids and without position_ids, one sequence in each row, or use cp: 1",
        )
    tokens = batch["input_ids"]
    samples, length = tokens.shape
    missing = -length % (2 * cp_size)
    fields = dict(batch)
    if causal:
        fields["labels"] = next_token_targets(batch)
    elif missing and "attention_mask" not in fields:
        fields["attention_mask"] = torch.ones_like(tokens)  # no query may attend to the padding
    positions = torch.arange(length + missing, device=tokens.device).expand(samples, -1)
    found = {}
    for name, value in fields.items():
        if isinstance(value, Tensor) and value.shape[:2] == tokens.shape:
            fill = IGNORED if name == "labels" else 0
            value = _chunks(functional.pad(value, (0, missing), value=fill), cp_rank, cp_size)
        found[name] = value
    return {**found, "position_ids": _chunks(positions, cp_rank, cp_size)}


def _chunks(value: Tensor, piece: int, pieces: int) -> Tensor:
    """Cut dimension 1 of `value` into 2 x pieces chunks. Return chunks `piece` and 2 x pieces - 1 -
    piece, concatenated.
    """
    chunks = value.chunk(2 * pieces, 1)
    return torch.cat([chunks[piece], chunks[2 * pieces - 1 - piece]], 1)


@dataclass(frozen=True)
class SequenceChunks:
    """The `Data` of one device under context parallelism. It yields the batches of another `Data`,
    cut to this device's chunks of each sequence.

    All devices that share samples read the same samples.

    data     the `Data` with full sequences
    causal   whether the model predicts next tokens
    cp_rank  this device's rank among the devices that share samples
    cp_size  the number of these devices
    pinned   whether to put batches into page-locked memory
    """

    data: Data
    causal: bool
    cp_rank: int
    cp_size: int
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
        """Yield, for each step, the list of its micro-batches, cut to this device's chunks.

        consumed  the number of samples that earlier steps have used
        until     the number of samples after which to stop; None: never stop
        """
        for micro_batches in self.data.steps(consumed, until):
            yield [self.cut(batch) for batch in micro_batches]

    def held_out(self, samples: int | None) -> Iterator[Batch]:
        """Yield the evaluation batches, cut to this device's chunks.

        samples  how many evaluation samples to use at most; None: all of them
        """
        return map(self.cut, self.data.held_out(samples))

    def example(self) -> Batch:
        """Return an example batch, with full sequences."""
        return self.data.example()

    def cut(self, batch: Batch) -> Batch:
        """Return a batch with this device's chunks of the sequences in `batch`. For a
        DummyMicroBatch, return a DummyMicroBatch.
        """
        if isinstance(batch, DummyMicroBatch):
            return DummyMicroBatch(self.cut(batch.batch))
        mine = shard_batch(batch, self.causal, self.cp_rank, self.cp_size)
        return map_tensors(lambda tensor: tensor.pin_memory(), mine) if self.pinned else mine
