"""Copy scalars from the device to the host asynchronously, and wait for them only when they are
read.

A CUDA device runs queued work while Python queues more. Reading a number with `.item()` makes
Python wait for all queued work, and afterwards the device waits for Python. So a step does not read
its figures (loss, gradient norm). It starts to copy them to page-locked host memory. Code that
reads a figure later waits only for this copy.
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
    """Scalars that are being copied to the host. A call of the object waits for the copies and
    returns the values by name. Every call returns the same values.

    numbers  name -> a number, or a tensor with one element

    Integers up to 2^53 stay exact. A tensor in host memory is not copied, so it must not be changed
    in place before the first call. Of a tensor on a GPU only the copy is kept.
    """

    def __init__(self, numbers: Mapping[str, float | Tensor]) -> None:
        there = {name: one for name, one in numbers.items() if isinstance(one, Tensor) and one.is_cuda}
        self._here: dict[str, float | Tensor] = {name: one for name, one in numbers.items() if name not in there}
        self._names = list(there)
        self._copied: Tensor | None = None
        self._arrived: Any = None
        if there:
            self._copy(list(there.values()))

    @torch.no_grad()
    def _copy(self, scalars: list[Tensor]) -> None:
        together = torch.stack([one.detach().to(torch.float64) for one in scalars])
        self._copied = torch.empty(len(scalars), dtype=torch.float64, pin_memory=True)
        self._copied.copy_(together, non_blocking=True)
        self._arrived = torch.cuda.Event(blocking=True)
        self._arrived.record(torch.cuda.current_stream(together.device))

    def __call__(self) -> dict[str, float]:
        if self._copied is not None:
            self._arrived.synchronize()
            self._here |= dict(zip(self._names, self._copied.tolist(), strict=True))
            self._copied = self._arrived = None
        found = {name: float(one) for name, one in self._here.items()}
        self._here = dict(found)
        return found


def begin_reading(numbers: Mapping[str, float | Tensor]) -> Reading:
    """Start to copy scalars to the host. Return a callable that waits for the copies and returns
    the values by name.

    numbers  name -> a number, or a tensor with one element
    """
    return Reading(numbers)


def read_all(owner: Any) -> None:
    """Read all fields of `owner` that are not read yet (see `read_late`), so that the page-locked
    memory of their copies is freed.

    This does not wait if the step that computed the fields has ended.
    """
    for name in list(vars(owner)):
        getattr(owner, name)


class _Late:
    """A field of a frozen dataclass whose value may be a function. The first read of the field
    calls the function and stores its result as the field's value.
    """

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
    """Return a decorator for a frozen dataclass whose fields `names` may be functions that wait for
    the value.

    Code that reads, compares, prints, copies or pickles such a field gets the value, not the
    function.
    """

    def decorate(kind: Kind) -> Kind:
        for name in names:
            setattr(kind, name, _Late(name))
        setattr(kind, "__getstate__", _values)  # noqa: B010, as no type checker knows it for a method of any class
        return kind

    return decorate


class StepTimer:
    """Measures the seconds that each step takes on its device.

    On a CPU, a step lasts from `begin` to `end`. On CUDA, it lasts from the end of the work that
    was queued before `begin` to the end of the work that was queued before `end`. A wait for data
    between `begin` and `end` counts. Work that the caller queues between an `end` and the next
    `begin`, such as an evaluation, does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._began: Any = None
        self._ended: Any = None  # the end of the previous step

    def begin(self) -> None:
        self._began = self._now()

    def end(self) -> float | Callable[[], float]:
        """Return the seconds of the step; on CUDA a function that waits for the step's end and
        returns its seconds.

        On CUDA this call waits for the end of the previous step, so that Python is never more than
        one step ahead of the device.
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
