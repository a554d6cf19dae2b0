"""Reads the user's own samples. Those of a map-style dataset or a sequence are read in the order
that `Order` computes; those of an iterable are read in the iterable's order.

A dataset may use the random generators of Python, NumPy and torch, for example to augment samples.
For a map-style dataset, the random numbers depend only on the seed, the sample and the epoch. For
an iterable, they depend on the seed, the epoch and the numbers drawn before in this epoch. The
state of the training's own generators does not change.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tightfit.data.collate import (
    as_tensors,
    check_labelled,
    collate,
    items_in,
    tensors_in,
    warn_unmasked,
    warn_unshifted,
)
from tightfit.data.order import Integers, hash_numbers
from tightfit.data.own_generators import own_generators, seed_own_generators
from tightfit.data.rng import GeneratorStates, generators_restored, seed_generators
from tightfit.data.samples import ModelInput, one_sample
from tightfit.data.shared_memory import pack_dataset, unpack_dataset
from tightfit.errors import InputError, TightfitError
from tightfit.models import load_python
from tightfit.models.batches import Batch

_SEEN = 8  # samples that are inspected when a dataset is opened
_DRAW_NOTHING = (list, tuple, TensorDataset)  # datasets that draw no random numbers to return a sample
_END = object()  # marks the end of an iterator


@runtime_checkable
class MapStyle(Protocol):
    """Interface of a dataset whose samples are read by index: it has __len__ and __getitem__."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class DatasetObject:
    """Holds a dataset that the user gave as a Python object; calling this object returns the
    dataset. When it is pickled for a worker process, the dataset's tensors go to shared memory, so
    that all workers read the same memory."""

    dataset: Any

    def __call__(self) -> Any:
        return self.dataset

    @cached_property
    def _packed(self) -> Any:
        return pack_dataset(self.dataset)

    def __reduce__(self) -> Any:
        return _restore_given, self._packed


def _restore_given(*parts: Any) -> DatasetObject:
    return DatasetObject(unpack_dataset(*parts))


@dataclass(frozen=True)
class DatasetFunction:
    """Names a user's function that makes a dataset; calling this object calls the function and
    returns the dataset. It raises InputError if the function cannot be loaded or fails.

    source  "file.py:function" or "module:function". Only this name is pickled, so each worker
            process calls the function itself
    """

    source: str

    def __call__(self) -> Any:
        function = load_python(self.source)
        try:
            return function()
        except TightfitError:
            raise
        except Exception as error:
            raise InputError(
                f"data: python={self.source}",
                f"the function raised {type(error).__name__}: {error}",
                "correct the function",
            ) from error


class UserSamples:
    """Samples from a user's map-style dataset, which `collate` pads and stacks to batches.

    make     returns the dataset; worker processes call it to get their own
    dataset  the dataset in this process
    model    the inputs that the model takes
    seed     selects the random numbers that the dataset draws

    The constructor reads up to 8 samples, to find out how many tokens a sample has and whether
    shapes differ. It raises InputError if the dataset is empty, if it fails, or if the first sample
    has no labels although the loss of the model's task needs them.
    """

    damaged = 0
    tokenizer = None

    def __init__(self, make: DatasetObject | DatasetFunction, dataset: MapStyle, model: ModelInput, seed: int) -> None:
        self.make, self.dataset, self.model, self.seed = make, dataset, model, seed
        if len(dataset) == 0:
            raise InputError("data", "the dataset is empty", "give one with samples")
        self._generators = own_generators(dataset)
        count = min(_SEEN, len(dataset))
        examples = self._samples(range(count), [0] * count)
        check_labelled(examples[0], model)
        warn_unshifted(examples[0], model)
        warn_unmasked(examples)
        self.ragged = len({tuple(tensor.shape for tensor in tensors_in(sample)) for sample in examples}) > 1
        self.sample_items = max(map(items_in, examples))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "dataset": None, "_generators": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        dataset = state["make"]()
        self.__dict__.update(state, dataset=dataset, _generators=own_generators(dataset))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return one_sample(self, index)

    def batch(self, indices: Integers, epochs: Integers) -> Batch:
        return collate(self._samples(indices.tolist(), epochs.tolist()), self.model)

    def _samples(self, indices: Iterable[int], epochs: Iterable[int]) -> list[Any]:
        if type(self.dataset) in _DRAW_NOTHING:
            return [self._sample(index) for index in indices]
        found = []
        with generators_restored():
            for index, epoch in zip(indices, epochs, strict=True):
                seed = hash_numbers(self.seed, epoch, index)
                seed_generators(seed)
                seed_own_generators(self._generators, seed)
                found.append(self._sample(index))
        return found

    def _sample(self, index: int) -> Any:
        try:
            return as_tensors(self.dataset[index])
        except TightfitError:
            raise
        except Exception as error:
            raise InputError(
                f"data: sample {index}",
                f"the dataset raised {type(error).__name__}: {error}",
                "correct the dataset's __getitem__",
            ) from error


