"""Buckets: gradients of many parameters in one flat buffer, sent while backward goes on.

A bucket fills in the order in which backward makes gradients, and is sent when it is full: the sum over all devices
(`Summed`), or to each device the sum of its rows (`Scattered`). Buckets are sent in the same order everywhere.

Source  Li et al. 2020, arXiv:2006.15704 (buckets and overlap); Rajbhandari et al. 2020, arXiv:1910.02054 (rows); Megatron-LM, whose
        buckets grow with the devices too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import active_fake_mode

from tightfit.errors import InputError
from tightfit.methods.collectives import begin_scatter_rows
from tightfit.optim.hooks import when_complete

BUCKET_BYTES = 25 * 2**20
PIECE_BYTES = (
    2**20
)  # that a device of many sends at least at a time: by far more than a network sends while a message arrives


def bucket_bytes(devices: int) -> int:
    """How large a bucket is at most. A ring of many devices goes around in as many steps, each with its part of the bucket."""
    return max(BUCKET_BYTES, devices * PIECE_BYTES)


@dataclass
class Bucket:
    """Parameters whose gradients travel together. `buffer` is there from the first gradient to the step's end."""

    parameters: list[nn.Parameter] = field(default_factory=list)
    buffer: Tensor | None = None
    arrived: set[int] = field(default_factory=set)
    work: Any = None

    @property
    def is_full(self) -> bool:
        return len(self.arrived) == len(self.parameters)


def in_buckets(parameters: Iterable[nn.Parameter], limit: int) -> list[Bucket]:
    """Buckets of one type and device each, last parameter first, as backward makes their gradients."""
    found: list[Bucket] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[Bucket, int]] = {}
    for parameter in reversed(list(parameters)):
        kind = parameter.dtype, parameter.device
        bucket, size = filling.get(kind, (None, limit))
        if bucket is None or size + parameter.nbytes > limit:
            bucket, size = Bucket(), 0
            found.append(bucket)
        bucket.parameters.append(parameter)
        filling[kind] = bucket, size + parameter.nbytes
    return found


class Reducer:
    """Watches the gradients of `parameters`, and sends each bucket as soon as it is full, in order.

    devices   how many take part
    allocate  bucket -> its buffer, of zeros where a gradient may be missing
    write     (bucket, place, gradient or None) -> put it into the buffer; None: this device's backward has made none
    send      bucket -> start sending; leaves in `bucket.work` what is to be waited for
    arrived   bucket -> what becomes of it when it was waited for
    in_flight  how many buckets may be under way before the oldest is waited for; None: all
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        devices: int,
        allocate: Callable[[Bucket], Tensor],
        write: Callable[[Bucket, int, Tensor | None], None],
        send: Callable[[Bucket], None],
        arrived: Callable[[Bucket], None] = lambda bucket: None,
        in_flight: int | None = None,
    ) -> None:
        self.buckets = in_buckets(parameters, bucket_bytes(devices))
        self._allocate, self._write, self._start = allocate, write, send
        self._arrived, self._in_flight = arrived, in_flight
        self._sending, self._next = False, 0
        self._place = {
            parameter: (bucket, place) for bucket in self.buckets for place, parameter in enumerate(bucket.parameters)
        }
        when_complete(parameters, self._see)

    def begin(self, sending: bool) -> None:
        """Before a micro-batch: whether the gradients that it completes are sent."""
        self._sending = sending

    def _see(self, parameter: Tensor) -> None:
        if self._sending:
            bucket, place = self._place[parameter]  # type: ignore[index]
            if place in bucket.arrived:  # what was taken first may have been sent
                raise _completed_twice(parameter)
            self._take(bucket, place, parameter.grad)
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
            self._arrived(bucket)

    def _take(self, bucket: Bucket, place: int, gradient: Tensor | None) -> None:
        if bucket.buffer is None:
            bucket.buffer = self._allocate(bucket)
        self._write(bucket, place, gradient)
        bucket.arrived.add(place)

    @torch.no_grad()
    def finish(self) -> None:
        """Send what is left, gradients that were not made as none, and wait for everything."""
        for bucket in self.buckets[self._next :]:
            for place, parameter in enumerate(bucket.parameters):
                if place not in bucket.arrived:
                    self._take(bucket, place, parameter.grad)  # of earlier micro-batches, where there is one
                    parameter.grad = None
            self._send()
        for bucket in self.buckets:
            self._wait(bucket)
            bucket.arrived.clear()
        self._next, self._sending = 0, False


class Summed:
    """Each gradient becomes the sum of all devices'. Its `.grad` is then a part of the bucket it travelled in.

    Behind the gradients, a bucket carries one number for each: how many devices made it. Where none did, a parameter
    has no gradient, as on one device.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup, narrow: torch.dtype | None = None):
        self.group, self.narrow = group, narrow
        devices = dist.get_world_size(group)
        self._reducer = Reducer(parameters, devices, self._allocate, self._write, self._send)
        self._slots: dict[int, tuple[Tensor, ...]] = {}  # of each bucket's buffer: a gradient's each, and the counts
        self._missed: list[tuple[Bucket, int]] = []
        self.begin = self._reducer.begin

    def _allocate(self, bucket: Bucket) -> Tensor:
        like, sizes = bucket.parameters[0], [p.numel() for p in bucket.parameters]
        buffer = torch.empty(sum(sizes) + len(sizes), dtype=like.dtype, device=like.device)
        self._slots[id(bucket)] = buffer.split([*sizes, len(sizes)])
        self._slots[id(bucket)][-1].fill_(1.0)
        return buffer

    def _write(self, bucket: Bucket, place: int, gradient: Tensor | None) -> None:
        slots = self._slots[id(bucket)]
        if gradient is None:
            slots[place].zero_()
            slots[-1][place] = 0.0
            self._missed.append((bucket, place))
        else:
            slots[place].copy_(gradient.reshape(-1))

    def _send(self, bucket: Bucket) -> None:
        assert bucket.buffer is not None
        if self.narrow is None or bucket.buffer.dtype.itemsize <= self.narrow.itemsize:
            bucket.work = dist.all_reduce(bucket.buffer, group=self.group, async_op=True)
        else:
            wide = torch.view_as_real(bucket.buffer) if bucket.buffer.is_complex() else bucket.buffer
            narrowed = wide.to(self.narrow)
            bucket.work = _Widened(dist.all_reduce(narrowed, group=self.group, async_op=True), narrowed, wide)

    def finish(self) -> None:
        self._reducer.finish()
        for bucket in self._reducer.buckets:
            for parameter, slot in zip(bucket.parameters, self._slots[id(bucket)], strict=False):
                parameter.grad = slot.view(parameter.shape)
        for bucket in self._reducer.buckets:
            for place in absent(self._slots[id(bucket)][-1], [place for at, place in self._missed if at is bucket]):
                bucket.parameters[place].grad = None
        self._missed.clear()
        self._slots.clear()
        for bucket in self._reducer.buckets:
            bucket.buffer = None


