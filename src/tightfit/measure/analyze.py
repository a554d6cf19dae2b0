"""`tightfit explain --analyze`: runs a few steps of a plan and measures their time and memory, so
that they can be compared with the prediction."""

from __future__ import annotations

from tightfit.engine.build import build
from tightfit.engine.loop import train
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.measure.observer import SAMPLED, Observer
from tightfit.plan import Plan
from tightfit.record import Record


def analyze(job: Job, plan: Plan, machine: Machine, steps: int = 5) -> Record:
    """Train the job for a few steps with `plan`, and return the record of the measured times and
    memory.

    steps  number of timed steps. A few more steps run before them: they compile, allocate the
           optimizer states, and are sampled for memory
    """
    sampled = 1 + 2 * (plan.pp - 1) * (plan.schedule == "pipedream")
    short = job.replace(train=job.train.replace(steps=steps + SAMPLED + sampled, epochs=None, warmup=0))
    run = build(short, plan, machine)
    observer = Observer(run, 0)
    for result in train(run, take=observer.take, weights_at_yield=False):
        observer.add(result)
    return observer.record(machine)
