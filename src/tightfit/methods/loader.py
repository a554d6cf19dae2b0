"""Loads the training samples in the job's order and groups them into micro-batches. Worker
processes can prepare samples ahead, and page-locked (pinned) memory makes copies to a GPU faster.

Saves   time, not memory: workers prepare samples while the device computes. Copies from pinned
        memory run at the rate of the link, from pageable memory at about half of it (6 against 3
        GB/s on older hosts); with non_blocking, they overlap with the device's work.
Costs   host memory: each worker is a Python process that has imported torch, and holds `prefetch`
        micro-batches and its own view of the dataset; pinned buffers cannot be swapped out. With
        non_blocking, the device holds one more micro-batch.
When    preparing samples takes a large part of a step's time, as with images to decode or a dataset
        that the user wrote. Token files need no worker, because a micro-batch is one gather from
        mapped memory.
Order   before the methods that read the data's length and shapes; the workers start with the first
        step.
Source  torch.utils.data; "Use pinned memory buffers" in PyTorch's notes on CUDA semantics.
"""

from __future__ import annotations

import inspect
import itertools
import math
import multiprocessing
import pickle
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tightfit._torch.fake import active_fake_mode
from tightfit.cost.ledger import Ledger
from tightfit.data import (
    MixedOrder,
    Order,
    Samples,
    SampleStream,
    first_samples,
    open_evaluation,
    open_samples,
    order_of,
)
from tightfit.data.order import Integers, split_ranges
from tightfit.data.user_samples import UserStream
from tightfit.distributed.mesh import DATA
from tightfit.errors import InputError, TightfitError
from tightfit.job import DataSpec, Job
from tightfit.machine import Machine
from tightfit.models.masks import PADDING, check_separates_sequences
from tightfit.models.objective import Batch, map_tensors
from tightfit.models.tensors import tensors_in
from tightfit.plan import Plan
from tightfit.runtime.copy_stream import BatchPrefetcher
from tightfit.runtime.method import Default
from tightfit.runtime.run import DummyMicroBatch, Run
from tightfit.target_device import kind_of

FIELDS = ("loader_workers", "prefetch", "pin_memory", "non_blocking")
VARIANTS = ({"loader_workers": 2},)
WORKER_BYTES = 135 * 2**20  # private memory of a worker process
SERVER_BYTES = 63 * 2**20  # private memory of the fork server, which starts the workers
EXAMPLE_SAMPLES = 3  # samples in an example batch
MASK_MAKERS = ("create_causal_mask", "create_bidirectional_mask")
PAGEABLE_RATE = 0.5  # rate of copies from pageable memory, relative to pinned memory


def enabled(plan: Plan) -> bool:
    return True  # every run needs data


def defaults(job: Job, machine: Machine) -> Iterator[Default]:
    if machine.device == "cuda":
        yield Default("pin_memory", True, "copies from page-locked memory are about twice as fast")
        yield Default("non_blocking", True, "copies overlap with the device's work")


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Return the ledger (the predicted memory and time of a step) with two additions: the host
    memory of the workers, of their prefetched micro-batches and of a stream, and the seconds in
    which a step's samples are prepared and copied to the device."""
    samples = ledger.micro_batch * ledger.micro_batches
    workers, piece = plan.loader_workers, min(plan.micro_batch or samples, samples)
    ready = piece * workers * plan.prefetch * ledger.batch_bytes
    host = {"loader": (SERVER_BYTES if workers else 0) + workers * WORKER_BYTES + ready}
    prepared = samples
    if ledger.stream_bytes:
        host["stream"] = ledger.stream_bytes
        prepared *= plan.data_parallel  # every data rank tokenizes the whole stream
    seconds, ahead = {"prepare": prepared * ledger.sample_s / max(workers, 1)}, {"prepare"} if workers else set()
    if machine.device == "cuda":
        step = samples * ledger.batch_bytes
        host["loader"] += step
        host["pinned batches"] = step + ready if plan.pin_memory else 0.0
        if machine.host_to_device_bytes_per_s is not None:
            rate = machine.host_to_device_bytes_per_s.value * (1.0 if plan.pin_memory else PAGEABLE_RATE)
            seconds["copy"] = step / rate
        ahead |= {"copy"} if plan.non_blocking and plan.pin_memory else set()
    return replace(
        ledger,
        batches_ahead=int(overlaps_uploads(plan, machine.device)),
        host={**ledger.host, **host},
        host_work_s={**ledger.host_work_s, **seconds},
        overlapped_work=ledger.overlapped_work | ahead,
    )


