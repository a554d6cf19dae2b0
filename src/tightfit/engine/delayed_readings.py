"""Readings: scalars that a device computes are copied to the host asynchronously, and waited for
when they are read.

A CUDA device runs queued work while Python queues more. Reading a number with `.item()` makes
Python wait for all of it, and afterwards the device waits for Python. So a step reads nothing: it
starts copies to page-locked memory, and whoever reads a figure waits only for its copy.
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
    """Scalars by name that are being copied to the host. Calling it waits for them and returns
    them; every call returns the same values.

    Integers up to 2^53 stay exact. Tensors on the host must not be changed in place before they are
    read. Tensors on the device are not kept, only their copies, until they are read.
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
    """Start to copy scalars to the host; returns a callable that waits for them."""
    return Reading(numbers)


def read_all(owner: Any) -> None:
    """Read all late fields, so that the page-locked copies behind them are freed.

    It does not wait if the step that computed them has ended.
    """
    for name in list(vars(owner)):
        getattr(owner, name)


class _Late:
    """A field of a frozen dataclass that may hold a function, which is called at the first read."""

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
    """A decorator of frozen dataclasses: these fields may hold functions that wait for the value.

    Reading, comparing, printing, copying or pickling them gives the value.
    """

    def decorate(kind: Kind) -> Kind:
        for name in names:
            setattr(kind, name, _Late(name))
        setattr(kind, "__getstate__", _values)  # noqa: B010, as no type checker knows it for a method of any class
        return kind

    return decorate


class StepTimer:
    """Measures the seconds of one step after another on their device.

    On CPU: from `begin` to `end`. On CUDA: from the end of the work that was queued before `begin`
    to the end of the work that was queued before `end`. The wait for data in between counts. What
    the caller queues between an `end` and the next `begin`, such as an evaluation, does not.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._began: Any = None
        self._ended: Any = None  # of the step before

    def begin(self) -> None:
        self._began = self._now()

    def end(self) -> float | Callable[[], float]:
        """The step's seconds; on CUDA a function that waits for them.

        On CUDA this call itself waits for the end of the step before, so that Python is never more
        than one step ahead of the device.
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
