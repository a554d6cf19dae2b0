"""Several sources of text in one training: samples are drawn in proportion to the weights of their
sources.

An epoch of a mixture has as many samples as all sources have together. Each source gets a share of
the epoch that is proportional to its weight. The places of the epoch are shuffled, and each source
is read in its own shuffled order. A source whose share is larger than the source is read again from
its start, in another order. The sample at a position of the stream is a function of the seed and
the position, as it is for one source.

Example: sources of 100 and 300 samples with the weights 3 and 1. An epoch of 400 samples has 300
samples of the first source, which is read three times, and 100 samples of the second source, which
is read completely after three epochs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tightfit.data.language import check_task, open_language, row_length_and_spans, text_source
from tightfit.data.order import Integers, Order, hash_numbers, in_chunks, shuffled_epochs
from tightfit.data.samples import DamagePolicy, ModelInput, Samples, one_sample
from tightfit.data.sequences import LabelledSamples
from tightfit.data.text import Document, TextSource, first_document
from tightfit.data.tokenizer import named_tokenizer, special_tokens, trained_tokenizer
from tightfit.errors import InputError
from tightfit.job import DataSpec
from tightfit.models.batches import IGNORED


@dataclass(frozen=True)
class MixedOrder:
    """The order of the training samples of several sources. It has the methods of `Order`.

    orders   the order of each source
    weights  how often each source is drawn, relative to the others
    seed     the job's seed

    Indices count the samples of all sources, one source after another.
    """

    orders: tuple[Order, ...]
    weights: tuple[float, ...]
    seed: int

    @property
    def evaluation_count(self) -> int:
        """The number of held-out samples of all sources."""
        return sum(order.evaluation_count for order in self.orders)

    @property
    def training_count(self) -> int:
        """The number of samples in an epoch."""
        return sum(order.training_count for order in self.orders)

    def training_samples(self, start: int, stop: int) -> tuple[Integers, Integers]:
        """Return (indices, epochs) of the training samples at positions start..stop of the stream,
        without stop: two arrays of shape (stop - start,). The epochs are those of the sources."""
        return in_chunks(self, start, stop)

    def compute(self, start: int, stop: int) -> tuple[Integers, Integers]:
        """Compute what `training_samples` returns."""
        draws, rounds = shuffled_epochs(np.arange(start, stop, dtype=np.int64), self.training_count, self.seed)
        sources = np.searchsorted(self._bounds, draws, side="right") - 1
        indices, epochs = np.empty_like(draws), np.empty_like(draws)
        for number, order in enumerate(self.orders):
            chosen = sources == number
            positions = rounds[chosen] * self.drawn[number] + draws[chosen] - self._bounds[number]
            indices[chosen], epochs[chosen] = order.samples_at(positions)
            indices[chosen] += self._starts[number]
        return indices, epochs

    def held_out(self, limit: int) -> Integers:
        """Return the indices of `limit` held-out samples, or of all if there are fewer: the same at
        every call. They are in proportion to the weights, as far as each source has enough."""
        counts = shares(limit, self.weights, [order.evaluation_count for order in self.orders])
        pairs = zip(self.orders, counts, self._starts[:-1], strict=True)
        return np.concatenate([order.held_out(count) + start for order, count, start in pairs])

    @cached_property
    def drawn(self) -> list[int]:
        """How many samples of an epoch are of each source."""
        return shares(self.training_count, self.weights, [self.training_count] * len(self.orders))

    @cached_property
    def _bounds(self) -> Integers:
        return np.array([0, *itertools.accumulate(self.drawn)])[:-1]

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *itertools.accumulate(order.count for order in self.orders)]


def shares(total: int, weights: Sequence[float], most: Sequence[int]) -> list[int]:
    """Divide `total` in proportion to the weights, rounded so that the sum is `total`.

    most  the largest share of each. What exceeds it is divided among the others; the sum is smaller
          than `total` only if all shares are at their largest

    Example: shares(10, (3, 1), (6, 9)) is [6, 4], because 7 or 8 is more than 6.
    """
    found = [0] * len(weights)
    while left := min(total, sum(most)) - sum(found):
        free = [number for number, share in enumerate(found) if share < most[number]]
        ends = np.cumsum([weights[number] for number in free])
        ends = np.floor(ends / ends[-1] * left + 0.5).astype(int)
        for number, extra in zip(free, np.diff(ends, prepend=0).tolist(), strict=True):
            found[number] = min(found[number] + extra, most[number])
    return found


@dataclass(frozen=True)
class MixedSamples:
    """The samples of several sources, one source after another. Batches may hold samples of several
    sources: their tensors are padded on the right to the longest one.

    parts    the samples of each source, all with the same tokenizer
    weights  how often each source is drawn, relative to the others
    pad      the padding token
    """

    parts: tuple[Samples, ...]
    weights: tuple[float, ...]
    pad: int
    starts: Integers = field(init=False)  # index of the first sample of each part, and their number

    def __post_init__(self) -> None:
        starts = np.array([0, *itertools.accumulate(map(len, self.parts))], dtype=np.int64)
        object.__setattr__(self, "starts", starts)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> Any:
        return one_sample(self, index)

    @property
    def sample_items(self) -> int:
        return max(part.sample_items for part in self.parts)

    @property
    def ragged(self) -> bool:
        return any(part.ragged for part in self.parts)

    @property
    def damaged(self) -> int:
        return sum(part.damaged for part in self.parts)

    @property
    def tokenizer(self) -> Any:
        return self.parts[0].tokenizer

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, by their numbers; empty if the data has none."""
        return next((part.class_names for part in self.parts if isinstance(part, LabelledSamples)), ())

    def order(self, share: float, seed: int) -> MixedOrder:
        """Return the order of the samples. share: the share of each source that is held out.

        Raises InputError if the weight of a source is too small for one sample in each epoch.
        """
        orders = (Order(len(part), share, hash_numbers(seed, number)) for number, part in enumerate(self.parts))
        mixed = MixedOrder(tuple(orders), self.weights, seed)
        for weight, count in zip(self.weights, mixed.drawn, strict=True):
            if count == 0:
                raise InputError(
                    f"job: data.sources: weight={weight:g}",
                    f"is less than one of the {mixed.training_count} samples of an epoch",
                    "increase this weight, or leave out this source",
                )
        return mixed

    def first(self, limit: int) -> Integers:
        """Return the indices of `limit` samples, the first of each source, in proportion to the
        weights as far as each source has enough."""
        counts = shares(limit, self.weights, [len(part) for part in self.parts])
        return np.concatenate([np.arange(count) + start for count, start in zip(counts, self.starts, strict=False)])

    def batch(self, indices: Integers, epochs: Integers) -> dict[str, Tensor]:
        sources = np.searchsorted(self.starts, indices, side="right") - 1
        rows_of_parts, batches = [], []
        for number in np.unique(sources).tolist():
            rows = np.flatnonzero(sources == number)
            rows_of_parts.append(rows)
            batches.append(self.parts[number].batch(indices[rows] - self.starts[number], epochs[rows]))
        order = torch.from_numpy(np.argsort(np.concatenate(rows_of_parts)))
        return {name: self._joined(name, [batch[name] for batch in batches])[order] for name in batches[0]}

    def _joined(self, name: str, tensors: list[Tensor]) -> Tensor:
        if tensors[0].dim() < 2:
            return torch.cat(tensors)
        longest = max(tensor.shape[1] for tensor in tensors)
        fill = {"labels": IGNORED, "input_ids": self.pad}.get(name, 0)
        return torch.cat([functional.pad(tensor, (0, longest - tensor.shape[1]), value=fill) for tensor in tensors])