def overlaps_uploads(plan: Plan, device: str) -> bool:
    """Return whether the next micro-batch is copied to the device while the device computes the
    current micro-batch.

    This needs a GPU, pin_memory and non_blocking. It is never the case in a pipeline, whose ranks
    read micro-batches in the schedule's order, nor with a parameter server, whose workers read
    micro-batches one at a time.

    device  the kind of device: "cpu" or "cuda"
    """
    alone = plan.pp == 1 and plan.parameter_server == "none"
    return device == "cuda" and plan.pin_memory and plan.non_blocking and alone


def apply(run: Run, plan: Plan) -> Run:
    """Open the job's data, and return the run with `data`, which yields this data rank's share of
    the samples of each step."""
    if overlaps_uploads(plan, run.device.type):
        run = replace(run, prefetcher=BatchPrefetcher(run.device))
    run = replace(run, droppable_masks=_optional_masks(run.model, plan) if kind_of(run.device) == "cuda" else ())
    source = open_samples(run.job)
    evaluation = open_evaluation(run.job, source)
    part = run.mesh.data_rank_and_size if run.mesh is not None else (0, 1)
    if isinstance(source, SampleStream):
        if isinstance(source, UserStream):
            _check_same_samples(run, source)
        return replace(run, data=_streamed(source, evaluation, run.job, plan, part))
    return replace(run, data=_ordered(source, evaluation, run.job, plan, part))


def _check_same_samples(run: Run, source: UserStream) -> None:
    """Raise InputError on all devices if an iterable of the user's does not yield the same first sample on
    all of them, because it divides its samples by rank itself: each device takes its share of them, so
    they would be divided twice."""
    if run.mesh is None or run.plan.data_parallel == 1 or active_fake_mode() is not None:
        return
    checksum = 0
    for tensor in tensors_in(source.example(1)):
        plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        values = plain.detach().cpu().contiguous().flatten()
        checksum = zlib.crc32(values.view(torch.uint8).numpy().tobytes(), checksum)
    largest = run.mesh.all_reduce(torch.tensor([checksum, -checksum], device=run.device), DATA, dist.ReduceOp.MAX)
    if largest[0] != -largest[1]:
        raise InputError(
            "data",
            "the iterable yields other samples on each device, and each device takes its share of them, so they would be "
            "divided twice",
            "yield the same samples in the same order on every device, without RANK and WORLD_SIZE",
        )


def check_packing(model: nn.Module, job: Job) -> None:
    """Raise InputError if the job packs several samples into one sequence that must not attend to
    each other (data.packing: separate), and the model cannot keep them apart."""
    if isinstance(job.data, DataSpec) and job.data.packing == "separate":
        check_separates_sequences(model, "job: data.packing=separate")


def _optional_masks(model: nn.Module, plan: Plan) -> tuple[str, ...]:
    """Return the names of the model's mask inputs, such as ("attention_mask",), that may be left
    out of a batch if the mask is all ones. Return () if the model needs its masks.

    Models that call transformers' mask functions treat a missing mask like a mask of ones. If there
    is a mask, they first read from the device whether it is all ones, and the host waits for the
    answer. Without a mask, the host need not wait.

    With compile: model, masks are never left out. The compiled model does not read them in this
    way, and would be compiled twice, with and without a mask. With cp, they are never left out
    either, because all devices that share a sequence must have masks, or none of them.
    """
    if plan.compile == "model" or plan.cp > 1:
        return ()
    modules = [sys.modules.get(kind.__module__) for kind in type(model).__mro__]
    if not any(name in vars(module) for module in modules if module is not None for name in MASK_MAKERS):
        return ()
    fields = inspect.signature(model.forward).parameters
    return tuple(name for name in PADDING if name in fields and fields[name].default is None)


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
        places = np.arange(min(EXAMPLE_SAMPLES, len(self.source)))
        return self.source.batch(places, 0 * places)

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
        return _from_workers(_SampleMicroBatches(self.source), keys, self.plan)


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

    def _prepare(self, read: _StreamMicroBatches) -> Iterator[Batch]:
        if self.plan.loader_workers == 0:
            return (_pinned(batch, self.plan) for batch in read.batches())
        return _from_workers(read, None, self.plan)


def _evaluation_batches(source: Samples, indices: Integers, micro: int, part: tuple[int, int]) -> Iterator[Batch]:
    """Yield one data rank's micro-batches of the samples of `source` with these indices. A rank
    with fewer micro-batches than others yields a DummyMicroBatch for each missing one.

    micro  number of samples in a full micro-batch
    part   (rank, count): the data rank, and the number of data ranks
    """
    for begin, end, fills in micro_batch_ranges(0, len(indices), micro, part):
        batch = source.batch(indices[begin:end], indices[begin:end] * 0)
        yield DummyMicroBatch(batch) if fills else batch


