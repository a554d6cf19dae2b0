"""Row: one device's part of a pipeline's step, as the timetable has it: forwards, backwards, and what goes to its neighbours."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from tightfit.errors import InputError
from tightfit.methods.buckets import made_everywhere
from tightfit.methods.deferred import Deferred
from tightfit.methods.hollow import Elsewhere, Here, Leaves, Passage
from tightfit.methods.mesh import Mesh
from tightfit.methods.run import Filler, Run, to_device, weights_named, without_full_masks
from tightfit.models.dataflow import not_in_a_row, sample_shapes
from tightfit.models.objective import Batch, sample_count
from tightfit.plan import Plan
from tightfit.target_device import kind_of
from tightfit.timetable import BACKWARD, FORWARD, WEIGHTS, Action, coming, given_by, taken_by, timetable

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
DIMS = 8


@dataclass
class _Alive:
    """What a micro-batch's forward leaves for its backward: what its gradients begin from, and where those of what came end."""

    came: _Came
    roots: list[Any]
    scale: float | Tensor = 1.0


class _Came:
    """The tensors that a stage was sent for a micro-batch; backward leaves their gradients here."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.differentiable: list[bool] = []
        self.like: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self.gradients: tuple[Tensor | None, ...] = ()

    def entered(self) -> list[Tensor]:
        """The tensors, as the model gets them: what it does to them is followed."""
        followed = [tensor for tensor, is_so in zip(self.tensors, self.differentiable, strict=True) if is_so]
        if not (followed and torch.is_grad_enabled()):
            return self.tensors
        self.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in followed]
        anchor = torch.empty(0, device=followed[0].device, requires_grad=True)
        entered = iter(_Entered.apply(anchor, self, followed))
        found = [next(entered) if is_so else t for t, is_so in zip(self.tensors, self.differentiable, strict=True)]
        self.tensors = []
        return found

    def backward(self) -> list[Tensor | None]:
        """Gradients of those that may have one; None of one that leads to no loss."""
        return list(self.gradients or (None,) * len(self.like))

    def zeros(self, place: int) -> Tensor:
        shape, dtype, device = self.like[place]
        return torch.zeros(shape, dtype=dtype, device=device)


class _Entered(torch.autograd.Function):
    """Forward what came from the stage before; backward leaves its gradients to be sent there."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, came: _Came, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.came = came
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.came.gradients = gradients
        return None, None, None


Look = tuple[
    torch.dtype, tuple[int, ...], bool
]  # a tensor that is sent: its type, its shape, and whether it has a gradient


