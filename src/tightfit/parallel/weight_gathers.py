"""All-gather updated weights (ZeRO-1 and ZeRO-2) while the next forward computes.

In ZeRO-1 and ZeRO-2 each device updates its shards of the parameters (see
`ReduceScatteredGradients`). After an update, the all-gathers of all shards begin at once, in the
order in which a forward needs the weights, and the step ends. The next forward waits at its start
for weights outside of the blocks, such as embeddings. Each block waits for its own weights when it
is called. `begin` starts all gathers, so their order is the same on all devices, whichever blocks a
device calls.

Example: an embedding and three blocks are gathered in two buckets: 0 (embedding, block 0) and 1
(blocks 1 and 2). The forward waits for bucket 0 at its start. Bucket 1 arrives while block 0
computes, and block 1 waits for it when it is called.

Source  Megatron-LM's distributed optimizer (--overlap-param-gather): pre-forward hooks; DeepSpeed
        (allgather_bucket_size): Rajbhandari et al. 2020, arXiv:1910.02054.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tightfit._torch.dispatch import TorchDispatchMode, current_dispatch_modes, without_dispatch_modes
from tightfit._torch.fake import active_fake_mode, is_fake
from tightfit._torch.modules import call_of, compiled_in_place, replace_call
from tightfit._torch.pytree import tree_leaves
from tightfit._torch.tensors import storage_id
from tightfit.distributed.collectives import all_gather
from tightfit.models.batches import Batch
from tightfit.optim.own_writes import is_noted, note_own_write
from tightfit.parallel.gradient_buckets import ReduceScatteredGradients, bucket_bytes, make_buckets

# gloo takes longer to send a shard of this size than to begin a message.
MIN_IN_PLACE_BYTES = 2**17


def gathers_in_place(size: float, devices: int) -> bool:
    """Return whether a CPU receives a parameter directly in the parameter's own memory. A smaller
    parameter is received in a buffer, together with other parameters, and then copied.

    size     bytes of the full parameter
    devices  the number of devices over which it is sharded
    """
    return size / devices >= MIN_IN_PLACE_BYTES


@dataclass(eq=False)
class _Bucket:
    """Parameters whose shards are all-gathered together.

    parameters  the parameters
    buffered    those of the parameters whose shards are received in `buffer` and then copied. The
                shards of all others are received directly in the parameters' own memory
    offsets     where the shard of each buffered parameter begins in a row of the buffer, in
                elements, and where the last shard ends
    buffer      shape (devices, elements of a row), while a gather on a CPU is in flight; else None
    works       the handles of the broadcasts in flight, on a CPU
    event       a CUDA event that is recorded when the parameters are complete; None on a CPU
    pending     whether a gather has begun that `wait` has not waited for yet
    """

    parameters: list[nn.Parameter]
    buffered: list[nn.Parameter]
    offsets: list[int]
    buffer: Tensor | None = None
    works: list[Any] = field(default_factory=list)
    event: Any = None
    pending: bool = False


class WeightGathers:
    """All-gathers parameters after an update, in which each device has updated its own shards only.

    rows      the object that divides the parameters into shards
    blocks    the model's blocks in forward order. Each block waits for its own weights when it is
              called. If this is empty, `begin` itself waits for all weights
    group     the process group of the devices over which the parameters are sharded
    in_place  True: broadcast large shards one by one, directly into the parameters, which is faster
              on gloo. False: all-gather the shards of a bucket through a buffer. On a GPU the
              buckets are gathered one after another on a separate stream, and reuse the same memory
    device    this process's device
    """

    def __init__(
        self,
        rows: ReduceScatteredGradients,
        blocks: Sequence[nn.Module],
        group: dist.ProcessGroup,
        in_place: bool,
        device: torch.device,
    ) -> None:
        self.sharding, self.group, self.in_place, self.device = rows, group, in_place, device
        self.overlaps = bool(blocks)
        self._are_fake = any(map(is_fake, rows.shards))
        # True during a training forward, in which each block waits for its own weights
        self.is_running = False
        owned = {block: [p for p in block.parameters() if p in rows.shards] for block in blocks}
        inside = dict.fromkeys(parameter for own in owned.values() for parameter in own)
        self._outside_blocks = [parameter for parameter in rows.shards if parameter not in inside]
        order = [*self._outside_blocks, *inside]
        self._buckets = [
            self._make_bucket(bucket.parameters) for bucket in make_buckets(order[::-1], bucket_bytes(rows.count))
        ]
        self._bucket = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and self.overlaps else None
        self._pending = 0  # number of pending buckets
        # None once the first training forward has ended
        self._reads = _ReadTracker(owned) if owned else None
        for block, own in owned.items():
            self._wait_before_calls(block, own)

    def _make_bucket(self, parameters: list[nn.Parameter]) -> _Bucket:
        buffered = [p for p in parameters if not self._is_received_in_place(p)]
        return _Bucket(parameters, buffered, self.sharding.offsets(buffered))

    def _is_received_in_place(self, parameter: nn.Parameter) -> bool:
        return self.in_place and parameter.dim() > 0 and gathers_in_place(parameter.nbytes, self.sharding.count)

    @torch.no_grad()
    def begin(self) -> None:
        """Begin to all-gather the shards that the devices have updated. Call this after an update.

        If the model has no blocks that wait for their own weights, this also waits for all gathers.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                for bucket in self._buckets:
                    self._gather(bucket)
                    bucket.event = self._stream.record_event()
        else:
            for bucket in self._buckets:
                self._begin_broadcasts(bucket) if self.in_place else self._gather(bucket)
        for bucket in self._buckets:
            bucket.pending = True
        self._pending = len(self._buckets)
        if not self.overlaps:
            self.wait()

    def wait(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Wait until parameters have their updated values.

        On a GPU the host does not wait: kernels that are launched on the current stream after this
        call wait.

        parameters  the parameters to wait for; None: all
        """
        if not self._pending:
            return
        buckets = self._buckets if parameters is None else dict.fromkeys(self._bucket[p] for p in parameters)
        for bucket in buckets:
            if bucket.pending:
                self._end(bucket)
                bucket.pending = False
                self._pending -= 1

    def with_waits(self, loss_sum: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        """Return a function that waits for updated weights and then runs `loss_sum`.

        In training the function waits for the weights outside of the blocks only, because each
        block waits for its own weights when it is called. In evaluation it waits for all weights.

        loss_sum  a function from a micro-batch to its summed loss
        """

        def computed(batch: Batch) -> Tensor:
            # Two cases wait for all weights: an evaluation, which may read weights in another order
            # than training, and a forward that uses fake tensors in place of the real weights.
            other_weights = active_fake_mode() is not None and not self._are_fake
            if not torch.is_grad_enabled() or other_weights:
                self.wait()
                return loss_sum(batch)
            self.wait(self._outside_blocks)
            self.is_running = True
            try:
                if self._reads is None:
                    return loss_sum(batch)
                with self._reads:
                    total = loss_sum(batch)
            finally:
                self.is_running = False
            self._outside_blocks += self._reads.found()
            self._reads = None
            return total

        return computed

    def _wait_before_calls(self, block: nn.Module, own: list[nn.Parameter]) -> None:
        """Make each call of `block` first wait for the block's weights.

        This is not done by a forward hook: the hooks of a compiled block are compiled with the
        block, and a wait would break its graph. Calls of a copy of the block do not wait.

        own  the block's parameters
        """
        is_compiled, call = compiled_in_place(block), call_of(block)

        def arrived_first(*args: Any, **kwargs: Any) -> Any:
            self.wait(own)
            if self._reads is None or not self.is_running:
                return call(*args, **kwargs)
            with self._reads.within(block, is_compiled):
                return call(*args, **kwargs)

        replace_call(block, arrived_first)

    def _gather(self, bucket: _Bucket) -> None:
        """All-gather a bucket through a buffer, and copy the result into the parameters. On a GPU
        the current stream waits for this, not the host.
        """
        buffer = self._pack(bucket)
        all_gather(buffer, self.group)
        self._unpack(bucket, buffer)

    def _begin_broadcasts(self, bucket: _Bucket) -> None:
        """Begin the broadcasts that all-gather a bucket, on a CPU. Store their handles in the
        bucket's `works`.

        Each device broadcasts its row of the buffer. It also broadcasts its shard of each parameter
        that is received directly in the parameter's own memory.
        """
        pieces = []
        if bucket.buffered:
            bucket.buffer = self._pack(bucket)
            pieces += list(enumerate(bucket.buffer))
        buffered = set(bucket.buffered)
        for parameter in bucket.parameters:
            if parameter not in buffered:
                for rank in range(self.sharding.count):
                    first, last = self.sharding.shard_range(parameter, rank)
                    pieces.append((rank, parameter.detach()[first:last]))
        bucket.works = [
            dist.broadcast(piece, group=self.group, group_src=rank, async_op=True)
            for rank, piece in pieces
            if piece.numel()
        ]

    @torch.no_grad()
    def _end(self, bucket: _Bucket) -> None:
        """Wait for the gather of a bucket. If it used a buffer, copy the buffer into the
        parameters.
        """
        # A run with real weights may be called under a FakeTensorMode, for example to count FLOPs.
        # The copies below must run outside of that mode, which would drop them.
        with nullcontext() if self._are_fake else without_dispatch_modes():
            for work in bucket.works:
                work.wait()
            bucket.works = []
            if bucket.event is not None:
                torch.cuda.current_stream(self.device).wait_event(bucket.event)
            if bucket.buffer is not None:
                self._unpack(bucket, bucket.buffer)
                bucket.buffer = None
        # so that autograd raises an error in a backward that needs the weights before the update
        torch.autograd.graph.increment_version(bucket.parameters)
        for share in (self.sharding.shards[parameter] for parameter in bucket.parameters):
            if is_noted(share):
                note_own_write(share)

    def _pack(self, bucket: _Bucket) -> Tensor:
        """Return a new buffer for a gather, with one row for each device. This device's row holds
        its updated shards; the other rows are uninitialized.
        """
        like = bucket.parameters[0]
        buffer = torch.empty(self.sharding.count, bucket.offsets[-1], dtype=like.dtype, device=like.device)
        mine = buffer[self.sharding.rank]
        for index, parameter in enumerate(bucket.buffered):
            share = self.sharding.shards[parameter]
            mine[bucket.offsets[index] : bucket.offsets[index] + share.numel()].copy_(share.detach().reshape(-1))
        return buffer

    def _unpack(self, bucket: _Bucket, buffer: Tensor) -> None:
        """Copy the shards of all devices from a buffer into the bucket's parameters."""
        for index, parameter in enumerate(bucket.buffered):
            slots = buffer[:, bucket.offsets[index] : bucket.offsets[index + 1]]
            if slots.numel() == parameter.numel():
                parameter.detach().view(self.sharding.count, -1).copy_(slots)
                continue
            flat = parameter.detach().view(-1)
            width = flat.numel() // len(parameter) if parameter.dim() and len(parameter) else flat.numel()
            for device, slot in enumerate(slots):
                first, last = self.sharding.shard_range(parameter, device)
                flat[first * width : last * width].copy_(slot[: (last - first) * width])


class _ReadTracker(TorchDispatchMode):
    """Finds, in the first training forward, the blocks with a weight that is read too early: before
    the block is called, or by code outside of the block's call. An example is a weight that is tied
    to the output head.

    A block waits for its weights only when it is called, which is too late for such reads. So later
    forwards wait for these weights at their start.

    The tracker is a dispatch mode that sees each operation's arguments. Compiled blocks run outside
    of it, because torch compiles nothing under a dispatch mode.

    owned  block -> the block's parameters
    """

    def __init__(self, owned: dict[nn.Module, list[nn.Parameter]]) -> None:
        super().__init__()
        self._owned = owned
        # id of a storage, which views share -> the blocks with parameters in it
        self._blocks_by_storage: dict[int, set[nn.Module]] = defaultdict(set)
        for block, parameters in owned.items():
            for parameter in parameters:
                self._blocks_by_storage[storage_id(parameter)].add(block)
        self._called: set[nn.Module] = set()
        self._depth = 0  # how many calls of blocks are under way, one inside the other
        self._read_early: set[nn.Module] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                owners = self._blocks_by_storage.get(storage_id(leaf), set())
                if owners and not (self._depth and owners & self._called):
                    self._read_early |= owners
        return func(*args, **(kwargs or {}))

    @contextmanager
    def within(self, block: nn.Module, is_compiled: bool) -> Iterator[None]:
        """The context in which `block` is called. Reads of the block's weights inside this context
        are not too early.

        A compiled block is called with this dispatch mode switched off.

        is_compiled  whether the block was compiled
        """
        self._called.add(block)
        self._depth += 1
        leaves = is_compiled and current_dispatch_modes()[-1:] == [self]
        if leaves:
            self.__exit__(None, None, None)
        try:
            yield
        finally:
            if leaves:
                self.__enter__()
            self._depth -= 1

    def found(self) -> list[nn.Parameter]:
        """Return the parameters of all blocks of which a weight was read before or outside of the
        block's call.
        """
        return [parameter for block, own in self._owned.items() if block in self._read_early for parameter in own]


class WaitForWeights:
    """A hook of the model that waits until all weights have their updated values. It runs before
    `state_dict`, and before a forward outside of training.

    In a copy of the model, the hook does nothing.

    gathers  the object whose gathers it waits for; None: there is nothing to wait for
    """

    def __init__(self, gathers: WeightGathers | None = None) -> None:
        self._gathers = gathers

    def __call__(self, *unused: Any) -> None:
        if self._gathers is not None and not self._gathers.is_running:
            self._gathers.wait()

    def __reduce__(self) -> Any:
        return WaitForWeights, ()


__all__ = ["WaitForWeights", "WeightGathers", "gathers_in_place"]
