"""Defines `Samples`, the interface of all data that has a length; `ModelInput`, which checks
samples against the inputs that a model takes; and `DamagePolicy`, which counts damaged samples or
raises an error."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from tightfit.data.order import Integers
from tightfit.errors import InputError, TightfitWarning
from tightfit.models.batches import Batch, map_tensors

_MOST_NAMED = 5  # classes that a message names


class Samples(Protocol):
    """Interface of data whose samples can be read in any order.

    len(samples)   the number of samples, including those held out for evaluation
    samples[i]     sample i: a batch of one sample, whose tensors have no batch dim
    batch          returns the batch of the samples at `indices`, (B,), on the CPU. `epochs`, (B,),
                   is the epoch of each sample, which selects its random numbers, for example for
                   masking. The same arguments give the same batch in every process
    sample_items   the number of tokens in a sample of full length; 1 if samples are not sequences
    ragged         True if the tensors of two batches may differ in shape other than in the batch
                   dim
    damaged        how many samples were left out because they are damaged
    tokenizer      the transformers tokenizer that made the tokens; None if there is none
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
    """Describes the inputs that a model takes. A field is None if the model's config does not give
    its value.

    task         causal-lm, masked-lm, seq2seq-lm or classification
    own_loss     whether the job has its own loss, which then decides what fields a sample needs
    is_token_classifier  whether it is one of transformers, whose labels are those of the same tokens
    vocabulary   the size of the vocabulary: token ids must be below this number
    positions    the most tokens that a sequence can have
    labels       the number of classes: class labels must be below this number
    image_size   height and width of the input images in pixels
    channels     number of channels of the input images
    tokenizer    the folder of the model's own tokenizer
    pretrained   the folder or id of the pretrained weights
    class_names  the names of the classes, by their numbers, of a pretrained classifier or, for
                 evaluation data, of the training data; empty if there are none
    only_these_classes  whether the data must not have other classes than `class_names`
    """

    task: str | None
    own_loss: bool = False
    is_token_classifier: bool = False
    vocabulary: int | None = None
    positions: int | None = None
    labels: int | None = None
    image_size: int | None = None
    channels: int | None = None
    tokenizer: str | None = None
    pretrained: str | None = None
    class_names: tuple[str, ...] = ()
    only_these_classes: bool = False

    def check_length(self, asked: str, length: int) -> None:
        """Raise InputError if `length` tokens are more than the model has positions.

        asked: the setting that gives the length, such as "data: sequence_length", for the message
        """
        if self.positions is not None and length > self.positions:
            raise InputError(
                f"{asked}={length}",
                f"the model has only {self.positions} positions",
                f"use at most {self.positions}, or set model.max_position_embeddings: {length}"
                if self.pretrained is None
                else f"use at most {self.positions}; or, if the positions of this pretrained model are not learned (rotary), set "
                f"model.config: {{max_position_embeddings: {length}}}",
            )

    def check_ids(self, ids: Tensor) -> None:
        """Raise InputError if the model has no embedding for a token id, because the id is negative
        or not below the vocabulary size. On a GPU such an id would abort the process without a
        clear error."""
        if self.vocabulary is not None and ids.numel():
            smallest, largest = (int(value) for value in ids.aminmax())
            if smallest < 0 or largest >= self.vocabulary:
                wrong = largest if smallest >= 0 else smallest
                raise InputError(
                    "data",
                    f"has the token id {wrong}, but the model's vocabulary has {self.vocabulary} tokens",
                    f"{self._larger_vocabulary(largest + 1)}, or correct the data",
                )

    def check_tokenizer(self, asked: str, size: int) -> None:
        """Raise InputError if a tokenizer of `size` tokens has more tokens than the model's
        vocabulary.

        asked: the setting that selects the tokenizer, for the message
        """
        if self.vocabulary is not None and size > self.vocabulary:
            raise InputError(
                asked,
                f"has {size} tokens, but the model's vocabulary has {self.vocabulary}",
                f"{self._larger_vocabulary(size)}, or use another tokenizer",
            )

    def _larger_vocabulary(self, tokens: int) -> str:
        """Return the remedy that gives the model an embedding for each of so many tokens."""
        if self.pretrained is None:
            return f"set model.vocab_size: {-(-tokens // 64) * 64}"
        return f"call resize_token_embeddings({tokens}) of transformers once, and save the model to a new folder"

    def numbered(self, asked: str, names: Sequence[str]) -> tuple[Integers, tuple[str, ...]]:
        """Return (the number of each class, the names of all classes by their numbers) for the names
        of the classes in the data.

        The numbers are those of `class_names` if it has all of the names, else 0, 1, ... in the order
        of `names`. Issues a TightfitWarning if a pretrained classifier has other names.

        asked: what the names come from, for messages

        Raises InputError for evaluation data with a class that the training data does not have.
        """
        known = {name: number for number, name in enumerate(self.class_names)}
        other = [name for name in names if name not in known]
        if known and not other:
            return np.array([known[name] for name in names], dtype=np.int64), self.class_names
        if known and self.only_these_classes:
            raise InputError(
                asked,
                f"has the class {other[0]!r}, and the training data does not have it",
                f"use the names of the training data: {_listed(self.class_names)}",
            )
        if known:
            warnings.warn(
                f"{asked}: its classes ({_listed(names)}) are not those of the pretrained model ({_listed(self.class_names)}), "
                "so they are numbered in alphabetical order, and its last layer learns them anew",
                TightfitWarning,
                stacklevel=1,
            )
        return np.arange(len(names)), tuple(names)

    def check_labels(self, asked: str, labels: Integers) -> None:
        """Raise InputError if a class label is negative, or not below the model's number of
        classes.

        asked: what the labels come from, such as "data: train.jsonl", for the message
        """
        smallest, largest = int(labels.min(initial=0)), int(labels.max(initial=0))
        if smallest < 0:
            raise InputError(asked, f"has the label {smallest}", "number the classes from 0")
        if self.labels is not None and largest >= self.labels:
            raise InputError(
                asked,
                f"has the label {largest}, but the model knows only the labels 0 to {self.labels - 1}",
                f"set model.num_labels: {largest + 1}"
                if self.pretrained is None
                else f"set model.config: {{num_labels: {largest + 1}}}, which gives the pretrained model a new last layer",
            )


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:_MOST_NAMED])}{', ...' if len(names) > _MOST_NAMED else ''}"


