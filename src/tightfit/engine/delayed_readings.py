"""Copy scalars from the device to the host asynchronously, and wait for them only when they are
read.

A CUDA device runs queued work while Python queues more. `.item()` makes Python wait for all queued
work, and afterwards the device waits for Python. So a training step does not read its loss and
gradient norm. It begins to copy them to page-locked host memory. Code that reads one of them later
waits only for this copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

Kind = TypeVar("Kind", bound=type)


class Reading:
    """Copies scalars to the host in the background. To get them, call the object: it waits for the
    copies and returns a dict of name -> float. Later calls return the same values.

    numbers  name -> a number, or a tensor with one element

    Integers up to 2^53 stay exact. A tensor in host memory is not copied, so it must not be changed
    in place before the first call. A tensor on a GPU may be changed or freed at once.
    """

    def __init__(self, numbers: Mapping[str, float | Tensor]) -> None:
        on_gpu = {name: number for name, number in numbers.items() if isinstance(number, Tensor) and number.is_cuda}
        self._on_host: dict[str, float | Tensor] = {
            name: number for name, number in numbers.items() if name not in on_gpu
        }
        self._names = list(on_gpu)
        self._copied: Tensor | None = None
        self._arrived: Any = None
        if on_gpu:
            self._copy(list(on_gpu.values()))

    @torch.no_grad()
    def _copy(self, scalars: list[Tensor]) -> None:
        together = torch.stack([scalar.detach().to(torch.float64) for scalar in scalars])
        self._copied = torch.empty(len(scalars), dtype=torch.float64, pin_memory=True)
        self._copied.copy_(together, non_blocking=True)
        self._arrived = torch.cuda.Event(blocking=True)
        self._arrived.record(torch.cuda.current_stream(together.device))

    def __call__(self) -> dict[str, float]:
        if self._copied is not None:
            self._arrived.synchronize()
            self._on_host |= dict(zip(self._names, self._copied.tolist(), strict=True))
            self._copied = self._arrived = None
        found = {name: float(one) for name, one in self._on_host.items()}
        self._on_host = dict(found)
        return found


def begin_reading(numbers: Mapping[str, float | Tensor]) -> Reading:
    """Begin to copy scalars to the host. Return a callable that waits for the copies and returns
    name -> float.

    numbers  name -> a number, or a tensor with one element
    """
    return Reading(numbers)


def read_all(owner: Any) -> None:
    """Read every field of `owner`, a dataclass decorated with `read_late`, so that the page-locked
    memory of pending copies is freed.

    The call waits for the device unless the step that computed the fields has ended.
    """
    for name in list(vars(owner)):
        getattr(owner, name)


class _Late:
    """A descriptor for a dataclass field. If the field was set to a function, the first read of the
    field calls the function and stores its result as the field's value."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, owner: Any, kind: type) -> Any:
        if owner is None:
            return self
        value = vars(owner)[self.name]
        if callable(value):
            value = vars(owner)[self.name] = value()
        return value

    def __set__(self, owner: Any, value: Any) -> None:
        vars(owner)[self.name] = value


def _values(owner: Any) -> dict[str, Any]:
    return {name: getattr(owner, name) for name in vars(owner)}


def read_late(*names: str) -> Callable[[Kind], Kind]:
    """Return a class decorator for a frozen dataclass. In the decorated class, the fields `names`
    may be set to functions without arguments in place of values.

    The first read of such a field calls the function, which may wait for the device, and stores its
    result. Code that reads, compares, prints, copies or pickles the field always gets the value,
    not the function.
    """

    def decorate(kind: Kind) -> Kind:
        for name in names:
            setattr(kind, name, _Late(name))
        setattr(kind, "__getstate__", _values)  # noqa: B010, as no type checker knows it for a method of any class
        return kind

    return decorate


class StepTimer:
    """Measures how many seconds each training step takes on its device. Call `begin` before a step
    and `end` after it.

    On a CPU, the result is the time between `begin` and `end`. On CUDA, it is the time from the end
    of the work that was queued before `begin` to the end of the work that was queued before `end`.
    A wait for data between `begin` and `end` counts. Work that the caller queues after `end` and
    before the next `begin`, such as an evaluation, does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._began: Any = None
        self._ended: Any = None  # the end of the previous step

    def begin(self) -> None:
        self._began = self._now()

    def end(self) -> float | Callable[[], float]:
        """End the step. On a CPU, return its seconds. On CUDA, return a function that waits for the
        end of the step's work and returns its seconds.

        On CUDA this call itself waits for the end of the previous step's work, so that Python is
        never more than one step ahead of the device.
        """
        began, ended, before = self._began, self._now(), self._ended
        self._ended = ended
        if self.device.type != "cuda":
            seconds: float = ended - began
            return seconds
        if before is not None:
            before.synchronize()

        def wait() -> float:
            ended.synchronize()
            milliseconds: float = began.elapsed_time(ended)
            return milliseconds / 1e3

        return cache(wait)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


__all__ = ["Reading", "StepTimer", "begin_reading", "read_all", "read_late"]