class UserStream:
    """Reads a user's iterable as an endless stream of samples: when the iterable ends, it is read
    again from its start, as the next epoch. A resumed run reads the samples that the earlier run
    has used, and skips them.

    make   returns the iterable
    model  the inputs that the model takes
    seed   selects the random numbers that the iterable draws
    """

    ragged = False
    damaged = 0
    tokenizer = None

    def __init__(self, make: DatasetObject | DatasetFunction, model: ModelInput, seed: int) -> None:
        self.make, self.model, self.seed = make, model, seed

    def batches(self, ranges: Iterable[tuple[int, int]]) -> Iterator[Batch]:
        """Yield a batch for each of `ranges`, pairs (first, stop): the samples at the positions
        `first` to `stop` - 1 of the stream.

        The ranges must be in ascending order, because the stream cannot go back. For a range that
        begins before the end of the previous one, the previous batch is yielded again.
        """
        samples, position, batch = self._samples(), 0, None
        for first, stop in ranges:
            if batch is None or first >= position:
                taken = itertools.islice(samples, first - position, stop - position)
                batch, position = [as_tensors(sample) for sample in taken], stop
                check_labelled(batch[0], self.model)
            yield collate(batch, self.model)

    def example(self, count: int) -> Batch:
        """Return the batch of the first `count` samples."""
        return next(self.batches([(0, count)]))

    @property
    def sample_items(self) -> int:
        """The number of tokens of the first sample; 1 if it is not a sequence of tokens."""
        sample = as_tensors(next(self._samples()))
        warn_unshifted(sample, self.model)
        return items_in(sample)

    def _samples(self) -> Iterator[Any]:
        for epoch in itertools.count():
            empty = True
            for sample in self._epoch(epoch):
                empty = False
                yield sample
            if empty:
                raise InputError(
                    "data",
                    f"the iterable gave no samples in epoch {epoch}",
                    "let __iter__ return a new iterator each time it is called",
                )

    def _epoch(self, epoch: int) -> Iterator[Any]:
        randomness = GeneratorStates(hash_numbers(self.seed, epoch))
        with randomness.active():
            samples = iter(self.make())
        while True:
            with randomness.active():
                sample = self._next(samples)
            if sample is _END:
                return
            yield sample

    def _next(self, samples: Iterator[Any]) -> Any:
        try:
            return next(samples, _END)
        except TightfitError:
            raise
        except Exception as error:
            raise InputError(
                "data", f"the iterable raised {type(error).__name__}: {error}", "correct its __iter__"
            ) from error


def open_user(make: DatasetObject | DatasetFunction, model: ModelInput, seed: int) -> UserSamples | UserStream:
    """Return the samples of a user's dataset: UserSamples if it has a length and can be indexed,
    such as a list or a map-style Dataset; a UserStream if it is any other iterable.

    make   returns the dataset
    model  the inputs that the model takes
    seed   selects the random numbers that the dataset draws

    Raises InputError for anything else: a DataLoader, a string, a dict, or an iterator object,
    which can be read only once.
    """
    dataset, asked = make(), f"data: python={make.source}" if isinstance(make, DatasetFunction) else "data"
    found = f"a {type(dataset).__name__}"
    if isinstance(dataset, DataLoader):
        raise InputError(
            asked, f"{found}, which makes batches itself", "give its dataset; train.batch sets the batch size"
        )
    if isinstance(dataset, str | bytes | dict):
        raise InputError(
            asked, f"{found}, not a dataset", "give a list of samples, a torch Dataset or an iterable of samples"
        )
    if isinstance(dataset, Iterator) and isinstance(make, DatasetObject):
        raise InputError(
            asked,
            f"{found}, which can be read only once, so a run could not be resumed",
            "give a list, an IterableDataset, or the function that makes it: {python: 'file.py:function'}",
        )
    if isinstance(dataset, MapStyle) and not isinstance(dataset, IterableDataset):
        return UserSamples(make, dataset, model, seed)
    if isinstance(dataset, IterableDataset) or (isinstance(dataset, Iterable) and not isinstance(dataset, Dataset)):
        return UserStream(make, model, seed)
    raise InputError(
        asked,
        f"{found}, which has no __len__ or no __getitem__",
        "add both, or derive it from torch.utils.data.IterableDataset",
    )
