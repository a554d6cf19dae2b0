"""Measures one plan of a ladder (a list of plans that save memory step by step): runs a few steps
of it in a separate process.

A separate process is needed for two reasons. A plan changes settings of its process that cannot be
undone, such as the allocator. And the operating system records peak memory for a whole process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from tightfit.engine.launch import environment
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.plan import Plan

STEPS = 5  # timed steps
_CODE = "import sys; from tightfit.measure.rung import measured; print(measured(sys.stdin.read()))"


@dataclass(frozen=True)
class Measured:
    """What was measured in a process that trained with a plan. Fields are None if the process
    failed.

    step_s         median seconds of the timed steps
    tensor_bytes   bytes of all tensors at the peak of the step that was sampled for memory
    process_bytes  largest resident set size of the process
    loss           loss of the last step. All plans of a ladder have then trained on the same
                   samples, so their losses can be compared
    failed         why the process failed; empty if it did not
    """

    step_s: float | None = None
    tensor_bytes: int | None = None
    process_bytes: int | None = None
    loss: float | None = None
    failed: str = ""

    def content(self) -> dict[str, Any]:
        """Return the fields as a dict of name -> value, for the output of `--json`."""
        return asdict(self)


def measure_rung(job: Job, plan: Plan, machine: Machine, steps: int = STEPS) -> Measured:
    """Train the job for a few steps with `plan` in a separate process, and return the measurements.

    steps  number of timed steps

    If the process fails, no error is raised: the field `failed` of the result says why.
    """
    asked = {"job": job.content(), "plan": plan.content(), "machine": machine.content(), "steps": steps}
    done = subprocess.run(
        [sys.executable, "-c", _CODE],
        input=json.dumps(asked),
        env={**os.environ, **environment(plan, machine.device, os.environ)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        ended = f"its process ended with code {done.returncode}"
        return Measured(failed=said[-1] if said and done.returncode > 0 else ended)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def measured(text: str) -> str:
    """Measure a plan in this process, which `measure_rung` has started. Return the fields of
    `Measured` as one line of JSON.

    text  JSON with the keys "job", "plan", "machine" and "steps" (the number of timed steps)
    """
    from tightfit.measure.analyze import analyze

    asked = json.loads(text)
    machine = Machine.parse(asked["machine"])
    record = analyze(Job.parse(asked["job"]), Plan.parse(asked["plan"]), machine, asked["steps"])
    peak = record.peak_bytes
    found = Measured(record.median_step_s, peak.measured, peak.process, record.loss[-1][1] if record.loss else None)
    return json.dumps(found.content())
