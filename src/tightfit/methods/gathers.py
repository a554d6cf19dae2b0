"""Gathers: updated weights on their way to all devices while the next forward begins.

ZeRO's first and second stage update rows of parameters. After an update the gathers of all rows begin at once, in the order in
which a forward needs them, and the step ends. Each of the model's blocks waits for its own weights when it is called; what
is in no block is waited for when the forward begins. Collectives are started in one place only, so their order is the same on
all devices, whichever blocks a device calls.

Source  Megatron-LM's distributed optimizer (--overlap-param-gather): pre-forward hooks; DeepSpeed (allgather_bucket_size):
        Rajbhandari et al. 2020, arXiv:1910.02054.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from tightfit.methods.buckets import Scattered, bucket_bytes, in_buckets
from tightfit.methods.collectives import gather_rows
from tightfit.models.objective import Batch

IN_PLACE_BYTES = 2**17  # of a share: from here on gloo takes longer to send it than to begin a message for it


def goes_in_place(size: float, devices: int) -> bool:
    """Whether a processor receives a parameter of `size` bytes where it lies, and not in a buffer with others."""
    return size / devices >= IN_PLACE_BYTES


@dataclass(eq=False)
class _Bucket:
    """Parameters whose rows travel together, by a buffer or in place.

    works   what is to be waited for on a processor
    event   on a GPU, when the parameters have all rows
    """

    parameters: list[nn.Parameter]
    buffered: list[nn.Parameter] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    buffer: Tensor | None = None
    works: list[Any] = field(default_factory=list)
    event: Any = None
    coming: bool = False


class Gathers:
    """Brings the rows that each device has updated to all devices.

    blocks    of the model, in the order of a forward, that wait for their own weights. Without any, `begin` waits for all
    in_place  whether each device's rows are sent by themselves, to where they belong, as suits gloo; else the rows of a bucket
              are gathered in a buffer: on a GPU on a stream of its own, one bucket after another in the same memory
    """

    def __init__(
        self,
        rows: Scattered,
        blocks: Sequence[nn.Module],
        group: dist.ProcessGroup,
        in_place: bool,
        device: torch.device,
    ) -> None:
        self.rows, self.group, self.in_place, self.device = rows, group, in_place, device
        self.overlaps = bool(blocks)
        self.is_running = False  # a forward of the training, whose blocks wait for themselves
        owned = {block: [p for p in block.parameters() if p in rows.shares] for block in blocks}
        inside = dict.fromkeys(parameter for own in owned.values() for parameter in own)
        self._outside = [parameter for parameter in rows.shares if parameter not in inside]
        order = [*self._outside, *inside]
        self._buckets = [_Bucket(one.parameters) for one in in_buckets(order[::-1], bucket_bytes(rows.count))]
        self._bucket = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        for bucket in self._buckets:
            bucket.buffered = [
                p for p in bucket.parameters if not (in_place and p.dim() and goes_in_place(p.nbytes, rows.count))
            ]
            bucket.offsets = rows.offsets(bucket.buffered)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and self.overlaps else None
        self._coming = 0  # how many buckets are
        self._reads = _Reads(owned) if owned else None  # until a forward has been watched
        for block, own in owned.items():
            self._let_wait(block, own)

    @torch.no_grad()
    def begin(self) -> None:
        """After an update: send this device's rows, and receive all others."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                for bucket in self._buckets:
                    self._gather(bucket)
                    bucket.event = self._stream.record_event()
        else:
            for bucket in self._buckets:
                self._send(bucket) if self.in_place else self._gather(bucket)
        for bucket in self._buckets:
            bucket.coming = True
        self._coming = len(self._buckets)
        if not self.overlaps:
            self.wait()

    def wait(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Until these parameters, or all, are as the last update left them on every device; on a GPU whatever its stream is given
        from now on comes after that."""
        if not self._coming:
            return
        buckets = self._buckets if parameters is None else dict.fromkeys(self._bucket[p] for p in parameters)
        for bucket in buckets:
            if bucket.coming:
                self._end(bucket)
                bucket.coming = False
                self._coming -= 1

    def in_forward(self, loss_sum: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        """`loss_sum`, which waits when it begins for what no block waits for."""

        def computed(batch: Batch) -> Tensor:
            if not torch.is_grad_enabled():  # an evaluation, which may run other code than was watched
                self.wait()
                return loss_sum(batch)
            self.wait(self._outside)
            self.is_running = True
            try:
                if self._reads is None:
                    return loss_sum(batch)
                with self._reads:
                    total = loss_sum(batch)
            finally:
                self.is_running = False
            self._outside += self._reads.found()
            self._reads = None
            return total

        return computed

    def _let_wait(self, block: nn.Module, own: list[nn.Parameter]) -> None:
        """From now on a call of the block waits first. A compiled block's hooks are compiled with it, and would break its
        graph: so the wait comes before the call. torch leaves `_compiled_call_impl` out of a model's copies."""
        is_compiled = block._compiled_call_impl is not None
        call: Callable[..., Any] = block._compiled_call_impl or block._call_impl

        def arrived_first(*args: Any, **kwargs: Any) -> Any:
            self.wait(own)
            if self._reads is None or not self.is_running:
                return call(*args, **kwargs)
            with self._reads.within(block, is_compiled):
                return call(*args, **kwargs)

        block._compiled_call_impl = arrived_first

    def _gather(self, bucket: _Bucket) -> None:
        there = self._filled(bucket)
        gather_rows(there, self.group)
        self._take(bucket, there)

    def _send(self, bucket: _Bucket) -> None:
        """Begin as many broadcasts as devices for what travels in a buffer, and for each parameter that does not."""
        pieces = []
        if bucket.buffered:
            bucket.buffer = self._filled(bucket)
            pieces += list(enumerate(bucket.buffer))
        buffered = set(bucket.buffered)
        for parameter in bucket.parameters:
            if parameter not in buffered:
                for place in range(self.rows.count):
                    first, last = self.rows.range(parameter, place)
                    pieces.append((place, parameter.detach()[first:last]))
        bucket.works = [
            dist.broadcast(piece, group=self.group, group_src=place, async_op=True)
            for place, piece in pieces
            if piece.numel()
        ]

    @torch.no_grad()
    def _end(self, bucket: _Bucket) -> None:
        for work in bucket.works:
            work.wait()
        bucket.works = []
        if bucket.event is not None:
            torch.cuda.current_stream(self.device).wait_event(bucket.event)
        if bucket.buffer is not None:
            self._take(bucket, bucket.buffer)
            bucket.buffer = None
        # so that a backward refuses what was computed from them before
        torch.autograd.graph.increment_version(bucket.parameters)

    def _filled(self, bucket: _Bucket) -> Tensor:
        """A row for each device, and in this device's what it has updated."""
        like = bucket.parameters[0]
        there = torch.empty(self.rows.count, bucket.offsets[-1], dtype=like.dtype, device=like.device)
        mine = there[self.rows.rank]
        for place, parameter in enumerate(bucket.buffered):
            share = self.rows.shares[parameter]
            mine[bucket.offsets[place] : bucket.offsets[place] + share.numel()].copy_(share.detach().reshape(-1))
        return there

    def _take(self, bucket: _Bucket, there: Tensor) -> None:
        """Everyone's rows into the parameters."""
        for place, parameter in enumerate(bucket.buffered):
            slots = there[:, bucket.offsets[place] : bucket.offsets[place + 1]]
            if slots.numel() == parameter.numel():
                parameter.detach().view(self.rows.count, -1).copy_(slots)
                continue
            flat = parameter.detach().view(-1)
            width = flat.numel() // len(parameter) if parameter.dim() and len(parameter) else flat.numel()
            for device, slot in enumerate(slots):
                first, last = self.rows.range(parameter, device)
                flat[first * width : last * width].copy_(slot[: (last - first) * width])


class _Reads(TorchDispatchMode):
    """Sees in one forward of the training which blocks' weights are read before the block is called, or by what is in no block:
    weights that are tied, normalised or multiplied with elsewhere. Those are waited for at the start of a forward.

    Into compiled blocks it does not look: torch compiles nothing under such a mode.
    """

    def __init__(self, owned: dict[nn.Module, list[nn.Parameter]]) -> None:
        super().__init__()
        self._owned = owned
        self._owners: dict[int, set[nn.Module]] = defaultdict(set)  # by storage, which views share
        for block, parameters in owned.items():
            for parameter in parameters:
                self._owners[_storage(parameter)].add(block)
        self._begun: set[nn.Module] = set()
        self._depth = 0  # of calls of blocks
        self._read: set[nn.Module] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                owners = self._owners.get(_storage(leaf), set())
                if owners and not (self._depth and owners & self._begun):
                    self._read |= owners
        return func(*args, **(kwargs or {}))

    @contextmanager
    def within(self, block: nn.Module, is_compiled: bool) -> Iterator[None]:
        """A call of a block."""
        self._begun.add(block)
        self._depth += 1
        leaves = is_compiled and _get_current_dispatch_mode_stack()[-1:] == [self]
        if leaves:
            self.__exit__(None, None, None)
        try:
            yield
        finally:
            if leaves:
                self.__enter__()
            self._depth -= 1

    def found(self) -> list[nn.Parameter]:
        """The parameters of the blocks that something else reads."""
        return [parameter for block, own in self._owned.items() if block in self._read for parameter in own]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Waits:
    """A hook by which a model waits for all of its weights: before a forward that is not the training's, and before its state_dict.
    A copy of the model has one that waits for nothing."""

    def __init__(self, gathers: Gathers | None = None) -> None:
        self._gathers = gathers

    def __call__(self, *unused: Any) -> None:
        if self._gathers is not None and not self._gathers.is_running:
            self._gathers.wait()

    def __reduce__(self) -> Any:
        return Waits, ()


__all__ = ["Gathers", "Waits", "goes_in_place"]
