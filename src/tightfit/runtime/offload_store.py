"""Memory outside of the device for data that a step needs rarely: page-locked host memory, or
memory-mapped files.

`offload` makes a `Store` for a run. It holds parameters, gradients, optimizer states, or tensors
saved for backward. A mapped file does not count as the process's own memory: the system writes its
pages to disk when memory is short, and reads them back.

On a GPU, copies run on two streams besides the compute stream, one for each direction, so that
copies in do not wait for copies out. Events order the three streams. An optimizer updates
parameters one after another. While update k runs, the states of update k + 1 are copied in, and
those of update k - 1 are copied out.

torch's allocator of page-locked memory reuses a freed buffer for one of the same size, but not
before the copies that it knows of have ended. All copies here are of that kind.
"""

from __future__ import annotations

import os
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from tightfit._torch.distributed import local_shard
from tightfit._torch.fake import active_fake_mode
from tightfit._torch.tensors import storage_id
from tightfit.errors import DoesNotFit, InputError
from tightfit.optim.gradient_hooks import on_gradient_ready
from tightfit.plan import Plan
from tightfit.target_device import has_own_memory
from tightfit.units import format_bytes

MIN_OFFLOAD_BYTES = 2**16  # bytes; saved tensors up to this size are not offloaded
# bytes; the most saved tensors that are prefetched at a time, unless one tensor is larger
MAX_PREFETCH_BYTES = 2**28


