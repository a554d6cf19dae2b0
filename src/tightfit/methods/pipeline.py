"""Pipeline: devices in a row, each with some of the model's blocks; micro-batches go through them, and gradients back.

Saves   a device's parameters, their states and its activations, by the number of devices. Only the hidden states between
        two blocks travel, so the link may be slow.
Costs   waiting: with p devices and m micro-batches a share of (p-1)/(m+p-1) of the step (the bubble); interleaved divides it
        by the pieces on each device, zero-bubble fills most of it with weights' gradients; naive waits (p-1)/p. GPipe holds
        all m micro-batches' activations, 1F1B those of at most p.
When    the model does not fit a device, and links between devices (nodes) are too slow for zero or tp. Many micro-batches.
Order   after all that changes blocks, which it then divides; before what watches gradients.
Source  GPipe: Huang et al. 2019, arXiv:1811.06965; 1F1B with flush: Narayanan et al. 2020, arXiv:2006.09503; interleaved:
        Narayanan et al. 2021, arXiv:2104.04473; zero bubble: Qi et al. 2023, arXiv:2401.10241.

Every device runs the model's own forward. In the place of blocks that it does not have are stubs: those before its own hand
on what came from the device before, the first one after them ends the forward. So any model that calls its blocks in a row
can be cut, and need not know. What lies before the blocks (embeddings) belongs to the first device, what comes after them to
the last one; a weight that both use is on both, and its gradients are summed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from tightfit.errors import InputError
from tightfit.job import ModelSpec
from tightfit.ledger import Ledger
from tightfit.machine import Machine
from tightfit.methods.deferred import Deferred
from tightfit.methods.mesh import DATA, Mesh
from tightfit.methods.run import Filler, Run, to_device, weights_named
from tightfit.methods.stages import pieces_of, pieces_with, staged
from tightfit.models import find_blocks, places_of
from tightfit.models.objective import Batch
from tightfit.plan import Plan
from tightfit.timetable import BACKWARD, FORWARD, WEIGHTS, Action, timetable

VARIANTS = (
    {"pp": 2, "micro_batch": 2},
    {"pp": 2, "micro_batch": 2, "schedule": "gpipe"},
    {"pp": 2, "micro_batch": 2, "schedule": "interleaved", "virtual_stages": 2},
    {"pp": 2, "micro_batch": 2, "schedule": "zero-bubble"},
    {"pp": 2, "schedule": "naive"},
)
_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
_DIMS = 8


def wanted(plan: Plan) -> bool:
    return plan.pp > 1


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """What one device of the row holds and does: the ledger's `stage` says which one."""
    return staged(ledger, plan, machine)


def apply(run: Run, plan: Plan) -> Run:
    assert run.mesh is not None
    name = run.job.model.blocks if isinstance(run.job.model, ModelSpec) else None
    blocks = find_blocks(run.model, name)
    pieces = pieces_of(plan, len(blocks))
    own = [number for number in range(plan.stages) if number % plan.pp == run.mesh.rank("pp")]
    places = places_of(run.model, blocks)
    _refuse_what_cannot_be_cut(run.model, places, len(blocks))
    ends = {
        name for name, where in places.items() if len(pieces_with(where, pieces)) > 1
    }  # on the first device and on the last
    passage = _Passage()
    stubs = [Elsewhere(number, passage) for number in range(len(blocks))]
    kept = {number: block for piece in own for number, (_, block) in enumerate(blocks) if number in pieces[piece]}
    names = [name for name, _ in blocks]
    parents = [run.model.get_submodule(name.rpartition(".")[0]) for name in names]
    slots = [(parent, name.rpartition(".")[2]) for parent, name in zip(parents, names, strict=True)]
    for block in kept.values():
        block.register_forward_hook(passage.note_form)
    parameters = dict(run.model.named_parameters())
    mine = {name for name, where in places.items() if pieces_with(where, pieces) & set(own)}
    foreign = {parameter for name, parameter in parameters.items() if name not in mine}
    _hollow(run.model, foreign, own[0] == 0, passage)
    for number, (parent, child) in enumerate(slots):
        if number not in kept:
            parent._modules[child] = stubs[number]
    kind = PipeDream if plan.schedule == "pipedream" else Pipeline
    stages = kind(run.mesh, plan, pieces, own, passage, slots, kept, stubs, frozenset(ends & mine))
    slices = {name: cut for name, cut in run.slices.items() if name in mine}
    if stages.deferred is not None:
        stages.deferred.attach(run.model)
    return replace(run, stages=stages, blocks=tuple(kept.values()), slices=slices)


