"""The micro-batches of each step, in the job's order: of a dataset with random access, or of a stream.

A step's samples are divided into one share for each data rank, and each share into micro-batches. All
ranks get the same number of micro-batches; a rank with fewer samples gets dummies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from tightfit.data import MixedOrder, Order, Samples, SampleStream, first_samples
from tightfit.data.order import Integers, split_ranges
from tightfit.errors import TightfitError
from tightfit.models.batches import Batch, map_tensors
from tightfit.plan import Plan
from tightfit.runtime.loader_workers import batches_from_workers, result_or_error
from tightfit.runtime.run import DummyMicroBatch

EXAMPLE_SAMPLES = 3  # samples in an example batch


@dataclass(frozen=True)
class OrderedData:
    """Yields the micro-batches of a dataset with random access. It implements the interface `Data`
    (see `runtime/run.py`).

    source      the samples of the dataset
    order       the order of the training samples, and which samples are held out for evaluations.
                It does not depend on the number of workers
    batch       number of samples in a step, on all devices
    plan        its fields set the size of micro-batches and the number of worker processes
    data_rank   (rank, count): the samples of each step are divided into `count` shares, and this
                process reads share number `rank`
    evaluation  the samples of the job's `evaluate.data`; None: the held-out samples of `order`
    """

    source: Samples
    order: Order | MixedOrder
    batch: int
    plan: Plan
    data_rank: tuple[int, int] = (0, 1)
    evaluation: Samples | None = None

    @property
    def samples(self) -> int:
        return self.order.training_count

    @property
    def sample_items(self) -> int:
        return self.source.sample_items

    @property
    def ragged(self) -> bool:
        return self.source.ragged

    @property
    def damaged(self) -> int:
        return self.source.damaged

    @property
    def tokenizer(self) -> Any:
        return self.source.tokenizer

    def steps(self, consumed: int, until: int | None) -> Iterator[list[Batch]]:
        """Yield, for each optimizer step, the list of this data rank's micro-batches, in host
        memory.

        consumed  number of samples that earlier steps have used: the first step begins after them
        until     number of samples after which the last step ends; None: there is no end

        A step's last micro-batch may be short. A rank with fewer micro-batches than others gets a
        DummyMicroBatch for each missing one.
        """
        micro = self.plan.micro_batch_of(self.batch)
        wanted = (key for begin, end in _steps(consumed, until, self.batch) for key in self._keys(begin, end, micro))
        batches = self._prepare(wanted)
        for begin, end in _steps(consumed, until, self.batch):
            yield [
                DummyMicroBatch(next(batches)) if fills else next(batches)
                for *_, fills in micro_batch_ranges(begin, end, micro, self.data_rank)
            ]

    def held_out(self, samples: int | None) -> Iterator[Batch]:
        """Yield this data rank's micro-batches of the first `samples` evaluation samples (of all
        samples if it is None). This process prepares them without workers.
        """
        micro = self.plan.micro_batch_of(self.batch)
        if self.evaluation is not None:
            return _evaluation_batches(self.evaluation, first_samples(self.evaluation, samples), micro, self.data_rank)
        indices = self.order.held_out(self.order.evaluation_count if samples is None else samples)
        return _evaluation_batches(self.source, indices, micro, self.data_rank)

    def example(self) -> Batch:
        """Return a micro-batch of the first few samples, which shows their shapes and types."""
        indices = np.arange(min(EXAMPLE_SAMPLES, len(self.source)))
        return self.source.batch(indices, 0 * indices)

    def samples_between(self, begin: int, end: int) -> Batch:
        """Return the samples at the positions `begin` to `end` - 1 of the training as one batch."""
        return self.source.batch(*self.order.training_samples(begin, end))

    def _keys(self, begin: int, end: int, micro: int) -> Iterator[tuple[Integers, Integers]]:
        """Yield (sample indices, epochs) for each of this data rank's micro-batches of one step:
        for each sample, its index in the dataset, and in which epoch it is used.

        begin, end  the step has the samples at positions `begin` to `end - 1` in the order of
                    training
        micro       number of samples in a full micro-batch
        """
        indices, epochs = self.order.training_samples(begin, end)
        for first, last, _ in micro_batch_ranges(begin, end, micro, self.data_rank):
            yield indices[first - begin : last - begin], epochs[first - begin : last - begin]

    def _prepare(self, keys: Iterator[tuple[Integers, Integers]]) -> Iterator[Batch]:
        if self.plan.loader_workers == 0:
            return (_pinned(self.source.batch(*key), self.plan) for key in keys)
        return batches_from_workers(_SampleMicroBatches(self.source), keys, self.plan)


@dataclass(frozen=True)
class StreamedData:
    """Yields the micro-batches of a stream or an iterable dataset, in its own order. It implements
    the interface `Data` (see `runtime/run.py`).

    source        the stream or iterable
    batch         number of samples in a step, on all devices
    sample_items  tokens in a full sample; 1 for images
    plan          its fields set the size of micro-batches and the number of worker processes
    data_rank     (rank, count): the samples of each step are divided into `count` shares, and this
                  process reads share number `rank`
    evaluation    the samples of the job's `evaluate.data`; None: there are no evaluation samples,
                  because none are held out from a stream
    """

    source: SampleStream
    batch: int
    plan: Plan
    sample_items: int
    samples: int | None = None
    ragged: bool = False
    tokenizer: Any = None
    data_rank: tuple[int, int] = (0, 1)
    evaluation: Samples | None = None

    @property
    def damaged(self) -> int:
        """How many samples were left out because they are damaged, as far as the stream was read. Those
        that a loader worker leaves out are not counted."""
        return self.source.damaged

    def steps(self, consumed: int, until: int | None) -> Iterator[list[Batch]]:
        """Yield, for each optimizer step, the list of this data rank's micro-batches, in host
        memory. Samples that earlier steps have used, or that belong to other ranks, are read and
        skipped.

        consumed  number of samples that earlier steps have used: the first step begins after them
        until     number of samples after which the last step ends; None: there is no end
        """
        micro = self.plan.micro_batch_of(self.batch)
        batches = self._prepare(_StreamMicroBatches(self.source, consumed, until, self.batch, micro, self.data_rank))
        for begin, end in _steps(consumed, until, self.batch):
            yield [
                DummyMicroBatch(next(batches)) if fills else next(batches)
                for *_, fills in micro_batch_ranges(begin, end, micro, self.data_rank)
            ]

    def held_out(self, samples: int | None) -> Iterator[Batch]:
        if self.evaluation is None:
            return iter(())
        micro = self.plan.micro_batch_of(self.batch)
        return _evaluation_batches(self.evaluation, first_samples(self.evaluation, samples), micro, self.data_rank)

    def example(self) -> Batch:
        return self.source.example(EXAMPLE_SAMPLES)

    def samples_between(self, begin: int, end: int) -> Batch:
        """Return the samples at the positions `begin` to `end` - 1 of the stream as one batch."""
        return next(self.source.batches([(begin, end)]))

    def _prepare(self, read: _StreamMicroBatches) -> Iterator[Batch]:
        if self.plan.loader_workers == 0:
            return (_pinned(batch, self.plan) for batch in read.batches())
        return batches_from_workers(read, None, self.plan)


def _evaluation_batches(source: Samples, indices: Integers, micro: int, part: tuple[int, int]) -> Iterator[Batch]:
    """Yield one data rank's micro-batches of the samples of `source` with these indices. A rank
    with fewer micro-batches than others yields a DummyMicroBatch for each missing one.

    micro  number of samples in a full micro-batch
    part   (rank, count): the data rank, and the number of data ranks
    """
    for begin, end, fills in micro_batch_ranges(0, len(indices), micro, part):
        batch = source.batch(indices[begin:end], indices[begin:end] * 0)
        yield DummyMicroBatch(batch) if fills else batch


def _steps(consumed: int, until: int | None, batch: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) for each step: the step has the samples at positions `begin` to `end - 1`.

    consumed  position at which the first step begins
    until     position at which the last step ends, which may therefore be short; None: there is no
              last step
    batch     number of samples in a step
    """
    begins = itertools.count(consumed, batch) if until is None else range(consumed, until, batch)
    for begin in begins:
        yield begin, begin + batch if until is None else min(begin + batch, until)


