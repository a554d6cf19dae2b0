"""The protocol of sample sources, the checks against the model's inputs, and the policy for damaged
samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from tightfit.data.order import Integers
from tightfit.errors import InputError
from tightfit.models.objective import Batch, map_tensors


class Samples(Protocol):
    """Samples with random access.

    len(samples)   the number of samples, including held-out ones
    samples[i]     one sample, with the tensors of a batch without their batch dim
    batch          (indices, epochs), two arrays of shape (B,) -> the batch of these samples on the
                   host. The same arguments give the same batch in every process
    sample_items   tokens in a full sample; 1 if samples are not sequences
    ragged         whether the tensors of batches differ in shape beyond the batch dim
    damaged        how many samples were left out because they are damaged
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
    """The inputs that a model takes. A field is None if the model's config does not say.

    task         causal-lm, masked-lm, seq2seq-lm or classification
    own_loss     whether the job has its own loss, which then decides what fields a sample needs
    vocabulary   token ids are below this number
    positions    the most tokens that a sequence can have
    labels       class labels are below this number
    image_size   height and width of the input images in pixels
    channels     number of channels of the input images
    tokenizer    the folder of the model's own tokenizer
    """

    task: str | None
    own_loss: bool = False
    vocabulary: int | None = None
    positions: int | None = None
    labels: int | None = None
    image_size: int | None = None
    channels: int | None = None
    tokenizer: str | None = None

    def check_length(self, asked: str, length: int) -> None:
        """Raise InputError if sequences of `length` tokens are longer than the model has positions.
        asked: the field that sets the length, for the message."""
        if self.positions is not None and length > self.positions:
            raise InputError(
                f"{asked}={length}",
                f"the model has only {self.positions} positions",
                f"use at most {self.positions}, or set model.max_position_embeddings: {length}",
            )

    def check_ids(self, ids: Tensor) -> None:
        """Raise InputError for token ids without an embedding. On a GPU such ids would abort the
        process without a clear error."""
        if self.vocabulary is not None and ids.numel():
            smallest, largest = (int(value) for value in ids.aminmax())
            if smallest < 0 or largest >= self.vocabulary:
                wrong = largest if smallest >= 0 else smallest
                raise InputError(
                    "data",
                    f"has the token id {wrong}, but the model's vocabulary has {self.vocabulary} tokens",
                    f"set model.vocab_size: {-(-(largest + 1) // 64) * 64}, or correct the data",
                )

    def check_tokenizer(self, asked: str, size: int) -> None:
        """Raise InputError if a tokenizer of `size` tokens has more tokens than the model's
        vocabulary. asked: the tokenizer's field, for the message."""
        if self.vocabulary is not None and size > self.vocabulary:
            raise InputError(
                asked,
                f"has {size} tokens, but the model's vocabulary has {self.vocabulary}",
                f"set model.vocab_size: {-(-size // 64) * 64}, or use another tokenizer",
            )

    def check_labels(self, asked: str, labels: Integers) -> None:
        """Raise InputError for class labels for which the model's last layer has no output. asked:
        the labels' field, for the message."""
        smallest, largest = int(labels.min(initial=0)), int(labels.max(initial=0))
        if smallest < 0:
            raise InputError(asked, f"has the label {smallest}", "number the classes from 0")
        if self.labels is not None and largest >= self.labels:
            raise InputError(
                asked,
                f"has the label {largest}, but the model knows only the labels 0 to {self.labels - 1}",
                f"set model.num_labels: {largest + 1}",
            )


def one_sample(samples: Samples, index: int) -> Any:
    """Return one sample: a batch of size 1 without its batch dim. Raises IndexError if the index is
    out of range."""
    if not -len(samples) <= index < len(samples):
        raise IndexError(f"sample {index} of {len(samples)}")
    batch = samples.batch(np.array([index % len(samples)]), np.array([0]))
    return map_tensors(lambda tensor: tensor[0], batch)


class DamagePolicy:
    """The policy for damaged samples: raise InputError at the first one, or, with `skip`, leave all
    of them out and count them.

    count  the number of damaged samples that were left out
    first  (place, what is wrong) of the first damaged sample, or None
    """

    def __init__(self, skip: bool) -> None:
        self.skip, self.count = skip, 0
        self.first: tuple[str, str] | None = None

    def report(self, place: str, found: str) -> None:
        """Count a damaged sample, or raise InputError.

        place  the sample's file or file:line
        found  what is wrong with the sample
        """
        if not self.skip:
            raise InputError(place, found, "correct the sample, or set data.skip_damaged: true to skip damaged samples")
        self.count += 1
        self.first = self.first or (place, found)
