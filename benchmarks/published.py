"""Compare what explain predicts with training runs that others published: memory and speed.

    .venv/bin/python benchmarks/published.py --out records/published.json

The runs are facts in published.yaml (one device) and published_devices.yaml (several, up to
thousands). Nothing is fitted to a row. Speed is compared in two ways: as predicted from the device's
published figures, and after one calibration for each (machine, framework) of its efficiencies in
products, memory, launches and links (planner/fit_machine.py). The calibration uses its runs without a
pipeline, where it has any.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tightfit.cost.ledger import Ledger
from tightfit.job import Job, Train
from tightfit.machine import Machine
from tightfit.plan import Plan
from tightfit.planner.allocators.cuda import reserved_bytes
from tightfit.planner.estimate import Estimate, Estimator
from tightfit.planner.fit_machine import TimedRun, fit_efficiencies
from tightfit.planner.time_model import CostModel
from tightfit.units import parse_bytes

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of this file's folder
from benchmarks import harness

ALLOW = ["bf16", "fp16", "tf32", "8-bit-states", "4-bit-states", "bf16-states"]
FILES = ("published.yaml", "published_devices.yaml")
LIVING = ("ledger", "estimator", "plan", "loop")  # of a comparison, what is no figure
ANY_MACHINE = "a100-80gb"  # for rows that state none, whose memory alone is compared


def compare(row: dict[str, Any]) -> dict[str, Any]:
    """Published and predicted figures of one run."""
    given = {name: row[name] for name in ("momentum", "clip") if name in row}
    train = Train(optimizer=row["optimizer"], batch=row["batch"], steps=1000, **given)
    job = Job(model=row["model"], data=row["data"], allow=ALLOW, train=train)
    machine = with_their_kernels(Machine.named(row.get("machine", ANY_MACHINE)), row.get("loop", {}))
    estimator = Estimator(job, machine)
    estimate = estimator.estimate(Plan(**row["plan"]))
    ledger = as_their_loop(estimate.ledger, row.get("loop", {}))
    amount = row["batch"] * (row["data"]["sequence_length"] if row["data"].get("sequence_length", 0) > 1000 else 1)
    return {
        "id": row["id"],
        "framework": row["framework"],
        "machine": row.get("machine"),
        "devices": estimate.plan.devices,
        **(compare_memory(row, ledger, estimator.include_allocator(estimate)) if "memory" in row else {}),
        "published_speed": row.get("speed"),
        "predicted_speed": amount / estimate.time.step_s if "speed" in row else None,
        "amount": amount,
        "ledger": ledger,
        "estimator": estimator,
        "plan": estimate.plan,
        "loop": row.get("loop", {}),
    }


def with_their_kernels(machine: Machine, loop: dict[str, Any]) -> Machine:
    """The machine with the rates of another framework's attention kernels, where they are known."""
    return machine.replace(attention_kernel=loop.get("attention", ""))


def compare_memory(row: dict[str, Any], ledger: Ledger, settled: Estimate) -> dict[str, Any]:
    """Published and predicted bytes of a device, by the source's own metric."""
    if settled.plan.devices > 1:  # settled: with what the allocator reserves
        ((metric, size),) = row["memory"].items()
        predicted = settled.peak.total - settled.peak.rows["runtime"] + settled.workspace_bytes
        return {"metric": metric, "published_bytes": parse_bytes(size), "predicted_bytes": round(predicted)}
    late = row.get("loop", {}).get("zeroes_before_backward", False)
    ((metric, size),) = row["memory"].items()
    peak = max(
        sum(rows.values()) + late * (phase == "forward") * ledger.gradient_bytes()
        for phase, _, rows in ledger.instants()
    )
    predicted = peak - ledger.fixed["runtime"] + settled.workspace_bytes
    if metric != "allocated":
        predicted = max(
            reserved_bytes(ledger, expandable=False, zero_grad_late=late) + settled.workspace_bytes, predicted
        )
    if metric == "device":
        predicted += parse_bytes(row["context"])
    return {"metric": metric, "published_bytes": parse_bytes(size), "predicted_bytes": round(predicted)}


