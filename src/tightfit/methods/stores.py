"""Stores: memory that is not the device's, for what a step needs rarely: page-locked host memory, or files that are mapped.

A mapped file is no data of the process: the system writes its pages to disk when memory is short, and reads them back.

A GPU copies on two streams beside its own, one for each direction, so that what comes does not wait for what goes. Events
order the three. An optimizer's updates follow one another: while one runs, what the next one needs comes, and what the one
before has changed leaves. torch's allocator of page-locked memory keeps freed buffers for the next ones of the same size, and gives
none away before the copies that it knows of have ended: each copy here is one of those.
"""

from __future__ import annotations

import os
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from tightfit.errors import DoesNotFit, InputError
from tightfit.optim.hooks import when_complete
from tightfit.plan import Plan
from tightfit.units import format_bytes

TARGET: ContextVar[str | None] = ContextVar("target", default=None)
"""The kind of device that fake tensors stand for; None for the one that they lie on."""
SMALL = 2**16  # bytes up to which a saved tensor stays where it is
AHEAD = 2**28  # bytes of saved tensors that come to the device ahead of their use: at most so many, or one tensor


def is_apart(device: torch.device) -> bool:
    """Whether a device computes only with what lies in its own memory: a processor does with whatever is mapped."""
    return device.type != "cpu" or TARGET.get() == "cuda"


