"""Measures a rung of a ladder: some steps of a plan, in a process of its own.

Plans change settings of their process that cannot be taken back, such as its allocator, and a peak
is that of a whole process.
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
    """What a process that trained with a plan took.

    step_s         median seconds of the timed steps
    tensor_bytes   bytes of all tensors at the peak of the sampled step
    process_bytes  largest resident set size of the process
    loss           loss of the last step; at this step, all rungs have trained on the same samples
    failed         why the process did not finish; empty if it did
    """

    step_s: float | None = None
    tensor_bytes: int | None = None
    process_bytes: int | None = None
    loss: float | None = None
    failed: str = ""

    def content(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return asdict(self)


def measure_rung(job: Job, plan: Plan, machine: Machine, steps: int = STEPS) -> Measured:
    """Run some steps of the job with a plan on this machine, in a process of its own."""
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
    """The measurement in its own process; what to run and the result as one line of JSON."""
    from tightfit.measure.analyze import analyze

    asked = json.loads(text)
    machine = Machine.parse(asked["machine"])
    record = analyze(Job.parse(asked["job"]), Plan.parse(asked["plan"]), machine, asked["steps"])
    peak = record.peak_bytes
    found = Measured(record.median_step_s, peak.measured, peak.process, record.loss[-1][1] if record.loss else None)
    return json.dumps(found.content())
