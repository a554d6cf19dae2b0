"""All-gathers of updated weights that overlap with the next forward.

In ZeRO-1 and ZeRO-2 each device updates its shards of the parameters (see `ReduceScatteredGradients`). After an
update, the all-gathers of all shards begin at once, in the order in which a forward needs them, and
the step ends. Each of the model's blocks waits for its own weights when it is called. The forward
waits at its start for weights outside of the blocks, such as embeddings. All gathers begin in one
place, so their order is the same on all devices, whichever blocks a device calls.

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
from tightfit.models.objective import Batch
from tightfit.parallel.gradient_buckets import ReduceScatteredGradients, bucket_bytes, make_buckets

# From this size of a shard on, gloo takes longer to send it than to begin a message.
MIN_IN_PLACE_BYTES = 2**17


def gathers_in_place(size: float, devices: int) -> bool:
    """Whether a CPU receives a parameter of `size` bytes directly in its memory, and not in a
    buffer that it shares with other parameters.
    """
    return size / devices >= MIN_IN_PLACE_BYTES


@dataclass(eq=False)
class _Bucket:
    """Parameters that are gathered together.

    parameters  the parameters
    buffered    those that are gathered through `buffer`; the others are received in place
    offsets     where each buffered parameter's shard begins in a row of the buffer, and where the
                last ends
    buffer      (devices, elements of a row) while a gather on a CPU is in flight
    works       the broadcasts in flight, on a CPU
    event       on a GPU, recorded when the parameters are complete
    pending     whether a gather has begun that nobody has waited for
    """

    parameters: list[nn.Parameter]
    buffered: list[nn.Parameter]
    offsets: list[int]
    buffer: Tensor | None = None
    works: list[Any] = field(default_factory=list)
    event: Any = None
    pending: bool = False


class WeightGathers:
    """All-gathers the shards that each device has updated.

    sharding  how the parameters are sharded
    blocks    the model's blocks in forward order, each of which waits for its own weights. If there
              are none, `begin` waits for all
    group     the devices that share the parameters
    in_place  whether each device's shards are broadcast one by one into the parameters, which suits
              gloo. Otherwise the shards of a bucket are all-gathered through a buffer; on a GPU
              this runs on a stream of its own, and one bucket after another uses the same memory
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
        # True within a training forward, whose blocks wait for their own weights
        self.is_running = False
        owned = {block: [p for p in block.parameters() if p in rows.shards] for block in blocks}
        inside = dict.fromkeys(parameter for own in owned.values() for parameter in own)
        self._outside_blocks = [parameter for parameter in rows.shards if parameter not in inside]
        order = [*self._outside_blocks, *inside]
        self._buckets = [
            self._make_bucket(one.parameters) for one in make_buckets(order[::-1], bucket_bytes(rows.count))
        ]
        self._bucket = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and self.overlaps else None
        self._pending = 0  # number of pending buckets
        # until the first training forward has ended
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
        """Call after an update: begin to send this device's shards and to receive all others."""
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
        """Wait until these parameters (None: all) have their updated values.

        On a GPU the host does not wait: kernels that are launched afterwards on the current stream
        do.
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
        """`loss_sum`, which first waits for the weights outside of blocks. In evaluation it waits
        for all weights.
        """

        def computed(batch: Batch) -> Tensor:
            # an evaluation, which may read weights in another order than training; or a forward on fake
            # tensors in the place of the weights, which reads none of them
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
        """Make calls of `block` wait for its weights first.

        The wait precedes the call and is no forward hook: the hooks of a compiled block are
        compiled with it, and a wait would break its graph. Copies of a model do not wait.
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
        """All-gather a bucket through a buffer, and wait (on a GPU: in the current stream)."""
        buffer = self._pack(bucket)
        all_gather(buffer, self.group)
        self._unpack(bucket, buffer)

    def _begin_broadcasts(self, bucket: _Bucket) -> None:
        """Begin one broadcast from each device for the buffer, and one for each parameter that is
        received in place.
        """
        pieces = []
        if bucket.buffered:
            bucket.buffer = self._pack(bucket)
            pieces += list(enumerate(bucket.buffer))
        buffered = set(bucket.buffered)
        for parameter in bucket.parameters:
            if parameter not in buffered:
                for place in range(self.sharding.count):
                    first, last = self.sharding.shard_range(parameter, place)
                    pieces.append((place, parameter.detach()[first:last]))
        bucket.works = [
            dist.broadcast(piece, group=self.group, group_src=place, async_op=True)
            for place, piece in pieces
            if piece.numel()
        ]

    @torch.no_grad()
    def _end(self, bucket: _Bucket) -> None:
        """Wait for a bucket's gather and complete its parameters."""
        # outside of a FakeTensorMode that is active around a run with real weights, such as that of counting FLOPs:
        # it would lose the copies
        with nullcontext() if self._are_fake else without_dispatch_modes():
            for work in bucket.works:
                work.wait()
            bucket.works = []
            if bucket.event is not None:
                torch.cuda.current_stream(self.device).wait_event(bucket.event)
            if bucket.buffer is not None:
                self._unpack(bucket, bucket.buffer)
                bucket.buffer = None
        # so that autograd rejects a backward through activations of the weights before the update
        torch.autograd.graph.increment_version(bucket.parameters)

    def _pack(self, bucket: _Bucket) -> Tensor:
        """A buffer with one row for each device; this device's row holds its updated shards."""
        like = bucket.parameters[0]
        buffer = torch.empty(self.sharding.count, bucket.offsets[-1], dtype=like.dtype, device=like.device)
        mine = buffer[self.sharding.rank]
        for place, parameter in enumerate(bucket.buffered):
            share = self.sharding.shards[parameter]
            mine[bucket.offsets[place] : bucket.offsets[place] + share.numel()].copy_(share.detach().reshape(-1))
        return buffer

    def _unpack(self, bucket: _Bucket, buffer: Tensor) -> None:
        """Copy all devices' shards from the buffer into the parameters."""
        for place, parameter in enumerate(bucket.buffered):
            slots = buffer[:, bucket.offsets[place] : bucket.offsets[place + 1]]
            if slots.numel() == parameter.numel():
                parameter.detach().view(self.sharding.count, -1).copy_(slots)
                continue
            flat = parameter.detach().view(-1)
            width = flat.numel() // len(parameter) if parameter.dim() and len(parameter) else flat.numel()
            for device, slot in enumerate(slots):
                first, last = self.sharding.shard_range(parameter, device)
                flat[first * width : last * width].copy_(slot[: (last - first) * width])


