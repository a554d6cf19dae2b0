"""Profile: the first ledger, from the user's own model: traced on fake tensors at two batch sizes.

What decides which operations run (precision, attention, chunked loss) is applied by the rooms themselves before the
trace, so nothing is described twice. Everything else is a method's `cost`, which edits the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tightfit.job import Job, LossSpec, ModelSpec
from tightfit.ledger import Ledger, Parameter, Passage, Update
from tightfit.methods import attention, compile, loss, materialize, optimizer_states, precision
from tightfit.methods.run import Run
from tightfit.models import find_blocks, load_python, task_of
from tightfit.models.objective import Batch, Objective, objective_of, processed_count, sample_count
from tightfit.plan import Plan
from tightfit.planner.example import example, is_padded, sized
from tightfit.planner.fit import fitted
from tightfit.planner.storages import tensor_bytes, tensors_in
from tightfit.planner.trace import FakeValues, Traced, trace
from tightfit.planner.updates import trace_updates

DECIDING = (attention, loss, compile, precision)  # rooms that decide which operations run; in the order of METHODS
SIZES = (2, 4)  # samples of the two micro-batches that are traced: at 1, strides and statistics are special


@dataclass(frozen=True)
class Programs:
    """What a model does with a micro-batch, whatever its size."""

    training: tuple[Passage, ...]
    inference: tuple[Passage, ...]
    parameters: tuple[Parameter, ...]
    blocks: int


class Profiler:
    """A job's traces, each made when it is first asked for. device: the kind that it is meant for, cpu or cuda."""

    def __init__(self, job: Job, device: str) -> None:
        self.job, self.device = job, device
        self.batch: Batch = example(job)
        self.samples, self.tokens = sample_count(self.batch), processed_count(self.batch)
        self.padded = is_padded(self.batch)
        self.unit = self._objective().unit
        self._programs: dict[Any, Programs] = {}
        self._updates: dict[Any, dict[str, Update]] = {}

    def ledger(self, plan: Plan) -> Ledger:
        """The first ledger of `plan`: its precision, kernels and optimizer, and no other method: the whole batch at once."""
        batch = self.job.train.batch
        programs = self.programs(plan, plan.micro_batch_of(batch))
        return Ledger(
            micro_batch=batch,
            micro_batches=1,
            training=programs.training,
            inference=programs.inference,
            parameters=programs.parameters,
            blocks=programs.blocks,
            updates=self.updates(plan),
            batch_bytes=tensor_bytes(tensors_in(self.batch)) / self.samples,
            host_batch=self.device == "cpu",
        )

    def programs(self, plan: Plan, micro_batch: int) -> Programs:
        """The model's programs under the plan's precision, attention and loss."""
        sizes = self._sizes(plan, micro_batch)
        kind = plan.precision.replace("fp16", "bf16").replace("tf32", "fp32")
        key = kind, plan.attention, plan.chunked_loss, plan.compile, sizes
        if key not in self._programs:
            self._programs[key] = self._trace(plan.replace(precision=kind), sizes)
        return self._programs[key]

    def _sizes(self, plan: Plan, micro_batch: int) -> tuple[int, int]:
        """The two numbers of samples to trace at. A chunked loss grows up to one whole chunk, and then has more of them."""
        if plan.chunked_loss is None:
            return SIZES
        whole = max(int(-(-plan.chunked_loss // (self.tokens / self.samples))), 1)
        if micro_batch < whole:
            return whole // 2, whole
        first = max(whole, SIZES[0])
        return first, 2 * first

    def _trace(self, plan: Plan, sizes: tuple[int, int]) -> Programs:
        with FakeTensorMode(), FakeValues(self.padded):
            run = self._run(plan)
            name = self.job.model.blocks if isinstance(self.job.model, ModelSpec) else None
            blocks = [block for _, block in find_blocks(run.model, name)]
            one, other = (self._traced(run, samples, blocks) for samples in sizes)
            training, inference = (
                fitted(one.training, other.training, sizes),
                fitted(one.inference, other.inference, sizes),
            )
            assert training is not None
            assert inference is not None
            return Programs(training, inference, _parameters(run.model), len(blocks))

    def _run(self, plan: Plan) -> Run:
        """The job's model under the rooms that decide which operations run. Call it inside FakeTensorMode."""
        objective = self._objective()
        unset = cast(Any, None)
        model = materialize.create_on_device(self.job.model, torch.device("cpu"), materialize.weights_dtype(plan))
        model.train()
        run = Run(
            self.job,
            plan,
            torch.device("cpu"),
            objective,
            model,
            partial(objective.total, model),
            unset,
            unset,
            unset,
        )
        if plan.compile != "none":
            torch._dynamo.reset()  # or what an earlier trace compiled would count against the limit of recompilations
        for room in DECIDING:
            if room.wanted(plan):
                run = room.apply(run, plan)
        return run

    def _objective(self) -> Objective:
        given = self.job.loss
        return objective_of(
            load_python(given.python) if isinstance(given, LossSpec) else given, task_of(self.job.model)
        )

    def _traced(self, run: Run, samples: int, blocks: list[nn.Module]) -> Traced:
        return trace(run.model, run.loss_sum, sized(self.batch, samples), blocks)

    def updates(self, plan: Plan) -> dict[str, Update]:
        """What the job's optimizer does to each parameter, with the plan's states and kernels."""
        fields = plan.states, plan.rounding, plan.fused_optimizer, plan.update_in_backward
        key = (plan.is_true, plan.precision == "fp16-true", *fields)
        if key not in self._updates:
            with FakeTensorMode(), FakeValues():
                dtype = materialize.weights_dtype(plan)
                model = materialize.create_on_device(self.job.model, torch.device("cpu"), dtype)
                self._updates[key] = trace_updates(model, optimizer_states.optimizer_of(model, self.job.train, plan))
        return self._updates[key]


def _parameters(model: nn.Module) -> tuple[Parameter, ...]:
    own = [*model.named_parameters(), *model.named_buffers()]
    return tuple(
        Parameter(name, tuple(tensor.shape), tensor_bytes([tensor]), tensor.requires_grad) for name, tensor in own
    )


def profile(job: Job, plan: Plan | None = None, device: str = "cpu") -> Ledger:
    """The first ledger of a job on a kind of device (cpu, cuda), before any method but those of `plan` that decide
    which operations run. Raises InputError for a model that cannot be traced."""
    return Profiler(job, device).ledger(plan or Plan())


__all__ = ["Profiler", "Programs", "profile"]