def _refuse_what_cannot_be_cut(model: nn.Module, places: dict[str, tuple[int, ...]], blocks: int) -> None:
    for name, where in places.items():
        inner = {place for place in where if 0 <= place < blocks}
        if len(inner) > 1 or (inner and len(set(where)) > 1):
            raise InputError(
                "plan: pp", f"{name} is used by several blocks, which a pipeline puts on several devices", "use pp: 1"
            )
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise InputError(
            "plan: pp",
            "an encoder and a decoder are two rows of blocks, and each decoder block needs the encoder",
            "use tp",
        )


def _hollow(model: nn.Module, foreign: set[nn.Parameter], first: bool, passage: _Passage) -> None:
    """In the place of other devices' parameters, zeros of their shape that take no memory and are no parameters: what lies
    before the blocks runs with them, and its output is not used."""
    for path, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter in foreign:
                module.register_forward_pre_hook(partial(passage.refuse, path))
                del module._parameters[name]
                empty = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
                setattr(module, name, empty)
                if isinstance(module, nn.Embedding) and not first:
                    module.forward = _Zeros(module.embedding_dim, parameter.dtype)  # type: ignore[method-assign]


@dataclass(frozen=True)
class _Zeros:
    """An embedding's forward on a device that does not have it."""

    width: int
    dtype: torch.dtype

    def __call__(self, input: Tensor) -> Tensor:
        return torch.zeros((), dtype=self.dtype, device=input.device).expand(*input.shape, self.width)


class _Passage:
    """The forward under way: which blocks run, and what takes the place of the first one's input.

    form  how blocks return: 0 the hidden states, n a tuple of n of which they are the first
    """

    def __init__(self) -> None:
        self.piece = range(0)
        self.take: Any = None
        self.form = 0
        self.left = 0  # blocks of the piece that have not run

    def begin(self, piece: range, take: Any) -> None:
        self.piece, self.take, self.left = piece, take, len(piece)

    def refuse(self, name: str, module: nn.Module, inputs: Any) -> None:
        """A module of which this device has no values is called where its output is used. Raises InputError."""
        if self.left == 0 or self.piece.start == 0:
            used, defined = ("behind", "before") if self.left == 0 else ("before", "behind")
            raise InputError(
                "plan: pp",
                f"{name} is used {used} the model's blocks, and defined {defined} them",
                f"define it {used} them in the model's constructor, so that the device that uses it has it",
            )

    def note_form(self, block: nn.Module, inputs: Any, output: Any) -> None:
        self.left -= 1
        self.form = 0 if isinstance(output, Tensor) else len(output)
        hidden = output if isinstance(output, Tensor) else output[0]
        if not isinstance(hidden, Tensor):
            raise InputError(
                "plan: pp", f"a block returns {type(hidden).__name__}, and no hidden states to hand on", "use pp: 1"
            )


