"""Compare the plan that search chooses with every legal plan of a list, on jobs with memory limits.

    .venv/bin/python benchmarks/choice.py --out records/choice.json

For each job, search chooses among the plans of the list within a limit that the reference plan does
not meet. Then each plan runs in a process of its own that has searched before, as `tightfit train`
does. The chosen plan should stay within the limit, and be within 5 % of the fastest plan that fits.

A plan fits if its process leaves as much of the limit free as search does (3 %). The fastest plan
that merely stayed below the limit is recorded too. On some jobs the limit is enforced
(RLIMIT_DATA): the chosen plan has to train, and the reference plan has to run out of memory.

The machine is shared. A fixed piece of work (`calibration/clock_drift.py`) is timed before and after
each process. `step_s` is at the speed of the calibration, and `pace` says what the speed was.

`--measured FILE` takes the measurements of an earlier comparison on this machine, and only chooses
again.
"""

from __future__ import annotations

import itertools
import os
import resource
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of this file's folder
from benchmarks import harness

ALLOW = ["bf16", "8-bit-states"]
STEPS = 4
ENFORCED = 3  # of the jobs
SLACK = 0.1  # of the limit that an enforced one leaves to what is no tensor: libraries' buffers, fragments of the heap
STEP_OF_HEAP = 64 * 2**20  # by which the heap grows under `allocator: tuned`
AGAIN, CLOSE = 2, 1.15  # how often the chosen plan, and those as near the fastest, run again: medians are compared
MOST, DOUBT = 6, 1.05  # how often while the chosen plan seems so much slower than one of them: the machine is shared


def language(architecture: str, depth: int, width: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    if architecture == "gpt2":
        return {
            "architecture": "gpt2",
            "n_embd": width,
            "n_layer": depth,
            "n_head": 4,
            "vocab_size": vocabulary,
            **more,
        }
    return {
        "architecture": architecture, "hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": 4,
        "intermediate_size": 3 * width, "vocab_size": vocabulary, **more,
    }  # fmt: skip


def tokens(length: int) -> dict[str, Any]:
    return {"synthetic": "tokens", "sequence_length": length}


VIT = {
    "architecture": "vit", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024,
    "image_size": 96, "patch_size": 8, "num_labels": 10,
}  # fmt: skip
# model, data, batch, optimizer, share of what the reference plan takes beside the libraries that the limit leaves to a plan
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any], int, str, float]] = {
    "llama, half": (language("llama", 6, 256, 2048), tokens(128), 16, "adamw", 0.5),
    "llama, third": (language("llama", 6, 256, 2048), tokens(128), 16, "adamw", 0.33),
    "vit, half": (VIT, {"synthetic": "images"}, 16, "adamw", 0.5),
    "llama, quarter": (language("llama", 8, 192, 1024), tokens(256), 16, "adamw", 0.25),
    "gpt2, half": (language("gpt2", 6, 256, 2048, n_positions=128), tokens(128), 16, "adamw", 0.5),
    "gpt2, third": (language("gpt2", 6, 256, 2048, n_positions=128), tokens(128), 16, "adamw", 0.35),
    "bert, half": (language("bert", 6, 256, 2048), tokens(128), 16, "adamw", 0.5),
    "vit, 45 %": (VIT, {"synthetic": "images"}, 16, "adamw", 0.45),
    "wide llama, three quarters": (language("llama", 4, 512, 4096), tokens(64), 16, "adamw", 0.75),
    "llama with sgd, third": (language("llama", 6, 256, 2048), tokens(128), 16, "sgd", 0.33),
}


