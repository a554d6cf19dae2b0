"""PipeDream: a pipeline that never drains, with versions of the weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import active_fake_mode

from tightfit.methods.mesh import DATA
from tightfit.methods.row import Pipeline, added
from tightfit.methods.run import Run
from tightfit.models.objective import Batch
from tightfit.timetable import BACKWARD, FORWARD, Action

MOST = 2**20  # micro-batches of a step


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

    losses  of the steps whose backward was done here, in order; seen: the last device's, of steps whose backward is still to
            come; told: those that were asked for
    """

    free = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.behind = self.devices - 1 - self.rank
        self.delay = self.devices - 1
        self.under_way: deque[_Minibatch] = deque()
        self.versions: dict[int, dict[nn.Parameter, nn.Parameter]] = {}
        self.started = self.updated = 0
        self.seen: dict[int, Tensor] = {}
        self.told: dict[int, tuple[Any, Tensor]] = {}

    def accumulate(self, run: Run, micro_batches: list[Batch], scale: float | Tensor) -> Tensor:
        """This step's forward, and the backward of the one that is due. Its loss is known later: see `losses`."""
        assert run.mesh is not None
        version = max(self.started - self.delay, 0) if self.plan.vertical_sync else self.updated
        step = _Minibatch(self.started, len(micro_batches), run.optimizer.param_groups[0]["lr"], version)
        total: Tensor | None = None
        forwards = [(Action(FORWARD, self.rank, self._place(step, n)), batch) for n, batch in enumerate(micro_batches)]
        due = self._backwards(self.under_way[0])[:1] if 0 < self.behind <= len(self.under_way) else []
        with self._version(run, version):
            for number, (action, batch) in enumerate(forwards):
                self._free_completed_sends(run)
                if due and number == len(forwards) - 1:
                    self._ask_for_loss(self.under_way[0].number)
                self._post_receives(run, [*forwards, *due][number : number + 2])
                total = added(total, self.forward(run, action, batch, scale))
        if self.rank == self.devices - 1:
            here = torch.zeros((), device=run.device) if total is None else total
            self.seen[step.number] = run.mesh.sum(here, DATA) * scale
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

    def _backwards(self, step: _Minibatch) -> list[tuple[Action, Batch]]:
        """A step's backwards, as `_post_receives` takes them: what they are sent does not depend on a batch."""
        places = (self._place(step, number) for number in range(step.micro_batches))
        return [(Action(BACKWARD, self.rank, place), None) for place in places]

    def _place(self, step: _Minibatch, number: int) -> int:
        return step.number * MOST + number

    def place_of(self, action: Action) -> Any:
        """A device does a step's forward before the backward of the step that is due then."""
        step, number = divmod(action.micro_batch, MOST)
        behind = self.devices - 1 - action.chunk if action.kind == BACKWARD else 0
        return step + behind, action.kind == BACKWARD, number

    def _do_backward(self, run: Run) -> None:
        """Backward of the oldest step under way; its gradients are then those of the newest weights."""
        step = self.under_way.popleft()
        for group in run.optimizer.param_groups:
            group["lr"] = step.rate
        self._pass_on_loss(run, step)
        backwards = self._backwards(step)
        with self._version(run, step.version):
            for number, (action, _) in enumerate(backwards):
                self._post_receives(run, backwards[number : number + 2])
                self.backward(run, action, False)
        self.told.pop(step.number, None)
        if run.reduction is not None:
            run.reduction.begin(True)
        for parameter, used in self.versions[step.version].items():
            parameter.grad, used.grad = used.grad, None
        if run.reduction is not None:
            run.reduction.end(True)
        self._keep_versions(run)
        self.updated += 1

    def _ask_for_loss(self, number: int) -> None:
        """A step's loss comes before its first gradients."""
        if self.rank < self.devices - 1 and number not in self.told:
            loss = torch.zeros((), device=self.device)
            group, device = self._link(self.rank, self.rank + 1, "backward")
            work = None if active_fake_mode() is not None else dist.irecv(loss, group=group, group_src=device)
            self.told[number] = work, loss

    def _pass_on_loss(self, run: Run, step: _Minibatch) -> None:
        """From the last device to the first, before the gradients."""
        if self.rank < self.devices - 1:
            self._ask_for_loss(step.number)
            work, loss = self.told[step.number]
            self._wait_for(work)
        else:
            loss = self.seen.pop(step.number).to(torch.float32)
        if self.rank:
            self._send(loss, Action(BACKWARD, self.rank, self._place(step, 0)), "backward")
        self.losses.append(loss)

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
