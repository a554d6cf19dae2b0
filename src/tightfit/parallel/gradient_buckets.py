"""Reduce gradients in buckets, while backward still computes: a bucket is one flat buffer for many
gradients.

A bucket fills in the order in which backward computes gradients. When it is full, its reduction
begins. `AllReducedGradients` all-reduces the bucket (data parallelism). `ReduceScatteredGradients`
reduce-scatters it, so that each device gets the sum of its own shards (ZeRO-1 and ZeRO-2). All
devices reduce their buckets in the same order, because collectives match by their order.

Example: ten blocks, each with one parameter of 10 MiB, on four devices. A bucket holds at most 25
MiB, so there are five buckets of two gradients, 20 MiB each.

    backward computes    block 9, 8 | 7, 6     | 5, 4     | 3, 2     | 1, 0
    bucket that fills    0          | 1        | 2        | 3        | 4
    reduction begins                  of 0       of 1       of 2       of 3       of 4

With `AllReducedGradients`, all buckets may be in flight at once. Their buffers become the
gradients, so all five buffers exist at the end of backward: 100 MiB. With
`ReduceScatteredGradients`, at most two buffers exist at a time, one in flight and one that fills:
40 MiB. When the reduction of bucket 1 has begun, the device waits for bucket 0 and frees its
buffer. Of each bucket the device keeps its shard of the reduced gradients, 5 MiB, which makes 25
MiB for the five buckets.

Source  Li et al. 2020, arXiv:2006.15704 (buckets and overlap); Rajbhandari et al. 2020,
        arXiv:1910.02054 (shards); Megatron-LM (buckets that grow with the number of devices).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tightfit._torch.fake import active_fake_mode
from tightfit.distributed.collectives import begin_reduce_scatter
from tightfit.errors import InputError
from tightfit.optim.gradient_dtype import copy_gradient_dtype, empty_gradient, gradient_dtype
from tightfit.optim.gradient_hooks import on_gradient_ready

BUCKET_BYTES = 25 * 2**20
# The least bytes that each device sends in one step of a ring. Sending them takes much longer than
# the network's latency.
MIN_BYTES_PER_DEVICE = 2**20


def bucket_bytes(devices: int) -> int:
    """Return the largest size of a bucket, in bytes, for a number of devices.

    A collective over a ring of n devices takes about n steps, and each step sends 1/n of the
    bucket. A bucket of n MiB makes each step send 1 MiB, which takes much longer than the latency
    of the network. So the result is n MiB, but at least 25 MiB: 25 MiB for up to 25 devices, and 64
    MiB for 64 devices.
    """
    return max(BUCKET_BYTES, devices * MIN_BYTES_PER_DEVICE)


@dataclass
class Bucket:
    """Parameters whose gradients are reduced together, in one flat buffer.

    parameters  the parameters, in the order in which backward computes their gradients
    buffer      the flat buffer of the gradients. It is allocated for the first gradient.
                `ReduceScatteredGradients` frees it when the reduction is complete,
                `AllReducedGradients` at the end of the step. Otherwise None
    ready       indices of the parameters whose gradients are in the buffer
    work        the handle of the reduction in flight; None if there is none
    """

    parameters: list[nn.Parameter] = field(default_factory=list)
    buffer: Tensor | None = None
    ready: set[int] = field(default_factory=set)
    work: Any = None

    @property
    def is_full(self) -> bool:
        """Return whether the gradients of all parameters of the bucket are in the buffer."""
        return len(self.ready) == len(self.parameters)


def make_buckets(
    parameters: Iterable[nn.Parameter],
    limit: int,
    dtype_of: Callable[[Tensor], torch.dtype] = lambda parameter: parameter.dtype,
) -> list[Bucket]:
    """Divide parameters into buckets, and return the buckets in the order in which backward fills
    them.

    Backward computes the last parameter's gradient first, so the parameters are taken from last to
    first. All parameters of a bucket have the same dtype and the same device. A parameter that is
    larger than `limit` gets a bucket of its own.

    parameters  the parameters, in the order in which the forward uses them
    limit       the largest size of a bucket in bytes
    dtype_of    parameter -> the dtype of what the bucket holds of it. By default buckets hold the
                parameters themselves; pass `gradient_dtype` for buckets of gradients
    """
    buckets: list[Bucket] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[Bucket, int]] = {}
    for parameter in reversed(list(parameters)):
        kind = dtype_of(parameter), parameter.device
        bucket, size = filling.get(kind, (None, limit))
        own = parameter.numel() * kind[0].itemsize
        if bucket is None or size + own > limit:
            bucket, size = Bucket(), 0
            buckets.append(bucket)
        bucket.parameters.append(parameter)
        filling[kind] = bucket, size + own
    return buckets


class Reducer:
    """Collects the gradients of parameters in buckets during backward, and begins the reduction of
    a bucket as soon as it is full. Buckets are reduced in order.

    The functions below decide what a buffer looks like and which collective reduces it.

    parameters  the parameters, in the order in which the forward uses them
    devices     the number of devices that take part in the reduction
    allocate    bucket -> a new buffer for the bucket. Called before the first gradient is written
    write       called with (bucket, index, gradient) to write the gradient of the bucket's
                parameter number `index` into the buffer. The gradient is None if this device's
                backward has computed none for the parameter
    send        called with a bucket to begin its reduction; must set `bucket.work`
    on_reduced  called with a bucket when its reduction is complete
    in_flight   how many reductions may stay in flight when a new one has begun. Older reductions
                are waited for. None: `finish` waits for all of them
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        devices: int,
        allocate: Callable[[Bucket], Tensor],
        write: Callable[[Bucket, int, Tensor | None], None],
        send: Callable[[Bucket], None],
        on_reduced: Callable[[Bucket], None] = lambda bucket: None,
        in_flight: int | None = None,
    ) -> None:
        self.buckets = make_buckets(parameters, bucket_bytes(devices), gradient_dtype)
        self._allocate, self._write, self._start = allocate, write, send
        self._on_reduced, self._in_flight = on_reduced, in_flight
        self._sending, self._next = False, 0
        self._slot = {
            parameter: (bucket, index) for bucket in self.buckets for index, parameter in enumerate(bucket.parameters)
        }
        on_gradient_ready(parameters, self._on_gradient)

    def begin(self, reduces: bool) -> None:
        """Prepare for a micro-batch. Call this before its forward.

        reduces  whether this micro-batch's backward puts gradients into buckets and reduces them.
                 False: gradients accumulate in `.grad`, for a reduction in a later micro-batch
        """
        self._sending = reduces

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._sending:
            bucket, index = self._slot[parameter]  # type: ignore[index]
            if index in bucket.ready:  # the reduction of its first gradient may have begun
                raise completed_twice(parameter)
            self._write_gradient(bucket, index, parameter.grad)
            parameter.grad = None
            while self._next < len(self.buckets) and self.buckets[self._next].is_full:
                self._send()

    def _send(self) -> None:
        self._start(self.buckets[self._next])
        self._next += 1
        if self._in_flight is not None and self._next > self._in_flight:
            self._wait(self.buckets[self._next - 1 - self._in_flight])

    def _wait(self, bucket: Bucket) -> None:
        if bucket.work is not None:
            bucket.work.wait()
            bucket.work = None
            self._on_reduced(bucket)

    def _write_gradient(self, bucket: Bucket, index: int, gradient: Tensor | None) -> None:
        if bucket.buffer is None:
            bucket.buffer = self._allocate(bucket)
        self._write(bucket, index, gradient)
        bucket.ready.add(index)

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce the buckets that are not full yet, and wait for the reductions of all buckets.
        Call this after the backward of a micro-batch that reduces.

        A parameter may have got no gradient in this backward. Then the gradient that earlier
        micro-batches have accumulated in its `.grad` is reduced, or None if there is none.
        """
        for bucket in self.buckets[self._next :]:
            for index, parameter in enumerate(bucket.parameters):
                if index not in bucket.ready:
                    # the gradient that earlier micro-batches have accumulated, or None
                    self._write_gradient(bucket, index, parameter.grad)
                    parameter.grad = None
            self._send()
        for bucket in self.buckets:
            self._wait(bucket)
            bucket.ready.clear()
        self._next, self._sending = 0, False


class AllReducedGradients:
    """All-reduces the gradients of parameters in buckets, while backward computes. After `finish`,
    the `.grad` of each parameter is the sum over the devices, a view of its bucket's buffer.

    At the end of each buffer is one more number for each parameter: on how many devices it has a
    gradient. If it has none on any device, its `.grad` is None, as in training on one device.

    parameters  the parameters whose gradients are reduced
    group       the process group of the devices that take part
    narrow      the dtype to which gradients of a wider dtype are cast before they are sent
                (`compressed_gradients`). None: gradients are sent in their own dtype
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup, narrow: torch.dtype | None = None):
        self.group, self.narrow = group, narrow
        devices = dist.get_world_size(group)
        self._reducer = Reducer(parameters, devices, self._allocate, self._write, self._send)
        # id of a bucket -> views of its buffer: one for each gradient, then one for the counts
        self._views: dict[int, tuple[Tensor, ...]] = {}
        self._missing: list[tuple[Bucket, int]] = []
        self.begin = self._reducer.begin

    def _allocate(self, bucket: Bucket) -> Tensor:
        like, sizes = bucket.parameters[0], [p.numel() for p in bucket.parameters]
        buffer = torch.empty(sum(sizes) + len(sizes), dtype=gradient_dtype(like), device=like.device)
        self._views[id(bucket)] = buffer.split([*sizes, len(sizes)])
        self._views[id(bucket)][-1].fill_(1.0)
        return buffer

    def _write(self, bucket: Bucket, index: int, gradient: Tensor | None) -> None:
        slots = self._views[id(bucket)]
        if gradient is None:
            slots[index].zero_()
            slots[-1][index] = 0.0
            self._missing.append((bucket, index))
        else:
            slots[index].copy_(gradient.reshape(-1))

    def _send(self, bucket: Bucket) -> None:
        assert bucket.buffer is not None
        if self.narrow is None or bucket.buffer.dtype.itemsize <= self.narrow.itemsize:
            bucket.work = dist.all_reduce(bucket.buffer, group=self.group, async_op=True)
        else:
            wide = torch.view_as_real(bucket.buffer) if bucket.buffer.is_complex() else bucket.buffer
            narrowed = wide.to(self.narrow)
            bucket.work = _CastBack(dist.all_reduce(narrowed, group=self.group, async_op=True), narrowed, wide)

    def finish(self) -> None:
        """Wait for all reductions, and set the `.grad` of each parameter. Call this after the last
        backward of a step.
        """
        self._reducer.finish()
        for bucket in self._reducer.buckets:
            for parameter, slot in zip(bucket.parameters, self._views[id(bucket)], strict=False):
                parameter.grad = slot.view(parameter.shape)
        for bucket in self._reducer.buckets:
            for index in missing_everywhere(
                self._views[id(bucket)][-1], [index for at, index in self._missing if at is bucket]
            ):
                bucket.parameters[index].grad = None
        self._missing.clear()
        self._views.clear()
        for bucket in self._reducer.buckets:
            bucket.buffer = None


