"""What a source of samples is, what the model wants of it, and what becomes of damaged samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from tightfit.data.order import Integers
from tightfit.errors import InputError
from tightfit.models.objective import Batch, map_tensors


class Samples(Protocol):
    """Samples that can be had in any order.

    len(samples)   how many there are, held-out ones included
    samples[i]     one sample, as `batch` gives it but without the first dim
    batch          (indices, epochs), two arrays of length B -> the batch of these samples on the host; a pure
                   function of the two, whichever process calls it
    sample_items   tokens in a full sample, 1 where samples are not sequences
    ragged         whether batches differ in shape beyond the number of samples
    damaged        how many samples were left out as damaged
    tokenizer      a transformers tokenizer, or None
    """

    @property
    def sample_items(self) -> int: ...

    @property
    def ragged(self) -> bool: ...

    @property
    def damaged(self) -> int: ...

    @property
    def tokenizer(self) -> Any: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...

    def batch(self, indices: Integers, epochs: Integers) -> Batch: ...


@dataclass(frozen=True)
class ModelInput:
    """What a model takes. None: the model does not say.

    task         causal-lm, masked-lm, seq2seq-lm or classification
    own_loss     whether the job brings its own loss, and so decides itself what a sample has to have
    vocabulary   token ids are below it
    positions    a sequence has at most so many tokens
    labels       class labels are below it
    image_size, channels   of its images, in pixels
    """

    task: str | None
    own_loss: bool = False
    vocabulary: int | None = None
    positions: int | None = None
    labels: int | None = None
    image_size: int | None = None
    channels: int | None = None

    def check_length(self, asked: str, length: int) -> None:
        """Refuse sequences longer than the model has positions."""
        if self.positions is not None and length > self.positions:
            raise InputError(
                f"{asked}={length}",
                f"the model has {self.positions} positions",
                f"use at most {self.positions}, or set model.max_position_embeddings: {length}",
            )

    def check_ids(self, ids: Tensor) -> None:
        """Refuse token ids that the model has no embedding for: on a GPU they would end the process without a word."""
        if self.vocabulary is not None and ids.numel():
            smallest, largest = (int(value) for value in ids.aminmax())
            if smallest < 0 or largest >= self.vocabulary:
                wrong = largest if smallest >= 0 else smallest
                raise InputError(
                    "data",
                    f"has the token id {wrong}, the model a vocabulary of {self.vocabulary}",
                    f"set model.vocab_size: {-(-(largest + 1) // 64) * 64}, or mend the data",
                )

    def check_tokenizer(self, asked: str, size: int) -> None:
        """Refuse a tokenizer that has more tokens than the model's vocabulary."""
        if self.vocabulary is not None and size > self.vocabulary:
            raise InputError(
                asked,
                f"has {size} tokens, the model a vocabulary of {self.vocabulary}",
                f"set model.vocab_size: {-(-size // 64) * 64}, or use another tokenizer",
            )

    def check_labels(self, asked: str, labels: Integers) -> None:
        """Refuse class labels that the model's last layer does not have."""
        smallest, largest = int(labels.min(initial=0)), int(labels.max(initial=0))
        if smallest < 0:
            raise InputError(asked, f"has the label {smallest}", "number the classes from 0")
        if self.labels is not None and largest >= self.labels:
            raise InputError(
                asked,
                f"has the label {largest}, the model only 0 to {self.labels - 1}",
                f"set model.num_labels: {largest + 1}",
            )


def single(samples: Samples, index: int) -> Any:
    """One sample: a batch of it alone, without the first dim."""
    if not -len(samples) <= index < len(samples):
        raise IndexError(f"sample {index} of {len(samples)}")
    batch = samples.batch(np.array([index % len(samples)]), np.array([0]))
    return map_tensors(lambda tensor: tensor[0], batch)


class Damage:
    """What becomes of damaged samples: the first is refused, or all are left out and counted."""

    def __init__(self, skip: bool) -> None:
        self.skip, self.count = skip, 0

    def report(self, place: str, found: str) -> None:
        """Count what is damaged at `place` (file or file:line), or raise InputError."""
        if not self.skip:
            raise InputError(place, found, "mend it, or set data.skip_damaged: true to leave such samples out")
        self.count += 1