class _ReadTracker(TorchDispatchMode):
    """Finds, in the first training forward, weights of blocks that are read before their block is
    called or outside of any block. Examples are weights that are tied, normalized or multiplied
    elsewhere. The next forwards wait for these weights at their start.

    It does not look into compiled blocks, because torch compiles nothing under such a mode.
    """

    def __init__(self, owned: dict[nn.Module, list[nn.Parameter]]) -> None:
        super().__init__()
        self._owned = owned
        self._blocks_by_storage: dict[int, set[nn.Module]] = defaultdict(
            set
        )  # a storage, which views share -> the blocks
        for block, parameters in owned.items():
            for parameter in parameters:
                self._blocks_by_storage[storage_id(parameter)].add(block)
        self._called: set[nn.Module] = set()
        self._depth = 0  # of calls of blocks
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
        """The context of one call of a block."""
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
        """The parameters of blocks that other code reads."""
        return [parameter for block, own in self._owned.items() if block in self._read_early for parameter in own]


class WaitForWeights:
    """A model hook that waits for all of the model's weights: before a forward outside of training,
    and before its state_dict. The hook of a copy of the model waits for nothing.
    """

    def __init__(self, gathers: WeightGathers | None = None) -> None:
        self._gathers = gathers

    def __call__(self, *unused: Any) -> None:
        if self._gathers is not None and not self._gathers.is_running:
            self._gathers.wait()

    def __reduce__(self) -> Any:
        return WaitForWeights, ()


__all__ = ["WaitForWeights", "WeightGathers", "gathers_in_place"]
