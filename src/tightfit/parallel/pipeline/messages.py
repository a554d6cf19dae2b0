"""Sends and receives what crosses the boundaries between pipeline stages.

`PipelineRank` calls `StageMessages`. What crosses a boundary: usually one tensor forward, such as
the hidden states (4, 1024, 2048) of 4 sequences in bf16, 16 MiB, and its gradient of the same size
back. The first time that a batch has these shapes, an int64 tensor of shape (tensors, 3 + MAX_DIMS)
precedes the tensors. Each row is a header: dtype, whether the tensor has a gradient, number of
dimensions, and the shape. Here it is (1, 11). Later micro-batches of the same shapes need no header.
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
from tightfit.models.objective import Batch
from tightfit.models.tensors import tensors_in
from tightfit.runtime.run import DummyMicroBatch, Run, without_full_masks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
MAX_DIMS = 8

# a tensor that is sent: its dtype, its shape, and whether it has a gradient
TensorSpec = tuple[torch.dtype, tuple[int, ...], bool]


class StageInputs:
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
    def forward(ctx: Any, anchor: Tensor, inputs: StageInputs, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.inputs = inputs
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.inputs.gradients = gradients
        return None, None, None


class StageMessages:
    """A pipeline rank's messages to and from its neighbours.

    last_stage       number of the model's last stage
    positions        the position of each action among those of its rank
    pending_sends    sends that may not have arrived: the action that consumes them, the work handle
                     (None in a dry run) and the tensor
    posted_receives  receives posted before their action: of each tensor the work handle, and the
                     tensor that it arrives in
    tensor_specs     what the tensors that cross a boundary are like, once it is known
    has_gradient     by stage and boundary, which of the tensors that cross it get a gradient
    waited_s         seconds spent waiting for other ranks so far (on a CPU; a GPU's queue waits by
                     itself)
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
        """The position of an action among those of its rank. Only comparisons of positions matter."""
        return self.positions[action]

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        self._free_sent(lambda taken: True)

    def free_completed(self) -> None:
        """Free sent tensors that have arrived, as NCCL's work handles tell.

        gloo's never do, so on a CPU it is `_acknowledge` that infers it.
        """
        self.pending_sends = [one for one in self.pending_sends if one[1] is not None and not one[1].is_completed()]

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

    def link(self, piece: int, other: int, direction: str) -> tuple[dist.ProcessGroup, int]:
        """The process group in which two neighbouring stages communicate, and the other stage's
        rank."""
        around = " around" if max(piece, other) % self.pp_size == 0 else ""
        return self.mesh.p2p_groups[direction + around], other % self.pp_size

    def send(self, tensor: Tensor, action: Action, direction: str) -> None:
        """Send an action's result to the rank that consumes it: activations forward, gradients
        backward."""
        taken = consumer_of(action)
        group, device = self.link(action.stage, taken.stage, direction)
        sent = tensor.detach().contiguous()
        is_dry_run = active_fake_mode() is not None
        self.pending_sends.append(
            (taken, None if is_dry_run else dist.isend(sent, group=group, group_dst=device), sent)
        )

    def send_outputs(self, action: Action, key: Any, tensors: list[Tensor]) -> None:
        """Send a stage's outputs; their header first, where a batch has these shapes for the first
        time."""
        specs = [(tensor.dtype, tuple(tensor.shape), tensor.requires_grad) for tensor in tensors]
        if tensors and (known := (action.stage, "out", key)) not in self.tensor_specs:
            self.tensor_specs[known] = specs
            header = torch.zeros(len(specs), 3 + MAX_DIMS, dtype=torch.int64, device=tensors[0].device)
            for row, (dtype, shape, is_differentiable) in enumerate(specs):
                fields = [DTYPES.index(dtype), int(is_differentiable), len(shape), *shape]
                header[row, : len(fields)] = torch.tensor(fields)
            self.send(header, action, "forward")
        if torch.is_grad_enabled():  # in an evaluation, no backward would remove the entry
            self.tensor_specs[action.stage, "gradient", action.micro_batch] = [spec for spec in specs if spec[2]]
        for tensor in tensors:
            self.send(tensor, action, "forward")

    def post_receives(self, run: Run, actions: Iterable[tuple[Action, Batch]]) -> None:
        """Post the receives of these actions (each with its micro-batch), in the order of their
        sends.

        Stops at the first action whose shapes are not known yet: its header has to be received
        first.
        """
        for action, batch in actions:
            if action not in self.posted_receives and not self.post_receive(run, action, batch):
                break

    def post_receive(self, run: Run, action: Action, batch: Batch) -> bool:
        """Post the receives of an action, so that they can arrive during the action before it.

        Returns whether nothing else has to be received for it: False where its shapes are not
        known.
        """
        if action.kind == FORWARD and action.stage > 0:
            there = without_full_masks(batch.batch if isinstance(batch, DummyMicroBatch) else batch, run)
            key = action.stage, "in", shape_key(there)
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
        """The tensors that stage `other` sends for an action; waits for them.

        Takes the posted receives where there are some, else receives tensors like `specs`.
        """
        group, device = self.link(action.stage, other, direction)
        found = []
        if action in self.posted_receives:
            for work, tensor in self.posted_receives.pop(action):
                self.wait_for(work)
                found.append(tensor)
        else:
            for dtype, shape, _ in specs:
                found.append(torch.empty(shape, dtype=dtype, device=self.mesh.device))
                self._receive_now(found[-1], group, device)
        if found:
            self._acknowledge(action)
        return found

    def receive_inputs(self, action: Action, key: Any, arguments: list[Tensor], inputs: StageInputs) -> None:
        """Receive what the stage before sends to replace `arguments`, those of the stage's
        first block."""
        group, device = self.link(action.stage, action.stage - 1, "forward")
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

    def wait_for(self, work: Any) -> None:
        """Wait for a posted receive. On a GPU the stream waits, not the host."""
        began = time.perf_counter()
        if work is not None:
            work.wait()
        self.waited_s += time.perf_counter() - began

    def send_gradients(self, action: Action, inputs: StageInputs) -> None:
        """Send the gradients of what a stage received to the stage before.

        Before the first ones, send which of the tensors have a gradient at all; for the others
        nothing is sent. Weights that lead to no loss have to stay without a gradient: optimizers
        skip those. Raises InputError where a tensor has a gradient in some micro-batches only.
        """
        gradients, known = inputs.backward(), (action.stage, "in")
        if gradients and known not in self.has_gradient:
            self.has_gradient[known] = [gradient is not None for gradient in gradients]
            self.send(
                torch.tensor(self.has_gradient[known], dtype=torch.int64, device=inputs.metadata[0][2]),
                action,
                "backward",
            )
        for place, gradient in enumerate(gradients):
            if self.has_gradient[known][place]:
                self.send(inputs.zeros(place) if gradient is None else gradient, action, "backward")
            elif gradient is not None:
                raise InputError(
                    "plan: pp",
                    f"an input of stage {action.stage + 1} has a gradient in some micro-batches only",
                    "use pp: 1; zero: 3 or tp shard a model too",
                )

    def receive_gradients(self, action: Action) -> list[Tensor | None]:
        """The gradients of what a stage sent forward; None for a tensor that gets none."""
        specs = self.tensor_specs.pop((action.stage, "gradient", action.micro_batch))
        if not specs:
            return []
        has_gradient = self.outputs_with_gradient(action, len(specs))
        arriving = [spec for spec, is_so in zip(specs, has_gradient, strict=True) if is_so]
        arrived = iter(self._collect(action, arriving, action.stage + 1, "backward"))
        return [next(arrived) if is_so else None for is_so in has_gradient]

    def outputs_with_gradient(self, action: Action, count: int) -> list[bool]:
        """For each of the `count` tensors that a stage sent forward, whether it gets a gradient.

        The next stage says so once, before its first gradients; this waits for it then.
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
    """What determines the specs of the tensors sent for a batch: its shapes, and whether autograd
    is on."""
    leaves = tuple(tuple(leaf.shape) for leaf in tensors_in(batch))
    return leaves, torch.is_grad_enabled()
