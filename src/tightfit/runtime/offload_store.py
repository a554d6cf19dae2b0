"""Memory outside of the device, for data that a step needs rarely: page-locked host memory, or
memory-mapped files.

The method `offload` creates a `Store` for a run. It holds parameters, gradients, optimizer states,
or tensors saved for backward. A mapped file does not count as the process's own memory: when memory
is short, the system writes its pages to disk, and reads them back later.

On a GPU, copies run on two streams besides the compute stream, one for each direction, so that
copies to the device do not wait for copies to the store. Events order the three streams. An
optimizer updates parameters one after another. While update k runs, the states of update k + 1 are
copied to the device, and those of update k - 1 to the store.

torch's allocator of page-locked memory reuses a freed buffer for a new one of the same size, but
only after the copies that `Tensor.copy_` began for it have ended. For this reason, this module
copies only with `copy_`.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tightfit._torch.fake import active_fake_mode
from tightfit._torch.tensors import storage_id
from tightfit.errors import DoesNotFit, InputError
from tightfit.optim.gradient_dtype import copy_gradient_dtype
from tightfit.plan import Plan
from tightfit.target_device import has_own_memory
from tightfit.units import format_bytes


class Store:
    """Allocates tensors in the memory that a plan offloads to, and copies tensors to and from it.
    That memory is called the store.

    plan          its field `offload_to` says whether the store is host memory or files;
                  `offload_folder` is the folder of the files
    device        the device that computes
    stored_bytes  bytes of all tensors in the store

    Raises InputError if the store is on disk and its folder does not exist.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.device, self.on_disk = device, plan.offload_to == "disk"
        self.folder = Path(plan.offload_folder or tempfile.gettempdir())
        self.stored_bytes = 0
        self._out_stream: torch.cuda.Stream | None = None  # the stream of copies to the store
        self._in_stream: torch.cuda.Stream | None = None  # the stream of copies to the device
        # id of a storage in the store -> the event at the end of the last copy into it
        self._copies_out: dict[int, torch.cuda.Event] = {}
        # `_storage_key` of a tensor in the store -> its prefetched copy on the device
        self._prefetched: dict[tuple[int, int], PendingFetch] = {}
        # the copies to the store that the previous update began, and those that this update began
        self._pending_sends: tuple[list[PendingSend], list[PendingSend]] = [], []
        # called with each tensor that the store allocates, for the memory watch
        self.note: Callable[[Tensor], None] | None = None
        self.factor: Tensor | None = None  # scales gradients when they are fetched for an update
        self.states: dict[tuple[Tensor, str], Tensor] = {}
        self.gradients: dict[Tensor, Tensor] = {}
        # stub weight -> its parameter on the device, whose gradient is in the store
        self.owners: dict[Tensor, nn.Parameter] = {}
        if self.on_disk and not self.folder.is_dir():
            raise InputError(
                f"plan: offload_folder={self.folder}",
                "it is not a folder",
                "create this folder, or name another one on a disk with free space",
            )

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Allocate and return an uninitialized tensor in the store. Raises DoesNotFit if the disk
        is full."""
        made = self._allocate(shape, dtype)
        if self.note is not None:
            self.note(made)
        return made

    def _allocate(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Allocate and return an uninitialized tensor in page-locked host memory or in a mapped
        file, and add its bytes to `stored_bytes`. Raises DoesNotFit if the disk is full."""
        count = shape.numel()
        size = count * dtype.itemsize
        self.stored_bytes += size
        # a dry run counts the tensor in stored_bytes, not in the device's memory
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
                f"offload to {self.folder}: the disk has no space for {format_bytes(size)} more "
                f"({error.strerror}); {format_bytes(self.stored_bytes - size)} are offloaded already\n"
                "  fix: name a folder on a larger disk with plan.offload_folder"
            ) from error
        finally:
            # the mapping keeps the data until the process ends, and then no file is left to delete
            path.unlink(missing_ok=True)
        return mapped.view(shape)

    def stored_tensors(self, model: nn.Module) -> Iterator[Tensor]:
        """Yield the tensors that stay in the store between steps: optimizer states, gradients, and
        those parameters of `model` that are offloaded."""
        yield from self.states.values()
        yield from self.gradients.values()
        yield from (parameter for parameter in model.parameters() if is_stored(parameter))

    def put(self, value: Tensor) -> Tensor:
        """Begin to copy `value` to the store, into new memory. Return the stored tensor; its values
        may not have arrived yet."""
        stored = self.empty(value.shape, value.dtype)
        return stored.copy_(value, non_blocking=True)

    def put_state(self, parameter: Tensor, name: str, value: Tensor) -> Tensor:
        """Begin to copy an optimizer state of a parameter to the store. Each call for the same
        state copies into the same memory. Return the stored tensor; its values may not have arrived
        yet.

        name   the state's name, such as "exp_avg"
        value  the state. If it is the stored tensor itself, nothing is copied
        """
        key = parameter, name
        stored = self.states.get(key)
        if stored is value:
            return value
        if stored is None or stored.shape != value.shape or stored.dtype != value.dtype:
            stored = self.states[key] = self.empty(value.shape, value.dtype)
        self._begin_store(value, stored)
        return stored

    def fetch_ahead(self, value: Tensor) -> None:
        """Begin to copy a stored tensor to the device, so that a later call of `fetch` with the
        same tensor has to wait less. Do not change the tensor in between."""
        if has_own_memory(self.device) and value.device.type == "cpu":
            self._prefetched[_storage_key(value)] = self.begin_fetch(value)

    def fetch(self, value: Tensor) -> Tensor:
        """Return a stored tensor for the device to compute with: a copy on a GPU, the tensor itself
        on a CPU. On a GPU, the compute stream waits for the copy; the host does not."""
        coming = self._prefetched.pop(_storage_key(value), None) if self._prefetched else None
        return (coming or self.begin_fetch(value)).wait()

    def next_update(self) -> None:
        """Free the device memory of the states that the update before the last one has sent to the
        store. Call it before the update of each parameter.

        The compute stream first waits until these states have been copied; the host does not wait.
        Example: called before update 5, it frees the states of update 3, while those of update 4
        are still being copied.
        """
        before, last = self._pending_sends
        if before and before[-1].done is not None:  # copies end in order, so the last one is enough
            torch.cuda.current_stream(self.device).wait_event(before[-1].done)
        self._pending_sends = last, []

    def end_updates(self) -> None:
        """Make the compute stream wait for all copies to the store that updates have begun, and
        free the device memory of the copied tensors. The host does not wait. Call it after the last
        update of a step."""
        self.next_update()
        self.next_update()

    def begin_fetch(self, value: Tensor) -> PendingFetch:
        """Begin to copy a stored tensor to the device while the device computes. Return the pending
        copy.

        The copy gets its memory on the compute stream, like all other tensors. Work that was
        launched on that stream earlier may still use this memory, so the copy waits for that work.
        If the stored tensor itself is still being written, the copy waits for that, too. It waits
        for no other copies to the store.
        """
        if not has_own_memory(self.device) or value.device.type != "cpu":
            return PendingFetch(value)
        if self.device.type == "cpu":  # a dry run of a GPU's plan
            return PendingFetch(value.clone())
        on_device = torch.empty_like(value, device=self.device, pin_memory=False)
        current = torch.cuda.current_stream(self.device)
        self._in_stream = self._in_stream or torch.cuda.Stream(self.device)
        self._in_stream.wait_stream(current)
        left = self._copies_out.get(_storage_key(value)[0])
        if left is not None:
            self._in_stream.wait_event(left)
        with torch.cuda.stream(self._in_stream):
            on_device.copy_(value, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(self._in_stream)
        return PendingFetch(on_device, arrived, current)

    def send(self, value: Tensor, stored: Tensor) -> None:
        """Begin to copy `value`, a tensor on the device, into `stored`, a tensor in the store, while
        the device computes. If `value` is in host memory, where fully_shard offloads gradients, the
        host copies it before this method returns."""
        if self._is_on_host(value):
            stored.copy_(value)
            return
        with self._on_copy_stream(stored):
            stored.copy_(value, non_blocking=True)
        self._hold_for_copy(value)

    def _begin_store(self, value: Tensor, stored: Tensor) -> None:
        """Begin to copy `value`, a state or weight that an update has changed on the device, into
        `stored`, a tensor in the store.

        Unlike `send`, this method keeps `value` alive until `next_update` has made the compute
        stream wait for the copy. Then a later update can reuse the memory at once. After
        `record_stream`, which `send` uses, the allocator would first have to ask whether the copy
        has ended.
        """
        if not has_own_memory(self.device):
            stored.copy_(value)
            return
        with self._on_copy_stream(stored):
            stored.copy_(value, non_blocking=True)
        self._pending_sends[1].append(PendingSend(value, self._copies_out.get(_storage_key(stored)[0])))

    def add(self, value: Tensor, stored: Tensor) -> None:
        """Begin to add `value`, a tensor on the device, to `stored`, a tensor in the store, while the
        device computes. If `value` is in host memory, the host adds it before this method returns.
        """
        if not has_own_memory(self.device) or self._is_on_host(value):
            stored.add_(value)
            return
        with self._on_copy_stream(stored):  # the device adds, so the host need not wait for the copy
            on_device = torch.empty_like(stored, device=self.device, pin_memory=False).copy_(stored, non_blocking=True)
            stored.copy_(on_device.add_(value), non_blocking=True)
        self._hold_for_copy(value)

    def _is_on_host(self, value: Tensor) -> bool:
        """Return whether a tensor that is to be stored is in host memory, while the run's device is
        a GPU."""
        return self.device.type == "cuda" and value.device.type == "cpu"

    @contextmanager
    def _on_copy_stream(self, stored: Tensor) -> Iterator[None]:
        """Context manager in which CUDA operations run on the stream of copies to the store. At the
        end it records an event, so that later fetches of `stored` wait for its copy.

        stored  the stored tensor that is copied into
        """
        if self.device.type != "cuda":
            yield
            return
        self._out_stream = self._out_stream or torch.cuda.Stream(self.device)
        self._out_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out_stream):
            yield
        left = torch.cuda.Event()
        left.record(self._out_stream)
        self._copies_out[_storage_key(stored)[0]] = left

    def _hold_for_copy(self, value: Tensor) -> None:
        """Keep torch's allocator from reusing the memory of `value` before its copy to the store
        has ended."""
        if self._out_stream is not None:
            value.record_stream(self._out_stream)

    def release(self, stored: Tensor) -> None:
        """Subtract the bytes of a stored tensor from `stored_bytes`. Call it when the tensor is not
        needed any more."""
        self.stored_bytes -= stored.nbytes
        self._copies_out.pop(_storage_key(stored)[0], None)

    def bring_ahead(self, weight: Tensor) -> None:
        """Begin to copy to the device what the store has of a weight and its gradient. A later call
        of `bring` for this weight then has to wait less."""
        if weight not in self.owners:
            self.fetch_ahead(weight.detach())
        if weight.grad is not None:
            self.fetch_ahead(weight.grad)

    def bring(self, weight: Tensor) -> Tensor:
        """Return a weight on the device, with its gradient on the device as `.grad`. The gradient
        is copied from the store, and so is the weight if it is stored. If `factor` is set, the
        gradient is multiplied by it.

        weight  the tensor that the optimizer has: a stored weight, or the stub of a weight that
                stays on the device (see `make_stub`)
        """
        on_device = self.owners.get(weight)
        if on_device is None:
            on_device = nn.Parameter(self.fetch(weight.detach()), requires_grad=weight.requires_grad)
            copy_gradient_dtype(on_device, weight)
        assert weight.grad is not None
        on_device.grad = self.fetch(weight.grad)
        if self.factor is not None:
            on_device.grad.mul_(self.factor)
        return on_device

    def take_back(self, weight: Tensor, on_device: Tensor) -> None:
        """Free the gradient on the device and, if the weight is stored, begin to copy the updated
        weight to the store. Call it after the update of the weight.

        weight     the tensor that was passed to `bring`
        on_device  the weight on the device that `bring` returned
        """
        on_device.grad = None
        if weight not in self.owners:
            self._begin_store(on_device.detach(), weight.detach())

    def settle(self) -> None:
        """Make the host wait until all copies to the store have ended. Call it before the host
        reads stored tensors."""
        if self._out_stream is not None:
            self._out_stream.synchronize()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._copies_out.clear()

    def make_stub(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a stub for the optimizer to hold in place of `parameter`, which stays on the
        device while its gradient is in the store. The stub has the parameter's shape, but takes no
        memory."""
        nothing = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        weight = nn.Parameter(nothing, requires_grad=parameter.requires_grad)
        copy_gradient_dtype(weight, parameter)
        self.owners[weight] = parameter
        return weight


_IS_STORED = "_tightfit_is_stored"  # attribute of a parameter


def mark_stored(parameter: Tensor) -> None:
    """Note on a parameter that its values are in the store between steps."""
    setattr(parameter, _IS_STORED, True)


def is_stored(parameter: Tensor) -> bool:
    return getattr(parameter, _IS_STORED, False)


@dataclass(frozen=True)
class PendingSend:
    """A tensor on the device that is being copied to the store.

    value  the tensor. The reference keeps it alive until the copy has ended
    done   the event at the end of the copy; None if no copy is in flight
    """

    value: Tensor
    done: torch.cuda.Event | None


def _storage_key(value: Tensor) -> tuple[int, int]:
    """Return a key of the memory in which a tensor begins: (id of its storage, its offset in the
    storage)."""
    return storage_id(value), int(value.storage_offset())


class PendingFetch:
    """A stored tensor that is being copied to the device.

    tensor   the copy on the device
    arrived  the event at the end of the copy; None if no copy is in flight
    stream   the compute stream, on which `tensor` was allocated
    """

    def __init__(self, tensor: Tensor, arrived: torch.cuda.Event | None = None, stream: Any = None) -> None:
        self.tensor, self.arrived, self.stream = tensor, arrived, stream

    def wait(self) -> Tensor:
        """Return the tensor on the device. The current CUDA stream waits for the copy; the host
        does not."""
        if self.arrived is not None:
            current = torch.cuda.current_stream(self.tensor.device)
            current.wait_event(self.arrived)
            if current != self.stream:
                self.tensor.record_stream(current)
            self.arrived = None
        return self.tensor

    def __del__(self) -> None:
        # `wait` was not called: the memory must not be reused before the copy has ended
        if self.arrived is not None:
            self.stream.wait_event(self.arrived)
