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
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from tightfit._torch.fake import active_fake_mode
from tightfit.cost.ledger import Ledger
from tightfit.data import (
    Samples,
    SampleStream,
    open_evaluation,
    open_samples,
    order_of,
)
from tightfit.data.user_samples import UserStream
from tightfit.distributed.mesh import DATA
from tightfit.errors import InputError
from tightfit.job import DataSpec, Job
from tightfit.machine import Machine
from tightfit.models.masks import PADDING, check_separates_sequences
from tightfit.models.tensors import tensors_in
from tightfit.plan import Plan
from tightfit.runtime.copy_stream import BatchPrefetcher
from tightfit.runtime.method import Default
from tightfit.runtime.micro_batches import OrderedData, StreamedData
from tightfit.runtime.run import Run
from tightfit.target_device import kind_of

FIELDS = ("loader_workers", "prefetch", "pin_memory", "non_blocking")
VARIANTS = ({"loader_workers": 2},)
WORKER_BYTES = 135 * 2**20  # private memory of a worker process
SERVER_BYTES = 63 * 2**20  # private memory of the fork server, which starts the workers
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
        return replace(run, data=_streamed_data(source, evaluation, run.job, plan, part))
    return replace(run, data=_ordered_data(source, evaluation, run.job, plan, part))


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


def _ordered_data(
    source: Samples, evaluation: Samples | None, job: Job, plan: Plan, part: tuple[int, int]
) -> OrderedData:
    # no samples are held out from a dataset that the user passes as an object
    share = job.held_out
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


def _streamed_data(
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
