"""Compare the settings of glibc's allocator in a training on a CPU: speed and process memory.

    .venv/bin/python benchmarks/allocator.py --out records/allocator.json

The demo's job runs through `tightfit train` with four settings: glibc's defaults; freed memory is
kept; freed memory is kept and small blocks are not cached (`allocator: tuned`, as the command line
starts it); freed memory is returned at once (`lean`). Each runs with saved activations and with
recomputed ones. Every setting runs once in each turn. The figures are medians over turns, and speed
is the ratio to glibc's defaults in the same turn.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of this file's folder
from benchmarks import harness

STEPS = 6
CONTROL = "default"  # the setting to which speeds are compared
RECOMPUTE = ("none", "full")


def settings() -> dict[str, tuple[str, dict[str, str]]]:
    """By name: the plan's allocator, and additional environment variables."""
    from tightfit.engine.launch import GLIBC_TUNABLES

    cached = ":".join(part for part in GLIBC_TUNABLES.split(":") if "tcache" not in part and "mxfast" not in part)
    return {
        "default": ("default", {}),
        "tuned, small blocks cached": ("tuned", {"GLIBC_TUNABLES": cached}),
        "tuned": ("tuned", {}),
        "lean": ("lean", {}),
    }


def run(recompute: str, name: str) -> dict[str, Any]:
    """The figures of one training, in a process of its own."""
    allocator, added = settings()[name]
    plan = {"allocator": allocator, "recompute": recompute}
    sets = [f"--set=train.{what}" for what in (f"steps={STEPS}", "warmup=1")]
    sets += [f"--set=plan.{field}={value}" for field, value in plan.items()]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "tightfit",
            "train",
            str(harness.ROOT / "examples/demo.yaml"),
            "--out",
            folder,
            *sets,
        ]
        environ = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
        subprocess.run(command, check=True, capture_output=True, env={**environ, **added})
        record: dict[str, Any] = json.loads((Path(folder) / "record.json").read_text())
    peak = record["peak_bytes"]
    return {
        "step_s": statistics.median(record["step_s"]),
        "process_bytes": peak["process"],
        "predicted_process_bytes": peak["predicted_process"],
        "tensor_bytes": peak["measured"],
    }


def main() -> None:
    arguments = harness.make_parser(__doc__, only="settings whose name contains this", rounds=3).parse_args()
    cases = {
        f"recompute {recompute}, {name}": (recompute, name)
        for recompute in RECOMPUTE
        for name in settings()
        if name == CONTROL or arguments.only in name
    }
    rounds = harness.interleaved(arguments.rounds, list(cases), lambda text, _: run(*cases[text]))
    rows, lines = [], []
    for text, (recompute, name) in cases.items():
        seen = [one[text] for one in rounds]
        control = [one[f"recompute {recompute}, {CONTROL}"] for one in rounds]
        speeds = harness.ratios((one["step_s"] for one in control), (one["step_s"] for one in seen))
        row = {"recompute": recompute, "allocator": name, "speed": statistics.median(speeds)}
        row |= harness.median_of_each(seen)
        error = row["predicted_process_bytes"] / row["process_bytes"] - 1
        sizes = [f"{row[key] / 1e9:.2f}" for key in ("process_bytes", "tensor_bytes")]
        lines.append([recompute, name, harness.spread(speeds), *sizes, f"{error:+.1%}"])
        rows.append(row)
    columns = ("recompute", "allocator", "speed", "process GB", "tensors GB", "process predicted")
    harness.print_table(columns, lines, left=2)
    harness.write_record(arguments.out, {"turns": len(rounds), "rows": rows})


if __name__ == "__main__":
    main()
