"""The training loop: `train` is a generator that yields each step's result. The caller's `for` loop
does the logging, the checkpoints and the evaluation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator

from tightfit.engine.delayed_readings import StepTimer, begin_reading, read_all
from tightfit.engine.divided_check import check_divided, wants_divided_check
from tightfit.engine.pipeline_check import check_split, wants_check
from tightfit.engine.rng import seed_all
from tightfit.engine.step import Step, drain, take_step, with_fields
from tightfit.errors import InputError
from tightfit.models.batches import Batch
from tightfit.optim import schedule
from tightfit.runtime.activity import note_activity
from tightfit.runtime.run import Run, check_run, wait_for_weights

TakeStep = Callable[[Run, list[Batch], int], Step]


def total_steps(run: Run) -> int:
    """Return the number of optimizer steps of the run's job. It is `train.steps`, or follows from
    the number of epochs and samples. Raises InputError if the job does not set train.steps and the
    data has no end."""
    steps = schedule.total_steps(run.job.train, run.data.samples)
    if steps is None:
        raise InputError("job: train.steps", "is not set, and the data has no end", "set train.steps")
    return steps


def train(run: Run, start: int = 0, take: TakeStep = take_step, weights_at_yield: bool = True) -> Iterator[Step]:
    """Train from step `start` to the job's last step, and yield a `Step` (loss, duration, ...)
    after each step. To stop early, leave the loop.

    start             number of the first step, from 0. To continue a run, pass what `resume`
                      returned
    take              the function that runs one step: `take_step`, or a function that also measures
                      the step
    weights_at_yield  whether all weights are up to date when a step is yielded. If False, ZeRO-1
                      and ZeRO-2 may still be gathering updated weights then, which makes training
                      faster. The model's forward and `state_dict`, `evaluate`, `save` and the end
                      of the loop wait for the weights; code that reads a parameter directly must
                      call `run.model.state_dict()` first. `tightfit train` passes False

    With the pipedream schedule, the loss of a step becomes known some steps later, and only then is
    the step yielded. On CUDA, a step is yielded when all of its work is queued and the previous
    step has ended. Code that reads the loss at once makes the host wait for the device; afterwards
    the device waits for the host. `tightfit train` therefore reads the results of a step after the
    next step has begun.

    Raises InputError if the job does not set train.steps and the data has no end, or if a
    pipeline's stages, or a user's own model that tp or cp divides, compute another result than the
    undivided model (see the job's `check_split`).
    Also raises it at the beginning of a step if a parameter was unfrozen after the run was built.
    """
    check_run(run, "train")
    batch = run.job.train.batch
    until = None
    if run.job.train.steps is None and run.data.samples is not None:
        until = math.ceil((run.job.train.epochs or 1) * run.data.samples)
    if start == 0:
        rng_rank = run.mesh.rng_rank if run.mesh is not None else 0
        # seed again after `build`, so that dropout does not depend on how the model was created
        seed_all(run.job.train.seed + 1 + 7919 * rng_rank)
    if wants_divided_check(run):
        check_divided(run)
    if wants_check(run, total_steps(run) - start):
        check_split(run)
    waiting: deque[Step] = deque()
    before: Step | None = None
    clock = StepTimer(run.device)
    wait = wait_for_weights  # a local name: at exit, Python may clear the module before it closes this generator
    clock.begin()
    note_activity("reading data", start)
    for step, micro_batches in zip(range(start, total_steps(run)), run.data.steps(start * batch, until), strict=False):
        result = take(run, micro_batches, step)
        if run.device.type == "cuda":
            note_activity("the end of the previous step")
        waiting.append(with_fields(result, seconds=clock.end()))
        if before is not None and run.device.type == "cuda":
            read_all(before)  # it has ended; unread figures would keep page-locked memory
        before = waiting[-1]
        if run.executor is None or len(waiting) > run.executor.loss_delay:
            if weights_at_yield:
                wait(run)
            try:
                yield _with_loss(run, waiting.popleft())
            except GeneratorExit:  # the caller has left the loop, and may read any weight
                wait(run)
                raise
        note_activity("reading data", step + 1)
        clock.begin()
    drain(run)
    while waiting:
        yield _with_loss(run, waiting.popleft())


def _with_loss(run: Run, step: Step) -> Step:
    if run.executor is None or not run.executor.loss_delay:
        return step
    read = begin_reading({"loss": run.executor.losses.popleft()})
    return with_fields(step, loss=lambda: read()["loss"])


__all__ = ["total_steps", "train"]