def as_their_loop(ledger: Ledger, loop: dict[str, Any]) -> Ledger:
    """The ledger of another framework's loop, with the bytes of its optimizer's kernels where they are known."""
    times = loop.get("temporaries_of_update", 1)
    updates = {
        name: replace(update, foreach_bytes=times * update.foreach_bytes) for name, update in ledger.updates.items()
    }
    return replace(ledger, updates=updates, foreach=ledger.foreach and not loop.get("one_by_one", False))


def calibrate(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """One calibration for each (machine, framework): its efficiencies by name. Rows are given their calibrated speed."""
    shares = {}
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["published_speed"]:
            groups[row["machine"].partition(":")[0], row["framework"]].append(row)
    for (device, framework), same in groups.items():
        straight = [row for row in same if row["plan"].pp == 1] or same
        machine = with_their_kernels(Machine.named(device), same[0]["loop"])
        seen = [TimedRun(row["ledger"], row["amount"] / row["published_speed"], machine) for row in straight]
        refined = fit_efficiencies(machine, seen)
        for row in same:
            row["calibrated_speed"] = row["amount"] / _seconds(row, refined)
        shares[f"{framework} on {device}"] = {name: figure.value for name, figure in refined.efficiency.items()}
    return shares


def _seconds(row: dict[str, Any], refined: Machine) -> float:
    """A step's, with the efficiencies of `refined`."""
    clock = CostModel(refined)
    if row["plan"].pp == 1:
        return clock.step_time(row["ledger"]).step_s
    estimator: Estimator = row["estimator"]
    estimator.cost_model = clock
    return estimator.estimate(row["plan"]).time.step_s


def line_of(row: dict[str, Any]) -> str:
    line = f"{row['id']:50s}"
    if "metric" in row:
        predicted, published = row["predicted_bytes"], row["published_bytes"]
        line += f" {predicted / 1e9:7.2f} GB of {published / 1e9:7.2f} GB {predicted / published - 1:+6.1%} {row['metric']:9s}"
    if row["published_speed"]:
        predicted, published = row["predicted_speed"], row["published_speed"]
        line += f" {predicted:8.4g}/s of {published:8.4g}/s {predicted / published - 1:+6.1%}"
    return line


def summed_up(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median and worst error, on one device and on several."""
    found = {}
    for several in (False, True):
        those = [row for row in rows if (row["devices"] > 1) == several]
        of = "several devices" if several else "one device"
        timed = [row for row in those if row["published_speed"]]
        errors = {
            f"memory, {of}": [row["predicted_bytes"] / row["published_bytes"] for row in those if "metric" in row],
            f"speed, {of}": [row["predicted_speed"] / row["published_speed"] for row in timed],
            f"speed, calibrated, {of}": [row["calibrated_speed"] / row["published_speed"] for row in timed],
        }
        for name, ratios in errors.items():
            if ratios:
                found[name] = {"rows": len(ratios), **harness.error_summary(ratio - 1 for ratio in ratios)}
    return found


def main() -> None:
    arguments = harness.make_parser(__doc__, only="rows whose id begins so").parse_args()
    runs = [run for name in FILES for run in yaml.safe_load((Path(__file__).parent / name).read_text())]
    rows = []
    for run in runs:
        if run["id"].startswith(arguments.only):
            rows.append(compare(run))
            print(line_of(rows[-1]), flush=True)
    shares = calibrate(rows)
    summary = summed_up(rows)
    for name, errors in summary.items():
        print(
            f"{name:34s} {errors['rows']:3.0f} rows: median error {errors['median']:.1%}, worst {errors['worst']:.1%}"
        )
    for name, efficiencies in shares.items():
        print(f"{name}: " + ", ".join(f"{kind} {share:.2f}" for kind, share in efficiencies.items()))
    figures = [{name: value for name, value in row.items() if name not in LIVING} for row in rows]
    harness.write_record(arguments.out, {"summary": summary, "shares": shares, "rows": figures})


if __name__ == "__main__":
    main()
