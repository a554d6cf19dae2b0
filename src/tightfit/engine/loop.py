"""The loop: a generator that yields each step's result. What is done with it is the caller's `for`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator

import torch

from tightfit.engine.randomness import evaluating, randomness_kept, seed_all
from tightfit.engine.readings import Clock, begin_reading, settle
from tightfit.engine.split import check_split, wants_check
from tightfit.engine.step import Step, changed, drain, take_step
from tightfit.errors import InputError
from tightfit.methods.mesh import DATA
from tightfit.methods.progress import doing
from tightfit.methods.run import Filler, Run, to_device, wait_for_weights
from tightfit.models.objective import Batch
from tightfit.optim import schedule

TakeStep = Callable[[Run, list[Batch], int], Step]


def total_steps(run: Run) -> int:
    """How many optimizer steps the job has. Raises InputError for endless data without train.steps."""
    steps = schedule.total_steps(run.job.train, run.data.samples)
    if steps is None:
        raise InputError("job: train.steps", "is not said, and the data has no end", "add train.steps")
    return steps


def train(run: Run, start: int = 0, take: TakeStep = take_step, weights_at_yield: bool = True) -> Iterator[Step]:
    """Train from step `start` to the job's end, yielding a Step for each. Stop by leaving the loop.

    take              takes a step: one that also observes it may stand in for the engine's own
    weights_at_yield  whether all weights are up to date when a step is yielded. False lets ZeRO 1 and 2 gather updated
                      weights while the next forward runs. Then a forward of the model, its `state_dict`, `evaluate` and `save`
                      wait for them, and so does the end of the loop, however it is left; whoever reads a parameter
                      directly calls `run.model.state_dict()` first. `tightfit train` passes False.

    A step whose loss is known some steps later (pipedream) is yielded then. On CUDA a step is yielded when the device has all of
    it to do, and has done the step before: whoever reads its loss then waits, and the device waits for Python after that.
    `tightfit train` reads a step's figures after the next step has begun.
    """
    batch = run.job.train.batch
    until = None
    if run.job.train.steps is None and run.data.samples is not None:
        until = math.ceil((run.job.train.epochs or 1) * run.data.samples)
    if start == 0:
        place = run.mesh.draws if run.mesh is not None else 0
        seed_all(run.job.train.seed + 1 + 7919 * place)  # dropout draws the same numbers however the model was created
    if wants_check(run, total_steps(run) - start):
        check_split(run)
    waiting: deque[Step] = deque()
    before: Step | None = None
    clock = Clock(run.device)
    clock.begin()
    doing("reading data", start)
    for step, micro_batches in zip(range(start, total_steps(run)), run.data.steps(start * batch, until), strict=False):
        result = take(run, micro_batches, step)
        if run.device.type == "cuda":
            doing("the end of the step before")
        waiting.append(changed(result, seconds=clock.end()))
        if before is not None and run.device.type == "cuda":
            settle(before)  # it has ended; a caller that keeps all steps and reads none would keep page-locked memory
        before = waiting[-1]
        if run.stages is None or len(waiting) > run.stages.delay:
            if weights_at_yield:
                wait_for_weights(run)
            try:
                yield _with_loss(run, waiting.popleft())
            except GeneratorExit:  # the caller has left, and may read what it likes
                wait_for_weights(run)
                raise
        doing("reading data", step + 1)
        clock.begin()
    drain(run)
    while waiting:
        yield _with_loss(run, waiting.popleft())


def _with_loss(run: Run, step: Step) -> Step:
    if run.stages is None or not run.stages.delay:
        return step
    read = begin_reading({"loss": run.stages.losses.popleft()})
    return changed(step, loss=lambda: read()["loss"])


@torch.no_grad()
def evaluate(run: Run, samples: int | None = None) -> float:
    """Mean loss over held-out samples, one micro-batch at a time: nothing but the running sum is kept.

    Leaves the training as it was: modes, running statistics and random numbers. Raises InputError where no samples
    are held out.
    """
    drain(run)
    total, items = torch.zeros((), dtype=torch.float64, device=run.device), 0
    with evaluating(run.model), randomness_kept():
        for number, batch in enumerate(run.data.held_out(samples or run.job.train.evaluate_samples)):
            doing(f"evaluation, micro-batch {number + 1}")
            if run.stages is not None:
                items += 0 if isinstance(batch, Filler) else run.objective.count(batch)
                total += run.stages.evaluate(run, batch)
                continue
            if isinstance(batch, Filler):  # parameters that are divided come only where all devices ask for them
                run.loss_sum(to_device(batch.batch, run))
                continue
            items += run.objective.count(batch)
            total += run.loss_sum(to_device(batch, run))
    if run.mesh is not None:
        run.mesh.sum(total, ("pp",))
        run.mesh.sum(total, DATA)
        items = int(run.mesh.sum(torch.tensor(items, device=run.device), DATA))
    if not items:
        raise InputError("evaluate", "the data holds out nothing that counts", "set data.held_out: 0.01")
    return float(total) / items


__all__ = ["evaluate", "evaluating", "total_steps", "train"]
