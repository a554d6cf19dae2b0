"""Compare the plan that search chooses with every legal plan of a list, on jobs with memory limits.

    .venv/bin/python benchmarks/choice.py --out records/choice.json

For each job, search chooses among the plans of the list within a limit that the reference plan does
not meet. Then each plan runs in a process of its own that has searched before, as `tightfit train`
does. The chosen plan should stay within the limit, and be within 5 % of the fastest plan that fits.

A plan fits if its process leaves as much of the limit free as search does (3 %). The fastest plan
that merely stayed below the limit is recorded too. On some jobs the limit is enforced
(RLIMIT_DATA): the chosen plan has to train, and the reference plan has to run out of memory.

The machine is shared. A fixed piece of work (`measure/clock_drift.py`) is timed before and after
each process. `step_s` is at the speed of the calibration, and `pace` says what the speed was.

`--measured FILE` takes the measurements of an earlier comparison on this machine, and only chooses
again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

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
    """The list: what trades memory for time on one device, in the type that it multiplies fastest."""
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
    """What search says: the limit, and the plans with what they are predicted to take."""
    from tightfit.machine import Machine
    from tightfit.plan import Plan
    from tightfit.planner.estimate import Estimator
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
    """A few steps of one plan: bytes of its process and of its tensors at the peak, seconds of a step. limit: enforced, where
    given."""
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
    """Let libraries map what they map once, threads' stacks and modules among it, before the limit is set."""
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


def child(what: dict[str, Any]) -> dict[str, Any] | None:
    """The answer of a process of its own; None where it died for want of memory."""
    from tightfit.engine.launch import environment
    from tightfit.plan import Plan

    added = environment(Plan(allocator="tuned"), "cpu", os.environ)
    command = [sys.executable, __file__, "--child", json.dumps(what)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **added}, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if lines:
        return json.loads(lines[0].removeprefix("RESULT "))
    if "memory" in done.stderr.lower() or "could not create a primitive" in done.stderr:  # as oneDNN says it
        return None
    raise SystemExit(f"{what}: {done.stderr[-2000:]}")


def at_usual_pace(what: dict[str, Any], control: Callable[[], float]) -> dict[str, Any]:
    """What a child says of its steps, their seconds brought to the pace of the calibration. control: what the fixed piece of
    work takes now, in units of what it takes usually."""
    before = control()
    seen = child(what)
    assert seen is not None
    pace = 2 / (before + control())
    return {**seen, "step_s": seen["step_s"] * pace, "pace": pace}


def compare(name: str, enforced: bool, measured: list[dict[str, Any]], control: Callable[[], float]) -> dict[str, Any]:
    """Search's choice on one job beside every plan of the list. measured: plans that have run already; control: as of
    `at_usual_pace`."""
    from tightfit.planner.estimate import MARGIN

    said = child({"choose": name})
    assert said is not None
    rows = list(measured)
    for fields in plans(JOBS[name][2])[len(rows) :]:
        print(f"\r{name}: {len(rows) + 1} plans", end="", file=sys.stderr, flush=True)
        rows.append({"plan": fields, **at_usual_pace({"run": name, "plan": fields, "limit": None}, control)})
    print(file=sys.stderr)
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
                seen = at_usual_pace({"run": name, "plan": row["plan"], "limit": None}, control)
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
        found["lives_within_enforced_limit"] = (
            child({"run": name, "plan": chosen["plan"], "limit": said["limit"]}) is not None
        )
        reference = {"allocator": "tuned"}
        found["reference_dies_of_it"] = child({"run": name, "plan": reference, "limit": said["limit"]}) is None
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the comparison as JSON; one that is there is gone on with")
    parser.add_argument("--only", default="", help="jobs whose name begins so")
    parser.add_argument("--measured", type=Path, help="an earlier comparison whose runs are taken")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        what = json.loads(arguments.child)
        answer = choose(what["choose"]) if "choose" in what else run(what["run"], what["plan"], what["limit"])
        print("RESULT " + json.dumps(answer))
        return
    there = json.loads(arguments.out.read_text())["jobs"] if arguments.out and arguments.out.exists() else []
    taken = json.loads(arguments.measured.read_text())["jobs"] if arguments.measured else []
    ran = {row["job"]: row["rows"] for row in taken}
    rows = list(there)  # an interrupted comparison goes on
    control = calibrated_control()
    for number, name in enumerate(JOBS):
        if name.startswith(arguments.only) and name not in {row["job"] for row in there}:
            rows.append(compare(name, number < ENFORCED, ran.get(name, []), control))
            show(rows[-1])
            if arguments.out:
                write(arguments.out, rows)
    print(
        f"worst {max(row['slower'] for row in rows):+.1%}, all within the limit: {all(row['within_limit'] for row in rows)}"
    )


def calibrated_control() -> Callable[[], float]:
    import torch

    from tightfit.machine import Machine
    from tightfit.measure.clock_drift import control_s

    usual = Machine.detect().control_s
    if usual is None:
        raise SystemExit("this machine is not calibrated: run tightfit machine --calibrate")
    return lambda: control_s(torch.device("cpu")) / usual.value


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    from provenance import provenance  # beside this file, which runs as a script

    what = {**provenance(), "jobs": rows}
    path.write_text(json.dumps(what, indent=1) + "\n")


if __name__ == "__main__":
    main()
