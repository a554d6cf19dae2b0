"""Row: one device's part of a pipeline's step, as the timetable has it: forwards, backwards, and what goes to its neighbours."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from tightfit.methods.buckets import made_everywhere
from tightfit.methods.deferred import Deferred
from tightfit.methods.hollow import Elsewhere, Leaves, Passage, not_in_a_row
from tightfit.methods.mesh import Mesh
from tightfit.methods.run import Filler, Run, kind_of, to_device, weights_named
from tightfit.models.objective import Batch
from tightfit.plan import Plan
from tightfit.timetable import BACKWARD, FORWARD, WEIGHTS, Action, timetable

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
DIMS = 8


@dataclass
class _Alive:
    """What a micro-batch's forward leaves for its backward: the piece's input, and what its gradient begins from."""

    input: Tensor | None
    root: Tensor | GradientEdge | None
    scale: float


class Pipeline:
    """A device's part of the timetable: the `Stages` of a Run.

    waited_s  seconds spent until now on waiting for other devices (on a processor; a GPU's queue waits by itself)
    delay   how many steps later than taken a step's loss is known
    copies  names of the weights that an earlier device has too: in a norm over all devices they count once
    """

    def __init__(
        self,
        mesh: Mesh,
        plan: Plan,
        pieces: list[range],
        own: list[int],
        passage: Passage,
        slots: list[tuple[nn.Module, str]],
        kept: dict[int, nn.Module],
        stubs: list[Elsewhere],
        shared: frozenset[str],
    ) -> None:
        self.mesh, self.plan, self.pieces, self.own, self.passage = mesh, plan, pieces, own, passage
        self.slots, self.kept, self.stubs, self.shared = slots, kept, stubs, shared
        self.rank, self.devices = mesh.rank("pp"), mesh.size("pp")
        self.last = len(pieces) - 1
        self.copies = shared if self.rank else frozenset()
        self.alive: dict[tuple[int, int], _Alive] = {}
        self.sending: list[tuple[Any, Tensor]] = []
        self.expected: dict[Action, tuple[Any, Tensor]] = {}
        self.shapes: dict[Any, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        self.losses: deque[float] = deque()
        self.staleness: list[int] = []
        self.waited_s = 0.0
        self.deferred = Deferred() if plan.schedule == "zero-bubble" else None

    delay = 0
    free = False
    counted: tuple[int, int, int] | None = None

    def drain(self, run: Run) -> Iterator[None]:
        """Nothing is left of a step when the next begins."""
        return iter(())

    def accumulate(self, run: Run, micro_batches: list[Batch], scale: float) -> Tensor:
        """Forward and backward of a step's micro-batches, as the timetable has it; returns the sum of the losses that this
        device saw: the last one's."""
        actions = timetable(self.plan.schedule, self.devices, self.plan.virtual_stages, len(micro_batches))[self.rank]
        total: Tensor | None = None
        completing = WEIGHTS if self.deferred is not None else BACKWARD
        final = max(place for place, action in enumerate(actions) if action.kind == completing)
        for place, action in enumerate(actions):
            self._forget_sent()
            ahead = (
                2 if kind_of(run.device) == "cpu" else 0
            )  # of a GPU that receives and waits, others would wait in turn
            for expected in actions[place : place + ahead]:  # in the order in which it is sent
                if not self._expect(expected, micro_batches[expected.micro_batch]):
                    break
            batch = micro_batches[action.micro_batch]
            last = action.micro_batch == len(micro_batches) - 1
            if action.kind == FORWARD:
                total = added(total, self.forward(run, action, batch, scale))
                continue
            if action.kind == BACKWARD and self.deferred is not None:
                with self.deferred.group(action.micro_batch):
                    self.backward(run, action, place == final)
                continue
            if run.reduction is not None:
                run.reduction.begin(last)
            if action.kind == BACKWARD:
                self.backward(run, action, place == final)
            else:
                assert self.deferred is not None
                self.deferred.run(action.micro_batch)
            if run.reduction is not None:
                run.reduction.end(place == final)
        self.finish()
        self._sum_ends(run)
        return torch.zeros((), device=run.device) if total is None else total

    @torch.no_grad()
    def evaluate(self, run: Run, batch: Batch) -> Tensor:
        """The loss of a micro-batch, on the last device; 0 on the others."""
        total: Tensor | None = None
        for piece in self.own:
            total = added(total, self.forward(run, Action(FORWARD, piece, 0), batch, 1.0))
            self.alive.clear()
        self.finish()
        return torch.zeros((), device=run.device) if total is None else total

    def forward(self, run: Run, action: Action, batch: Batch, scale: float) -> Tensor | None:
        """Returns the loss, where this is the last piece and the micro-batch counts."""
        counts = not isinstance(batch, Filler)
        there = to_device(batch if counts else batch.batch, run)
        key = _shapes_of(there)
        taken: list[Tensor] = []

        def take(like: Tensor) -> Tensor:
            taken.append(self._receive(action, key, like).requires_grad_(torch.is_grad_enabled()))
            return taken[0]

        self._enter(action.chunk, take)
        try:
            loss = run.loss_sum(there)
        except Leaves as left:
            left.__traceback__ = None
            hidden = left.hidden
            self._send_hidden(action, key, hidden)
            root = get_gradient_edge(hidden) if hidden.requires_grad else None
            self.alive[action.chunk, action.micro_batch] = _Alive(_first(taken), root, 1.0)
            return None
        finally:
            self._leave(action.chunk)
        if action.chunk != self.last:
            raise not_in_a_row()
        self.passage.end()
        self.alive[action.chunk, action.micro_batch] = _Alive(_first(taken), loss, scale if counts else 0.0)
        return loss.detach() if counts else None

    def backward(self, run: Run, action: Action, final: bool) -> None:
        alive = self.alive.pop((action.chunk, action.micro_batch))
        if isinstance(run.model, FSDPModule):  # the forward ended before the model's own hooks
            run.model.unshard()
            run.model.set_is_last_backward(final)
        if action.chunk == self.last:
            assert isinstance(alive.root, Tensor)
            (alive.root * alive.scale).backward()
        else:
            gradient = self._receive_gradient(action)
            if alive.root is not None:
                torch.autograd.backward([cast(Any, alive.root)], [gradient])
        if action.chunk:
            assert alive.input is not None
            given = alive.input.grad
            self._send(torch.zeros_like(alive.input) if given is None else given, action.chunk - 1, "backward")

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()

    def _enter(self, piece: int, take: Any) -> None:
        self.passage.begin(self.pieces[piece], take)
        for number in self.kept:
            if number not in self.pieces[piece]:
                parent, child = self.slots[number]
                parent._modules[child] = self.stubs[number]

    def _leave(self, piece: int) -> None:
        for number, block in self.kept.items():
            if number not in self.pieces[piece]:
                parent, child = self.slots[number]
                parent._modules[child] = block

    def _line(self, piece: int, other: int, direction: str) -> tuple[dist.ProcessGroup, int]:
        """The group in which two neighbouring pieces talk, and the other one's device."""
        around = " around" if max(piece, other) % self.devices == 0 else ""
        return self.mesh.lines[direction + around], other % self.devices

    def _send(self, tensor: Tensor, piece: int, direction: str) -> None:
        """To the device of `piece`: hidden states forward, their gradients backward."""
        group, device = self._line(piece + (1 if direction == "backward" else -1), piece, direction)
        sent = tensor.detach().contiguous()
        if active_fake_mode() is None:  # who predicts takes it as sent
            self.sending.append((dist.isend(sent, group=group, group_dst=device), sent))

    def _forget_sent(self) -> None:
        self.sending = [(work, tensor) for work, tensor in self.sending if not work.is_completed()]

    def _send_hidden(self, action: Action, key: Any, hidden: Tensor) -> None:
        """The first time that a batch has these shapes, what the hidden states look like goes before them."""
        look = self.passage.form, hidden.dtype, tuple(hidden.shape)
        if (known := (action.chunk, "out", key)) not in self.shapes:
            self.shapes[known] = look
            header = [look[0], TYPES.index(look[1]), len(look[2]), *look[2]]
            words = torch.tensor(header + [0] * (3 + DIMS - len(header)), device=hidden.device)
            self._send(words, action.chunk + 1, "forward")
        self.shapes[action.chunk, "gradient", action.micro_batch] = look
        self._send(hidden, action.chunk + 1, "forward")

    def _expect(self, action: Action, batch: Batch) -> bool:
        """What an action begins with may arrive while the one before it is at work. Returns whether nothing else of it is to
        come: not where its shape is not known yet."""
        if action.kind == FORWARD and action.chunk > 0:
            key = action.chunk, "in", _shapes_of(batch.batch if isinstance(batch, Filler) else batch)
            line = self._line(action.chunk, action.chunk - 1, "forward")
        elif action.kind == BACKWARD and action.chunk < self.last:
            key = action.chunk, "gradient", action.micro_batch
            line = self._line(action.chunk, action.chunk + 1, "backward")
        else:
            return True
        if action in self.expected:
            return True
        if key not in self.shapes:
            return False
        _, dtype, shape = self.shapes[key]
        tensor = torch.empty(shape, dtype=dtype, device=group_device(self.kept))
        predicted = active_fake_mode() is not None
        self.expected[action] = None if predicted else dist.irecv(tensor, group=line[0], group_src=line[1]), tensor
        return True

    def _expected(self, action: Action) -> Tensor | None:
        """What was under way, once it is there."""
        if action not in self.expected:
            return None
        began = time.perf_counter()
        work, tensor = self.expected.pop(action)
        if work is not None:
            work.wait()
        self.waited_s += time.perf_counter() - began
        return tensor

    def _receive(self, action: Action, key: Any, like: Tensor) -> Tensor:
        """The hidden states from the device before. like: what the model hands to its blocks."""
        group, device = self._line(action.chunk, action.chunk - 1, "forward")
        known = action.chunk, "in", key
        if active_fake_mode() is not None:  # who predicts has nobody to ask
            self.shapes[known] = self.passage.form, like.dtype, tuple(like.shape)
        elif known not in self.shapes:
            words = torch.zeros(3 + DIMS, dtype=torch.int64, device=like.device)
            self._wait_for(words, group, device)
            form, kind, dims, *sizes = words.tolist()
            self.shapes[known] = form, TYPES[kind], tuple(sizes[:dims])
        self.passage.form, dtype, shape = self.shapes[known]
        if (expected := self._expected(action)) is not None:
            return expected
        received = torch.empty(shape, dtype=dtype, device=like.device)
        self._wait_for(received, group, device)
        return received

    def _wait_for(self, tensor: Tensor, group: dist.ProcessGroup, device: int) -> None:
        if active_fake_mode() is not None:
            return
        began = time.perf_counter()
        dist.recv(tensor, group=group, group_src=device)
        self.waited_s += time.perf_counter() - began

    def _receive_gradient(self, action: Action) -> Tensor:
        group, device = self._line(action.chunk, action.chunk + 1, "backward")
        _, dtype, shape = self.shapes.pop((action.chunk, "gradient", action.micro_batch))
        if (expected := self._expected(action)) is not None:
            return expected
        gradient = torch.empty(shape, dtype=dtype, device=group_device(self.kept))
        self._wait_for(gradient, group, device)
        return gradient

    @torch.no_grad()
    def _sum_ends(self, run: Run) -> None:
        """Gradients of weights that the first and the last device both use."""
        weights = [weight for weight in weights_named(run, self.shared) if weight.requires_grad]
        if not weights:
            return
        total = partial(dist.all_reduce, group=self.mesh.lines["ends"])
        with made_everywhere(weights, total):
            for weight in weights:
                total(weight.grad)


def added(total: Tensor | None, loss: Tensor | None) -> Tensor | None:
    """A sum of losses, of which a device may have seen none."""
    return loss if total is None else total if loss is None else total + loss


def _shapes_of(batch: Batch) -> Any:
    return tuple(tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def group_device(blocks: dict[int, nn.Module]) -> torch.device:
    return next(parameter.device for block in blocks.values() for parameter in block.parameters())


def _first(tensors: list[Tensor]) -> Tensor | None:
    return tensors[0] if tensors else None