def plans(batch: int) -> list[dict[str, Any]]:
    """The list: plans that trade memory for time on one device, in its fastest precision."""
    from tightfit.capabilities import has_fast_bf16
    from tightfit.machine import Machine

    found, precision = [], "bf16-mixed" if has_fast_bf16(Machine.detect()) else "fp32"
    for pieces, recompute, in_backward in itertools.product((1, 2, 4), ("none", "full"), (False, True)):
        if not (in_backward and pieces > 1):
            fields = {"precision": precision, "recompute": recompute, "update_in_backward": in_backward}
            found.append({**fields, "micro_batch": batch // pieces if pieces > 1 else None, "allocator": "tuned"})
    return found


def job_of(name: str, limit: float | None = None) -> Any:
    import tightfit

    model, data, batch, optimizer, _ = JOBS[name]
    train = tightfit.Train(optimizer=optimizer, batch=batch, steps=STEPS + 2)
    limits = {} if limit is None else {"limits": {"memory": round(limit)}}
    return tightfit.Job(model=model, data=data, allow=ALLOW, train=train, **limits)


def choose(name: str) -> dict[str, Any]:
    """The limit, the plan that search chooses, and the predictions for all plans."""
    from tightfit.machine import Machine
    from tightfit.plan import Plan
    from tightfit.planner.estimator import Estimator
    from tightfit.planner.search import search

    machine = Machine.detect()
    estimator = Estimator(job_of(name), machine)
    reference = estimator.include_allocator(estimator.estimate(Plan(allocator="tuned")))
    runtime = reference.peak.rows["runtime"]
    limit = runtime + JOBS[name][4] * (reference.peak.total - runtime)
    job = job_of(name, limit)
    among = [Plan(**fields) for fields in plans(job.train.batch)]
    found = search(job, machine, None, Estimator(job, machine), among)
    return {
        "limit": limit,
        "runtime": runtime,
        "chosen": found[0].plan.content(),
        "predicted": {str(one.plan): one.time.step_s for one in found},
        "predicted_bytes": found[0].peak_bytes,
    }


def run(name: str, fields: dict[str, Any], limit: float | None) -> dict[str, Any]:
    """A few steps of one plan: peak bytes of its process and its tensors, seconds of a step.

    limit: bytes that the system allows the process, where given.
    """
    from tightfit.engine.build import build
    from tightfit.engine.loop import train
    from tightfit.measure.observer import Observer
    from tightfit.plan import Plan

    choose(name)
    job, plan = job_of(name), Plan(**fields)
    if limit is not None:
        warm_up(job, plan)
        left = limit - psutil.Process().memory_info().rss
        allowed = data_bytes() + left * (1 + SLACK) + STEP_OF_HEAP
        resource.setrlimit(resource.RLIMIT_DATA, (round(allowed), resource.RLIM_INFINITY))
    built = build(job, plan)
    observer = Observer(built, 0)
    seconds = []
    for result in train(built, take=observer.take):
        observer.add(result)
        seconds.append(result.seconds)
    from tightfit.machine import Machine

    record = observer.record(Machine.detect())
    peak = record.peak_bytes
    return {"process_bytes": peak.process, "peak_bytes": peak.measured, "step_s": record.median_step_s}


def warm_up(job: Any, plan: Any) -> None:
    """Let libraries map their memory, such as threads' stacks and modules, before the limit is set."""
    import torch

    from tightfit.planner.dry_run import dry_run

    layer = torch.nn.Linear(256, 256)
    layer(torch.randn(256, 256)).sum().backward()
    dry_run(job, plan)


def data_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def alone(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any] | None:
    """The answer of a process of its own, started as for `allocator: tuned`; None where it ran out of memory."""
    from tightfit.engine.launch import environment
    from tightfit.plan import Plan

    added = environment(Plan(allocator="tuned"), "cpu", os.environ)
    try:
        return harness.in_fresh_process(function, *arguments, environment=added)
    except harness.MeasurementFailed as failure:
        if "memory" in failure.output.lower() or "could not create a primitive" in failure.output:  # as oneDNN says it
            return None
        raise


def at_usual_pace(name: str, plan: dict[str, Any], control: Callable[[], float]) -> dict[str, Any]:
    """The figures of a plan's process, its seconds at the pace of the calibration.

    control: the current time of the fixed piece of work, as a multiple of its usual time.
    """
    before = control()
    seen = alone(run, name, plan, None)
    assert seen is not None
    pace = 2 / (before + control())
    return {**seen, "step_s": seen["step_s"] * pace, "pace": pace}


def compare(name: str, enforced: bool, measured: list[dict[str, Any]], control: Callable[[], float]) -> dict[str, Any]:
    """Search's choice on one job, and every plan of the list.

    measured: plans that have run already. control: as in `at_usual_pace`.
    """
    from tightfit.planner.estimate import MARGIN

    said = alone(choose, name)
    assert said is not None
    rows = list(measured)
    for fields in plans(JOBS[name][2])[len(rows) :]:
        harness.show_progress(f"{name}: {len(rows) + 1} plans")
        rows.append({"plan": fields, **at_usual_pace(name, fields, control)})
    harness.show_progress("")
    chosen = next(row for row in rows if all(said["chosen"][key] == value for key, value in row["plan"].items()))
    below = [row for row in rows if row["process_bytes"] <= said["limit"]]
    fitting = [
        row
        for row in below
        if row["process_bytes"] + MARGIN * (row["process_bytes"] - said["runtime"]) <= said["limit"]
    ]
    fastest = min(row["step_s"] for row in below)
    near = [row for row in below if row is chosen or row["step_s"] < CLOSE * fastest]
    if not all("runs_s" in row for row in near):
        times: dict[int, list[float]] = {number: [row["step_s"]] for number, row in enumerate(near)}
        for turn in range(MOST):  # in turn, for a machine's speed drifts
            if turn >= AGAIN and chosen["step_s"] <= DOUBT * min(row["step_s"] for row in near):
                break
            for number, row in enumerate(near):
                seen = at_usual_pace(name, row["plan"], control)
                times[number].append(seen["step_s"])
                row["step_s"], row["runs_s"] = statistics.median(times[number]), times[number]
    best = min([row for row in near if row in fitting] or [chosen], key=lambda row: row["step_s"])
    found = {
        "job": name,
        "limit_bytes": said["limit"],
        "predicted_bytes": said["predicted_bytes"],
        "chosen": chosen,
        "best": best,
        "slower": chosen["step_s"] / best["step_s"] - 1,
        "slower_than_any_below_the_limit": chosen["step_s"] / min(row["step_s"] for row in near) - 1,
        "within_limit": chosen["process_bytes"] <= said["limit"],
        "fitting": len(fitting),
        "rows": rows,
    }
    if enforced:
        found["lives_within_enforced_limit"] = alone(run, name, chosen["plan"], said["limit"]) is not None
        found["reference_dies_of_it"] = alone(run, name, {"allocator": "tuned"}, said["limit"]) is None
    return found


def show(row: dict[str, Any]) -> None:
    plan = ", ".join(f"{name}={value}" for name, value in row["chosen"]["plan"].items() if value not in (None, False))
    line = (
        f"{row['job']:26s} {row['slower']:+6.1%} of the best of {row['fitting']:2d} that fit "
        f"({row['slower_than_any_below_the_limit']:+.1%} of any below the limit), "
        f"{row['chosen']['process_bytes'] / row['limit_bytes']:4.0%} of the limit: {plan}"
    )
    if "reference_dies_of_it" in row:
        line += f"; enforced: {'lives' if row['lives_within_enforced_limit'] else 'DIES'}"
        line += f", reference {'dies' if row['reference_dies_of_it'] else 'LIVES'}"
    print(line, flush=True)


def main() -> None:
    parser = harness.make_parser(__doc__, only="jobs whose name begins so; a comparison in --out is continued")
    parser.add_argument("--measured", type=Path, help="an earlier comparison whose runs are taken")
    arguments = parser.parse_args()
    there = harness.read_record(arguments.out).get("jobs", [])
    taken = harness.read_record(arguments.measured).get("jobs", [])
    ran = {row["job"]: row["rows"] for row in taken}
    rows = list(there)  # an interrupted comparison goes on
    control = calibrated_control()
    for number, name in enumerate(JOBS):
        if name.startswith(arguments.only) and name not in {row["job"] for row in there}:
            rows.append(compare(name, number < ENFORCED, ran.get(name, []), control))
            show(rows[-1])
            harness.write_record(arguments.out, {"jobs": rows})
    print(
        f"worst {max(row['slower'] for row in rows):+.1%}, all within the limit: {all(row['within_limit'] for row in rows)}"
    )


def calibrated_control() -> Callable[[], float]:
    import torch

    from tightfit.calibration.clock_drift import control_s

    usual_s = harness.usual_control_s()
    return lambda: control_s(torch.device("cpu")) / usual_s


if __name__ == "__main__":
    main()
