"""Uploads: micro-batches copied to a CUDA device while it works at the one before, on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tightfit.models.objective import Batch

Copy = Callable[[Tensor], Tensor]


@dataclass
class _Room:
    """Memory on the device for a micro-batch's tensors, in their order. since: an event after which the device's own stream uses
    it for nothing else; None where there are no streams."""

    tensors: list[Tensor]
    since: Any


@dataclass(frozen=True)
class _Coming:
    """A micro-batch on its way. arrived: the event of its last copy."""

    batch: Batch
    arrived: Any


class Uploads:
    """Two micro-batches lie on the device at a time: the one at work, and the next one, which is copied meanwhile.

    Memory for the next one is taken from the device's own stream before the work at this one begins, also for the first one of
    the next step, whose samples come later. So it is used again in the order of that stream, like all other memory, whoever keeps
    a batch, and the other stream waits only for what came before.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._room: _Room | None = None  # for the first micro-batch of the next step
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def one_ahead(self, batches: Sequence[Batch], place: Callable[[Batch, Copy], Batch]) -> Iterator[Batch]:
        """The micro-batches of a step, each on the device. place: a batch on the host, and how to copy a tensor -> the batch
        there."""
        room, self._room = self._room, None
        shapes: list[Tensor] = []  # of the first one's tensors
        coming = [self._start(batches[0], place, room, shapes)]
        del room
        try:
            for number in range(len(batches)):
                if number + 1 < len(batches):
                    coming.append(self._start(batches[number + 1], place, None, []))
                else:
                    made = [torch.empty_like(shape, device=self.device) for shape in shapes]
                    self._room = _Room(made, self._passed())
                    del made
                self._wait_for(coming[0])
                yield coming.pop(0).batch
        finally:
            for one in coming:  # of a step that ended early: nobody may use its memory until the copy is done
                self._wait_for(one)

    def _start(
        self, batch: Batch, place: Callable[[Batch, Copy], Batch], room: _Room | None, shapes: list[Tensor]
    ) -> _Coming:
        """Start to copy a batch, into `room` as far as it fits. Adds what its tensors look like to `shapes`."""
        left = iter(room.tensors if room is not None else [])
        if self._stream is not None:
            since = room.since if room is not None else self._passed()
            self._stream.wait_event(since)

        def copy(tensor: Tensor) -> Tensor:
            if tensor.device.type == self.device.type != "cpu":
                return tensor
            there = next(left, None)
            shapes.append(torch.empty_like(tensor, device="meta"))
            if there is None or not _alike(there, tensor):
                there = torch.empty_like(tensor, device=self.device)
                if room is not None and self._stream is not None:  # memory that was used until now
                    self._stream.wait_event(self._passed())
            if self._stream is None:
                return there.copy_(tensor)
            with torch.cuda.stream(self._stream):  # from pageable memory the host would wait for the copy
                return there.copy_(tensor if tensor.is_pinned() else tensor.pin_memory(), non_blocking=True)

        placed = place(batch, copy)
        if self._stream is None:
            return _Coming(placed, None)
        arrived = torch.cuda.Event()
        arrived.record(self._stream)
        return _Coming(placed, arrived)

    def _wait_for(self, coming: _Coming) -> None:
        """The device's own stream goes on when the copy is done."""
        if coming.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(coming.arrived)

    def _passed(self) -> Any:
        """An event of the device's own stream: what it was given so far is done."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event


def _alike(there: Tensor, tensor: Tensor) -> bool:
    return there.shape == tensor.shape and there.dtype == tensor.dtype and there.stride() == tensor.stride()


__all__ = ["Uploads"]
