"""The processes of a parameter server: the server, and workers that send it gradients and receive weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import active_fake_mode

from tightfit.methods.mesh import Mesh, Statistics
from tightfit.methods.run import Data, Filler, Run, Undivided, to_device
from tightfit.models.objective import Batch, processed_count, sample_count
from tightfit.plan import Plan

SERVER = 0  # the rank of the server among the dp_replicate processes


@dataclass(frozen=True)
class ServerData:
    """The server's `Data`: as many steps as the workers', without micro-batches."""

    of: Data

    @property
    def samples(self) -> int | None:
        return self.of.samples

    @property
    def sample_items(self) -> int:
        return self.of.sample_items

    @property
    def ragged(self) -> bool:
        return self.of.ragged

    @property
    def damaged(self) -> int:
        return 0

    @property
    def tokenizer(self) -> Any:
        return self.of.tokenizer

    def steps(self, consumed: int, until: int | None) -> Iterator[list[Batch]]:
        batch = getattr(self.of, "batch", 1)
        while until is None or consumed < until:
            yield []
            consumed += batch

    def held_out(self, samples: int) -> Iterator[Batch]:
        return iter(())

    def example(self) -> Batch:
        return self.of.example()


class GradientBox:
    """What travels between a worker and the server: all gradients in one tensor, and whether each is there; all weights."""

    def __init__(self, parameters: list[nn.Parameter], mesh: Mesh) -> None:
        self.parameters, self.group = parameters, mesh.lines["server"]
        self.sizes = [_real(parameter).numel() for parameter in parameters]
        self.dtype = (
            torch.float64 if any(p.dtype in (torch.float64, torch.complex128) for p in parameters) else torch.float32
        )
        self.workers = range(1, mesh.size("dp_replicate"))

    def empty(self) -> Tensor:
        return torch.empty(sum(self.sizes) + len(self.sizes), dtype=self.dtype)

    def empty_weights(self) -> Tensor:
        return torch.empty(sum(self.sizes), dtype=self.dtype)

    def _flat(self, tensor: Tensor) -> Tensor:
        return _real(tensor.detach()).cpu().to(self.dtype).flatten()

    @torch.no_grad()
    def gradients(self) -> Tensor:
        """This worker's gradients, which it then has no more; behind them a number for each that is there."""
        parts = [
            torch.zeros(size, dtype=self.dtype) if parameter.grad is None else self._flat(parameter.grad)
            for parameter, size in zip(self.parameters, self.sizes, strict=True)
        ]
        there = torch.tensor([parameter.grad is not None for parameter in self.parameters], dtype=self.dtype)
        for parameter in self.parameters:
            parameter.grad = None
        return torch.cat([*parts, there])

    @torch.no_grad()
    def put_gradients(self, flat: Tensor) -> None:
        for parameter, part, there in zip(
            self.parameters, flat.split([*self.sizes, len(self.sizes)]), flat[-len(self.sizes) :].tolist(), strict=False
        ):
            if not there:
                parameter.grad = None
                continue
            parameter.grad = torch.empty_like(parameter)
            _real(parameter.grad).copy_(part.view_as(_real(parameter)))

    @torch.no_grad()
    def weights(self) -> Tensor:
        return torch.cat([self._flat(parameter) for parameter in self.parameters])

    @torch.no_grad()
    def put_weights(self, flat: Tensor) -> None:
        for parameter, part in zip(self.parameters, flat.split(self.sizes), strict=True):
            real = _real(parameter)
            real.copy_(part.view_as(real))


def _real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, which are its own memory."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class _Process(Undivided):
    """What server and workers share, as `Stages` and as `Reduction`."""

    copies: frozenset[str] = frozenset()
    stale: frozenset[str] = frozenset()
    delay = 0
    free = False
    counted: tuple[int, int, int] | None = None

    def __init__(self, box: GradientBox, plan: Plan, statistics: Statistics) -> None:
        self.box, self.plan, self.statistics = box, plan, statistics
        self.losses: deque[Tensor] = deque()
        self.staleness: list[int] = []

    def evaluate(self, run: Run, batch: Batch) -> Tensor:
        if isinstance(batch, Filler):
            return torch.zeros((), device=run.device)
        return run.loss_sum(to_device(batch, run))

    def drain(self, run: Run) -> Iterator[None]:
        """Everybody has the server's weights."""
        if self.free:
            flat = self.box.weights()
            dist.broadcast(flat, SERVER, group=self.box.group)
            self.box.put_weights(flat)
        return iter(())


