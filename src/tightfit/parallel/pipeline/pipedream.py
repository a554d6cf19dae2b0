"""Run a pipeline that does not drain between steps, and that keeps several versions of the weights
(PipeDream).

`pipeline` uses `PipeDream` in place of `PipelineRank` for schedule: pipedream. Its gradients are
stale, which changes the job's mathematics, so the job's `allow` has to contain `asynchronous`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tightfit._torch.fake import active_fake_mode
from tightfit._torch.modules import own_parameters
from tightfit.cost.pipeline_schedule import BACKWARD, FORWARD, Action
from tightfit.distributed.mesh import DATA
from tightfit.models.batches import Batch
from tightfit.optim.gradient_dtype import copy_gradient_dtype
from tightfit.optim.groups import base_learning_rates, put_base_learning_rates
from tightfit.parallel.pipeline.executor import PipelineRank, add_losses
from tightfit.parallel.pipeline.messages import StageMessages
from tightfit.runtime.run import Run
from tightfit.target_device import kind_of

MAX_MICRO_BATCHES = 2**20  # more micro-batches than a step can have


@dataclass
class _StepInFlight:
    """A step whose forwards have run on this rank, and whose backwards have not.

    number         the number of the step, counted from when the pipeline was last empty
    micro_batches  the number of its micro-batches
    rates          for each parameter group, the learning rate of this step
    version        the number of the version of the weights that its forwards used
    """

    number: int
    micro_batches: int
    rates: list[float]
    version: int


class _StepMessages(StageMessages):
    """Sends and receives the messages of a rank that has several steps in flight. The order of the
    rank's actions therefore also depends on the step."""

    def position_of(self, action: Action) -> Any:
        """Return a value that orders the actions of a rank: a later action has a larger value. It
        is (round, whether the action is a backward, number of the micro-batch in its step).

        In each round, a rank first runs the forwards of one step, and then the backwards of the
        same or of an earlier step.
        """
        step, number = divmod(action.micro_batch, MAX_MICRO_BATCHES)
        behind = self.pp_size - 1 - action.stage if action.kind == BACKWARD else 0
        return step + behind, action.kind == BACKWARD, number


