"""Compare the settings of glibc's allocator in a training on a CPU: speed and process memory.

    .venv/bin/python benchmarks/allocator.py --out records/allocator.json

The demo's job runs through `tightfit train` with four settings: glibc's defaults; freed memory is
kept; freed memory is kept and small blocks are not cached (`allocator: tuned`, as the command line
starts it); freed memory is returned at once (`lean`). Each runs with saved activations and with
recomputed ones. Every setting runs once in each turn. The figures are medians over turns, and speed
is the ratio to glibc's defaults in the same turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
STEPS = 6
RECOMPUTE = ("none", "full")


def settings() -> dict[str, tuple[str, dict[str, str]]]:
    """By name: the plan's allocator, and what the environment adds to it."""
    from tightfit.engine.launch import GLIBC_TUNABLES

    cached = ":".join(part for part in GLIBC_TUNABLES.split(":") if "tcache" not in part and "mxfast" not in part)
    return {
        "default": ("default", {}),
        "tuned, small blocks cached": ("tuned", {"GLIBC_TUNABLES": cached}),
        "tuned": ("tuned", {}),
        "lean": ("lean", {}),
    }


def run(name: str, recompute: str) -> dict[str, Any]:
    """The record of one training, in a process of its own."""
    allocator, added = settings()[name]
    plan = {"allocator": allocator, "recompute": recompute}
    sets = [f"--set=train.{what}" for what in (f"steps={STEPS}", "warmup=1")]
    sets += [f"--set=plan.{field}={value}" for field, value in plan.items()]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tightfit", "train", str(ROOT / "examples/demo.yaml"), "--out", folder, *sets]
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    turns = []
    for number in range(arguments.turns):
        turns.append({})
        for recompute in RECOMPUTE:
            for name in settings():
                print(
                    f"\rturn {number + 1} of {arguments.turns}: recompute {recompute}, {name:30s}",
                    end="",
                    file=sys.stderr,
                )
                turns[-1][recompute, name] = run(name, recompute)
    print(file=sys.stderr)
    rows = []
    for recompute in RECOMPUTE:
        for name in settings():
            seen = [turn[recompute, name] for turn in turns]
            controls = [turn[recompute, "default"] for turn in turns]
            rows.append(
                {
                    "recompute": recompute,
                    "allocator": name,
                    "speed": statistics.median(
                        one["step_s"] / two["step_s"] for one, two in zip(controls, seen, strict=True)
                    ),
                    **{key: statistics.median(one[key] for one in seen) for key in seen[0]},
                }
            )
            row = rows[-1]
            error = row["predicted_process_bytes"] / row["process_bytes"] - 1
            print(
                f"recompute {recompute:5s} {name:27s} {row['speed']:5.2f} of the speed, process {row['process_bytes'] / 1e9:.2f} GB "
                f"(predicted {error:+.1%}), tensors {row['tensor_bytes'] / 1e9:.2f} GB"
            )
    if arguments.out:
        from provenance import provenance  # beside this file, which runs as a script

        what = {**provenance(), "turns": len(turns), "rows": rows}
        arguments.out.write_text(json.dumps(what, indent=1) + "\n")


if __name__ == "__main__":
    main()
