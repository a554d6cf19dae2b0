"""Send and receive the tensors that pass between pipeline stages.

`PipelineRank` calls `StageMessages`. Usually a stage sends one tensor forward, such as the bf16
hidden states (4, 1024, 2048) of 4 sequences, 16 MiB, and receives their gradient of the same size.

A stage does not know the shapes of the tensors that it will receive. So when a batch has new
shapes, the sender first sends a header: an int64 tensor of shape (number of tensors, 3 + MAX_DIMS),
in the example (1, 11). Each of its rows describes one tensor: dtype, whether it requires a
gradient, number of dimensions, and shape. Later micro-batches of the same shapes are sent without a
header.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit._torch.fake import active_fake_mode
from tightfit.cost.pipeline_schedule import BACKWARD, FORWARD, Action, consumer_of, producer_of
from tightfit.distributed.mesh import Mesh
from tightfit.errors import InputError
from tightfit.models.batches import Batch
from tightfit.models.tensors import tensors_in
from tightfit.runtime.run import DummyMicroBatch, Run, without_full_masks

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.complex64,
    torch.complex128,
)
MAX_DIMS = 8

# description of a tensor that is sent: (dtype, shape, whether it requires a gradient)
TensorSpec = tuple[torch.dtype, tuple[int, ...], bool]


def _refuse_unknown_types(tensors: list[Tensor]) -> None:
    """Raise InputError if stages cannot send one of the tensors, on the sending and the receiving rank."""
    for tensor in tensors:
        if tensor.dtype not in DTYPES or tensor.dim() > MAX_DIMS:
            raise InputError(
                "plan: pp",
                f"a block returns a {tensor.dtype} tensor with {tensor.dim()} dimensions, which stages cannot send",
                f"let it return another type and at most {MAX_DIMS} dimensions, or use pp: 1",
            )


class StageInputs:
    """The tensors that a stage received for one micro-batch and, after backward, their gradients.

    tensors         the received tensors. `for_model` empties this list if it returns them under
                    autograd
    differentiable  for each received tensor, whether it requires a gradient
    metadata        (shape, dtype, device) of each received tensor that requires a gradient
    gradients       after backward, the gradient of each of these tensors; None for one that does
                    not affect the loss
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.differentiable: list[bool] = []
        self.metadata: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self.gradients: tuple[Tensor | None, ...] = ()

    def for_model(self) -> list[Tensor]:
        """Return the received tensors in the form in which the model uses them.

        Under autograd, tensors that require a gradient are returned as outputs of an autograd node,
        which stores their gradients in this object. Otherwise the tensors are returned as received.
        """
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
        """Return the gradients of the received tensors that require one; None for a tensor that
        does not affect the loss. Call this after the stage's backward.
        """
        return list(self.gradients or (None,) * len(self.metadata))

    def zeros(self, index: int) -> Tensor:
        """Return zeros of the gradient's shape for one of the received tensors that require a
        gradient.

        index  the tensor's index among these tensors
        """
        shape, dtype, device = self.metadata[index]
        return torch.zeros(shape, dtype=dtype, device=device)


