"""Runs one pipeline rank's part of a step: forwards, backwards, and messages to its neighbours.

`PipelineRank` is the `StepExecutor` that `pipeline` puts into a Run. `make_schedule` says in which
order a rank runs its actions; this module runs them. An action is the forward, the backward or the
weight gradients of one micro-batch on one stage.

In-flight micro-batches: between a micro-batch's forward and its backward, the rank keeps what the
backward needs (`_InFlight`). Example: 4 ranks, 8 micro-batches, schedule 1f1b. Rank r first runs
3 - r forwards (warm-up), then alternates one forward and one backward, then runs the backwards
that are left:

    rank 0   F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7    at most 4 in flight
    rank 1   F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7    at most 3
    rank 3   F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7    at most 1

So rank r of p has min(p - r, micro-batches) in flight at its peak; with gpipe every rank has all
8. Suppose that a stage saves 1.5 GiB per micro-batch: rank 0 then holds 6 GiB with 1f1b, and
12 GiB with gpipe.

What crosses a stage boundary: usually one tensor forward, such as the hidden states (4, 1024, 2048)
of 4 sequences in bf16, 16 MiB, and its gradient of the same size back. The first time that a batch
has these shapes, an int64 tensor of shape (tensors, 3 + MAX_DIMS) precedes the tensors. Each row
is a header: dtype, whether the tensor has a gradient, number of dimensions, and the shape. Here
it is (1, 11). Later micro-batches of the same shapes need no header.
"""

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
from torch.autograd.graph import get_gradient_edge

from tightfit._torch.fake import active_fake_mode
from tightfit._torch.modules import own_children
from tightfit._torch.pytree import tree_leaves
from tightfit.cost.pipeline_schedule import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Action,
    coming,
    consumer_of,
    make_schedule,
    producer_of,
)
from tightfit.distributed.mesh import Mesh
from tightfit.errors import InputError
from tightfit.models.dataflow import blocks_out_of_order, sample_shapes
from tightfit.models.objective import Batch, sample_count
from tightfit.parallel.gradient_buckets import gradients_filled
from tightfit.parallel.pipeline.pruned_model import ForwardState, OwnBlock, StageEnd, StubBlock
from tightfit.parallel.pipeline.weight_gradients import DeferredWeightGradients
from tightfit.plan import Plan
from tightfit.runtime.run import DummyMicroBatch, Run, optimizer_weights_named, to_device, without_full_masks
from tightfit.target_device import kind_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
MAX_DIMS = 8


@dataclass
class _InFlight:
    """What a micro-batch's forward leaves for its backward.

    inputs          the tensors that the stage received, whose gradients backward sends back
    backward_roots  where backward begins: the loss on the last stage, else the gradient edges of
                    what was sent
    scale           what the loss is multiplied by; 0 for a dummy micro-batch
    """

    inputs: _StageInputs
    backward_roots: list[Any]
    scale: float | Tensor = 1.0


class _StageInputs:
    """The tensors that a stage received for a micro-batch; after backward, their gradients.

    tensors         as received; empty once the model has them and autograd follows them
    differentiable  for each of them, whether it has a gradient
    metadata        shape, dtype and device of each differentiable one
    gradients       of the differentiable ones, after backward; None where one leads to no loss
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.differentiable: list[bool] = []
        self.metadata: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self.gradients: tuple[Tensor | None, ...] = ()

    def for_model(self) -> list[Tensor]:
        """The tensors as the model gets them: differentiable ones are outputs of an autograd node."""
        followed = [tensor for tensor, is_so in zip(self.tensors, self.differentiable, strict=True) if is_so]
        if not (followed and torch.is_grad_enabled()):
            return self.tensors
        self.metadata = [(tensor.shape, tensor.dtype, tensor.device) for tensor in followed]
        anchor = torch.empty(0, device=followed[0].device, requires_grad=True)
        for_model = iter(_ReceivedInputs.apply(anchor, self, followed))
        found = [next(for_model) if is_so else t for t, is_so in zip(self.tensors, self.differentiable, strict=True)]
        self.tensors = []
        return found

    def backward(self) -> list[Tensor | None]:
        """The gradients of the differentiable tensors; None for one that leads to no loss."""
        return list(self.gradients or (None,) * len(self.metadata))

    def zeros(self, place: int) -> Tensor:
        """A gradient of zeros for the differentiable tensor `place`."""
        shape, dtype, device = self.metadata[place]
        return torch.zeros(shape, dtype=dtype, device=device)


class _ReceivedInputs(torch.autograd.Function):
    """The identity on received tensors; its backward stores their gradients, which are then sent
    back.

    anchor  an empty tensor that requires a gradient, so that autograd calls backward
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, inputs: _StageInputs, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.inputs = inputs
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.inputs.gradients = gradients
        return None, None, None