def one_sample(samples: Samples, index: int) -> Any:
    """Return sample `index` as it is in epoch 0: a batch of one sample, whose tensors have no batch
    dim. A negative index counts from the end. Raises IndexError if the index is out of range."""
    if not -len(samples) <= index < len(samples):
        raise IndexError(f"sample {index} of {len(samples)}")
    batch = samples.batch(np.array([index % len(samples)]), np.array([0]))
    return map_tensors(lambda tensor: tensor[0], batch)


class DamagePolicy:
    """Decides what happens when a reader of data finds a damaged sample and calls `report`.

    skip   False: `report` raises InputError. True: `report` counts the sample, and the reader
           leaves it out
    count  the number of damaged samples so far
    first  (place, what is wrong) of the first damaged sample; None if there is none
    """

    def __init__(self, skip: bool) -> None:
        self.skip, self.count = skip, 0
        self.first: tuple[str, str] | None = None

    def report(self, location: str, found: str) -> None:
        """Count a damaged sample if `skip` is True. Raise InputError if `skip` is False.

        location  where the sample is, such as file:line
        found     what is wrong with the sample
        """
        if not self.skip:
            raise InputError(
                location, found, "correct the sample, or set data.skip_damaged: true to skip damaged samples"
            )
        self.count += 1
        self.first = self.first or (location, found)