class _ReceivedInputs(torch.autograd.Function):
    """Forward: return `tensors`, the received tensors, unchanged. Backward: store their gradients
    in `inputs`, from where `StageMessages` sends them.

    anchor  an empty tensor that requires a gradient: without it autograd would not call backward
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, inputs: StageInputs, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.inputs = inputs
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.inputs.gradients = gradients
        return None, None, None


class StageMessages:
    """Sends and receives a pipeline rank's messages to and from the neighbouring stages.

    An action, such as the forward of one micro-batch on one stage, consumes the tensors that
    another action has sent.

    last_stage       the number of the model's last stage
    positions        action -> its index in its rank's list of actions
    pending_sends    sends that may not be complete: (action that consumes the tensor, work handle
                     or None in a dry run, tensor)
    posted_receives  action -> its receives that have begun before it: (work handle, tensor that the
                     data arrive in)
    tensor_specs     descriptions of the tensors of a message, once they are known. The key is
                     (stage, "in" or "out", shapes of the batch) for activations, and (stage,
                     "gradient", micro-batch) for gradients
    has_gradient     (stage, "in" or "out") -> for each tensor that requires a gradient, whether it
                     gets one
    waited_s         seconds that this process has waited for other ranks. On a GPU the stream
                     waits, which this does not count
    """

    def __init__(self, mesh: Mesh, last_stage: int) -> None:
        self.mesh, self.last_stage, self.pp_size = mesh, last_stage, mesh.size("pp")
        self.positions: dict[Action, int] = {}
        self.pending_sends: list[tuple[Action, Any, Tensor]] = []
        self.posted_receives: dict[Action, list[tuple[Any, Tensor]]] = {}
        self.tensor_specs: dict[Any, list[TensorSpec]] = {}
        self.has_gradient: dict[tuple[int, str], list[bool]] = {}
        self.waited_s = 0.0

    def position_of(self, action: Action) -> Any:
        """Return a value that orders the actions of a rank: a later action has a larger value."""
        return self.positions[action]

    def finish(self) -> None:
        """Wait until all sends are complete, and free the sent tensors."""
        self._free_sent(lambda taken: True)

    def free_completed(self) -> None:
        """Free the sent tensors whose work handles say that the send is complete.

        NCCL's work handles say so, but gloo's do not. On a CPU, `_acknowledge` frees the tensors
        instead.
        """
        self.pending_sends = [
            pending_send
            for pending_send in self.pending_sends
            if pending_send[1] is not None and not pending_send[1].is_completed()
        ]

    def _free_sent(self, has_arrived: Callable[[Action], bool]) -> None:
        """Free the sent tensors that have arrived.

        has_arrived  called with the action that consumes some sent tensors; returns whether these
                     tensors have arrived
        """
        pending, self.pending_sends = (
            self.pending_sends,
            [pending_send for pending_send in self.pending_sends if not has_arrived(pending_send[0])],
        )
        for taken, work, _ in pending:
            if work is not None and has_arrived(taken):
                work.wait()

    def _acknowledge(self, action: Action) -> None:
        """Free the sent tensors that must have arrived, because the input of `action` has arrived.

        Each rank runs its actions in order. So the rank that sent this input has received all
        tensors for the action that made the input, and for all actions before that.
        """
        producer = producer_of(action)
        sender, position = producer.stage % self.pp_size, self.position_of(producer)
        self._free_sent(lambda taken: taken.stage % self.pp_size == sender and self.position_of(taken) <= position)

    def link(self, stage: int, other: int, direction: str) -> tuple[dist.ProcessGroup, int]:
        """Return (process group, rank in the group) for messages to or from a neighbouring stage.
        The rank is that of the neighbouring stage's process.

        stage      the number of this rank's stage
        other      the number of the neighbouring stage
        direction  "forward" for activations, "backward" for gradients
        """
        around = " around" if max(stage, other) % self.pp_size == 0 else ""
        return self.mesh.other_groups[direction + around], other % self.pp_size

    def send(self, tensor: Tensor, action: Action, direction: str) -> None:
        """Begin to send a result of `action` to the rank that consumes it, and return without
        waiting. A dry run sends nothing.

        direction  "forward" for activations, "backward" for gradients
        """
        taken = consumer_of(action)
        group, rank = self.link(action.stage, taken.stage, direction)
        sent = tensor.detach().contiguous()
        is_dry_run = active_fake_mode() is not None
        self.pending_sends.append((taken, None if is_dry_run else dist.isend(sent, group=group, group_dst=rank), sent))

    def send_outputs(self, action: Action, key: Any, tensors: list[Tensor]) -> None:
        """Begin to send a stage's output tensors to the next stage. A header precedes them if no
        earlier batch had the same shapes.

        action  the forward that computed the tensors
        key     `shape_key` of the batch

        Raises InputError if the tensors have other types or shapes than those that were sent for such a batch, or if
        others of them require gradients: the next stage would wait for ever.
        """
        specs = [(tensor.dtype, tuple(tensor.shape), tensor.requires_grad) for tensor in tensors]
        known = action.stage, "out", key
        if self.tensor_specs.get(known, specs) != specs:
            raise InputError(
                "plan: pp",
                f"stage {action.stage} returns tensors with other types, shapes or gradients than in an earlier step",
                "freeze parameters before the training, all of a stage or none, or use pp: 1",
            )
        if tensors and known not in self.tensor_specs:
            _refuse_unknown_types(tensors)
            self.tensor_specs[known] = specs
            header = torch.zeros(len(specs), 3 + MAX_DIMS, dtype=torch.int64, device=tensors[0].device)
            for row, (dtype, shape, is_differentiable) in enumerate(specs):
                fields = [DTYPES.index(dtype), int(is_differentiable), len(shape), *shape]
                header[row, : len(fields)] = torch.tensor(fields)
            self.send(header, action, "forward")
        if torch.is_grad_enabled():  # an evaluation has no backward, which would remove the entry
            self.tensor_specs[action.stage, "gradient", action.micro_batch] = [spec for spec in specs if spec[2]]
        for tensor in tensors:
            self.send(tensor, action, "forward")

    def post_receives(self, run: Run, actions: Iterable[tuple[Action, Batch]]) -> None:
        """Begin to receive the tensors for several actions, in the order in which they are sent.

        Stops at the first action whose tensors have unknown shapes, because their header has to be
        received first.

        actions  (action, its micro-batch) of each, in order
        """
        for action, batch in actions:
            if action not in self.posted_receives and not self.post_receive(run, action, batch):
                break

    def post_receive(self, run: Run, action: Action, batch: Batch) -> bool:
        """Begin to receive the tensors for an action, so that they can arrive while the preceding
        action runs.

        Returns whether this was possible. If the shapes of the tensors are not known yet, receive
        nothing and return False. If the action needs no tensors of another stage, return True.

        action  a forward, which receives activations; a backward, which receives gradients; or
                weight gradients, which receive nothing
        batch   the action's micro-batch
        """
        if action.kind == FORWARD and action.stage > 0:
            without_masks = without_full_masks(batch.batch if isinstance(batch, DummyMicroBatch) else batch, run)
            key = action.stage, "in", shape_key(without_masks)
            line = self.link(action.stage, action.stage - 1, "forward")
        elif action.kind == BACKWARD and action.stage < self.last_stage:
            key = action.stage, "gradient", action.micro_batch
            line = self.link(action.stage, action.stage + 1, "backward")
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
            tensor = torch.empty(shape, dtype=dtype, device=self.mesh.device)
            work = None if is_dry_run else dist.irecv(tensor, group=line[0], group_src=line[1])
            self.posted_receives[action].append((work, tensor))
        return True

    def _collect(self, action: Action, specs: list[TensorSpec], other: int, direction: str) -> list[Tensor]:
        """Wait for the tensors that a neighbouring stage sends for an action, and return them.

        specs      descriptions of the tensors, which are used if their receives have not begun yet
        other      the number of the neighbouring stage
        direction  "forward" for activations, "backward" for gradients
        """
        group, rank = self.link(action.stage, other, direction)
        tensors = []
        if action in self.posted_receives:
            for work, tensor in self.posted_receives.pop(action):
                self.wait_for(work)
                tensors.append(tensor)
        else:
            for dtype, shape, _ in specs:
                tensors.append(torch.empty(shape, dtype=dtype, device=self.mesh.device))
                self._receive_now(tensors[-1], group, rank)
        if tensors:
            self._acknowledge(action)
        return tensors

    def receive_inputs(self, action: Action, key: Any, arguments: list[Tensor], inputs: StageInputs) -> None:
        """Wait for the tensors that the preceding stage sends for a forward, and put them into
        `inputs`.

        action     the forward
        key        `shape_key` of the batch
        arguments  those arguments of the stage's first block that the received tensors will replace
        inputs     the object that gets the received tensors
        """
        group, rank = self.link(action.stage, action.stage - 1, "forward")
        known = action.stage, "in", key
        if active_fake_mode() is not None:  # a dry run has no other rank that would send a header
            floating = [argument.is_floating_point() and torch.is_grad_enabled() for argument in arguments]
            self.tensor_specs[known] = [
                (argument.dtype, tuple(argument.shape), is_so)
                for argument, is_so in zip(arguments, floating, strict=True)
            ]
        elif not arguments:
            self.tensor_specs[known] = []
        elif known not in self.tensor_specs:
            _refuse_unknown_types(arguments)
            header = torch.zeros(len(arguments), 3 + MAX_DIMS, dtype=torch.int64, device=arguments[0].device)
            self._receive_now(header, group, rank)
            rows = header.tolist()
            self.tensor_specs[known] = [(DTYPES[row[0]], tuple(row[3 : 3 + row[2]]), bool(row[1])) for row in rows]
        specs = self.tensor_specs[known]
        inputs.tensors = self._collect(action, specs, action.stage - 1, "forward")
        inputs.differentiable = [spec[2] for spec in specs]

    def _receive_now(self, tensor: Tensor, group: dist.ProcessGroup, rank: int) -> None:
        """Receive data into `tensor`, and wait until they have arrived. A dry run does nothing.

        group   the process group
        rank    the rank of the sender in the group
        """
        if active_fake_mode() is not None:
            return
        began = time.perf_counter()
        dist.recv(tensor, group=group, group_src=rank)
        self.waited_s += time.perf_counter() - began

    def wait_for(self, work: Any) -> None:
        """Wait until a receive that has begun is complete. On a GPU the stream waits, not the host.

        work  the handle of the receive; None in a dry run, which does not wait
        """
        began = time.perf_counter()
        if work is not None:
            work.wait()
        self.waited_s += time.perf_counter() - began

    def send_gradients(self, action: Action, inputs: StageInputs) -> None:
        """Begin to send the gradients of a stage's inputs to the preceding stage.

        Before the first gradients, a mask is sent: for each input that requires a gradient, whether
        it has one. For an input without a gradient nothing is sent. So weights of the preceding
        stage that do not affect the loss have no gradient, and the optimizer skips them, as without
        a pipeline.

        action  the backward that computed the gradients
        inputs  the stage's inputs, with their gradients

        Raises InputError if an input had no gradient in the first micro-batch and has one now.
        """
        gradients, known = inputs.backward(), (action.stage, "in")
        if gradients and known not in self.has_gradient:
            self.has_gradient[known] = [gradient is not None for gradient in gradients]
            self.send(
                torch.tensor(self.has_gradient[known], dtype=torch.int64, device=inputs.metadata[0][2]),
                action,
                "backward",
            )
        for index, gradient in enumerate(gradients):
            if self.has_gradient[known][index]:
                self.send(inputs.zeros(index) if gradient is None else gradient, action, "backward")
            elif gradient is not None:
                raise InputError(
                    "plan: pp",
                    f"an input of stage {action.stage + 1} has a gradient in some micro-batches and none in others",
                    "use pp: 1, and split the model with zero: 3 or tp instead",
                )

    def receive_gradients(self, action: Action) -> list[Tensor | None]:
        """Wait for the gradients of the tensors that a stage sent forward, and return them, with
        None for a tensor without a gradient. Only tensors that require a gradient are in the list.

        action  the backward that needs the gradients
        """
        specs = self.tensor_specs.pop((action.stage, "gradient", action.micro_batch))
        if not specs:
            return []
        has_gradient = self.outputs_with_gradient(action, len(specs))
        arriving = [spec for spec, is_so in zip(specs, has_gradient, strict=True) if is_so]
        arrived = iter(self._collect(action, arriving, action.stage + 1, "backward"))
        return [next(arrived) if is_so else None for is_so in has_gradient]

    def outputs_with_gradient(self, action: Action, count: int) -> list[bool]:
        """Return, for each tensor that requires a gradient and that a stage sent forward, whether
        the next stage sends a gradient back.

        The next stage sends this mask once, before its first gradients. The first call waits for
        the mask, and later calls return the same mask.

        action  a backward of the stage
        count   the number of these tensors
        """
        known = action.stage, "out"
        if active_fake_mode() is not None:
            self.has_gradient[known] = [True] * count
        elif known not in self.has_gradient:
            header = torch.zeros(count, dtype=torch.int64, device=self.mesh.device)
            self._receive_now(header, *self.link(action.stage, action.stage + 1, "backward"))
            self.has_gradient[known] = [bool(word) for word in header.tolist()]
        return self.has_gradient[known]


def shape_key(batch: Batch) -> Any:
    """Return a key that is equal for batches whose messages have equal shapes. It contains the
    shapes of the batch's tensors, and whether autograd is enabled.
    """
    leaves = tuple(tuple(leaf.shape) for leaf in tensors_in(batch))
    return leaves, torch.is_grad_enabled()