class Store:
    """Where a plan offloads to. `taken`: bytes that it holds."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.device, self.on_disk = device, plan.offload_to == "disk"
        self.folder = Path(plan.offload_folder or tempfile.gettempdir())
        self.taken = 0
        self._out: torch.cuda.Stream | None = None  # on which copies leave beside the device's other work
        self._in: torch.cuda.Stream | None = None  # on which they come
        self._leaving: dict[int, torch.cuda.Event] = {}  # address of a storage here -> when its last copy has arrived
        self._coming: dict[
            tuple[int, int], Coming
        ] = {}  # place in a storage here -> its copy, fetched ahead of its use
        self._sent: tuple[list[Left], list[Left]] = [], []  # by the update before this one, and by this one
        self.note: Callable[[Tensor], None] | None = None  # who watches memory is told of what is made here
        self.factor: Tensor | None = None  # by which gradients are scaled when they are brought to the device
        self.states: dict[tuple[Tensor, str], Tensor] = {}
        self.gradients: dict[Tensor, Tensor] = {}
        self.owners: dict[Tensor, nn.Parameter] = {}  # of a weight that is here only to have its gradient here
        if self.on_disk and not self.folder.is_dir():
            raise InputError(
                f"plan: offload_folder={self.folder}", "is no folder", "make it, or name one on a disk with room"
            )

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor in the store. Raises DoesNotFit where the disk has no room for it."""
        made = self._empty(shape, dtype)
        if self.note is not None:
            self.note(made)
        return made

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        count = shape.numel()
        size = count * dtype.itemsize
        self.taken += size
        if active_fake_mode() is not None:  # who predicts takes it as stored: what it holds is no row of the device
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
                f"offload to {self.folder}: no room for {format_bytes(size)} more, {format_bytes(self.taken - size)} are "
                f"there ({error.strerror})\n  fix: name a folder on a larger disk with plan.offload_folder"
            ) from error
        finally:
            path.unlink(missing_ok=True)  # the mapping keeps it, and nothing is left when the process ends
        return mapped.view(shape)

    def there(self, model: nn.Module) -> Iterator[Tensor]:
        """What lies in the store from step to step: states, gradients, and parameters of a model that were put here."""
        yield from self.states.values()
        yield from self.gradients.values()
        yield from (parameter for parameter in model.parameters() if getattr(parameter, "stored", False))

    def put(self, value: Tensor) -> Tensor:
        """A copy of `value` in the store."""
        kept = self.empty(value.shape, value.dtype)
        return kept.copy_(value, non_blocking=True)

    def put_state(self, parameter: Tensor, name: str, value: Tensor) -> Tensor:
        """An optimizer's state of a parameter, always in the same place."""
        key = parameter, name
        kept = self.states.get(key)
        if kept is value:
            return value
        if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
            kept = self.states[key] = self.empty(value.shape, value.dtype)
        self._leave(value, kept)
        return kept

    def fetch_ahead(self, value: Tensor) -> None:
        """Begin to fetch a tensor that `fetch` is asked for soon, and that nobody changes until then."""
        if is_apart(self.device) and value.device.type == "cpu":
            self._coming[_place(value)] = self.begin(value)

    def fetch(self, value: Tensor) -> Tensor:
        """A tensor of the store as the device computes with it: a processor does where it is."""
        coming = self._coming.pop(_place(value), None) if self._coming else None
        return (coming or self.begin(value)).end()

    def next_update(self) -> None:
        """An update begins. What was sent by the one before the last has to have left: its memory is used again."""
        before, last = self._sent
        if before and before[-1].left is not None:  # copies leave in their order
            torch.cuda.current_stream(self.device).wait_event(before[-1].left)
        self._sent = last, []

    def end_updates(self) -> None:
        """No update follows: the device's stream goes on when all has left. No host waits."""
        self.next_update()
        self.next_update()

    def begin(self, value: Tensor) -> Coming:
        """Begin to fetch a tensor of the store while the device works on.

        The memory is of the device's own stream, as is all other memory. So the copy waits for the work that the stream has
        by now, which may use that memory, and for the tensor's copy out. It does not wait for other copies out.
        """
        if not is_apart(self.device) or value.device.type != "cpu":
            return Coming(value)
        if self.device.type == "cpu":  # predicted
            return Coming(value.clone())
        here = torch.empty_like(value, device=self.device, pin_memory=False)
        current = torch.cuda.current_stream(self.device)
        self._in = self._in or torch.cuda.Stream(self.device)
        self._in.wait_stream(current)
        left = self._leaving.get(_place(value)[0])
        if left is not None:
            self._in.wait_event(left)
        with torch.cuda.stream(self._in):
            here.copy_(value, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(self._in)
        return Coming(here, arrived, current)

    def send(self, value: Tensor, kept: Tensor) -> None:
        """Copy `value`, a tensor on the device, into `kept`, one of the store, while the device works on."""
        with self._beside(kept):
            kept.copy_(value, non_blocking=True)
        self._used_beside(value)

    def _leave(self, value: Tensor, kept: Tensor) -> None:
        """As `send`, of what an update has made. Its memory is held until the device's stream has waited for the copy, so that
        later updates find it: of memory that another stream uses, the allocator would have to be asked when it is free."""
        if not is_apart(self.device):
            kept.copy_(value)
            return
        with self._beside(kept):
            kept.copy_(value, non_blocking=True)
        self._sent[1].append(Left(value, self._leaving.get(_place(kept)[0])))

    def add(self, value: Tensor, kept: Tensor) -> None:
        """Add `value`, a tensor on the device, to `kept`, one of the store, while the device works on."""
        if not is_apart(self.device):
            kept.add_(value)
            return
        with self._beside(kept):  # the device adds: no host has to wait for it
            there = torch.empty_like(kept, device=self.device, pin_memory=False).copy_(kept, non_blocking=True)
            kept.copy_(there.add_(value), non_blocking=True)
        self._used_beside(value)

    @contextmanager
    def _beside(self, kept: Tensor) -> Iterator[None]:
        """Within, what is copied into `kept` is copied while the device works on."""
        if self.device.type != "cuda":
            yield
            return
        self._out = self._out or torch.cuda.Stream(self.device)
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            yield
        left = torch.cuda.Event()
        left.record(self._out)
        self._leaving[_place(kept)[0]] = left

    def _used_beside(self, value: Tensor) -> None:
        """Nobody gets the memory of `value` before what is copied of it has left."""
        if self._out is not None:
            value.record_stream(self._out)

    def forget(self, kept: Tensor) -> None:
        """Of a tensor of the store that is given up: nobody fetches it any more."""
        self.taken -= kept.nbytes
        self._leaving.pop(_place(kept)[0], None)

    def bring_ahead(self, weight: Tensor) -> None:
        """Begin to fetch what `bring` is asked for soon."""
        if weight not in self.owners:
            self.fetch_ahead(weight.detach())
        if weight.grad is not None:
            self.fetch_ahead(weight.grad)

    def bring(self, weight: Tensor) -> Tensor:
        """A weight that lies here, or whose gradient does, on the device and with its gradient."""
        here = self.owners.get(weight)
        if here is None:
            here = nn.Parameter(self.fetch(weight.detach()), requires_grad=weight.requires_grad)
        assert weight.grad is not None
        here.grad = self.fetch(weight.grad)
        if self.factor is not None:
            here.grad.mul_(self.factor)
        return here

    def take_back(self, weight: Tensor, here: Tensor) -> None:
        """What `bring` gave, after its update."""
        here.grad = None
        if weight not in self.owners:
            self._leave(here.detach(), weight.detach())

    def settle(self) -> None:
        """Wait for what is on its way from the device: the host reads it next."""
        if self._out is not None:
            self._out.synchronize()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._leaving.clear()

    def stand_in(self, parameter: nn.Parameter) -> nn.Parameter:
        """A weight for the optimizer in the place of a parameter on the device whose gradient lies here: it takes no memory."""
        nothing = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        weight = nn.Parameter(nothing, requires_grad=parameter.requires_grad)
        self.owners[weight] = parameter
        return weight

    def saving(self, parameters: set[int]) -> saved_tensors_hooks:
        """Within, what a forward saves for backward waits in the store. parameters: addresses of storages that stay."""

        order = _Order(self)

        def pack(tensor: Tensor) -> Any:
            if tensor.nbytes <= SMALL or tensor.untyped_storage()._cdata in parameters:
                return tensor
            return order.put(tensor.detach())

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else order.fetch(packed)

        return saved_tensors_hooks(pack, unpack)


@dataclass(frozen=True)
class Left:
    """A tensor of the device that was sent. left: when the copy has ended; None where no copy is under way."""

    value: Tensor
    left: torch.cuda.Event | None


def _place(value: Tensor) -> tuple[int, int]:
    """The address of a tensor's storage, and where in it the tensor begins."""
    return value.untyped_storage()._cdata, int(value.storage_offset())


class Coming:
    """A tensor on its way to the device.

    here     the tensor there: its memory is that of `stream`
    arrived  when the copy has ended; None where no copy is under way
    """

    def __init__(self, here: Tensor, arrived: torch.cuda.Event | None = None, stream: Any = None) -> None:
        self.here, self.arrived, self.stream = here, arrived, stream

    def end(self) -> Tensor:
        """The tensor, which the device's stream uses when the copy has ended."""
        if self.arrived is not None:
            current = torch.cuda.current_stream(self.here.device)
            current.wait_event(self.arrived)
            if current != self.stream:
                self.here.record_stream(current)
            self.arrived = None
        return self.here

    def __del__(self) -> None:
        if self.arrived is not None:  # nobody wants it: no other may have its memory before the copy has ended
            self.stream.wait_event(self.arrived)


class _Saved:
    """A tensor that a forward saved, until its graph gives it up.

    kept    the copy in the store
    place   its number in `order`
    coming  its copy for the device, where that is fetched ahead of its use
    asked   whether it was fetched before, ahead or when it was used
    """

    def __init__(self, kept: Tensor, order: _Order, place: int) -> None:
        self.kept, self.order, self.place = kept, order, place
        self.coming: Coming | None = None
        self.asked = False

    def __del__(self) -> None:
        if self.coming is not None:
            self.order.ahead -= self.kept.nbytes
        self.order.store.forget(self.kept)


class _Order:
    """What one forward saves, in this order: backward uses it in about the reverse one.

    When backward uses a tensor, those saved just before it begin to come, as many as fit in AHEAD bytes and in the bytes of
    the largest one, and at least one. Each comes once for each use: one that a graph uses again, because it was retained,
    comes when it is used. The graph alone holds what it saves.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.saved: list[weakref.ref[_Saved]] = []
        self.largest = self.ahead = 0  # bytes of the largest, and of those that are fetched and not yet used
        self.next = 0  # place of the next one to fetch ahead

    def put(self, value: Tensor) -> _Saved:
        kept = self.store.empty(value.shape, value.dtype)
        if is_dense(value):  # so the copy is one piece, and kernels find the layout that they would have found
            kept = kept.as_strided(value.shape, value.stride())
        self.store.send(value, kept)
        saved = _Saved(kept, self, len(self.saved))
        self.saved.append(weakref.ref(saved))
        self.largest, self.next = max(self.largest, kept.nbytes), len(self.saved)
        return saved

    def fetch(self, saved: _Saved) -> Tensor:
        """What was saved, on the device; what is used next comes meanwhile."""
        coming, saved.coming = saved.coming, None
        if coming is None:
            coming = self.store.begin(saved.kept)
        else:
            self.ahead -= saved.kept.nbytes
        saved.asked = True
        here = coming.end()
        if is_apart(self.store.device):
            self._fetch_ahead(saved.place)
        return here

    def _fetch_ahead(self, place: int) -> None:
        """Begin to fetch those before `place`."""
        most = most_ahead(self.largest)
        self.next = min(self.next, place - 1)
        while self.next >= 0:
            one = self.saved[self.next]()
            if one is not None and not one.asked:
                size = one.kept.nbytes
                if self.ahead and self.ahead + size > most:
                    return
                one.coming, one.asked = self.store.begin(one.kept), True
                self.ahead += size
            self.next -= 1


def most_ahead(largest: float) -> float:
    """Bytes of saved tensors that come ahead of their use, if several do. largest: bytes of the largest saved tensor."""
    return min(AHEAD, largest)


def is_dense(value: Tensor) -> bool:
    """Whether a tensor's elements fill its memory once each, in whatever order of its dims."""
    count = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != count:
            return False
        count *= size
    return True


class Gradients:
    """Takes each gradient into a store when backward has made it, and sums those of a step there.

    weights   parameter -> what the optimizer updates in its place, and finds the gradient at; maybe itself
    """

    def __init__(self, weights: dict[nn.Parameter, nn.Parameter], store: Store) -> None:
        self.weights, self.store = weights, store
        self.kept = store.gradients
        self.there: set[Tensor] = set()
        when_complete(weights, self._take)

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        gradient: Any = parameter.grad
        assert gradient is not None
        if isinstance(gradient, DTensor):
            gradient = gradient._local_tensor
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
        """After a step's last backward: the gradients are complete, and where the optimizer looks for them."""
        self.store.settle()
        for parameter in self.there:
            self.weights[parameter].grad = self.kept[parameter]  # type: ignore[index]
        self.there.clear()
