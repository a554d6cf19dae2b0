"""Readings: numbers that a device is computing, brought to the host beside its work, and waited for when somebody asks.

A CUDA device works through what it was given while Python prepares more. Whoever reads one of its numbers waits until it has
done everything, and it then waits for Python in turn. So a step reads nothing: it starts copies to page-locked memory, and
whoever asks for a figure waits for its copy only.
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
    """Scalars by name, on their way from the device to the host; called, it waits for them, and gives the same ones each time.

    Whole numbers up to 2^53 stay exact. Nobody may change tensors on the host in place until they are read. Of those on the
    device only their copies are kept, and these until they are read.
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
    """Start to read scalars; what it returns waits for them."""
    return Reading(numbers)


def settle(owner: Any) -> None:
    """Read all late fields, and so let go of what they come from: of a step whose end was waited for, nobody waits."""
    for name in list(vars(owner)):
        getattr(owner, name)


class _Late:
    """A field of a frozen dataclass that may be given as a function: it is called when the field is first read."""

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
    """A decorator of frozen dataclasses: these fields may be given as functions that wait for the value, and are values to
    whoever reads, compares, prints, copies or pickles them."""

    def decorate(kind: Kind) -> Kind:
        for name in names:
            setattr(kind, name, _Late(name))
        setattr(kind, "__getstate__", _values)  # noqa: B010, as no type checker knows it for a method of any class
        return kind

    return decorate


class Clock:
    """Seconds of one step after another, as its device sees them.

    On CPU: from `begin` to `end`. On CUDA: from when the device has done what was asked of it before `begin`, to when it has
    done what was asked of it before `end`. It waits for data in between like everybody else, so that is counted; what the
    caller asks of it between an `end` and the next `begin`, such as an evaluation, is not.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._began: Any = None
        self._ended: Any = None  # of the step before

    def begin(self) -> None:
        self._began = self._now()

    def end(self) -> float | Callable[[], float]:
        """The step's seconds; on CUDA a function that waits for them. There it waits until the step before this one has ended,
        so that Python is never more than a step ahead."""
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


__all__ = ["Clock", "begin_reading", "read_late", "settle"]