def open_mixture(spec: DataSpec, model: ModelInput, seed: int) -> MixedSamples:
    """Return the sources of `spec` as samples of the model's task. If `spec` names no tokenizer and
    the model has none, one is trained on the text of all sources.

    Raises InputError for a source that is missing, empty or damaged, and if the sources have
    different classes.
    """
    assert spec.sources is not None
    parts = with_shared_tokenizer(spec, model)
    opened = [open_language(part, model, hash_numbers(seed, number)) for number, part in enumerate(parts)]
    classes = [part.rows.tokens.facts["classes"] for part in opened if isinstance(part, LabelledSamples)]  # type: ignore[attr-defined]
    if any(names != classes[0] for names in classes):
        raise InputError(
            f"data: {spec}",
            f"the sources have different classes ({' and '.join(map(_listed, classes))})",
            "write the labels of all sources as numbers from 0",
        )
    tokenizer = opened[0].tokenizer
    pad = special_tokens(tokenizer, f"data: {spec}", model.task).pad
    return MixedSamples(tuple(opened), tuple(source.weight for source in spec.sources), pad)


def with_shared_tokenizer(spec: DataSpec, model: ModelInput) -> list[DataSpec]:
    """Return the parts of `spec`, all with the same tokenizer: the one that `spec` names, else the
    model's own, else one that is trained on the text of all sources."""
    parts = spec.parts()
    if named_tokenizer(spec, model):
        return parts
    task = next(check_task(part, model) for part in parts)
    trained = trained_tokenizer(_all_text(spec, task), spec, model, row_length_and_spans(spec, task)[1])
    return [part.replace(tokenizer=trained.name_or_path) for part in parts]


def _all_text(spec: DataSpec, task: str) -> TextSource:
    """Return the documents of all sources as one source."""
    sources = [text_source(part, task) for part in spec.parts()]
    for source in sources:
        first_document(source, spec.skip_damaged)

    def documents(damage: DamagePolicy) -> Iterator[Document]:
        return itertools.chain.from_iterable(source.documents(damage) for source in sources)

    known = all(source.identity is not None for source in sources)
    identity = [source.identity for source in sources] if known else None
    return TextSource(str(spec), identity, sum(source.size_bytes for source in sources), sources[0].columns, documents)


def _listed(classes: list[str]) -> str:
    return ", ".join(classes) or "numbers"