def micro_batch_ranges(begin: int, end: int, micro: int, part: tuple[int, int]) -> Iterator[tuple[int, int, bool]]:
    """Yield (first, last, is_dummy) for each micro-batch of one data rank in one step: the
    micro-batch consists of the samples at positions `first` to `last - 1`.

    All ranks get the same number of micro-batches. A rank with fewer samples than others gets dummy
    micro-batches of one sample in addition, for which `is_dummy` is True.

    begin, end  the step has the samples at positions `begin` to `end - 1`
    micro       number of samples in a full micro-batch
    part        (rank, count): the data rank, and the number of data ranks

    Example: a step of 5 samples on 2 ranks, with micro-batches of 2. Rank 0 has samples 0-1 and a
    dummy, rank 1 has samples 2-3 and sample 4.
    """
    number, parts = part
    size = end - begin
    first, last = begin + size * number // parts, begin + size * (number + 1) // parts
    own = list(split_ranges(first, last, micro))
    for micro_batch in own:
        yield *micro_batch, False
    most = math.ceil(math.ceil(size / parts) / micro)
    filling = max(last - 1, begin) if own else begin
    for _ in range(most - len(own)):
        yield filling, filling + 1, True


class _SampleMicroBatches(Dataset[Any]):
    """The dataset from which the worker processes read: dataset[sample indices, epochs] is the
    micro-batch of these samples.

    If reading fails with a TightfitError, the error is returned instead of raised. An exception
    that a worker raises would lose its attributes on the way to the main process.
    """

    def __init__(self, source: Samples) -> None:
        self.source = source

    def __getitem__(self, key: tuple[Integers, Integers]) -> Batch | TightfitError:
        return result_or_error(lambda: self.source.batch(*key))