class Worker(_Process):
    def accumulate(self, run: Run, micro_batches: list[Batch], scale: float | Tensor) -> Tensor:
        """Gradients of this worker's samples, sent to the server; returns the sum of its losses."""
        total = self._backward(run, micro_batches, scale)
        flat = self.box.gradients()
        if active_fake_mode() is None:
            dist.send(flat, SERVER, group=self.box.group)
        self.statistics.average()
        return total

    def _backward(self, run: Run, micro_batches: list[Batch], scale: float | Tensor) -> Tensor:
        total = torch.zeros((), device=run.device)
        for batch in micro_batches:
            if not isinstance(batch, Filler):
                loss = run.loss_sum(to_device(batch, run))
                (loss * scale).backward()
                total += loss.detach()
        return total

    def updated(self) -> None:
        flat = self.box.empty_weights()
        if active_fake_mode() is None:
            dist.broadcast(flat, SERVER, group=self.box.group)
            self.box.put_weights(flat)


class Server(_Process):
    def accumulate(self, run: Run, micro_batches: list[Batch], scale: float | Tensor) -> Tensor:
        """All workers' gradients, summed in their order."""
        total = torch.zeros_like(self.box.empty())
        for worker in self.box.workers:
            flat = self.box.empty()
            if active_fake_mode() is None:
                dist.recv(flat, worker, group=self.box.group)
            total += flat
        self.box.put_gradients(total)
        self.statistics.average(counts=False)
        return torch.zeros((), device=run.device)

    def updated(self) -> None:
        if active_fake_mode() is None:
            dist.broadcast(self.box.weights(), SERVER, group=self.box.group)


_HEAD = 7  # worker, its step, the version its weights were, items, samples, processed, sum of losses


class AsyncWorker(Worker):
    """Sends the mean gradient of its own samples, and goes on with the weights that come back."""

    free = True

    def __init__(self, box: GradientBox, plan: Plan, statistics: Statistics) -> None:
        super().__init__(box, plan, statistics)
        self.step = self.version = 0

    def accumulate(self, run: Run, micro_batches: list[Batch], scale: float | Tensor) -> Tensor:
        real = [batch for batch in micro_batches if not isinstance(batch, Filler)]
        items = sum(map(run.objective.count, real))
        total = self._backward(run, micro_batches, scale)
        counts = [items, sum(map(sample_count, real)), sum(map(processed_count, real))]
        if active_fake_mode() is not None:
            self.box.gradients()
            return total
        head = torch.tensor([dist.get_rank(), self.step, self.version, *counts, float(total)], dtype=torch.float64)
        dist.send(head, SERVER, group=self.box.group)
        dist.send(self.box.gradients(), SERVER, group=self.box.group)
        self.step += 1
        return total

    def updated(self) -> None:
        version, flat = torch.zeros(1, dtype=torch.int64), self.box.empty_weights()
        if active_fake_mode() is not None:
            return
        dist.recv(version, SERVER, group=self.box.group)
        dist.recv(flat, SERVER, group=self.box.group)
        self.version = int(version)
        self.box.put_weights(flat)


class AsyncServer(_Process):
    """Applies each worker's gradient when it arrives, and sends the weights back.

    A worker that is `staleness` steps ahead of the slowest gets them when that one has come closer.
    log  (worker, its step, the version that its gradient is of) of each update, in order: all that chance decided
    """

    free = True

    def __init__(self, box: GradientBox, plan: Plan, statistics: Statistics) -> None:
        super().__init__(box, plan, statistics)
        self.version = 0
        self.done = dict.fromkeys(box.workers, 0)
        self.waiting: list[int] = []
        self.log: list[tuple[int, int, int]] = []

    def accumulate(self, run: Run, micro_batches: list[Batch], scale: float | Tensor) -> Tensor:
        """As many arrivals as there are workers; the update of the last one follows."""
        counts, total = [0, 0, 0], 0.0
        self.staleness = []
        for left in reversed(self.box.workers):
            head = torch.zeros(_HEAD, dtype=torch.float64)
            dist.recv(head, group=self.box.group)
            worker, step, version, *numbers, loss = head.tolist()
            flat = self.box.empty()
            dist.recv(flat, int(worker), group=self.box.group)
            counts = [count + int(number) for count, number in zip(counts, numbers, strict=True)]
            total += loss
            self.staleness.append(self.version - int(version))
            self.log.append((int(worker), int(step), int(version)))
            self.done[int(worker)] += 1
            self.waiting.append(int(worker))
            if numbers[0]:
                self.box.put_gradients(flat)
            if left > 1:
                run.optimizer.step()
                run.optimizer.zero_grad(set_to_none=True)
                self.updated()
        self.counted = counts[0], counts[1], counts[2]
        return torch.tensor(total)

    def updated(self) -> None:
        """An update was done: whoever waits and may go on gets the weights."""
        self.version += 1
        slowest, bound = min(self.done.values()), self.plan.staleness
        due = [worker for worker in self.waiting if bound is None or self.done[worker] - slowest <= bound]
        for worker in due:
            dist.send(torch.tensor([self.version]), worker, group=self.box.group)
            dist.send(self.box.weights(), worker, group=self.box.group)
            self.waiting.remove(worker)