class Store:
    """The memory that a plan offloads to.

    plan          `offload_to` and `offload_folder` say where it is
    device        the device that computes
    stored_bytes  bytes that the store holds

    Raises InputError when offload_folder is not a folder.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.device, self.on_disk = device, plan.offload_to == "disk"
        self.folder = Path(plan.offload_folder or tempfile.gettempdir())
        self.stored_bytes = 0
        self._out_stream: torch.cuda.Stream | None = None  # the stream of copies to the store
        self._in_stream: torch.cuda.Stream | None = None  # the stream of copies to the device
        # id of a storage here -> the end of the last copy into it
        self._copies_out: dict[int, torch.cuda.Event] = {}
        # key of a tensor here -> its copy, prefetched
        self._prefetched: dict[tuple[int, int], PendingFetch] = {}
        # of the previous update, and of this one
        self._pending_sends: tuple[list[PendingSend], list[PendingSend]] = [], []
        self.note: Callable[[Tensor], None] | None = (
            None  # called with each tensor allocated here, for the memory watch
        )
        self.factor: Tensor | None = None  # scales gradients when they are fetched for an update
        self.states: dict[tuple[Tensor, str], Tensor] = {}
        self.gradients: dict[Tensor, Tensor] = {}
        self.owners: dict[
            Tensor, nn.Parameter
        ] = {}  # stub weight -> its parameter on the device, whose gradient is here
        if self.on_disk and not self.folder.is_dir():
            raise InputError(
                f"plan: offload_folder={self.folder}",
                "it is not a folder",
                "create it, or name a folder on a disk with free space",
            )

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor in the store. Raises DoesNotFit when the disk is full."""
        made = self._allocate(shape, dtype)
        if self.note is not None:
            self.note(made)
        return made

    def _allocate(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Allocate in page-locked memory, or map a file."""
        count = shape.numel()
        size = count * dtype.itemsize
        self.stored_bytes += size
        # a dry run counts it in stored_bytes, not in the device's memory
        if active_fake_mode() is not None:
            return torch.empty(shape, dtype=dtype)
        if not self.on_disk or size == 0:
            return torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")
        path = self.folder / f"tightfit-{uuid.uuid4().hex}"
        try:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
            mapped = torch.from_file(str(path), shared=True, size=count, dtype=dtype)
        except OSError as error:
            raise DoesNotFit(
                f"offload to {self.folder}: no room for {format_bytes(size)} more; {format_bytes(self.stored_bytes - size)} are "
                f"stored already ({error.strerror})\n  fix: name a folder on a larger disk with plan.offload_folder"
            ) from error
        finally:
            path.unlink(
                missing_ok=True
            )  # the mapping keeps the data until the process ends, and no file is left behind
        return mapped.view(shape)

    def stored_tensors(self, model: nn.Module) -> Iterator[Tensor]:
        """Tensors that stay in the store between steps: optimizer states, gradients, and offloaded
        parameters of `model`.
        """
        yield from self.states.values()
        yield from self.gradients.values()
        yield from (parameter for parameter in model.parameters() if getattr(parameter, "stored", False))

    def put(self, value: Tensor) -> Tensor:
        """A copy of `value` in the store. The copy may still be in flight."""
        kept = self.empty(value.shape, value.dtype)
        return kept.copy_(value, non_blocking=True)

    def put_state(self, parameter: Tensor, name: str, value: Tensor) -> Tensor:
        """Store an optimizer state of a parameter, always in the same memory. Returns the tensor in
        the store.
        """
        key = parameter, name
        kept = self.states.get(key)
        if kept is value:
            return value
        if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
            kept = self.states[key] = self.empty(value.shape, value.dtype)
        self._begin_store(value, kept)
        return kept

    def fetch_ahead(self, value: Tensor) -> None:
        """Begin to fetch a tensor that `fetch` is called for soon. Nobody may change it until then."""
        if has_own_memory(self.device) and value.device.type == "cpu":
            self._prefetched[_storage_key(value)] = self.begin_fetch(value)

    def fetch(self, value: Tensor) -> Tensor:
        """A stored tensor as the device computes with it: a copy on a GPU; on a CPU the tensor
        itself.
        """
        coming = self._prefetched.pop(_storage_key(value), None) if self._prefetched else None
        return (coming or self.begin_fetch(value)).wait()

    def next_update(self) -> None:
        """Call before each update. The copies out of the update before the last one must have
        ended, because their device memory is freed here.
        """
        before, last = self._pending_sends
        if before and before[-1].done is not None:  # copies end in order, so the last one is enough
            torch.cuda.current_stream(self.device).wait_event(before[-1].done)
        self._pending_sends = last, []

    def end_updates(self) -> None:
        """Call after the last update: the device's stream waits for all copies out. The host does
        not.
        """
        self.next_update()
        self.next_update()

    def begin_fetch(self, value: Tensor) -> PendingFetch:
        """Begin to fetch a stored tensor while the device computes.

        The copy's memory is allocated on the compute stream, as all other memory is. So the copy
        waits for the work that is on that stream now, which may still use that memory. It also
        waits for a pending copy into the stored tensor, but not for other copies out.
        """
        if not has_own_memory(self.device) or value.device.type != "cpu":
            return PendingFetch(value)
        if self.device.type == "cpu":  # a dry run of a GPU's plan
            return PendingFetch(value.clone())
        here = torch.empty_like(value, device=self.device, pin_memory=False)
        current = torch.cuda.current_stream(self.device)
        self._in_stream = self._in_stream or torch.cuda.Stream(self.device)
        self._in_stream.wait_stream(current)
        left = self._copies_out.get(_storage_key(value)[0])
        if left is not None:
            self._in_stream.wait_event(left)
        with torch.cuda.stream(self._in_stream):
            here.copy_(value, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(self._in_stream)
        return PendingFetch(here, arrived, current)

    def send(self, value: Tensor, kept: Tensor) -> None:
        """Copy `value`, on the device, into `kept`, in the store, while the device computes."""
        with self._on_copy_stream(kept):
            kept.copy_(value, non_blocking=True)
        self._hold_for_copy(value)

    def _begin_store(self, value: Tensor, kept: Tensor) -> None:
        """As `send`, for the results of an update.

        Their device memory is held until the compute stream has waited for the copy, so that later
        updates can reuse it. With `record_stream` the allocator would have to ask the copy stream
        when the memory is free.
        """
        if not has_own_memory(self.device):
            kept.copy_(value)
            return
        with self._on_copy_stream(kept):
            kept.copy_(value, non_blocking=True)
        self._pending_sends[1].append(PendingSend(value, self._copies_out.get(_storage_key(kept)[0])))

    def add(self, value: Tensor, kept: Tensor) -> None:
        """Add `value`, on the device, to `kept`, in the store, while the device computes."""
        if not has_own_memory(self.device):
            kept.add_(value)
            return
        with self._on_copy_stream(kept):  # the device adds, so the host need not wait for the copy
            there = torch.empty_like(kept, device=self.device, pin_memory=False).copy_(kept, non_blocking=True)
            kept.copy_(there.add_(value), non_blocking=True)
        self._hold_for_copy(value)

    @contextmanager
    def _on_copy_stream(self, kept: Tensor) -> Iterator[None]:
        """Within the context, copies into `kept` run on the copy stream."""
        if self.device.type != "cuda":
            yield
            return
        self._out_stream = self._out_stream or torch.cuda.Stream(self.device)
        self._out_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out_stream):
            yield
        left = torch.cuda.Event()
        left.record(self._out_stream)
        self._copies_out[_storage_key(kept)[0]] = left

    def _hold_for_copy(self, value: Tensor) -> None:
        """The allocator must not reuse the memory of `value` before its copy has ended."""
        if self._out_stream is not None:
            value.record_stream(self._out_stream)

    def release(self, kept: Tensor) -> None:
        """Release a tensor of the store: nobody fetches it again."""
        self.stored_bytes -= kept.nbytes
        self._copies_out.pop(_storage_key(kept)[0], None)

    def bring_ahead(self, weight: Tensor) -> None:
        """Begin to fetch what `bring` is called for soon."""
        if weight not in self.owners:
            self.fetch_ahead(weight.detach())
        if weight.grad is not None:
            self.fetch_ahead(weight.grad)

    def bring(self, weight: Tensor) -> Tensor:
        """A weight on the device with its gradient, one or both of which are stored here.

        The gradient is multiplied by `factor`, if that is set.
        """
        here = self.owners.get(weight)
        if here is None:
            here = nn.Parameter(self.fetch(weight.detach()), requires_grad=weight.requires_grad)
        assert weight.grad is not None
        here.grad = self.fetch(weight.grad)
        if self.factor is not None:
            here.grad.mul_(self.factor)
        return here

    def take_back(self, weight: Tensor, here: Tensor) -> None:
        """Call after the update of a weight that `bring` has returned: stores the weight and frees
        its gradient.
        """
        here.grad = None
        if weight not in self.owners:
            self._begin_store(here.detach(), weight.detach())

    def settle(self) -> None:
        """Wait until all copies to the host have ended, because the host reads the data next."""
        if self._out_stream is not None:
            self._out_stream.synchronize()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._copies_out.clear()

    def make_stub(self, parameter: nn.Parameter) -> nn.Parameter:
        """A stub weight for the optimizer, in place of a parameter on the device whose gradient is
        stored here. It has the parameter's shape, but takes no memory.
        """
        nothing = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        weight = nn.Parameter(nothing, requires_grad=parameter.requires_grad)
        self.owners[weight] = parameter
        return weight

    def offload_saved(self, parameters: set[int]) -> saved_tensors_hooks:
        """Within the returned context, tensors that a forward saves for backward are stored here.

        parameters  ids of the storages of parameters, which are not offloaded
        """

        order = _SaveOrder(self)

        def pack(tensor: Tensor) -> Any:
            if tensor.nbytes <= MIN_OFFLOAD_BYTES or storage_id(tensor) in parameters:
                return tensor
            return order.put(tensor.detach())

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else order.fetch(packed)

        return saved_tensors_hooks(pack, unpack)


@dataclass(frozen=True)
class PendingSend:
    """A tensor on the device that is being copied to the store.

    value  the tensor, held until the copy has ended
    done   the end of the copy; None: no copy is in flight
    """

    value: Tensor
    done: torch.cuda.Event | None


def _storage_key(value: Tensor) -> tuple[int, int]:
    """An id of a tensor's storage, and the tensor's offset in it."""
    return storage_id(value), int(value.storage_offset())


class PendingFetch:
    """A tensor that is being copied to the device.

    here     the tensor on the device, allocated on `stream`
    arrived  the end of the copy; None: no copy is in flight
    stream   the compute stream
    """

    def __init__(self, here: Tensor, arrived: torch.cuda.Event | None = None, stream: Any = None) -> None:
        self.here, self.arrived, self.stream = here, arrived, stream

    def wait(self) -> Tensor:
        """The tensor. The current stream waits for the copy; the host does not."""
        if self.arrived is not None:
            current = torch.cuda.current_stream(self.here.device)
            current.wait_event(self.arrived)
            if current != self.stream:
                self.here.record_stream(current)
            self.arrived = None
        return self.here

    def __del__(self) -> None:
        # unused: its memory must not be reused before the copy has ended
        if self.arrived is not None:
            self.stream.wait_event(self.arrived)


class _SavedTensor:
    """A tensor that a forward saved, until the autograd graph drops it.

    kept    the copy in the store
    order   the forward's saved tensors
    place   its index in `order`
    coming  its prefetched copy on the device, or None
    asked   whether it was fetched before, at its use or ahead of it
    """

    def __init__(self, kept: Tensor, order: _SaveOrder, place: int) -> None:
        self.kept, self.order, self.place = kept, order, place
        self.coming: PendingFetch | None = None
        self.asked = False

    def __del__(self) -> None:
        if self.coming is not None:
            self.order.ahead -= self.kept.nbytes
        self.order.store.release(self.kept)


class _SaveOrder:
    """The tensors that one forward saves, in order. Backward uses them in about the reverse order.

    When backward uses a tensor, those saved just before it are prefetched: at least one, and as
    many as fit in MAX_PREFETCH_BYTES and in the size of the largest one. Each is prefetched once. A
    tensor of a retained graph, which is used again, is then fetched at its use. Only the autograd
    graph keeps saved tensors alive.

    Example: a forward saves a, b, c, d of 100 MiB each, so at most max_prefetch_bytes(100 MiB) =
    100 MiB are prefetched. When backward uses d, c is prefetched; when it uses c, b is.

    largest  bytes of the largest saved tensor
    ahead    bytes that are prefetched and not used yet
    next     index of the next tensor to prefetch
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.saved: list[weakref.ref[_SavedTensor]] = []
        self.largest = self.ahead = 0  # bytes
        self.next = 0

    def put(self, value: Tensor) -> _SavedTensor:
        """Store a tensor that the forward saves."""
        kept = self.store.empty(value.shape, value.dtype)
        if is_dense(value):  # one contiguous copy, and kernels get the original layout
            kept = kept.as_strided(value.shape, value.stride())
        self.store.send(value, kept)
        saved = _SavedTensor(kept, self, len(self.saved))
        self.saved.append(weakref.ref(saved))
        self.largest, self.next = max(self.largest, kept.nbytes), len(self.saved)
        return saved

    def fetch(self, saved: _SavedTensor) -> Tensor:
        """The saved tensor on the device. Tensors that are used next are prefetched meanwhile."""
        coming, saved.coming = saved.coming, None
        if coming is None:
            coming = self.store.begin_fetch(saved.kept)
        else:
            self.ahead -= saved.kept.nbytes
        saved.asked = True
        here = coming.wait()
        if has_own_memory(self.store.device):
            self._fetch_ahead(saved.place)
        return here

    def _fetch_ahead(self, place: int) -> None:
        """Prefetch tensors before index `place`."""
        most = max_prefetch_bytes(self.largest)
        self.next = min(self.next, place - 1)
        while self.next >= 0:
            one = self.saved[self.next]()
            if one is not None and not one.asked:
                size = one.kept.nbytes
                if self.ahead and self.ahead + size > most:
                    return
                one.coming, one.asked = self.store.begin_fetch(one.kept), True
                self.ahead += size
            self.next -= 1


def max_prefetch_bytes(largest: float) -> float:
    """The most bytes of saved tensors that are prefetched at a time, if they are several.

    largest  bytes of the largest saved tensor
    """
    return min(MAX_PREFETCH_BYTES, largest)


def is_dense(value: Tensor) -> bool:
    """Whether a tensor's elements fill its memory exactly once, in any order of its dimensions."""
    count = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != count:
            return False
        count *= size
    return True


class OffloadedGradients:
    """Moves each gradient to the store as soon as backward has computed it, and accumulates a
    step's gradients there.

    weights  a parameter -> the weight that the optimizer updates in its place, and on which it
             finds the gradient; may be the parameter itself
    store    the store
    """

    def __init__(self, weights: dict[nn.Parameter, nn.Parameter], store: Store) -> None:
        self.weights, self.store = weights, store
        self.kept = store.gradients
        self.there: set[Tensor] = set()
        on_gradient_ready(weights, self._offload)

    @torch.no_grad()
    def _offload(self, parameter: Tensor) -> None:
        """The hook of a completed gradient: stores it, or adds it to the one of earlier
        micro-batches.
        """
        gradient: Any = parameter.grad
        assert gradient is not None
        if isinstance(gradient, DTensor):
            gradient = local_shard(gradient)
        if parameter not in self.kept:
            self.kept[parameter] = self.store.empty(gradient.shape, gradient.dtype)
        kept = self.kept[parameter]
        if parameter not in self.there:
            self.store.send(gradient, kept)
            self.there.add(parameter)
        else:
            self.store.add(gradient, kept)
        parameter.grad = None

    def end(self) -> None:
        """Call after a step's last backward: waits for the copies and sets the weights' gradients."""
        self.store.settle()
        for parameter in self.there:
            self.weights[parameter].grad = self.kept[parameter]  # type: ignore[index]
        self.there.clear()