@dataclass
class _CastBack:
    """The handle of an all-reduce that sends a copy of a buffer in a narrower dtype. `wait` waits
    for the all-reduce, and copies the result back into the buffer.

    work      the handle of the all-reduce
    narrowed  the narrow copy that is all-reduced
    buffer    the bucket's buffer
    """

    work: Any
    narrowed: Tensor
    buffer: Tensor

    def wait(self) -> None:
        self.work.wait()
        self.buffer.copy_(self.narrowed)


class ReduceScatteredGradients:
    """Reduce-scatters the gradients of parameters in buckets, while backward computes. Each device
    gets the summed gradients of its own shards only (ZeRO-1 and ZeRO-2).

    The dict `shards` maps each parameter to this device's shard of it along dimension 0, divided as
    a DTensor's Shard(0) divides. The summed gradients are stored in the `.grad` of these shards.
    The optimizer updates the shards. They are views of the parameters, so the updates change the
    model. `WeightGathers` then all-gathers the updated shards.

    Example: a parameter of shape (10, 3) over 4 devices has ceil(10 / 4) = 3 rows in each shard but
    the last: rows 0-2, 3-5, 6-8 and 9. A bucket's buffer has one row for each device. In each row
    the parameter takes 3 x 3 = 9 elements. In the row of device 3, six of the nine elements are
    padding (zeros). A parameter of 5 rows has shards of 2, 2, 1 and 0 rows.

    At the end of each row of a buffer is one more number for each parameter: on how many devices it
    has a gradient. If it has none on any device in the whole step, the `.grad` of its shards is
    None, as in training on one device.

    parameters  the parameters whose gradients are reduced
    group       the process group of the devices over which the parameters are sharded
    replicas    the process group of the devices that hold the same shards, whose gradients are then
                all-reduced. None: there are no replicas
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self.group, self.replicas = group, replicas
        self.count, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._reducer = Reducer(
            parameters, self.count, self._allocate, self._write, self._send, self._on_reduced, in_flight=1
        )
        # id of a bucket -> offsets in a row of its buffer: each parameter's, the counts', the end's
        self._offsets = {id(b): self.offsets(b.parameters, len(b.parameters)) for b in self._reducer.buckets}
        self.shards = {parameter: self._share(parameter, self.rank) for parameter in parameters}
        self._parts: dict[int, Tensor] = {}
        # id of a bucket -> how many devices computed each gradient
        self._counts: dict[int, Tensor] = {}
        # parameters whose gradients this device computed in this step
        self._with_gradient: set[nn.Parameter] = set()
        self.begin = self._reducer.begin

    def shard_rows(self, parameter: Tensor) -> int:
        """Return the number of rows (along dimension 0) in a shard of the parameter. The last
        shards may have fewer rows, or none.
        """
        return -(-_height(parameter) // self.count)

    def offsets(self, parameters: Sequence[Tensor], *more: int) -> list[int]:
        """Return where each part of a buffer's row begins, and where the row ends, as offsets in
        elements.

        A row first has a shard of each parameter, and then additional fields.

        parameters  the parameters whose shards are in the row
        more        the number of elements of each additional field

        Example: two parameters of shape (10, 3) over 4 devices, and a field of 2 elements:
        offsets([p, q], 2) gives [0, 9, 18, 20].
        """
        return _offsets([*(self.shard_rows(p) * _width(p) for p in parameters), *more])

    def shard_range(self, parameter: Tensor, rank: int) -> tuple[int, int]:
        """Return (begin, end): the rows (along dimension 0) of the parameter that are in the shard
        of device `rank`. `end` is exclusive.
        """
        rows, height = self.shard_rows(parameter), _height(parameter)
        return min(rank * rows, height), min((rank + 1) * rows, height)

    def _share(self, parameter: nn.Parameter, rank: int) -> nn.Parameter:
        first, last = self.shard_range(parameter, rank)
        rows = parameter.detach()
        rows = rows[first:last] if parameter.dim() else rows.view(1)[first:last]
        share = nn.Parameter(rows, requires_grad=parameter.requires_grad)
        copy_gradient_dtype(share, parameter)
        return share

    def _allocate(self, bucket: Bucket) -> Tensor:
        like = bucket.parameters[0]
        return torch.empty(self.count, self._offsets[id(bucket)][-1], dtype=gradient_dtype(like), device=like.device)

    def _write(self, bucket: Bucket, index: int, gradient: Tensor | None) -> None:
        assert bucket.buffer is not None
        offsets, parameter = self._offsets[id(bucket)], bucket.parameters[index]
        slots = bucket.buffer[:, offsets[index] : offsets[index + 1]]
        bucket.buffer[:, offsets[-2] + index] = 0.0 if gradient is None else 1.0
        if gradient is None:
            slots.zero_()
            return
        self._with_gradient.add(parameter)
        flat = gradient.reshape(-1)
        if flat.numel() == slots.numel():
            slots.copy_(flat.view(self.count, -1))
            return
        for rank, slot in enumerate(slots):
            first, last = self.shard_range(parameter, rank)
            width = _width(parameter)
            slot[: (last - first) * width].copy_(flat[first * width : last * width])
            slot[(last - first) * width :].zero_()

    def _send(self, bucket: Bucket) -> None:
        assert bucket.buffer is not None
        part = torch.empty(bucket.buffer.shape[1], dtype=bucket.buffer.dtype, device=bucket.buffer.device)
        self._parts[id(bucket)] = part
        bucket.work = begin_reduce_scatter(part, bucket.buffer, self.group)

    @torch.no_grad()
    def _on_reduced(self, bucket: Bucket) -> None:
        """Add the reduced gradients of a bucket to the `.grad` of the shards, or make them the
        `.grad` if it is None. Free the bucket's buffer.
        """
        bucket.buffer = None
        part, offsets = self._parts.pop(id(bucket)), self._offsets[id(bucket)]
        for index, parameter in enumerate(bucket.parameters):
            share = self.shards[parameter]
            gradient = part[offsets[index] : offsets[index] + share.numel()].view(share.shape)
            share.grad = gradient if share.grad is None else share.grad.add_(gradient)
        counts = part[offsets[-2] :]
        if id(bucket) in self._counts:
            self._counts[id(bucket)].add_(counts)
        else:
            self._counts[id(bucket)] = counts.clone()

    def finish(self) -> None:
        """Reduce the buckets that are not full yet, and wait for all reductions. Call this after
        the backward of each micro-batch that reduces.
        """
        self._reducer.finish()

    def complete(self) -> None:
        """Complete the gradients of a step. Call this once, after the step's last backward and
        `finish`.

        The shards' gradients are all-reduced over the replicas. The `.grad` of a shard is set to
        None if no device has computed the parameter's gradient in this step.
        """
        self._sum_replicas()
        for bucket in self._reducer.buckets:
            missed = [
                index for index, parameter in enumerate(bucket.parameters) if parameter not in self._with_gradient
            ]
            for index in missing_everywhere(self._counts[id(bucket)], missed):
                self.shards[bucket.parameters[index]].grad = None
        self._with_gradient.clear()
        self._counts.clear()

    @property
    def has_reduced(self) -> bool:
        """Return whether gradients were reduced since the last `complete`. The answer is the same
        on all devices.
        """
        return bool(self._counts)

    def forget(self) -> None:
        """Drop all gradients that were reduced since the last `complete`."""
        for share in self.shards.values():
            share.grad = None
        self._with_gradient.clear()
        self._counts.clear()

    def _sum_replicas(self) -> None:
        if self.replicas is None:
            return
        gradients = [share.grad for share in self.shards.values() if share.grad is not None]
        counts = [self._counts[id(bucket)] for bucket in self._reducer.buckets]
        for together in _by_type([*gradients, *counts]):
            flat = torch.cat([gradient.reshape(-1) for gradient in together])
            dist.all_reduce(flat, group=self.replicas)
            for gradient, summed in zip(together, flat.split([g.numel() for g in together]), strict=True):
                gradient.copy_(summed.view(gradient.shape))


def completed_twice(parameter: Tensor) -> InputError:
    """Return the error to raise when one backward completes a parameter's gradient twice. This
    happens if the model runs a backward within the backward.
    """
    return InputError(
        "plan: several devices",
        f"one backward completes the gradient of a parameter of shape {tuple(parameter.shape)} twice: the model runs a second "
        "backward within the backward, as torch.utils.checkpoint does with use_reentrant=True",
        "pass use_reentrant=False to torch.utils.checkpoint in the model, or train on one device",
    )


def missing_everywhere(counts: Tensor, missing: list[int]) -> list[int]:
    """Return the indices of the parameters for which no device has a gradient.

    counts   shape (number of parameters): on how many devices each parameter has a gradient
    missing  the indices of the parameters for which this device has no gradient. Only these are
             checked

    If `missing` is empty, `counts` is not read, so the host does not wait for the GPU. A dry run
    assumes that the other devices have the same gradients as this one, and returns all of
    `missing`.
    """
    if not missing or active_fake_mode() is not None:
        return missing
    made = counts.tolist()
    return [index for index in missing if not made[index]]


@contextmanager
def gradients_filled(weights: Sequence[Tensor], all_reduce: Callable[[Tensor], object]) -> Iterator[set[Tensor]]:
    """Inside this context, each weight has a gradient: zeros if this device has computed none. It yields
    the weights for which no device has computed one.

    After the context, a gradient that no device has computed is None again. All devices must enter
    the context with the same weights in the same order.

    weights     the weights, at least one
    all_reduce  a function that all-reduces (sums) a tensor over the devices in place
    """
    missed = [index for index, weight in enumerate(weights) if weight.grad is None]
    counts = torch.ones(len(weights), device=weights[0].device)
    for index in missed:
        counts[index] = 0.0
        weights[index].grad = empty_gradient(weights[index]).zero_()
    all_reduce(counts)
    absent = {weights[index] for index in missing_everywhere(counts, missed)}
    yield absent
    for weight in absent:
        weight.grad = None


def _height(parameter: Tensor) -> int:
    """Return the number of rows (size of dimension 0) of a parameter. A scalar has one row."""
    return parameter.shape[0] if parameter.dim() else 1


def _width(parameter: Tensor) -> int:
    """Return the number of elements in one row (index of dimension 0) of a parameter; 0 if it has
    no rows.
    """
    height = _height(parameter)
    return parameter.numel() // height if height else 0


def _offsets(sizes: list[int]) -> list[int]:
    """Return where each of several consecutive fields begins, and where the last field ends.

    Example: fields of 9, 9 and 2 elements give [0, 9, 18, 20].
    """
    found = [0]
    for size in sizes:
        found.append(found[-1] + size)
    return found


def _by_type(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Divide tensors into lists by dtype: each list of the result has tensors of one dtype."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())