@dataclass
class _Widened:
    """Work on a narrow copy of a buffer, which is written back when it is done."""

    work: Any
    narrowed: Tensor
    buffer: Tensor

    def wait(self) -> None:
        self.work.wait()
        self.buffer.copy_(self.narrowed)


class Scattered:
    """Of each parameter a device has a share, its rows (Shard(0) of a DTensor), and gets the sum of their gradients.

    Behind the gradients each row of a bucket carries one number for each parameter: how many devices made its gradient.
    Where none did in the whole step, a parameter has no gradient, as on one device.

    `shares` are the optimizer's parameters: views of these rows, so that what it updates is the model itself. `Gathers`
    (methods/gathers.py) then brings everyone's rows to everyone.
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
            parameters, self.count, self._allocate, self._write, self._send, self._arrived, in_flight=1
        )
        self._offsets = {  # of each parameter, of the counts, and of the row's end
            id(b): self.offsets(b.parameters, len(b.parameters)) for b in self._reducer.buckets
        }
        self.shares = {parameter: self._share(parameter, self.rank) for parameter in parameters}
        self._parts: dict[int, Tensor] = {}
        self._counts: dict[int, Tensor] = {}  # of each bucket, how many devices made its gradients in this step
        self._made: set[nn.Parameter] = set()  # whose gradients this one made
        self.begin = self._reducer.begin

    def rows(self, parameter: Tensor) -> int:
        """Rows of each share but the last ones, which may have fewer or none."""
        return -(-_height(parameter) // self.count)

    def offsets(self, parameters: Sequence[Tensor], *more: int) -> list[int]:
        """Where in a row of a bucket each parameter's share begins, then what has `more` elements, and where the last ends."""
        return _offsets([*(self.rows(p) * _width(p) for p in parameters), *more])

    def range(self, parameter: Tensor, rank: int) -> tuple[int, int]:
        """First and last row of a device's share."""
        rows, height = self.rows(parameter), _height(parameter)
        return min(rank * rows, height), min((rank + 1) * rows, height)

    def _share(self, parameter: nn.Parameter, rank: int) -> nn.Parameter:
        first, last = self.range(parameter, rank)
        rows = parameter.detach()
        rows = rows[first:last] if parameter.dim() else rows.view(1)[first:last]
        return nn.Parameter(rows, requires_grad=parameter.requires_grad)

    def _allocate(self, bucket: Bucket) -> Tensor:
        like = bucket.parameters[0]
        return torch.empty(self.count, self._offsets[id(bucket)][-1], dtype=like.dtype, device=like.device)

    def _write(self, bucket: Bucket, place: int, gradient: Tensor | None) -> None:
        assert bucket.buffer is not None
        offsets, parameter = self._offsets[id(bucket)], bucket.parameters[place]
        slots = bucket.buffer[:, offsets[place] : offsets[place + 1]]
        bucket.buffer[:, offsets[-2] + place] = 0.0 if gradient is None else 1.0
        if gradient is None:
            slots.zero_()
            return
        self._made.add(parameter)
        flat = gradient.reshape(-1)
        if flat.numel() == slots.numel():
            slots.copy_(flat.view(self.count, -1))
            return
        for rank, slot in enumerate(slots):
            first, last = self.range(parameter, rank)
            width = _width(parameter)
            slot[: (last - first) * width].copy_(flat[first * width : last * width])
            slot[(last - first) * width :].zero_()

    def _send(self, bucket: Bucket) -> None:
        assert bucket.buffer is not None
        part = torch.empty(bucket.buffer.shape[1], dtype=bucket.buffer.dtype, device=bucket.buffer.device)
        self._parts[id(bucket)] = part
        bucket.work = begin_scatter_rows(part, bucket.buffer, self.group)

    @torch.no_grad()
    def _arrived(self, bucket: Bucket) -> None:
        """The shares' gradients are there, or have this micro-batch's added to them."""
        bucket.buffer = None
        part, offsets = self._parts.pop(id(bucket)), self._offsets[id(bucket)]
        for place, parameter in enumerate(bucket.parameters):
            share = self.shares[parameter]
            gradient = part[offsets[place] : offsets[place] + share.numel()].view(share.shape)
            share.grad = gradient if share.grad is None else share.grad.add_(gradient)
        counts = part[offsets[-2] :]
        if id(bucket) in self._counts:
            self._counts[id(bucket)].add_(counts)
        else:
            self._counts[id(bucket)] = counts.clone()

    def finish(self) -> None:
        self._reducer.finish()

    def complete(self) -> None:
        """Once a step: the shares' gradients summed over the replicas of the group, and none where nobody made one."""
        self._sum_replicas()
        for bucket in self._reducer.buckets:
            missed = [place for place, parameter in enumerate(bucket.parameters) if parameter not in self._made]
            for place in absent(self._counts[id(bucket)], missed):
                self.shares[bucket.parameters[place]].grad = None
        self._made.clear()
        self._counts.clear()

    def _sum_replicas(self) -> None:
        if self.replicas is None:
            return
        gradients = [share.grad for share in self.shares.values() if share.grad is not None]
        counts = [self._counts[id(bucket)] for bucket in self._reducer.buckets]
        for together in _by_type([*gradients, *counts]):
            flat = torch.cat([gradient.reshape(-1) for gradient in together])
            dist.all_reduce(flat, group=self.replicas)
            for gradient, summed in zip(together, flat.split([g.numel() for g in together]), strict=True):
                gradient.copy_(summed.view(gradient.shape))