class Pipeline:
    """A device's part of the timetable: the `Stages` of a Run.

    sending   what was sent and may not have arrived: by the action that takes it, its work and the tensor
    expected  what was asked for before the action that takes it: of each tensor the work, and where it arrives
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
        stale: frozenset[str] = frozenset(),
    ) -> None:
        self.mesh, self.plan, self.pieces, self.own, self.passage = mesh, plan, pieces, own, passage
        self.slots, self.kept, self.stubs, self.shared, self.stale = slots, kept, stubs, shared, stale
        self.here = {number: Here(number, passage, block) for number, block in kept.items()}
        self.rank, self.devices = mesh.rank("pp"), mesh.size("pp")
        self.device = mesh.device  # not that of a parameter, which may be offloaded
        self.last = len(pieces) - 1
        self.copies = shared if self.rank else frozenset()
        self.alive: dict[tuple[int, int], _Alive] = {}
        self.sending: list[tuple[Action, Any, Tensor]] = []
        self.order: dict[Action, int] = {}
        self.expected: dict[Action, list[tuple[Any, Tensor]]] = {}
        self.shapes: dict[Any, list[Look]] = {}
        self.used: dict[tuple[int, str], list[bool]] = {}  # whether what a piece is given or gives has a gradient
        self.losses: deque[Tensor] = deque()
        self.staleness: list[int] = []
        self.waited_s = 0.0
        self.deferred = Deferred() if plan.schedule == "zero-bubble" else None

    delay = 0
    free = False
    counted: tuple[int, int, int] | None = None

    def drain(self, run: Run) -> Iterator[None]:
        """Nothing is left of a step when the next begins."""
        return iter(())

    def accumulate(self, run: Run, micro_batches: list[Batch], scale: float | Tensor) -> Tensor:
        """Forward and backward of a step's micro-batches, as the timetable has it; returns the sum of the losses that this
        device saw: the last one's."""
        return self._play(run, micro_batches, scale, self.plan.schedule)

    def once(self, run: Run, batch: Batch, scale: float | Tensor) -> Tensor:
        """Forward and backward of one micro-batch by itself, whatever the schedule; returns its loss, on the last device."""
        schedule = "1f1b" if self.plan.schedule == "pipedream" else self.plan.schedule
        return self._play(run, [batch], scale, schedule)

    def _play(self, run: Run, micro_batches: list[Batch], scale: float | Tensor, schedule: str) -> Tensor:
        table = timetable(schedule, self.devices, self.plan.virtual_stages, len(micro_batches))
        actions = table[self.rank]
        self.order = {action: place for own in table for place, action in enumerate(own)}
        total: Tensor | None = None
        completing = WEIGHTS if self.deferred is not None else BACKWARD
        final = max(place for place, action in enumerate(actions) if action.kind == completing)
        stops = kind_of(run.device) != "cpu"
        comes = coming(schedule, self.devices, self.plan.virtual_stages, len(micro_batches), self.rank, stops)
        for place, (action, after) in enumerate(zip(actions, comes, strict=True)):
            self._forget_sent(run)
            self._ask_for(run, [(one, micro_batches[one.micro_batch]) for one in (action, after) if one is not None])
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
        self.order = {Action(FORWARD, piece, 0): piece for piece in range(len(self.pieces))}
        for piece in self.own:
            total = added(total, self.forward(run, Action(FORWARD, piece, 0), batch, 1.0))
            self.alive.clear()
        self.finish()
        return torch.zeros((), device=run.device) if total is None else total

    def forward(self, run: Run, action: Action, batch: Batch, scale: float | Tensor) -> Tensor | None:
        """Returns the loss, where this is the last piece and the micro-batch counts."""
        counts = not isinstance(batch, Filler)
        there = to_device(batch if counts else batch.batch, run)
        key = _key_of(there)
        came = _Came()

        def take(given: list[Tensor]) -> list[Tensor]:
            self._receive(action, key, given, came)
            return came.entered()

        self._enter(action.chunk, take, there)
        try:
            loss = run.loss_sum(there)
        except Leaves as left:
            left.__traceback__ = None
            sent = left.sent
            self._send_forward(action, key, sent)
            roots = [get_gradient_edge(tensor) for tensor in sent if tensor.requires_grad]
            self.alive[action.chunk, action.micro_batch] = _Alive(came, roots)
            return None
        finally:
            self._leave(action.chunk)
        if action.chunk != self.last:
            raise not_in_a_row()
        self.passage.end()
        self.alive[action.chunk, action.micro_batch] = _Alive(came, [loss], scale if counts else 0.0)
        return (
            loss.detach().float() if counts else None
        )  # as the devices without a loss have it: their sums are one collective

    def backward(self, run: Run, action: Action, final: bool) -> None:
        alive = self.alive.pop((action.chunk, action.micro_batch))
        if isinstance(run.model, FSDPModule):  # the forward ended before the model's own hooks
            run.model.unshard()
            run.model.set_is_last_backward(final)
        if action.chunk == self.last:
            (alive.roots[0] * alive.scale).backward()
        else:
            found = zip(alive.roots, self._receive_gradients(action), strict=True)
            there = [(root, gradient) for root, gradient in found if gradient is not None]
            if there:
                torch.autograd.backward([root for root, _ in there], [gradient for _, gradient in there])
        if action.chunk:
            self._send_gradients(action, alive.came)

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        self._let_go(lambda taken: True)

    def place_of(self, action: Action) -> Any:
        """Where an action stands among those of its device."""
        return self.order[action]

    def _let_go(self, has_arrived: Callable[[Action], bool]) -> None:
        """Of what was sent. has_arrived: whether what an action takes is there."""
        there, self.sending = self.sending, [one for one in self.sending if not has_arrived(one[0])]
        for taken, work, _ in there:
            if work is not None and has_arrived(taken):
                work.wait()

    def _learn_from(self, action: Action) -> None:
        """What an action begins with has come: what its sender took before it sent this has arrived."""
        given = given_by(action)
        sender, place = given.chunk % self.devices, self.place_of(given)
        self._let_go(lambda taken: taken.chunk % self.devices == sender and self.place_of(taken) <= place)

    def _enter(self, piece: int, take: Any, batch: Batch) -> None:
        self.passage.begin(self.pieces[piece], take, sample_count(batch), sample_shapes(batch))
        for number in self.kept:
            parent, child = self.slots[number]
            parent._modules[child] = self.here[number] if number in self.pieces[piece] else self.stubs[number]

    def _leave(self, piece: int) -> None:
        for number, block in self.kept.items():
            parent, child = self.slots[number]
            parent._modules[child] = block

    def _line(self, piece: int, other: int, direction: str) -> tuple[dist.ProcessGroup, int]:
        """The group in which two neighbouring pieces talk, and the other one's device."""
        around = " around" if max(piece, other) % self.devices == 0 else ""
        return self.mesh.lines[direction + around], other % self.devices

    def _send(self, tensor: Tensor, action: Action, direction: str) -> None:
        """What an action made, to the device that goes on with it: hidden states forward, their gradients backward."""
        taken = taken_by(action)
        group, device = self._line(action.chunk, taken.chunk, direction)
        sent = tensor.detach().contiguous()
        predicted = active_fake_mode() is not None
        self.sending.append((taken, None if predicted else dist.isend(sent, group=group, group_dst=device), sent))

    def _forget_sent(self, run: Run) -> None:
        """Let go of what has arrived. A GPU says so itself; gloo never does, so there it is known by `_learn_from`."""
        if kind_of(run.device) != "cpu":
            self.sending = [one for one in self.sending if one[1] is not None and not one[1].is_completed()]

    def _send_forward(self, action: Action, key: Any, tensors: list[Tensor]) -> None:
        """The first time that a batch has these shapes, what the tensors look like goes before them."""
        looks = [(tensor.dtype, tuple(tensor.shape), tensor.requires_grad) for tensor in tensors]
        if tensors and (known := (action.chunk, "out", key)) not in self.shapes:
            self.shapes[known] = looks
            words = torch.zeros(len(looks), 3 + DIMS, dtype=torch.int64, device=tensors[0].device)
            for row, (dtype, shape, is_differentiable) in enumerate(looks):
                header = [TYPES.index(dtype), int(is_differentiable), len(shape), *shape]
                words[row, : len(header)] = torch.tensor(header)
            self._send(words, action, "forward")
        if torch.is_grad_enabled():  # an evaluation's forward has no backward that would take it
            self.shapes[action.chunk, "gradient", action.micro_batch] = [look for look in looks if look[2]]
        for tensor in tensors:
            self._send(tensor, action, "forward")

    def _ask_for(self, run: Run, actions: Iterable[tuple[Action, Batch]]) -> None:
        """Post the receives of what these actions begin with, each with its micro-batch, in their order: in which they are sent.
        Nothing after the first one whose shape is not known, for it has to be asked for first."""
        for action, batch in actions:
            if action not in self.expected and not self._expect(run, action, batch):
                break

    def _expect(self, run: Run, action: Action, batch: Batch) -> bool:
        """What an action begins with may arrive while the one before it is at work. Returns whether nothing else of it is to
        come: not where its shape is not known yet."""
        if action.kind == FORWARD and action.chunk > 0:
            there = without_full_masks(batch.batch if isinstance(batch, Filler) else batch, run)
            key = action.chunk, "in", _key_of(there)
            line = self._line(action.chunk, action.chunk - 1, "forward")
        elif action.kind == BACKWARD and action.chunk < self.last:
            key = action.chunk, "gradient", action.micro_batch
            line = self._line(action.chunk, action.chunk + 1, "backward")
        else:
            return True
        looks = self.shapes.get(key)
        if looks and action.kind == BACKWARD:
            used = self.used.get((action.chunk, "out"))
            looks = None if used is None else [look for look, is_so in zip(looks, used, strict=True) if is_so]
        if looks is None:
            return False
        predicted = active_fake_mode() is not None
        self.expected[action] = []
        for dtype, shape, _ in looks:
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            work = None if predicted else dist.irecv(tensor, group=line[0], group_src=line[1])
            self.expected[action].append((work, tensor))
        return True

    def _arrived(self, action: Action, looks: list[Look], other: int, direction: str) -> list[Tensor]:
        """What looks so, from the device of the piece `other`: once it is there, where it was under way."""
        group, device = self._line(action.chunk, other, direction)
        found = []
        if action in self.expected:
            for work, tensor in self.expected.pop(action):
                self._finish(work)
                found.append(tensor)
        else:
            for dtype, shape, _ in looks:
                found.append(torch.empty(shape, dtype=dtype, device=self.device))
                self._wait_for(found[-1], group, device)
        if found:
            self._learn_from(action)
        return found

    def _receive(self, action: Action, key: Any, given: list[Tensor], came: _Came) -> None:
        """What the stage before sends in the place of `given`, which the model hands to the stage's first block."""
        group, device = self._line(action.chunk, action.chunk - 1, "forward")
        known = action.chunk, "in", key
        if active_fake_mode() is not None:  # who predicts has nobody to ask
            floating = [one.is_floating_point() and torch.is_grad_enabled() for one in given]
            self.shapes[known] = [
                (one.dtype, tuple(one.shape), is_so) for one, is_so in zip(given, floating, strict=True)
            ]
        elif not given:
            self.shapes[known] = []
        elif known not in self.shapes:
            words = torch.zeros(len(given), 3 + DIMS, dtype=torch.int64, device=given[0].device)
            self._wait_for(words, group, device)
            rows = words.tolist()
            self.shapes[known] = [(TYPES[row[0]], tuple(row[3 : 3 + row[2]]), bool(row[1])) for row in rows]
        looks = self.shapes[known]
        came.tensors = self._arrived(action, looks, action.chunk - 1, "forward")
        came.differentiable = [look[2] for look in looks]

    def _wait_for(self, tensor: Tensor, group: dist.ProcessGroup, device: int) -> None:
        if active_fake_mode() is not None:
            return
        began = time.perf_counter()
        dist.recv(tensor, group=group, group_src=device)
        self.waited_s += time.perf_counter() - began

    def _finish(self, work: Any) -> None:
        """Wait for what was asked for; a GPU's stream does, not the host."""
        began = time.perf_counter()
        if work is not None:
            work.wait()
        self.waited_s += time.perf_counter() - began

    def _send_gradients(self, action: Action, came: _Came) -> None:
        """Which of what came have a gradient goes before the first ones: of those that have none, none is sent. Weights that lead to
        no loss have to stay without a gradient, as optimizers leave those alone."""
        gradients, known = came.backward(), (action.chunk, "in")
        if gradients and known not in self.used:
            self.used[known] = [gradient is not None for gradient in gradients]
            self._send(torch.tensor(self.used[known], dtype=torch.int64, device=came.like[0][2]), action, "backward")
        for place, gradient in enumerate(gradients):
            if self.used[known][place]:
                self._send(came.zeros(place) if gradient is None else gradient, action, "backward")
            elif gradient is not None:
                raise InputError(
                    "plan: pp",
                    f"what stage {action.chunk + 1} is given has a gradient in some micro-batches only",
                    "use pp: 1; zero: 3 or tp divide a model too",
                )

    def _receive_gradients(self, action: Action) -> list[Tensor | None]:
        looks = self.shapes.pop((action.chunk, "gradient", action.micro_batch))
        if not looks:
            return []
        known = action.chunk, "out"
        if active_fake_mode() is not None:
            self.used[known] = [True] * len(looks)
        elif known not in self.used:
            words = torch.zeros(len(looks), dtype=torch.int64, device=self.device)
            self._wait_for(words, *self._line(action.chunk, action.chunk + 1, "backward"))
            self.used[known] = [bool(word) for word in words.tolist()]
        used = self.used[known]
        arriving = [look for look, is_so in zip(looks, used, strict=True) if is_so]
        arrived = iter(self._arrived(action, arriving, action.chunk + 1, "backward"))
        return [next(arrived) if is_so else None for is_so in used]

    @torch.no_grad()
    def _sum_ends(self, run: Run) -> None:
        """Gradients of weights that the first and the last device both use."""
        weights = [weight for weight in weights_named(run, self.shared) if weight.requires_grad]
        if not weights:
            return
        total = partial(self.mesh.sum_in, group=self.mesh.lines["ends"])
        with made_everywhere(weights, total):
            for weight in weights:
                assert weight.grad is not None
                total(weight.grad)


def added(total: Tensor | None, loss: Tensor | None) -> Tensor | None:
    """A sum of losses, of which a device may have seen none."""
    return loss if total is None else total if loss is None else total + loss


def _key_of(batch: Batch) -> Any:
    """What decides the shapes of what is sent for a batch, and whether it has gradients."""
    leaves = tuple(tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    return leaves, torch.is_grad_enabled()