class _StreamMicroBatches(IterableDataset[Any]):
    """Iterates over the micro-batches that one data rank reads from an iterable dataset. `batches`
    is for this process. A worker process iterates over the object itself, which yields a
    TightfitError instead of raising it.

    consumed, until  the samples at positions `consumed` to `until - 1` are used; None: no end
    batch            number of samples in a step, on all devices
    micro            number of samples in a full micro-batch
    part             (rank, count): the data rank, and the number of data ranks
    """

    def __init__(
        self, source: SampleStream, consumed: int, until: int | None, batch: int, micro: int, part: tuple[int, int]
    ) -> None:
        self.source, self.consumed, self.until, self.batch, self.micro = source, consumed, until, batch, micro
        self.part = part

    def batches(self) -> Iterator[Batch]:
        ranges = (
            (first, last)
            for begin, end in _steps(self.consumed, self.until, self.batch)
            for first, last, _ in micro_batch_ranges(begin, end, self.micro, self.part)
        )
        return self.source.batches(ranges)

    def __iter__(self) -> Iterator[Batch | TightfitError]:
        batches = self.batches()
        while (batch := result_or_error(lambda: next(batches, _END))) is not _END:
            yield batch


_END = None  # marks the end: no batch is None


def _pinned(batch: Batch, plan: Plan) -> Batch:
    return map_tensors(lambda tensor: tensor.pin_memory(), batch) if plan.pin_memory else batch


def example_batches(data: Any, samples: int) -> Iterator[Batch]:
    """Yield a batch of few samples, and then a whole micro-batch, because a model may run with no other
    number of samples. A dry run's data has only the first.

    data     the run's data
    samples  number of samples in a micro-batch of the plan
    """
    yield data.example()
    if hasattr(data, "samples_between"):
        yield data.samples_between(0, samples)