class PipeDream(PipelineRank):
    """Runs a pipeline by 1F1B without draining it. Each rank updates its weights without waiting
    for the other ranks.

    In each step, a rank runs the step's forwards, and then the backwards of the step that is due:
    the earlier step whose gradients have reached the rank. The backwards of a step use the same
    version of the weights as its forwards did (weight stashing).

    On rank s of p, gradients are p - 1 - s updates stale. With vertical sync they are p - 1 updates
    stale on every rank. Example with p = 4: the gradients of rank 0 are 3 updates stale. Rank 0 has
    up to 4 steps in flight and keeps 3 versions of its weights beside the newest. The gradients of
    rank 3 are not stale.

    losses            the losses of the steps whose backwards have run on this rank, in order
    pending_losses    on the last rank, step -> its loss, for steps whose backwards have not run yet
    requested_losses  step -> (work handle, tensor) of the loss that the next rank sends
    versions          number of a version of the weights -> {parameter of the model: its value in
                      this version}

    Source: Harlap et al. 2018, arXiv:1806.03377.
    """

    unsynchronized = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.messages = _StepMessages(self.mesh, self.blocks.last_stage)
        self.behind = self.pp_size - 1 - self.rank
        self.loss_delay = self.pp_size - 1
        self.steps_in_flight: deque[_StepInFlight] = deque()
        self.versions: dict[int, dict[nn.Parameter, nn.Parameter]] = {}
        self.steps_begun = self.updates_done = 0
        self.pending_losses: dict[int, Tensor] = {}
        self.requested_losses: dict[int, tuple[Any, Tensor]] = {}

    def accumulate(self, run: Run, micro_batches: list[Batch], scale: float | Tensor) -> Tensor:
        """Run this step's forwards, and then the backwards of the step that is due on this rank (an
        earlier step, except on the last rank).

        scale  the factor of the losses in backward. The losses in `losses` are multiplied by it,
               too

        Returns NaN, because a loss becomes known only `loss_delay` steps later. It is then in
        `losses`.
        """
        assert run.mesh is not None
        version = max(self.steps_begun - self.loss_delay, 0) if self.plan.vertical_sync else self.updates_done
        step = _StepInFlight(self.steps_begun, len(micro_batches), base_learning_rates(run.optimizer), version)
        total: Tensor | None = None
        forwards = [
            (Action(FORWARD, self.rank, self._unique_number(step, n)), batch) for n, batch in enumerate(micro_batches)
        ]
        due = self._backwards(self.steps_in_flight[0]) if 0 < self.behind <= len(self.steps_in_flight) else []
        if kind_of(run.device) == "cpu":
            due = due[:1]
        elif due:
            self._request_gradients(run, due)
        with self._using_version(run, version):
            for number, (action, batch) in enumerate(forwards):
                self._free_completed_sends(run)
                if due and number == len(forwards) - 1:
                    self._request_loss(self.steps_in_flight[0].number)
                self.messages.post_receives(run, [*forwards, *due][number : number + 2])
                total = add_losses(total, self.forward(run, action, batch, scale))
        if self.rank == self.pp_size - 1:
            own_loss = torch.zeros((), device=run.device) if total is None else total
            self.pending_losses[step.number] = run.mesh.all_reduce(own_loss, DATA) * scale
        self.steps_in_flight.append(step)
        self.steps_begun += 1
        if len(self.steps_in_flight) > self.behind:
            self._run_backward(run)
        return torch.full((), float("nan"), device=run.device)

    def drain(self, run: Run) -> Iterator[None]:
        """Run the backwards of all steps in flight, so that the pipeline is empty. Yield after each
        step; the caller then has to update the weights.
        """
        while self.steps_in_flight:
            self._run_backward(run)
            yield
        self.messages.finish()
        self.steps_begun = self.updates_done = 0
        self.versions.clear()

    def _backwards(self, step: _StepInFlight) -> list[tuple[Action, Batch]]:
        """Return a step's backwards as (action, None), the form that `post_receives` takes. None is
        in the place of the batch, on which the receives of a backward do not depend.
        """
        unique_numbers = (self._unique_number(step, number) for number in range(step.micro_batches))
        return [(Action(BACKWARD, self.rank, unique_number), None) for unique_number in unique_numbers]

    def _unique_number(self, step: _StepInFlight, number: int) -> int:
        """Return a number for a micro-batch that differs from the numbers of all micro-batches of
        other steps.

        number  its number within the step
        """
        return step.number * MAX_MICRO_BATCHES + number

    def _run_backward(self, run: Run) -> None:
        """Run the backwards of the oldest step in flight, with the version of the weights that its
        forwards used. Then move the gradients to the newest version: they become the `.grad` of the
        model's parameters.
        """
        step = self.steps_in_flight.popleft()
        put_base_learning_rates(run.optimizer, step.rates)
        self._forward_loss(run, step)
        backwards = self._backwards(step)
        with self._using_version(run, step.version):
            for number, (action, _) in enumerate(backwards):
                self.messages.post_receives(run, backwards[number : number + 2])
                self.backward(run, action, False)
        self.requested_losses.pop(step.number, None)
        if run.reduction is not None:
            run.reduction.begin(True)
        for parameter, used in self.versions[step.version].items():
            parameter.grad, used.grad = used.grad, None
        if run.reduction is not None:
            run.reduction.end(True)
        self._preserve_version(run)
        self.updates_done += 1

    def _request_loss(self, number: int) -> None:
        """Begin to receive the loss of step `number` from the next rank, which sends it before the
        gradients. Does nothing if this has begun already, or on the last rank.
        """
        if self.rank < self.pp_size - 1 and number not in self.requested_losses:
            loss = torch.zeros((), device=self.device)
            group, rank = self.messages.link(self.rank, self.rank + 1, "backward")
            work = None if active_fake_mode() is not None else dist.irecv(loss, group=group, group_src=rank)
            self.requested_losses[number] = work, loss

    def _request_gradients(self, run: Run, due: list[tuple[Action, Batch]]) -> None:
        """Begin to receive all gradients of the step that is due.

        due  the backwards of this step, as `_backwards` returns them

        This happens before the forwards to prevent a deadlock. A GPU may stop within a forward
        until the next rank has received this rank's activations, while the next rank stops until
        this rank has received a gradient. See `pipeline_schedule.late`.
        """
        self._request_loss(self.steps_in_flight[0].number)
        action, _ = due[0]
        if specs := self.messages.tensor_specs[action.stage, "gradient", action.micro_batch]:
            self.messages.outputs_with_gradient(action, len(specs))
        self.messages.post_receives(run, due)

    def _forward_loss(self, run: Run, step: _StepInFlight) -> None:
        """Append a step's loss to `losses`, and send it to the preceding rank. The last rank has
        computed the loss; all others receive it from the next rank.

        So the loss travels from the last rank to the first, before the gradients.
        """
        if self.rank < self.pp_size - 1:
            self._request_loss(step.number)
            work, loss = self.requested_losses[step.number]
            self.messages.wait_for(work)
        else:
            loss = self.pending_losses.pop(step.number).to(torch.float32)
        if self.rank:
            self.messages.send(loss, Action(BACKWARD, self.rank, self._unique_number(step, 0)), "backward")
        self.losses.append(loss)

    @torch.no_grad()
    def _preserve_version(self, run: Run) -> None:
        """Prepare the versions of the weights for the next update. If a step still needs the newest
        version, the model's parameters get new memory with equal values, so that the update does
        not change this version. Versions that no step needs are freed.

        A step in flight needs the version that its forwards used. With vertical sync, later steps
        need the newest version, too.
        """
        needed = {step.version for step in self.steps_in_flight}
        if self.plan.vertical_sync:
            needed |= set(range(max(self.steps_begun - self.loss_delay, 0), self.updates_done + 1))
        for version in list(self.versions):
            if version not in needed:
                del self.versions[version]
        if self.updates_done in needed:
            # the newest weights get new memory: autograd graphs may have views of the old memory
            for parameter in self._newest_version(run):
                parameter.data = parameter.data.clone()

    def _newest_version(self, run: Run) -> dict[nn.Parameter, nn.Parameter]:
        """Return, for the newest version of the weights, trainable parameter of the model ->
        another nn.Parameter that shares its memory. Create it at the first call for this version.

        The forwards and backwards of this version compute with the second parameter. So it keeps
        its memory if `_preserve_version` gives the model's parameter a copy.
        """
        if self.updates_done not in self.versions:
            trained = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
            self.versions[self.updates_done] = used = {parameter: nn.Parameter(parameter.data) for parameter in trained}
            for parameter, version in used.items():
                copy_gradient_dtype(version, parameter)
        return self.versions[self.updates_done]

    @contextmanager
    def _using_version(self, run: Run, version: int) -> Iterator[None]:
        """Inside this context, the model computes with version number `version` of its weights."""
        used = self._newest_version(run) if version == self.updates_done else self.versions[version]
        replaced = [
            (module, name, parameter)
            for module in run.model.modules()
            for name, parameter in own_parameters(module).items()
            if parameter is not None and parameter in used
        ]
        for module, name, parameter in replaced:
            own_parameters(module)[name] = used[parameter]
        try:
            yield
        finally:
            for module, name, parameter in replaced:
                own_parameters(module)[name] = parameter
