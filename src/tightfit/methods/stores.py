"""Stores: memory that is not the device's, for what a step needs rarely: page-locked host memory, or files that are mapped.

A mapped file is no data of the process: the system writes its pages to disk when memory is short, and reads them back.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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


def is_apart(device: torch.device) -> bool:
    """Whether a device computes only with what lies in its own memory: a processor does with whatever is mapped."""
    return device.type != "cpu" or TARGET.get() == "cuda"


class Store:
    """Where a plan offloads to. `taken`: bytes that it holds."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.device, self.on_disk = device, plan.offload_to == "disk"
        self.folder = Path(plan.offload_folder or tempfile.gettempdir())
        self.taken = 0
        self._stream: torch.cuda.Stream | None = None  # on which copies pass beside the device's other work
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
            kept = self.states[key] = self.put(value)
            return kept
        return kept.copy_(value, non_blocking=True)

    def fetch(self, value: Tensor) -> Tensor:
        """A tensor of the store as the device computes with it: a processor does where it is."""
        if self.device.type == "cpu" and is_apart(self.device):  # predicted
            return value.clone()
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return value.to(self.device, non_blocking=True)

    @contextmanager
    def beside(self, value: Tensor) -> Iterator[None]:
        """Within, what is copied of `value`, a tensor on the device, is copied while the device goes on."""
        if self.device.type != "cuda":
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield
        value.record_stream(self._stream)

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
            weight.detach().copy_(here.detach(), non_blocking=True)

    def settle(self) -> None:
        """Wait for what is on its way from the device: the host reads it next."""
        if self._stream is not None:
            self._stream.synchronize()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def stand_in(self, parameter: nn.Parameter) -> nn.Parameter:
        """A weight for the optimizer in the place of a parameter on the device whose gradient lies here: it takes no memory."""
        nothing = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        weight = nn.Parameter(nothing, requires_grad=parameter.requires_grad)
        self.owners[weight] = parameter
        return weight

    def saving(self, parameters: set[int]) -> saved_tensors_hooks:
        """Within, what a forward saves for backward waits in the store. parameters: addresses of storages that stay."""

        def pack(tensor: Tensor) -> Any:
            if tensor.nbytes <= SMALL or tensor.untyped_storage()._cdata in parameters:
                return tensor
            with self.beside(tensor):
                return self.put(tensor.detach()), tensor.nbytes

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            kept, size = packed
            self.taken -= size
            return self.fetch(kept)

        return saved_tensors_hooks(pack, unpack)


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
        with self.store.beside(gradient):
            if parameter not in self.there:
                kept.copy_(gradient, non_blocking=True)
                self.there.add(parameter)
            elif is_apart(self.store.device):  # the device adds: no host has to wait for it
                kept.copy_(self.store.fetch(kept).add_(gradient), non_blocking=True)
            else:
                kept.add_(gradient)
        parameter.grad = None

    def end(self) -> None:
        """After a step's last backward: the gradients are complete, and where the optimizer looks for them."""
        self.store.settle()
        for parameter in self.there:
            self.weights[parameter].grad = self.kept[parameter]  # type: ignore[index]
        self.there.clear()
