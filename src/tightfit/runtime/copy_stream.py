"""Copies micro-batches to a CUDA device on a separate copy stream, while the device computes.

If the plan prefetches batches, `loader` puts a `BatchPrefetcher` into the Run. A step then takes
its micro-batches from `BatchPrefetcher.prefetch`, which copies the next micro-batch while the
device computes the current one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tightfit.models.batches import Batch

Copy = Callable[[Tensor], Tensor]


@dataclass
class _ReservedMemory:
    """Device memory that is reserved for the tensors of the next micro-batch.

    tensors  one uninitialized tensor for each tensor of the batch, in order
    since    an event on the compute stream. Earlier work may still use this memory, so the copy
             waits for the event. None on a CPU
    """

    tensors: list[Tensor]
    since: Any


@dataclass(frozen=True)
class _PendingCopy:
    """A micro-batch that is being copied to the device.

    batch    the micro-batch on the device
    arrived  an event on the copy stream, after the last copy; None on a CPU
    """

    batch: Batch
    arrived: Any


class BatchPrefetcher:
    """Copies the next micro-batch to the device while the device computes the current one, so two
    micro-batches are on the device at a time.

    The memory for the next micro-batch is allocated on the compute stream before the computation of
    the current one is launched. So the copy stream has to wait only for work that was launched
    earlier. During the last micro-batch of a step, memory is reserved in the same way for the first
    micro-batch of the next step, whose samples are not known yet. All batches are thus allocated
    and freed in the order of the compute stream, like all other memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._reserved: _ReservedMemory | None = None  # for the next step's first batch
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def prefetch(self, batches: Sequence[Batch], copy_batch: Callable[[Batch, Copy], Batch]) -> Iterator[Batch]:
        """Yield the micro-batches of a step, in order, each copied to the device. While the caller
        computes with one, the next one is being copied.

        batches     the step's micro-batches, on the host
        copy_batch  a function that copies a batch to the device: it gets the batch and a function
                    that copies one tensor, and returns the batch on the device
        """
        reserved, self._reserved = self._reserved, None
        shapes: list[Tensor] = []  # meta tensors like those of the step's first micro-batch
        pending = [self._start_copy(batches[0], copy_batch, reserved, shapes)]
        del reserved
        try:
            for number in range(len(batches)):
                if number + 1 < len(batches):
                    pending.append(self._start_copy(batches[number + 1], copy_batch, None, []))
                else:
                    made = [torch.empty_like(shape, device=self.device) for shape in shapes]
                    self._reserved = _ReservedMemory(made, self._compute_event())
                    del made
                self._wait_on_stream(pending[0])
                yield pending.pop(0).batch
        finally:
            # if the step ended early, the memory may be reused once the pending copies are done
            for one in pending:
                self._wait_on_stream(one)

    def _start_copy(
        self,
        batch: Batch,
        copy_batch: Callable[[Batch, Copy], Batch],
        reserved: _ReservedMemory | None,
        shapes: list[Tensor],
    ) -> _PendingCopy:
        """Begin to copy a batch to the device, and return the pending copy.

        copy_batch  copies the batch with the function that it gets, tensor by tensor, and returns
                    the batch on the device
        reserved    memory that was reserved for this batch; None if there is none. A tensor whose
                    shape differs from the reserved one is copied into new memory
        shapes      a list to which this method appends, for each copied tensor, a meta tensor of
                    the same shape
        """
        left = iter(reserved.tensors if reserved is not None else [])
        if self._stream is not None:
            since = reserved.since if reserved is not None else self._compute_event()
            self._stream.wait_event(since)

        def copy(tensor: Tensor) -> Tensor:
            if tensor.device.type == self.device.type != "cpu":
                return tensor
            target = next(left, None)
            shapes.append(torch.empty_like(tensor, device="meta"))
            if target is None or not _same_layout(target, tensor):
                target = torch.empty_like(tensor, device=self.device)
                # this memory may have been in use until now: the copy waits for the compute stream
                if reserved is not None and self._stream is not None:
                    self._stream.wait_event(self._compute_event())
            if self._stream is None:
                return target.copy_(tensor)
            # pinned, because a copy from pageable memory would block the host
            with torch.cuda.stream(self._stream):
                return target.copy_(tensor if tensor.is_pinned() else tensor.pin_memory(), non_blocking=True)

        copied = copy_batch(batch, copy)
        if self._stream is None:
            return _PendingCopy(copied, None)
        arrived = torch.cuda.Event()
        arrived.record(self._stream)
        return _PendingCopy(copied, arrived)

    def _wait_on_stream(self, pending: _PendingCopy) -> None:
        """Make the compute stream wait until the pending copy has finished. The host does not wait."""
        if pending.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(pending.arrived)

    def _compute_event(self) -> Any:
        """Record an event on the compute stream and return it. It is reached when all work launched
        so far is done. Return None on a CPU."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event


def _same_layout(target: Tensor, tensor: Tensor) -> bool:
    return target.shape == tensor.shape and target.dtype == tensor.dtype and target.stride() == tensor.stride()


__all__ = ["BatchPrefetcher"]
