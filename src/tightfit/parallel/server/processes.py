"""Train with a parameter server: the workers send gradients to the server process, and the server
sends updated weights to the workers.

In each process, `parameter_server` makes an object of one of four classes: Worker or Server for
synchronous updates, AsyncWorker or AsyncServer for asynchronous updates. This object is the run's
StepExecutor and its Reduction. Messages are tensors in host memory, sent in the "server" group of
the mesh.

Example of asynchronous updates with two workers: both workers begin with version 0 of the weights.
The gradient of worker 1 arrives first. The server applies the gradient and sends version 1 to
worker 1. Then the gradient of worker 2 arrives, which was computed with version 0: its staleness is
1 - 0 = 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tightfit._torch.fake import active_fake_mode
from tightfit.distributed.mesh import Mesh
from tightfit.distributed.replicas import ReplicatedBuffers
from tightfit.models.batches import Batch, processed_count, sample_count
from tightfit.optim.gradient_dtype import empty_gradient
from tightfit.plan import Plan
from tightfit.runtime.run import Data, DummyMicroBatch, Run, UnshardedReduction, to_device

SERVER = 0  # the rank of the server among the dp_replicate processes


@dataclass(frozen=True)
class ServerData:
    """The `Data` of the server process. The server computes no loss, so each step has no
    micro-batches.

    worker_data  the `Data` of the workers
    """

    worker_data: Data

    @property
    def samples(self) -> int | None:
        return self.worker_data.samples

    @property
    def sample_items(self) -> int:
        return self.worker_data.sample_items

    @property
    def ragged(self) -> bool:
        return self.worker_data.ragged

    @property
    def damaged(self) -> int:
        return 0

    @property
    def tokenizer(self) -> Any:
        return self.worker_data.tokenizer

    def steps(self, consumed: int, until: int | None) -> Iterator[list[Batch]]:
        """Yield an empty list of micro-batches for each step of the workers.

        consumed  the number of samples that earlier steps have used
        until     the number of samples after which to stop; None: never stop
        """
        batch = getattr(self.worker_data, "batch", 1)
        while until is None or consumed < until:
            yield []
            consumed += batch

    def held_out(self, samples: int | None) -> Iterator[Batch]:
        """Return an iterator without batches, because only the workers evaluate."""
        return iter(())

    def example(self) -> Batch:
        return self.worker_data.example()


class ParameterMessages:
    """Converts gradients and weights to the flat tensors that a worker and the server exchange, and
    back.

    The flat tensors are in host memory. Their dtype is fp64 if any parameter is fp64 or complex128,
    else fp32. A complex number takes two elements.

    parameters  the model's parameters, in the same order in all processes
    mesh        the devices, with a "server" group
    """

    def __init__(self, parameters: list[nn.Parameter], mesh: Mesh) -> None:
        self.parameters, self.group = parameters, mesh.other_groups["server"]
        self.sizes = [_as_real(parameter).numel() for parameter in parameters]
        self.dtype = (
            torch.float64 if any(p.dtype in (torch.float64, torch.complex128) for p in parameters) else torch.float32
        )
        self.workers = range(1, mesh.size("dp_replicate"))

    def empty(self) -> Tensor:
        """Return an uninitialized tensor for a message of gradients. It has one element for each
        parameter element (two for a complex one), and then one flag for each parameter.
        """
        return torch.empty(sum(self.sizes) + len(self.sizes), dtype=self.dtype)

    def empty_weights(self) -> Tensor:
        """Return an uninitialized tensor for a message of weights. It has one element for each
        parameter element (two for a complex one).
        """
        return torch.empty(sum(self.sizes), dtype=self.dtype)

    def _to_flat(self, tensor: Tensor) -> Tensor:
        """Return a flat copy of `tensor` in host memory, in the dtype of the messages."""
        return _as_real(tensor.detach()).cpu().to(self.dtype).flatten()

    @torch.no_grad()
    def gradients(self) -> Tensor:
        """Return this worker's gradients as one message, and set the parameters' `.grad` to None.

        The message holds the gradients of all parameters, with zeros for a missing gradient, and
        then one flag for each parameter: 1 if it has a gradient, else 0.
        """
        parts = [
            torch.zeros(size, dtype=self.dtype) if parameter.grad is None else self._to_flat(parameter.grad)
            for parameter, size in zip(self.parameters, self.sizes, strict=True)
        ]
        flags = torch.tensor([parameter.grad is not None for parameter in self.parameters], dtype=self.dtype)
        for parameter in self.parameters:
            parameter.grad = None
        return torch.cat([*parts, flags])

    @torch.no_grad()
    def put_gradients(self, flat: Tensor) -> None:
        """Set the parameters' `.grad` from a message.

        flat  a message that `gradients` returned on a worker, or the sum of such messages. If a
              parameter's flag is 0, no worker has a gradient for it, and its `.grad` becomes None
        """
        for parameter, part, has_gradient in zip(
            self.parameters, flat.split([*self.sizes, len(self.sizes)]), flat[-len(self.sizes) :].tolist(), strict=False
        ):
            if not has_gradient:
                parameter.grad = None
                continue
            parameter.grad = empty_gradient(parameter)
            _as_real(parameter.grad).copy_(part.view_as(_as_real(parameter)))

    @torch.no_grad()
    def weights(self) -> Tensor:
        """Return the values of all parameters as one message."""
        return torch.cat([self._to_flat(parameter) for parameter in self.parameters])

    @torch.no_grad()
    def put_weights(self, flat: Tensor) -> None:
        """Set the parameters, in place, from a message that another process got from `weights`."""
        for parameter, part in zip(self.parameters, flat.split(self.sizes), strict=True):
            real = _as_real(parameter)
            real.copy_(part.view_as(real))


def _as_real(tensor: Tensor) -> Tensor:
    """Return a view of a complex tensor as real numbers, with a last dimension of size 2. Return
    any other tensor as it is.
    """
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class _ServerProcess(UnshardedReduction):
    """Base class of the server and worker processes. Each is the StepExecutor and the Reduction of
    its run.

    box         makes and reads the messages
    plan        the plan
    statistics  averages the buffers that a forward writes over the workers
    """

    copies_of_earlier_ranks: frozenset[str] = frozenset()
    stale_buffers: frozenset[str] = frozenset()
    loss_delay = 0
    unsynchronized = False
    counted: tuple[int, int, int] | None = None

    def __init__(self, box: ParameterMessages, plan: Plan, statistics: ReplicatedBuffers) -> None:
        self.box, self.plan, self.statistics = box, plan, statistics
        self.losses: deque[Tensor] = deque()
        self.staleness: list[int] = []

    def evaluate(self, run: Run, batch: Batch) -> Tensor:
        """Return the summed loss of an evaluation batch; 0 for a DummyMicroBatch."""
        if isinstance(batch, DummyMicroBatch):
            return torch.zeros((), device=run.device)
        return run.loss_sum(to_device(batch, run))

    def drain(self, run: Run) -> Iterator[None]:
        """Make the weights of all processes equal after asynchronous updates: the server broadcasts
        its weights. After synchronous updates they are equal already. `engine/step.py` calls this
        before an evaluation, before a checkpoint and at the end of the training.

        Returns an empty iterator, because no step is in flight.
        """
        if self.unsynchronized:
            flat = self.box.weights()
            dist.broadcast(flat, SERVER, group=self.box.group)
            self.box.put_weights(flat)
        return iter(())


class Worker(_ServerProcess):
    """A worker with synchronous updates. In each step it sends its gradients to the server, and
    waits for the updated weights.
    """

    def accumulate(self, run: Run, micro_batches: list[Batch], scale: float | Tensor) -> Tensor:
        """Compute the gradients of this worker's samples, and send them to the server.

        scale  the factor of the losses in backward

        Returns the summed loss of this worker's samples, without the factor.
        """
        total = self._run_backward(run, micro_batches, scale)
        flat = self.box.gradients()
        if active_fake_mode() is None:
            dist.send(flat, SERVER, group=self.box.group)
        self.statistics.average()
        return total

    def _run_backward(self, run: Run, micro_batches: list[Batch], scale: float | Tensor) -> Tensor:
        total = torch.zeros((), device=run.device)
        for batch in micro_batches:
            if not isinstance(batch, DummyMicroBatch):
                loss = run.loss_sum(to_device(batch, run))
                (loss * scale).backward()
                total += loss.detach()
        return total

    def updated(self) -> None:
        """Receive the updated weights from the server, and put them into the model."""
        flat = self.box.empty_weights()
        if active_fake_mode() is None:
            dist.broadcast(flat, SERVER, group=self.box.group)
            self.box.put_weights(flat)


class Server(_ServerProcess):
    """The server with synchronous updates. In each step it sums the gradients of all workers for
    one update.
    """

    def accumulate(self, run: Run, micro_batches: list[Batch], scale: float | Tensor) -> Tensor:
        """Receive the gradients of all workers, and set the parameters' `.grad` to their sum.

        The sum is computed in the order of the workers, so it does not depend on timing. Returns 0
        as the loss, because the server has no samples. The arguments micro_batches and scale are
        not used.
        """
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
        """Broadcast the updated weights to all workers."""
        if active_fake_mode() is None:
            dist.broadcast(self.box.weights(), SERVER, group=self.box.group)


# worker, its step, the version of its weights, items, samples, processed items, summed loss
_HEADER_LENGTH = 7


class AsyncWorker(Worker):
    """A worker with asynchronous updates. In each step it sends the gradient of its own samples to
    the server, and continues with the weights that it receives.

    The server has updated these weights by this gradient, and perhaps by the gradients of other
    workers.
    """

    unsynchronized = True

    def __init__(self, box: ParameterMessages, plan: Plan, statistics: ReplicatedBuffers) -> None:
        super().__init__(box, plan, statistics)
        self.step = self.version = 0

    def accumulate(self, run: Run, micro_batches: list[Batch], scale: float | Tensor) -> Tensor:
        """Compute the gradients of this worker's samples. Send them to the server, after a header
        with this worker's rank, its step, the version of its weights, its counts of samples and its
        loss.

        scale  the factor of the losses in backward

        Returns the summed loss of this worker's samples, without the factor.
        """
        real = [batch for batch in micro_batches if not isinstance(batch, DummyMicroBatch)]
        items = sum(map(run.objective.count, real))
        total = self._run_backward(run, micro_batches, scale)
        counts = [items, sum(map(sample_count, real)), sum(map(processed_count, real))]
        if active_fake_mode() is not None:
            self.box.gradients()
            return total
        header = torch.tensor([dist.get_rank(), self.step, self.version, *counts, float(total)], dtype=torch.float64)
        dist.send(header, SERVER, group=self.box.group)
        dist.send(self.box.gradients(), SERVER, group=self.box.group)
        self.step += 1
        return total

    def updated(self) -> None:
        """Receive the weights and their version number from the server, and put the weights into
        the model.

        A worker that is more than the plan's `staleness` steps ahead of the slowest worker waits
        here, because the server sends nothing until the slowest worker has caught up.
        """
        version, flat = torch.zeros(1, dtype=torch.int64), self.box.empty_weights()
        if active_fake_mode() is not None:
            return
        dist.recv(version, SERVER, group=self.box.group)
        dist.recv(flat, SERVER, group=self.box.group)
        self.version = int(version)
        self.box.put_weights(flat)


class AsyncServer(_ServerProcess):
    """The server with asynchronous updates. It applies each gradient as soon as it arrives, and
    sends the updated weights to the worker that sent the gradient.

    A worker that is more than the plan's `staleness` steps ahead of the slowest worker gets the
    weights only after the slowest worker has caught up.

    version  the number of updates so far
    done     worker -> the number of its gradients that have arrived
    waiting  workers to which no weights have been sent since their last gradient
    log      for each gradient, in the order of arrival: (worker, the worker's step, the version of
             the weights with which the gradient was computed). In a repeated run, only this order
             and these versions may differ
    """

    unsynchronized = True

    def __init__(self, box: ParameterMessages, plan: Plan, statistics: ReplicatedBuffers) -> None:
        super().__init__(box, plan, statistics)
        self.version = 0
        self.done = dict.fromkeys(box.workers, 0)
        self.waiting: list[int] = []
        self.log: list[tuple[int, int, int]] = []

    def accumulate(self, run: Run, micro_batches: list[Batch], scale: float | Tensor) -> Tensor:
        """Receive as many gradients as there are workers, and update the weights after each
        gradient but the last. The caller does the last update.

        One worker may send several of these gradients. Returns the sum of the losses that the
        workers sent. The arguments micro_batches and scale are not used.
        """
        counts, total = [0, 0, 0], 0.0
        self.staleness = []
        for left in reversed(self.box.workers):
            header = torch.zeros(_HEADER_LENGTH, dtype=torch.float64)
            dist.recv(header, group=self.box.group)
            worker, step, version, *numbers, loss = header.tolist()
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
        """Count an update, and send the newest weights to the waiting workers that may continue.

        A worker may continue if it is at most the plan's `staleness` steps ahead of the slowest
        worker. Without a `staleness`, each may.
        """
        self.version += 1
        slowest, bound = min(self.done.values()), self.plan.staleness
        due = [worker for worker in self.waiting if bound is None or self.done[worker] - slowest <= bound]
        for worker in due:
            dist.send(torch.tensor([self.version]), worker, group=self.box.group)
            dist.send(self.box.weights(), worker, group=self.box.group)
            self.waiting.remove(worker)