def _completed_twice(parameter: Tensor) -> InputError:
    return InputError(
        "plan: several devices",
        f"one backward completes the gradient of a parameter of shape {tuple(parameter.shape)} twice: the model's code runs a "
        "backward within the backward, as torch.utils.checkpoint does with use_reentrant=True",
        "use use_reentrant=False in the model, or one device",
    )


def absent(counts: Tensor, places: list[int]) -> list[int]:
    """Of `places`, at which this device made no gradient, those where the devices' counts say that no other did. Nothing is
    read where this device made them all. Who predicts takes the others for devices like this one."""
    if not places or active_fake_mode() is not None:
        return places
    made = counts.tolist()
    return [place for place in places if not made[place]]


@contextmanager
def made_everywhere(weights: Sequence[Tensor], total: Callable[[Tensor], object]) -> Iterator[None]:
    """Within, each weight has a gradient: zeros where this device made none. Afterwards those have none that no device made.

    total  sums a tensor over the devices, in place. All of them take part, with the same weights.
    """
    missed = [place for place, weight in enumerate(weights) if weight.grad is None]
    counts = torch.ones(len(weights), device=weights[0].device)
    for place in missed:
        counts[place] = 0.0
        weights[place].grad = torch.zeros_like(weights[place])
    total(counts)
    yield
    for place in absent(counts, missed):
        weights[place].grad = None


def _height(parameter: Tensor) -> int:
    return parameter.shape[0] if parameter.dim() else 1


def _width(parameter: Tensor) -> int:
    height = _height(parameter)
    return parameter.numel() // height if height else 0


def _offsets(sizes: list[int]) -> list[int]:
    """Where each of consecutive pieces begins, and where the last ends."""
    found = [0]
    for size in sizes:
        found.append(found[-1] + size)
    return found


def _by_type(tensors: list[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())
