"""Derive the intervals of predictions from the records of the benchmarks that compare predictions with measurements.

    .venv/bin/python -m benchmarks.intervals

Reads records/prediction.json (runs on this processor, calibrated), records/gpu.json (runs on a GPU) and
records/published.json (runs that others published), and writes src/tightfit/planner/intervals.json. Prints how often
the measurements of one half of the runs are inside the intervals that the other half gives.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of this file's folder
from benchmarks import harness
from tightfit.machine import ACHIEVED, Figure, Machine
from tightfit.machines import devices
from tightfit.plan import Plan
from tightfit.planner.intervals import FEWEST_RUNS, classes

OUT = harness.ROOT / "src" / "tightfit" / "planner" / "intervals.json"
RECORDS = harness.ROOT / "records"
LOW, HIGH = 0.05, 0.95
# frameworks that keep on several devices what a plan says; the others keep more (whole gradients, gathered weights), or
# their source shows all of the device's memory
SAME_MEMORY = (
    "torchtitan",
    "torchtitan-2025",
    "torchtune",
    "torchao",
    "trainer-2022",
    "accelerate",
    "kempner",
    "megatron-2025",
)
OF_TOKENS = ("llama", "llama-long", "gpt2", "bert", "t5")  # models of benchmarks/prediction.py
Ratios = dict[str, list[tuple[float, str]]]  # class -> (measured / predicted, half)


def quantile(values: list[float], share: float) -> float:
    """The quantile of the next value to come, by those before it (conformal prediction): interpolated at place
    share x (n + 1) of n values in order, so that few values give a wider interval."""
    ordered = sorted(values)
    place = min(max(share * (len(ordered) + 1) - 1, 0.0), len(ordered) - 1.0)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def own_runs() -> list[tuple[str, list[str], float, str]]:
    """(quantity, classes, measured / predicted, half) of the runs on a calibrated CPU."""
    found = []
    machine = Machine.detect().replace(matrix_flops_per_s={"fp32": Figure(value=1e11, source="measured")})
    pairs = harness.read_record(RECORDS / "prediction.json")["pairs"]
    halves = ["ab"[place % 2] for place in range(len(pairs))]
    random.Random(0).shuffle(halves)  # neighbours are plans of one model
    for half, pair in zip(halves, pairs, strict=True):
        plan = Plan(**pair["plan"])
        tokens = pair["model"] in OF_TOKENS
        ratios = {
            "time": (pair.get("measured_s"), pair.get("predicted_s")),
            "memory": (pair.get("process_bytes"), pair.get("predicted_process_bytes")),
        }
        for quantity, (measured, predicted) in ratios.items():
            if measured and predicted:
                names = classes(quantity, machine, plan, tokens)  # type: ignore[arg-type]
                found.append((quantity, names, measured / predicted, half))
    return found


def own_gpu_runs() -> list[tuple[str, list[str], float, str]]:
    """(quantity, classes, measured / predicted, half) of the memory that torch reserved in the runs of benchmarks/gpu.py."""
    parts = {name: part.get("result", {}) for name, part in harness.read_record(RECORDS / "gpu.json")["parts"].items()}
    runs = [
        *parts["ladder"]["rungs"],
        parts["llama"],
        *(one.get("trained", {}) for one in parts["largest"]["ways"].values()),
    ]
    found = []
    for place, run in enumerate(one for one in runs if "reserved_bytes" in one):
        names = classes("memory", Machine.named("h100-sxm"), Plan(), run["tokens_per_s"] is not None)
        ratio = run["reserved_bytes"] / run["predicted"]["reserved_bytes"]
        found.append(("memory", names, ratio, "ab"[place % 2]))
    return found


def published_runs() -> list[tuple[str, list[str], float, str]]:
    """(quantity, classes, measured / predicted, half) of the runs that others published."""
    found = []
    for row in harness.read_record(RECORDS / "published.json")["rows"]:
        if "error" in row:
            continue
        machine = Machine.named(row["machine"] or "a100-80gb")
        plan = Plan(**{name: row[name] for name in ("tp", "pp", "cp")})
        if plan.devices < row["devices"]:
            plan = plan.replace(dp_replicate=row["devices"] // plan.devices)
        tokens = row.get("tokens_of_sequence") is not None
        if row.get("published_speed"):
            names = classes("time", machine, plan, tokens)
            found.append(("time", names, row["predicted_speed"] / row["published_speed"], row["half"]))
        if row.get("published_bytes") and (row["devices"] == 1 or row["framework"] in SAME_MEMORY):
            names = classes("memory", machine, plan, tokens)
            found.append(("memory", names, row["published_bytes"] / row["predicted_bytes"], row["half"]))
    return found


def guessed(known: dict[str, float]) -> dict[str, float]:
    """The interval for a GPU that is not in the table of devices, whose large products are assumed to reach a fixed
    share of the peak: that of known machines, widened by the quantiles of the table's shares."""
    shares = [share / ACHIEVED for row in devices().values() if isinstance(row.get("achieved"), dict)
              for kind, share in row["achieved"].items() if kind in ("bf16", "fp16")]  # fmt: skip
    low = math.hypot(math.log(known["low"]), math.log(quantile(shares, HIGH)))
    high = math.hypot(math.log(known["high"]), math.log(quantile(shares, LOW)))
    return {"low": math.exp(-low), "high": math.exp(high), "runs": known["runs"]}