def _ordered(source: Samples, evaluation: Samples | None, job: Job, plan: Plan, part: tuple[int, int]) -> OrderedData:
    # no samples are held out from a dataset that the user passes as an object
    share = job.data.held_out if isinstance(job.data, DataSpec) else 0.0
    order = order_of(source, share, job.train.seed)
    if job.evaluate_every and evaluation is None and not order.evaluation_count:
        raise InputError(
            f"job: train.evaluate_every={job.evaluate_every}",
            "no samples are held out",
            "give evaluate.data, or the data as {python: 'file.py:function', held_out: 0.01}, or leave out "
            "train.evaluate_every"
            if not isinstance(job.data, DataSpec)
            else "set data.held_out: 0.01, give evaluate.data, or give more data",
        )
    return OrderedData(source, order, job.train.batch, plan, part, evaluation)


def _streamed(
    source: SampleStream, evaluation: Samples | None, job: Job, plan: Plan, part: tuple[int, int]
) -> StreamedData:
    if job.train.steps is None:
        raise InputError("data", "has no known length, so the number of steps is unknown", "set train.steps")
    if job.evaluate_every and evaluation is None:
        raise InputError(
            f"job: train.evaluate_every={job.evaluate_every}",
            "a stream or an iterable has no held-out samples",
            "give evaluate.data, or data that has a length, or leave out train.evaluate_every",
        )
    if plan.loader_workers > 1:
        raise InputError(
            f"plan: loader_workers={plan.loader_workers}",
            "only one worker can read a stream or an iterable",
            "use loader_workers: 1",
        )
    return StreamedData(
        source,
        job.train.batch,
        plan,
        source.sample_items,
        ragged=source.ragged,
        tokenizer=source.tokenizer,
        data_rank=part,
        evaluation=evaluation,
    )


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
    for one in own:
        yield *one, False
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
        return _result_or_error(lambda: self.source.batch(*key))


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
        while (batch := _result_or_error(lambda: next(batches, _END))) is not _END:
            yield batch


_END = None  # marks the end: no batch is None
# errors of pickle; torch raises RuntimeError for a tensor that is part of an autograd graph
_NOT_PICKLABLE = (pickle.PicklingError, AttributeError, TypeError, RuntimeError)


def _result_or_error(make: Callable[[], Any]) -> Any:
    """Call `make` and return its result. If it raises a TightfitError, return this error."""
    try:
        return make()
    except TightfitError as error:
        return error


def _from_workers(dataset: Dataset[Any], keys: Iterable[Any] | None, plan: Plan) -> Iterator[Batch]:
    """Yield the micro-batches that the plan's worker processes prepare, in the order of `keys`.

    dataset  returns or yields micro-batches
    keys     for each micro-batch, the key with which it is read: dataset[key]; None if the dataset
             is an iterable

    Workers are forked from a fork server, a process that has imported torch and has no threads.
    Forking the training process itself could deadlock, because torch has started threads in it.
    Spawned workers would each import torch again.

    Raises TightfitError if a worker is killed, and InputError if the dataset cannot be pickled.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tightfit.data"])
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=keys,
        num_workers=plan.loader_workers,
        collate_fn=_identity,
        prefetch_factor=plan.prefetch,
        pin_memory=plan.pin_memory,
        multiprocessing_context=context,
        generator=torch.Generator(),  # else the loader would draw from torch's global generator
    )
    try:
        for batch in _start_workers(loader, plan):
            if isinstance(batch, TightfitError):
                raise batch
            yield batch
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise TightfitError(
            f"{error}\n  a worker is usually killed because host memory or /dev/shm is full\n"
            f"  fix: use fewer loader_workers than {plan.loader_workers}, or less prefetch; if your "
            "script defines the dataset's class, start training under if __name__ == '__main__'"
        ) from error


def _start_workers(loader: DataLoader[Any], plan: Plan) -> Iterator[Any]:
    """Start the loader's workers, and return the iterator over their batches. The workers import
    the user's script only if the dataset cannot be pickled without it. Raises InputError if the
    dataset cannot be pickled.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Got pickle error")  # the InputError below says it
        try:
            with _no_script():
                return iter(loader)
        except _NOT_PICKLABLE:
            pass  # the dataset's class may be defined in the script: try again with the script
        try:
            return iter(loader)
        except _NOT_PICKLABLE as error:
            raise InputError(
                f"plan: loader_workers={plan.loader_workers}",
                f"the dataset cannot be sent to a worker ({error})",
                "define the dataset's class at the top level of a module, or use loader_workers: 0",
            ) from None


@contextmanager
def _no_script() -> Iterator[None]:
    """A context in which new worker processes do not import the main script again, so that the
    script needs no `if __name__ == "__main__"`.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _identity(batch: Batch) -> Batch:
    return batch


def _pinned(batch: Batch, plan: Plan) -> Batch:
    return map_tensors(lambda tensor: tensor.pin_memory(), batch) if plan.pin_memory else batch