class Leaves(BaseException):
    """Ends a forward behind a device's last block, with what the next device needs."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Elsewhere(nn.Module):
    """Stands for a block that another device has, or that is not of the piece that runs."""

    def __init__(self, number: int, passage: _Passage) -> None:
        super().__init__()
        self.number, self.passage = number, passage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        passage = self.passage
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor):
            raise InputError("plan: pp", "the model hands no hidden states from block to block", "use pp: 1")
        if self.number >= passage.piece.stop:
            raise Leaves(hidden)
        if self.number == passage.piece.start - 1:
            hidden = passage.take(hidden)
        return hidden if passage.form == 0 else (hidden, *[None] * (passage.form - 1))


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
        passage: _Passage,
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
        total = torch.zeros((), device=run.device)
        completing = WEIGHTS if self.deferred is not None else BACKWARD
        final = max(place for place, action in enumerate(actions) if action.kind == completing)
        for place, action in enumerate(actions):
            self._forget_sent()
            batch = micro_batches[action.micro_batch]
            last = action.micro_batch == len(micro_batches) - 1
            if action.kind == FORWARD:
                total += self.forward(run, action, batch, scale)
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
        return total

    @torch.no_grad()
    def evaluate(self, run: Run, batch: Batch) -> Tensor:
        """The loss of a micro-batch, on the last device; 0 on the others."""
        total = torch.zeros((), device=run.device)
        for piece in self.own:
            total = total + self.forward(run, Action(FORWARD, piece, 0), batch, 1.0)
            self.alive.clear()
        self.finish()
        return total

    def forward(self, run: Run, action: Action, batch: Batch, scale: float) -> Tensor:
        """Returns the loss, where this is the last piece and the micro-batch counts; else 0."""
        counts = not isinstance(batch, Filler)
        there = to_device(batch if counts else batch.batch, run)
        key = tuple(tuple(leaf.shape) for leaf in tree_leaves(there) if isinstance(leaf, Tensor))
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
            return torch.zeros((), device=run.device)
        finally:
            self._leave(action.chunk)
        if action.chunk != self.last:
            raise InputError("plan: pp", "the model does not call its blocks in a row", "use pp: 1")
        self.alive[action.chunk, action.micro_batch] = _Alive(_first(taken), loss, scale if counts else 0.0)
        return loss.detach() if counts else torch.zeros((), device=run.device)

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
            header = [look[0], _TYPES.index(look[1]), len(look[2]), *look[2]]
            words = torch.tensor(header + [0] * (3 + _DIMS - len(header)), device=hidden.device)
            self._send(words, action.chunk + 1, "forward")
        self.shapes[action.chunk, "gradient", action.micro_batch] = look
        self._send(hidden, action.chunk + 1, "forward")

    def _receive(self, action: Action, key: Any, like: Tensor) -> Tensor:
        """The hidden states from the device before. like: what the model hands to its blocks."""
        group, device = self._line(action.chunk, action.chunk - 1, "forward")
        if active_fake_mode() is not None:  # who predicts has nobody to ask
            return torch.empty_like(like, memory_format=torch.contiguous_format)
        if (known := (action.chunk, "in", key)) not in self.shapes:
            words = torch.zeros(3 + _DIMS, dtype=torch.int64, device=like.device)
            self._wait_for(words, group, device)
            form, kind, dims, *sizes = words.tolist()
            self.shapes[known] = form, _TYPES[kind], tuple(sizes[:dims])
        self.passage.form, dtype, shape = self.shapes[known]
        received = torch.empty(shape, dtype=dtype, device=like.device)
        self._wait_for(received, group, device)
        return received

    def _wait_for(self, tensor: Tensor, group: dist.ProcessGroup, device: int) -> None:
        began = time.perf_counter()
        dist.recv(tensor, group=group, group_src=device)
        self.waited_s += time.perf_counter() - began

    def _receive_gradient(self, action: Action) -> Tensor:
        group, device = self._line(action.chunk, action.chunk + 1, "backward")
        _, dtype, shape = self.shapes.pop((action.chunk, "gradient", action.micro_batch))
        gradient = torch.empty(shape, dtype=dtype, device=group_device(self.kept))
        if active_fake_mode() is None:
            self._wait_for(gradient, group, device)
        return gradient

    @torch.no_grad()
    def _sum_ends(self, run: Run) -> None:
        """Gradients of weights that the first and the last device both use."""
        for weight in weights_named(run, self.shared):
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            dist.all_reduce(weight.grad, group=self.mesh.lines["ends"])


@dataclass
class _Minibatch:
    """A step under way: its number since the pipeline was empty, micro-batches, learning rate, version of the weights."""

    number: int
    micro_batches: int
    rate: float
    version: int


class PipeDream(Pipeline):
    """1F1B that never drains: each device does a step's forward, and the backward of the step that its successors have left
    it, and updates its weights by itself. A step's backward uses the weights of its forward (weight stashing).

    On device s of p a step's gradients are of weights that p-1-s updates are still to come to: with vertical sync p-1
    everywhere. Source: Harlap et al. 2018, arXiv:1806.03377.

    losses  of the steps whose backward was done here, in order
    """

    free = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.shared:
            raise InputError(
                "plan: schedule=pipedream",
                f"{min(self.shared)} is used by the first and the last device, which update it at different times",
                "use schedule: 1f1b, or a model whose embeddings are not tied",
            )
        self.behind = self.devices - 1 - self.rank
        self.delay = self.devices - 1
        self.under_way: deque[_Minibatch] = deque()
        self.versions: dict[int, dict[nn.Parameter, nn.Parameter]] = {}
        self.started = self.updated = 0
        self.seen: dict[int, Tensor] = {}

    def accumulate(self, run: Run, micro_batches: list[Batch], scale: float) -> Tensor:
        """This step's forward, and the backward of the one that is due. Its loss is known later: see `losses`."""
        assert run.mesh is not None
        version = max(self.started - self.delay, 0) if self.plan.vertical_sync else self.updated
        step = _Minibatch(self.started, len(micro_batches), run.optimizer.param_groups[0]["lr"], version)
        total = torch.zeros((), device=run.device)
        with self._version(run, version):
            for number, batch in enumerate(micro_batches):
                self._forget_sent()
                total += self.forward(run, Action(FORWARD, self.rank, self._place(step, number)), batch, scale)
        if self.rank == self.devices - 1:
            self.seen[step.number] = run.mesh.sum(total, DATA) * scale
        self.under_way.append(step)
        self.started += 1
        if len(self.under_way) > self.behind:
            self._do_backward(run)
        return torch.full((), float("nan"), device=run.device)

    def drain(self, run: Run) -> Iterator[None]:
        """Do the backwards that are left, one after another: an update has to follow each. Then the pipeline is empty."""
        while self.under_way:
            self._do_backward(run)
            yield
        self.finish()
        self.started = self.updated = 0
        self.versions.clear()

    def _place(self, step: _Minibatch, number: int) -> int:
        return step.number * 2**20 + number

    def _do_backward(self, run: Run) -> None:
        """Backward of the oldest step under way; its gradients are then those of the newest weights."""
        step = self.under_way.popleft()
        for group in run.optimizer.param_groups:
            group["lr"] = step.rate
        self._pass_on_loss(run, step)
        with self._version(run, step.version):
            for number in range(step.micro_batches):
                self.backward(run, Action(BACKWARD, self.rank, self._place(step, number)), False)
        if run.reduction is not None:
            run.reduction.begin(True)
        for parameter, used in self.versions[step.version].items():
            parameter.grad, used.grad = used.grad, None
        if run.reduction is not None:
            run.reduction.end(True)
        self._keep_versions(run)
        self.updated += 1

    def _pass_on_loss(self, run: Run, step: _Minibatch) -> None:
        """From the last device to the first, before the gradients."""
        if self.rank < self.devices - 1:
            loss = torch.zeros((), device=run.device)
            group, device = self._line(self.rank, self.rank + 1, "backward")
            self._wait_for(loss, group, device)
        else:
            loss = self.seen.pop(step.number).to(torch.float32)
        if self.rank:
            self._send(loss, self.rank - 1, "backward")
        self.losses.append(float(loss))

    @torch.no_grad()
    def _keep_versions(self, run: Run) -> None:
        """Before the update that follows: where a step under way, or one to come, needs the weights as they are, it is done on
        a copy."""
        needed = {step.version for step in self.under_way}
        if self.plan.vertical_sync:
            needed |= set(range(max(self.started - self.delay, 0), self.updated + 1))
        for version in list(self.versions):
            if version not in needed:
                del self.versions[version]
        if self.updated in needed:
            for parameter in self._newest(run):  # which moves: a graph may hold views of where it was
                parameter.data = parameter.data.clone()

    def _newest(self, run: Run) -> dict[nn.Parameter, nn.Parameter]:
        """By parameter, what shares its memory until it is kept."""
        if self.updated not in self.versions:
            trained = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
            self.versions[self.updated] = {parameter: nn.Parameter(parameter.data) for parameter in trained}
        return self.versions[self.updated]

    @contextmanager
    def _version(self, run: Run, version: int) -> Iterator[None]:
        """Within, the model computes with a version of its weights."""
        used = self._newest(run) if version == self.updated else self.versions[version]
        places = [
            (module, name, parameter)
            for module in run.model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter in used
        ]
        for module, name, parameter in places:
            module._parameters[name] = used[parameter]
        try:
            yield
        finally:
            for module, name, parameter in places:
                module._parameters[name] = parameter


def group_device(blocks: dict[int, nn.Module]) -> torch.device:
    return next(parameter.device for block in blocks.values() for parameter in block.parameters())


def _first(tensors: list[Tensor]) -> Tensor | None:
    return tensors[0] if tensors else None
