"""Derive the intervals of predictions from the records of the benchmarks that compare predictions with measurements.

    .venv/bin/python -m benchmarks.intervals

Reads records/prediction.json and records/prediction_others.json (runs on this processor, calibrated), records/gpu.json
(runs on a GPU) and records/published.json (runs that others published), and writes
src/tightfit/planner/intervals.json. The sources of these runs count the same, whether a source has 4 runs or 60.
Prints how often the measurements of each source are inside the intervals that all other sources give.

Source  Dunn, Wasserman, Ramdas 2022, "Distribution-free prediction sets for two-layer hierarchical models" (arXiv:1809.07441):
        quantiles of the pooled distribution in which each group has the same weight.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of this file's folder
from benchmarks import harness, other_models
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
# frameworks whose runs had samples of varied lengths, which fragment the memory of torch's allocator
VARIED_LENGTHS = ("ms-swift-2023", "peft-metamath")
OF_TOKENS = (  # models of benchmarks/prediction.py
    "llama", "llama-long", "gpt2", "bert", "t5",
    *(name for name, (_, data, _) in other_models.ARCHITECTURES.items() if data["synthetic"] == "tokens"),
)  # fmt: skip
FEWEST_SOURCES = 3  # a class with runs of fewer sources has no quantiles of its own


class Measured(NamedTuple):
    """A run whose time or memory was predicted and measured.

    quantity  "time" or "memory"
    classes   the classes of the prediction, the most special first
    ratio     measured / predicted
    source    runs of one source have errors that are alike: the model of an own run, or the group of a published one
    """

    quantity: str
    classes: list[str]
    ratio: float
    source: str


def quantile(values: Iterable[tuple[float, float]], share: float) -> float:
    """The quantile of the next value to come, by those before it (conformal prediction), as pairs (value, weight).

    Each value has a place: the weight of all values up to it, divided by the total weight. The total includes a mean
    weight for the value to come, so that few values give a wider interval. Between places, values are interpolated.

    Example: of three values with the weight 1, the places are 1/4, 2/4 and 3/4.
    """
    ordered = sorted(values)
    total = sum(weight for _, weight in ordered) * (1 + 1 / len(ordered))
    before, at = ordered[0][0], 0.0
    for value, weight in ordered:
        place = at + weight / total
        if place >= share:
            return before + (share - at) / (place - at) * (value - before)
        before, at = value, place
    return before


def weighted(runs: list[Measured]) -> list[tuple[float, float]]:
    """Pairs (measured / predicted, weight) of the runs: the runs of each source weigh 1 together."""
    counts = Counter(run.source for run in runs)
    return [(run.ratio, 1 / counts[run.source]) for run in runs]


def own_runs() -> list[Measured]:
    """The runs on a calibrated CPU."""
    found = []
    machine = Machine.detect().replace(matrix_flops_per_s={"fp32": Figure(value=1e11, source="measured")})
    records = [harness.read_record(RECORDS / f"{name}.json")["pairs"] for name in ("prediction", "prediction_others")]
    for pair in itertools.chain(*records):
        plan = Plan(**pair["plan"])
        tokens = pair["model"] in OF_TOKENS
        ratios = {
            "time": (pair.get("measured_s"), pair.get("predicted_s")),
            "memory": (pair.get("process_bytes"), pair.get("predicted_process_bytes")),
        }
        for quantity, (measured, predicted) in ratios.items():
            if measured and predicted:
                names = classes(quantity, machine, plan, tokens)  # type: ignore[arg-type]
                found.append(Measured(quantity, names, measured / predicted, pair["model"]))
    return found


def own_gpu_runs() -> list[Measured]:
    """The memory that torch reserved in the runs of benchmarks/gpu.py."""
    parts = {name: part.get("result", {}) for name, part in harness.read_record(RECORDS / "gpu.json")["parts"].items()}
    runs = [
        *parts["ladder"]["rungs"],
        parts["llama"],
        *(one.get("trained", {}) for one in parts["largest"]["ways"].values()),
    ]
    found = []
    for run in (one for one in runs if "reserved_bytes" in one):
        names = classes("memory", Machine.named("h100-sxm"), Plan(), run["tokens_per_s"] is not None)
        found.append(Measured("memory", names, run["reserved_bytes"] / run["predicted"]["reserved_bytes"], "own"))
    return found


def published_runs() -> list[Measured]:
    """The runs that others published."""
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
            found.append(Measured("time", names, row["predicted_speed"] / row["published_speed"], row["group"]))
        compares = (row["devices"] == 1 or row["framework"] in SAME_MEMORY) and row["framework"] not in VARIED_LENGTHS
        if row.get("published_bytes") and compares:
            names = classes("memory", machine, plan, tokens)
            found.append(Measured("memory", names, row["published_bytes"] / row["predicted_bytes"], row["group"]))
    return found


def guessed(known: dict[str, float]) -> dict[str, float]:
    """The interval for a GPU that is not in the table of devices, whose large products are assumed to reach a fixed
    share of the peak: that of known machines of the same class, widened by the quantiles of the table's shares."""
    shares = [(share / ACHIEVED, 1.0) for row in devices().values() if isinstance(row.get("achieved"), dict)
              for kind, share in row["achieved"].items() if kind in ("bf16", "fp16")]  # fmt: skip
    low = math.hypot(math.log(known["low"]), math.log(quantile(shares, HIGH)))
    high = math.hypot(math.log(known["high"]), math.log(quantile(shares, LOW)))
    return {"low": math.exp(-low), "high": math.exp(high), "runs": known["runs"]}


def table(runs: list[Measured]) -> dict[str, dict[str, dict[str, float]]]:
    """quantity -> class -> its quantiles, of the classes with enough runs and sources."""
    of_class: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    for run in runs:
        for name in run.classes:
            of_class[run.quantity, name].append(run)
    found: dict[str, dict[str, dict[str, float]]] = {"time": {}, "memory": {}}
    for (quantity, name), same in sorted(of_class.items()):
        if len(same) >= FEWEST_RUNS and len({run.source for run in same}) >= FEWEST_SOURCES:
            found[quantity][name] = {
                "low": round(quantile(weighted(same), LOW), 3),
                "high": round(quantile(weighted(same), HIGH), 3),
                "runs": len(same),
            }
    for name, known in list(found["time"].items()):
        if name.startswith("known machine"):
            wide = {end: round(value, 3) for end, value in guessed(known).items()}
            found["time"][name.replace("known", "guessed", 1)] = wide
    return found


def coverage(runs: list[Measured]) -> dict[str, dict[str, Any]]:
    """How many measurements of each source are inside the intervals of all other sources. The counts are summed by
    quantity and by what is known of the machine."""
    found: dict[str, dict[str, Any]] = {}
    for source in sorted({run.source for run in runs}):
        known = table([run for run in runs if run.source != source])
        for run in (run for run in runs if run.source == source):
            name = next((name for name in run.classes if name in known[run.quantity]), None)
            if name is None:
                continue
            row = known[run.quantity][name]
            count = found.setdefault(f"{run.quantity}, {run.classes[-1]}", {"runs": 0, "inside": 0})
            count["runs"] += 1
            count["inside"] += min(row["low"], 1.0) <= run.ratio <= max(row["high"], 1.0)
    return {name: {**count, "share": count["inside"] / count["runs"]} for name, count in found.items()}


def main() -> None:
    runs = own_runs() + own_gpu_runs() + published_runs()
    found = table(runs)
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
