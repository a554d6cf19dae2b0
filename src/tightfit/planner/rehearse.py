"""Rehearse: the assembled run takes a whole step on fake tensors, through the engine that would train.

The only place where the planner meets the engine: what is rehearsed is what runs. Nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tightfit.engine.build import build
from tightfit.engine.step import Step, accumulate, drain, take_step, update
from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.machine import Figure, Machine
from tightfit.methods import loader, optimizer_states, shards
from tightfit.methods.run import Run
from tightfit.methods.turns import few, taken_by
from tightfit.models.objective import LABELLED, Batch, Labelled, processed_count, sample_count
from tightfit.plan import Plan
from tightfit.planner.example import example, is_padded, labelled, sized
from tightfit.planner.fakes import FakeValues, traceable
from tightfit.planner.passing import shortened
from tightfit.planner.storages import Peak, tensor_bytes, tensors_in, track
from tightfit.planner.target import as_on, processes
from tightfit.planner.updates import take_all_at_once

ALIKE = 2  # micro-batches that are rehearsed: the first finds no gradients, and all later ones are like the second


def _rehearsed(plan: Plan) -> int | None:
    """How many micro-batches are rehearsed: in a pipeline as many as fill it; None for all."""
    if plan.pp == 1:
        return ALIKE
    return None if plan.schedule == "gpipe" else 2 * plan.stages


@dataclass(frozen=True)
class Shapes:
    """The `Data` of a rehearsal: micro-batches of the job's shapes, without its samples.

    labelled    how many labels count, which a chunked loss asks for; None where it is not told
    """

    batch: Batch
    job: Job
    plan: Plan
    labelled: Labelled | None = None
    ragged: bool = False
    damaged: int = 0
    tokenizer: Any = None

    @property
    def samples(self) -> int:
        return self.job.train.batch

    @property
    def sample_items(self) -> int:
        return processed_count(self.batch) // sample_count(self.batch)

    def steps(self, consumed: int, until: int | None) -> Iterator[list[Batch]]:
        whole = self.plan.share_of(self.job.train.batch)
        micro = self.plan.micro_batch_of(self.job.train.batch)
        while True:
            yield [
                self._sized(min(micro, whole - begin))
                for begin in list(range(0, whole, micro))[: _rehearsed(self.plan)]
            ]

    def held_out(self, samples: int) -> Iterator[Batch]:
        yield self._sized(self.plan.micro_batch_of(self.job.train.batch))

    def _sized(self, samples: int) -> Batch:
        batch = sized(self.batch, samples)
        return batch if self.labelled is None else {**batch, LABELLED: self.labelled}

    def example(self) -> Batch:
        return self.batch


def _here(plan: Plan) -> Plan:
    """The plan without what is only for a real device, or would leave its mark on this process."""
    single = plan.replace(precision="fp32") if plan.precision == "tf32" else plan
    return single.replace(pin_memory=False, non_blocking=False, allocator="default", materialize="host").replace(
        **({"offload_to": "disk"} if plan.offload else {})
    )


HERE = Machine(
    name="rehearsal",
    device="cpu",  # fake tensors of other devices need a torch that was built for them
    memory_bytes=Figure(value=1.0, source="system"),
    host_memory_bytes=Figure(value=1.0, source="system"),
)


def rehearse(job: Job, plan: Plan, device: str = "cpu", stage: int = 0) -> Peak:
    """The peak of a job's second step (the first makes the optimizer's states), by row. Raises InputError.

    stage   of a pipeline: which device of it
    device  cpu or cuda: the tensors are fake, and treated as a device of that kind would

    Compiled regions run as what the compiler is expected to make of them: see `methods/compiler.py`.
    """
    ahead = loader.uploads_beside(plan, device)
    plan = _here(plan)
    if plan.compile != "none":
        torch._dynamo.reset()  # or what an earlier rehearsal compiled would count against the limit of recompilations
    batch = example(job)[0]
    shapes = Shapes(batch, job, plan, None if plan.chunked_loss is None else labelled(job, batch))
    values = FakeValues(is_padded(shapes.batch))
    first = stage * plan.devices // plan.pp + plan.servers  # of those that have this piece; a worker, not its server
    gathers = shards.comes_and_goes(plan, device)
    with processes(plan.devices, first, gathers), FakeTensorMode(), values, as_on(device):
        run = build(job, plan, HERE, shapes)
        if optimizer_states.takes_all_at_once(plan, device):
            take_all_at_once(run.optimizer)
        steps = run.data.steps(0, None)
        with traceable(run.model), taken_by(few):
            _first_step(run, next(steps)[:1])
            micro_batches = next(steps)
            several = range(2 * run.stages.delay if run.stages is not None else 0)

            def take(watched: Run) -> Step:
                for step in several:  # until as many are under way as ever are
                    take_step(watched, micro_batches, step)
                return take_step(watched, micro_batches, len(several))

            peak = track(run, micro_batches, take)[1]
    return _with_other_batches(peak, shapes, device, ahead)


def _first_step(run: Run, micro_batches: list[Batch]) -> None:
    """What makes the optimizer's states, and compiles. Of blocks that are alike it takes three; the others' gradients are made."""
    if run.reduction is not None or run.stages is not None or run.plan.update_in_backward:
        take_step(run, micro_batches, 0)
        if run.stages is not None:
            drain(run)
        return
    apart = run.plan.compile != "model" and run.plan.recompute != "sqrt"  # whether each block runs by itself
    try:
        with traceable(), shortened(shards.blocks_of(run) if apart else []):
            accumulate(run, micro_batches, lambda: 1)
    except InputError:  # perhaps for what a block that was passed through did not leave
        accumulate(run, micro_batches, lambda: 1)
    for weight in (weight for group in run.optimizer.param_groups for weight in group["params"]):
        if weight.grad is None:
            weight.grad = torch.empty_like(weight)
    update(run)


def _with_other_batches(peak: Peak, shapes: Shapes, device: str, ahead: bool) -> Peak:
    """The peak with the step's micro-batches that are in memory and were not rehearsed: all of them on a processor, and
    elsewhere the next one, where it is copied ahead."""
    whole = shapes.plan.share_of(shapes.job.train.batch)
    micro = shapes.plan.micro_batch_of(shapes.job.train.batch)
    there = whole if device == "cpu" else micro * (1 + ahead)
    more = (
        tensor_bytes(tensors_in(shapes.batch))
        // (sample_count(shapes.batch) * shapes.plan.cp)
        * (there - min(micro * (_rehearsed(shapes.plan) or whole), whole))
    )
    return replace(peak, total=peak.total + more, rows={**peak.rows, "activations": peak.rows["activations"] + more})
