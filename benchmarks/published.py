"""Published training runs against what explain says of them: memory and speed, on machines that are not here.

    .venv/bin/python benchmarks/published.py --out records/published.json

The runs are facts in published.yaml. Nothing is fitted to a row. Speed is compared in two ways: as predicted from the
device's published figures, and after one calibration for each (machine, framework) of its efficiencies in products, memory
and launches (planner/calibrate.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tightfit.job import Job, Train
from tightfit.ledger import Ledger
from tightfit.machine import Machine
from tightfit.plan import Plan
from tightfit.planner.calibrate import refine
from tightfit.planner.estimate import WORKSPACE_BYTES, Estimator
from tightfit.planner.reserve import reserved_bytes
from tightfit.planner.time import Clock
from tightfit.record import code_version
from tightfit.units import parse_bytes

ALLOW = ["bf16", "fp16", "tf32", "8-bit-states", "4-bit-states", "bf16-states"]
ANY_MACHINE = "a100-80gb"  # for rows that state none, whose memory alone is compared


def compare(row: dict[str, Any]) -> dict[str, Any]:
    """Published and predicted figures of one run."""
    given = {name: row[name] for name in ("momentum", "clip") if name in row}
    train = Train(optimizer=row["optimizer"], batch=row["batch"], steps=1000, **given)
    job = Job(model=row["model"], data=row["data"], allow=ALLOW, train=train)
    machine = Machine.named(row.get("machine", ANY_MACHINE))
    estimate = Estimator(job, machine).estimate(Plan(**row["plan"]))
    ledger = as_their_loop(estimate.ledger, row.get("loop", {}))
    late = row.get("loop", {}).get("zeroes_before_backward", False)
    ((metric, size),) = row["memory"].items()
    peak = max(
        sum(rows.values()) + late * (phase == "forward") * ledger.gradient_bytes()
        for phase, _, rows in ledger.instants()
    )
    predicted = peak - ledger.fixed["runtime"] + WORKSPACE_BYTES
    if metric != "allocated":
        predicted = max(reserved_bytes(ledger, expandable=False, late=late) + WORKSPACE_BYTES, predicted)
    if metric == "device":
        predicted += parse_bytes(row["context"])
    in_tokens = row["data"].get("sequence_length", 0) > 1000
    amount = row["batch"] * (row["data"]["sequence_length"] if in_tokens else 1)
    return {
        "id": row["id"],
        "framework": row["framework"],
        "machine": row.get("machine"),
        "metric": metric,
        "published_bytes": parse_bytes(size),
        "predicted_bytes": round(predicted),
        "published_speed": row.get("speed"),
        "predicted_speed": amount / estimate.time.step_s if "speed" in row else None,
        "amount": amount,
        "ledger": ledger,
    }


def as_their_loop(ledger: Ledger, loop: dict[str, Any]) -> Ledger:
    """The ledger of a loop that is not ours: what its optimizer's kernels hold, where that is known to be otherwise."""
    times = loop.get("temporaries_of_update", 1)
    updates = {
        name: replace(update, foreach_bytes=times * update.foreach_bytes) for name, update in ledger.updates.items()
    }
    return replace(ledger, updates=updates, foreach=ledger.foreach and not loop.get("one_by_one", False))


def calibrate(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """One calibration for each (machine, framework): its efficiencies by name. Rows are given their calibrated speed."""
    shares = {}
    for machine, framework in dict.fromkeys(
        (row["machine"], row["framework"]) for row in rows if row["published_speed"]
    ):
        same = [
            row for row in rows if (row["machine"], row["framework"]) == (machine, framework) and row["published_speed"]
        ]
        known = Machine.named(machine)
        refined = refine(known, [(row["ledger"], row["amount"] / row["published_speed"]) for row in same])
        for row in same:
            row["calibrated_speed"] = row["amount"] / Clock(refined).step_time(row["ledger"]).step_s
        shares[f"{framework} on {machine}"] = {name: figure.value for name, figure in refined.efficiency.items()}
    return shares


def line_of(row: dict[str, Any]) -> str:
    predicted, published = row["predicted_bytes"], row["published_bytes"]
    line = f"{row['id']:32s} {predicted / 1e9:7.2f} GB of {published / 1e9:7.2f} GB {predicted / published - 1:+6.1%} {row['metric']}"
    if row["published_speed"]:
        line += f"   {row['predicted_speed']:8.4g}/s of {row['published_speed']:8.4g}/s"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="rows whose id begins so")
    arguments = parser.parse_args()
    runs = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    rows = []
    for run in runs:
        if run["id"].startswith(arguments.only):
            rows.append(compare(run))
            print(line_of(rows[-1]), flush=True)
    shares = calibrate(rows)
    memory = [abs(row["predicted_bytes"] / row["published_bytes"] - 1) for row in rows]
    timed = [row for row in rows if row["published_speed"]]
    as_published, after = (
        [abs(row[f"{kind}_speed"] / row["published_speed"] - 1) for row in timed]
        for kind in ("predicted", "calibrated")
    )
    summary = {
        name: {"rows": len(errors), "median": statistics.median(errors), "worst": max(errors)}
        for name, errors in (("memory", memory), ("speed", as_published), ("speed, calibrated", after))
        if errors
    }
    for name, errors in summary.items():
        print(f"{name:18s} {errors['rows']:3d} rows: median error {errors['median']:.1%}, worst {errors['worst']:.1%}")
    for name, efficiencies in shares.items():
        print(f"{name}: " + ", ".join(f"{kind} {share:.2f}" for kind, share in efficiencies.items()))
    if arguments.out:
        what = {
            "code": code_version(),
            "summary": summary,
            "shares": {" on ".join(reversed(key)): share for key, share in shares.items()},
            "rows": [{name: value for name, value in row.items() if name != "ledger"} for row in rows],
        }
        arguments.out.write_text(json.dumps(what, indent=1) + "\n")


if __name__ == "__main__":
    main()