# a tensor that is sent: its dtype, its shape, and whether it has a gradient
TensorSpec = tuple[torch.dtype, tuple[int, ...], bool]


class PipelineRank:
    """A rank's part of a pipeline schedule: the `StepExecutor` of a Run.

    stages            the range of blocks of each stage of the model; own_stages: numbers of this
                      rank's
    forward_state     tells the model's blocks which stage runs
    slots             of each block: its parent module, and its name there
    own_blocks        by number, the blocks that this rank has; wrappers: what wraps each of them
                      while it runs; stubs: what replaces each block that does not run
    shared            names of the weights that the first and the last rank both use
    pending_sends     sends that may not have arrived: the action that consumes them, the work
                      handle
                      (None in a dry run) and the tensor
    posted_receives   receives posted before their action: of each tensor the work handle, and the
                      tensor that it arrives in
    in_flight         by (stage, micro-batch), what a forward left for its backward
    tensor_specs      what the tensors that cross a boundary spec like, once it is known
    has_gradient      by stage and boundary, which of the tensors that cross it get a gradient
    waited_s          seconds spent waiting for other ranks so far (on a CPU; a GPU's queue waits by
                      itself)
    loss_delay        how many steps after its forward a step's loss becomes known
    replicated        names of the weights that an earlier rank has too: norms over all devices
                      count
                      them once
    stale_buffers     names of buffers whose correct values are on another rank
    """

    def __init__(
        self,
        mesh: Mesh,
        plan: Plan,
        pieces: list[range],
        own: list[int],
        forward_state: ForwardState,
        slots: list[tuple[nn.Module, str]],
        kept: dict[int, nn.Module],
        stubs: list[StubBlock],
        shared: frozenset[str],
        stale: frozenset[str] = frozenset(),
    ) -> None:
        self.mesh, self.plan, self.stages, self.own_stages, self.forward_state = mesh, plan, pieces, own, forward_state
        self.slots, self.own_blocks, self.stubs, self.shared, self.stale_buffers = slots, kept, stubs, shared, stale
        self.wrappers = {number: OwnBlock(number, forward_state, block) for number, block in kept.items()}
        self.rank, self.pp_size = mesh.rank("pp"), mesh.size("pp")
        self.device = mesh.device  # not a parameter's device: parameters may be offloaded
        self.last_stage = len(pieces) - 1
        self.replicated = shared if self.rank else frozenset()
        self.in_flight: dict[tuple[int, int], _InFlight] = {}
        self.pending_sends: list[tuple[Action, Any, Tensor]] = []
        self.positions: dict[Action, int] = {}
        self.posted_receives: dict[Action, list[tuple[Any, Tensor]]] = {}
        self.tensor_specs: dict[Any, list[TensorSpec]] = {}
        self.has_gradient: dict[tuple[int, str], list[bool]] = {}
        self.losses: deque[Tensor] = deque()
        self.staleness: list[int] = []
        self.waited_s = 0.0
        self.deferred = DeferredWeightGradients() if plan.schedule == "zero-bubble" else None

    loss_delay = 0
    unsynchronized = False
    counted: tuple[int, int, int] | None = None

    def drain(self, run: Run) -> Iterator[None]:
        """Nothing to do: no step is in flight when the next one begins."""
        return iter(())

    def accumulate(self, run: Run, micro_batches: list[Batch], scale: float | Tensor) -> Tensor:
        """Run forward and backward of a step's micro-batches in the order of the schedule.

        scale: factor of the losses in backward. Returns the sum of the losses that this rank
        computed: 0 on all ranks but the last.
        """
        return self._run_schedule(run, micro_batches, scale, self.plan.schedule)

    def run_micro_batch(self, run: Run, batch: Batch, scale: float | Tensor) -> Tensor:
        """Run forward and backward of one micro-batch alone, whatever the schedule.

        Returns its loss on the last rank, and 0 on the others.
        """
        schedule = "1f1b" if self.plan.schedule == "pipedream" else self.plan.schedule
        return self._run_schedule(run, [batch], scale, schedule)

    def _run_schedule(self, run: Run, micro_batches: list[Batch], scale: float | Tensor, schedule: str) -> Tensor:
        """Run this rank's actions of `schedule`, then all-reduce the gradients of shared weights.

        `schedule` may differ from the plan's: `once` replaces pipedream by 1f1b.
        """
        table = make_schedule(schedule, self.pp_size, self.plan.virtual_stages, len(micro_batches))
        actions = table[self.rank]
        self.positions = {action: place for own in table for place, action in enumerate(own)}
        total: Tensor | None = None
        completing = WEIGHTS if self.deferred is not None else BACKWARD
        final = max(place for place, action in enumerate(actions) if action.kind == completing)
        stops = kind_of(run.device) != "cpu"
        next_actions = coming(schedule, self.pp_size, self.plan.virtual_stages, len(micro_batches), self.rank, stops)
        for place, (action, after) in enumerate(zip(actions, next_actions, strict=True)):
            self._free_completed_sends(run)
            self._post_receives(
                run, [(one, micro_batches[one.micro_batch]) for one in (action, after) if one is not None]
            )
            batch = micro_batches[action.micro_batch]
            last = action.micro_batch == len(micro_batches) - 1
            if action.kind == FORWARD:
                total = add_losses(total, self.forward(run, action, batch, scale))
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
        self._all_reduce_shared(run)
        return torch.zeros((), device=run.device) if total is None else total

    @torch.no_grad()
    def evaluate(self, run: Run, batch: Batch) -> Tensor:
        """The loss of a micro-batch on the last rank; 0 on the others."""
        total: Tensor | None = None
        self.positions = {Action(FORWARD, piece, 0): piece for piece in range(len(self.stages))}
        for piece in self.own_stages:
            total = add_losses(total, self.forward(run, Action(FORWARD, piece, 0), batch, 1.0))
            self.in_flight.clear()
        self.finish()
        return torch.zeros((), device=run.device) if total is None else total

    def forward(self, run: Run, action: Action, batch: Batch, scale: float | Tensor) -> Tensor | None:
        """Run one stage's forward. Returns the loss on the last stage, where the micro-batch
        counts.

        On other stages it sends what the next stage needs, and returns None. Raises InputError
        where the model does not call its
        blocks in order.
        """
        is_real = not isinstance(batch, DummyMicroBatch)
        there = to_device(batch if is_real else batch.batch, run)
        key = _shape_key(there)
        inputs = _StageInputs()

        def take(arguments: list[Tensor]) -> list[Tensor]:
            self._receive_inputs(action, key, arguments, inputs)
            return inputs.for_model()

        self._enter_stage(action.stage, take, there)
        try:
            loss = run.loss_sum(there)
        except StageEnd as left:
            left.__traceback__ = None
            sent = left.sent
            self._send_forward(action, key, sent)
            backward_roots = [get_gradient_edge(tensor) for tensor in sent if tensor.requires_grad]
            self.in_flight[action.stage, action.micro_batch] = _InFlight(inputs, backward_roots)
            return None
        finally:
            self._leave_stage(action.stage)
        if action.stage != self.last_stage:
            raise blocks_out_of_order()
        self.forward_state.end_stage()
        self.in_flight[action.stage, action.micro_batch] = _InFlight(inputs, [loss], scale if is_real else 0.0)
        # in fp32, as on ranks that have no loss: all ranks take part in one all-reduce of the sums
        return loss.detach().float() if is_real else None

    def backward(self, run: Run, action: Action, final: bool) -> None:
        """Run one stage's backward, and send the gradients of what the stage received.

        final: whether it is the last backward of the step, after which FSDP reduces gradients.
        """
        from torch.distributed.fsdp import FSDPModule  # here, because a single device does not need it

        in_flight = self.in_flight.pop((action.stage, action.micro_batch))
        if isinstance(run.model, FSDPModule):  # StageEnd ended the forward before FSDP's own hooks
            run.model.unshard()
            run.model.set_is_last_backward(final)
        if action.stage == self.last_stage:
            (in_flight.backward_roots[0] * in_flight.scale).backward()
        else:
            found = zip(in_flight.backward_roots, self._receive_gradients(action), strict=True)
            there = [(root, gradient) for root, gradient in found if gradient is not None]
            if there:
                torch.autograd.backward([root for root, _ in there], [gradient for _, gradient in there])
        if action.stage:
            self._send_gradients(action, in_flight.inputs)

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        self._free_sent(lambda taken: True)

    def position_of(self, action: Action) -> Any:
        """The position of an action among those of its rank. Only comparisons of positions matter."""
        return self.positions[action]

    def _free_sent(self, has_arrived: Callable[[Action], bool]) -> None:
        """Free sent tensors that have arrived. has_arrived: whether what an action consumes is
        there."""
        there, self.pending_sends = self.pending_sends, [one for one in self.pending_sends if not has_arrived(one[0])]
        for taken, work, _ in there:
            if work is not None and has_arrived(taken):
                work.wait()

    def _acknowledge(self, action: Action) -> None:
        """An action's input has arrived. So its sender has received all that it consumed before
        sending."""
        producer = producer_of(action)
        sender, place = producer.stage % self.pp_size, self.position_of(producer)
        self._free_sent(lambda taken: taken.stage % self.pp_size == sender and self.position_of(taken) <= place)

    def _enter_stage(self, piece: int, take: Any, batch: Batch) -> None:
        """Make the model run the stage `piece`: its blocks run, and stubs replace the rank's other
        blocks."""
        self.forward_state.begin_stage(self.stages[piece], take, sample_count(batch), sample_shapes(batch))
        for number in self.own_blocks:
            parent, child = self.slots[number]
            own_children(parent)[child] = self.wrappers[number] if number in self.stages[piece] else self.stubs[number]

    def _leave_stage(self, piece: int) -> None:
        """Put all of the rank's blocks back into the model."""
        for number, block in self.own_blocks.items():
            parent, child = self.slots[number]
            own_children(parent)[child] = block

    def _link(self, piece: int, other: int, direction: str) -> tuple[dist.ProcessGroup, int]:
        """The process group in which two neighbouring stages communicate, and the other stage's
        rank."""
        around = " around" if max(piece, other) % self.pp_size == 0 else ""
        return self.mesh.p2p_groups[direction + around], other % self.pp_size

    def _send(self, tensor: Tensor, action: Action, direction: str) -> None:
        """Send an action's result to the rank that consumes it: activations forward, gradients
        backward."""
        taken = consumer_of(action)
        group, device = self._link(action.stage, taken.stage, direction)
        sent = tensor.detach().contiguous()
        is_dry_run = active_fake_mode() is not None
        self.pending_sends.append(
            (taken, None if is_dry_run else dist.isend(sent, group=group, group_dst=device), sent)
        )

    def _free_completed_sends(self, run: Run) -> None:
        """Free sent tensors that have arrived.

        NCCL's work handles tell whether a send is complete. gloo's never do, so on a CPU it is
        `_acknowledge` that infers it.
        """
        if kind_of(run.device) != "cpu":
            self.pending_sends = [one for one in self.pending_sends if one[1] is not None and not one[1].is_completed()]

    def _send_forward(self, action: Action, key: Any, tensors: list[Tensor]) -> None:
        """Send a stage's outputs; their header first, where a batch has these shapes for the first
        time."""
        specs = [(tensor.dtype, tuple(tensor.shape), tensor.requires_grad) for tensor in tensors]
        if tensors and (known := (action.stage, "out", key)) not in self.tensor_specs:
            self.tensor_specs[known] = specs
            header = torch.zeros(len(specs), 3 + MAX_DIMS, dtype=torch.int64, device=tensors[0].device)
            for row, (dtype, shape, is_differentiable) in enumerate(specs):
                fields = [DTYPES.index(dtype), int(is_differentiable), len(shape), *shape]
                header[row, : len(fields)] = torch.tensor(fields)
            self._send(header, action, "forward")
        if torch.is_grad_enabled():  # in an evaluation, no backward would remove the entry
            self.tensor_specs[action.stage, "gradient", action.micro_batch] = [spec for spec in specs if spec[2]]
        for tensor in tensors:
            self._send(tensor, action, "forward")

    def _post_receives(self, run: Run, actions: Iterable[tuple[Action, Batch]]) -> None:
        """Post the receives of these actions (each with its micro-batch), in the order of their
        sends.

        Stops at the first action whose shapes are not known yet: its header has to be received
        first.
        """
        for action, batch in actions:
            if action not in self.posted_receives and not self._post_receive(run, action, batch):
                break

    def _post_receive(self, run: Run, action: Action, batch: Batch) -> bool:
        """Post the receives of an action, so that they can arrive during the action before it.

        Returns whether nothing else has to be received for it: False where its shapes are not
        known.
        """
        if action.kind == FORWARD and action.stage > 0:
            there = without_full_masks(batch.batch if isinstance(batch, DummyMicroBatch) else batch, run)
            key = action.stage, "in", _shape_key(there)
            line = self._link(action.stage, action.stage - 1, "forward")
        elif action.kind == BACKWARD and action.stage < self.last_stage:
            key = action.stage, "gradient", action.micro_batch
            line = self._link(action.stage, action.stage + 1, "backward")
        else:
            return True
        specs = self.tensor_specs.get(key)
        if specs and action.kind == BACKWARD:
            has_gradient = self.has_gradient.get((action.stage, "out"))
            specs = (
                None
                if has_gradient is None
                else [spec for spec, is_so in zip(specs, has_gradient, strict=True) if is_so]
            )
        if specs is None:
            return False
        is_dry_run = active_fake_mode() is not None
        self.posted_receives[action] = []
        for dtype, shape, _ in specs:
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            work = None if is_dry_run else dist.irecv(tensor, group=line[0], group_src=line[1])
            self.posted_receives[action].append((work, tensor))
        return True

    def _collect(self, action: Action, specs: list[TensorSpec], other: int, direction: str) -> list[Tensor]:
        """The tensors that stage `other` sends for an action; waits for them.

        Takes the posted receives where there are some, else receives tensors that spec like
        `specs`.
        """
        group, device = self._link(action.stage, other, direction)
        found = []
        if action in self.posted_receives:
            for work, tensor in self.posted_receives.pop(action):
                self._wait_for(work)
                found.append(tensor)
        else:
            for dtype, shape, _ in specs:
                found.append(torch.empty(shape, dtype=dtype, device=self.device))
                self._receive_now(found[-1], group, device)
        if found:
            self._acknowledge(action)
        return found

    def _receive_inputs(self, action: Action, key: Any, arguments: list[Tensor], inputs: _StageInputs) -> None:
        """Receive what the stage before sends to replace `arguments`, those of the stage's
        first block."""
        group, device = self._link(action.stage, action.stage - 1, "forward")
        known = action.stage, "in", key
        if active_fake_mode() is not None:  # a dry run has no other rank that would send a header
            floating = [one.is_floating_point() and torch.is_grad_enabled() for one in arguments]
            self.tensor_specs[known] = [
                (one.dtype, tuple(one.shape), is_so) for one, is_so in zip(arguments, floating, strict=True)
            ]
        elif not arguments:
            self.tensor_specs[known] = []
        elif known not in self.tensor_specs:
            header = torch.zeros(len(arguments), 3 + MAX_DIMS, dtype=torch.int64, device=arguments[0].device)
            self._receive_now(header, group, device)
            rows = header.tolist()
            self.tensor_specs[known] = [(DTYPES[row[0]], tuple(row[3 : 3 + row[2]]), bool(row[1])) for row in rows]
        specs = self.tensor_specs[known]
        inputs.tensors = self._collect(action, specs, action.stage - 1, "forward")
        inputs.differentiable = [spec[2] for spec in specs]

    def _receive_now(self, tensor: Tensor, group: dist.ProcessGroup, device: int) -> None:
        """Receive into `tensor`, and block until it has arrived. Does nothing in a dry run."""
        if active_fake_mode() is not None:
            return
        began = time.perf_counter()
        dist.recv(tensor, group=group, group_src=device)
        self.waited_s += time.perf_counter() - began

    def _wait_for(self, work: Any) -> None:
        """Wait for a posted receive. On a GPU the stream waits, not the host."""
        began = time.perf_counter()
        if work is not None:
            work.wait()
        self.waited_s += time.perf_counter() - began

    def _send_gradients(self, action: Action, inputs: _StageInputs) -> None:
        """Send the gradients of what a stage received to the stage before.

        Before the first ones, send which of the tensors have a gradient at all; for the others
        nothing is
        sent. Weights that lead to no loss have to stay without a gradient: optimizers skip those.
        Raises InputError where a tensor has a gradient in some micro-batches only.
        """
        gradients, known = inputs.backward(), (action.stage, "in")
        if gradients and known not in self.has_gradient:
            self.has_gradient[known] = [gradient is not None for gradient in gradients]
            self._send(
                torch.tensor(self.has_gradient[known], dtype=torch.int64, device=inputs.metadata[0][2]),
                action,
                "backward",
            )
        for place, gradient in enumerate(gradients):
            if self.has_gradient[known][place]:
                self._send(inputs.zeros(place) if gradient is None else gradient, action, "backward")
            elif gradient is not None:
                raise InputError(
                    "plan: pp",
                    f"an input of stage {action.stage + 1} has a gradient in some micro-batches only",
                    "use pp: 1; zero: 3 or tp shard a model too",
                )

    def _receive_gradients(self, action: Action) -> list[Tensor | None]:
        """The gradients of what a stage sent forward; None for a tensor that gets none."""
        specs = self.tensor_specs.pop((action.stage, "gradient", action.micro_batch))
        if not specs:
            return []
        known = action.stage, "out"
        if active_fake_mode() is not None:
            self.has_gradient[known] = [True] * len(specs)
        elif known not in self.has_gradient:
            header = torch.zeros(len(specs), dtype=torch.int64, device=self.device)
            self._receive_now(header, *self._link(action.stage, action.stage + 1, "backward"))
            self.has_gradient[known] = [bool(word) for word in header.tolist()]
        has_gradient = self.has_gradient[known]
        arriving = [spec for spec, is_so in zip(specs, has_gradient, strict=True) if is_so]
        arrived = iter(self._collect(action, arriving, action.stage + 1, "backward"))
        return [next(arrived) if is_so else None for is_so in has_gradient]

    @torch.no_grad()
    def _all_reduce_shared(self, run: Run) -> None:
        """All-reduce the gradients of weights that the first and the last rank share (tied
        embeddings)."""
        weights = [weight for weight in optimizer_weights_named(run, self.shared) if weight.requires_grad]
        if not weights:
            return
        total = partial(self.mesh.all_reduce_in_group, group=self.mesh.p2p_groups["ends"])
        with gradients_filled(weights, total):
            for weight in weights:
                assert weight.grad is not None
                total(weight.grad)


def add_losses(total: Tensor | None, loss: Tensor | None) -> Tensor | None:
    """The sum of two losses, each of which may be None where a rank computed none."""
    return loss if total is None else total if loss is None else total + loss


def _shape_key(batch: Batch) -> Any:
    """What determines the specs of the tensors sent for a batch: its shapes, and whether autograd
    is on."""
    leaves = tuple(tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    return leaves, torch.is_grad_enabled()
