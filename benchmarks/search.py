"""Measure how long a search takes when nothing was traced before.

    .venv/bin/python benchmarks/search.py --out records/search.json

Each search runs in a process of its own with an empty cache. The time begins once torch, its compiler
and the model's code are imported.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# name -> (preset, or the demo's job; machine; samples of a step; length)
SEARCHES: dict[str, tuple[str | None, str, int, int]] = {
    "the demo's job on an RTX 4090": (None, "rtx-4090", 16, 256),
    "GPT-2 XL on an A100": ("gpt2-xl", "a100-80gb", 16, 1024),
    "Llama-2-70B on 64 H100": ("llama-2-70b", "h100-sxm:8x8", 512, 4096),
    "Llama-3-405B on 16,384 H100": ("llama-3-405b", "h100-sxm:8x2048", 2048, 8192),
}


def measure(name: str) -> dict[str, Any]:
    """Seconds of one search in this process, those of importing torch, its compiler and the model's code before, and the plan."""
    began = time.perf_counter()
    import torch._inductor.compile_fx  # noqa: F401

    import tightfit
    from tightfit.machine import Machine
    from tightfit.models import model_config
    from tightfit.planner.search import search

    preset, machine, batch, length = SEARCHES[name]
    if preset is None:
        job = tightfit.Job.load(ROOT / "examples" / "demo.yaml")
    else:
        data = {"synthetic": "tokens", "sequence_length": length}
        job = tightfit.Job(model={"preset": preset}, data=data, train=tightfit.Train(batch=batch, steps=1000))
    architecture = model_config(job.model).model_type
    importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    imports_s = time.perf_counter() - began
    began = time.perf_counter()
    best = search(job, Machine.named(machine))[0]
    seconds = time.perf_counter() - began
    return {
        "search": name,
        "seconds": seconds,
        "imports_s": imports_s,
        "plan": best.plan.differences(),
        "step_s": best.time.step_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print("RESULT " + json.dumps(measure(arguments.child)))
        return
    rows = []
    for name in SEARCHES:
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, "--child", name]
            done = subprocess.run(
                command, capture_output=True, text=True, env={**os.environ, "XDG_CACHE_HOME": cache}, check=False
            )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            raise SystemExit(f"{name}: {done.stderr[-2000:]}")
        rows.append(json.loads(lines[0].removeprefix("RESULT ")))
        print(f"{name:30s} {rows[-1]['seconds']:5.1f} s, imports before it {rows[-1]['imports_s']:.1f} s", flush=True)
    if arguments.out:
        from provenance import provenance  # beside this file, which runs as a script

        what = {**provenance(), "searches": rows}
        arguments.out.write_text(json.dumps(what, indent=1) + "\n")


if __name__ == "__main__":
    main()