def table(runs: list[tuple[str, list[str], float, str]]) -> dict[str, dict[str, dict[str, float]]]:
    """quantity -> class -> its quantiles, of the classes with enough runs."""
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for quantity, names, ratio, _ in runs:
        for name in names:
            ratios[quantity, name].append(ratio)
    found: dict[str, dict[str, dict[str, float]]] = {"time": {}, "memory": {}}
    for (quantity, name), values in sorted(ratios.items()):
        if len(values) >= FEWEST_RUNS:
            found[quantity][name] = {
                "low": round(quantile(values, LOW), 3),
                "high": round(quantile(values, HIGH), 3),
                "runs": len(values),
            }
    if "known machine" in found["time"]:
        wide = guessed(found["time"]["known machine"])
        found["time"]["guessed machine"] = {name: round(value, 3) for name, value in wide.items()}
    return found


def coverage(runs: list[tuple[str, list[str], float, str]]) -> dict[str, dict[str, Any]]:
    """How many measurements of each half are inside the intervals that the other half gives, by quantity and source; and
    how many of part c, which was added later, are inside the intervals that both halves give."""
    found: dict[str, dict[str, Any]] = {}
    for half in "abc":
        known = table([run for run in runs if run[3] not in (half, "c")])
        for quantity, names, ratio, _ in (run for run in runs if run[3] == half):
            name = next((name for name in names if name in known[quantity]), None)
            if name is None:
                continue
            row = known[quantity][name]
            part = ", part c" if half == "c" else ""
            count = found.setdefault(f"{quantity}, {names[-1]}{part}", {"runs": 0, "inside": 0})
            count["runs"] += 1
            count["inside"] += min(row["low"], 1.0) <= ratio <= max(row["high"], 1.0)
    return {name: {**count, "share": count["inside"] / count["runs"]} for name, count in found.items()}


def main() -> None:
    runs = own_runs() + own_gpu_runs() + published_runs()
    found = table([run for run in runs if run[3] != "c"])  # part c is kept to check them
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    for quantity, of in found.items():
        for name, row in of.items():
            print(
                f"{quantity:7s} {name:40s} {row['low']:.2f} to {row['high']:.2f} times the prediction ({row['runs']:.0f} runs)"
            )
    inside = coverage(runs)
    for name, count in inside.items():
        print(f"{name}: {count['inside']} of {count['runs']} measurements inside ({count['share']:.0%})")
    harness.write_record(RECORDS / "intervals.json", {"intervals": found, "coverage": inside})


if __name__ == "__main__":
    main()
