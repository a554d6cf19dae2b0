"""Measure how long a search takes when nothing was traced before.

    .venv/bin/python benchmarks/search.py --out records/search.json

Each search runs in a process of its own with an empty cache. The time begins once torch, its compiler
and the model's code are imported.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of this file's folder
from benchmarks import harness

# name -> (preset, or the demo's job; machine; samples of a step; length)
SEARCHES: dict[str, tuple[str | None, str, int, int]] = {
    "the demo's job on an RTX 4090": (None, "rtx-4090", 16, 256),
    "GPT-2 XL on an A100": ("gpt2-xl", "a100-80gb", 16, 1024),
    "Llama-2-70B on 64 H100": ("llama-2-70b", "h100-sxm:8x8", 512, 4096),
    "Llama-3-405B on 16,384 H100": ("llama-3-405b", "h100-sxm:8x2048", 2048, 8192),
}


def measure(name: str) -> dict[str, Any]:
    """Seconds of one search in this process, seconds of the imports before it, and the plan."""
    began = time.perf_counter()
    import torch._inductor.compile_fx  # noqa: F401

    import tightfit
    from tightfit.machine import Machine
    from tightfit.models import model_config
    from tightfit.planner.search import search

    preset, machine, batch, length = SEARCHES[name]
    if preset is None:
        job = tightfit.Job.load(harness.ROOT / "examples" / "demo.yaml")
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
    arguments = harness.make_parser(__doc__, only="searches whose name contains this").parse_args()
    rows = []
    for name in SEARCHES:
        if arguments.only not in name:
            continue
        with tempfile.TemporaryDirectory() as cache:
            rows.append(harness.in_fresh_process(measure, name, environment={"XDG_CACHE_HOME": cache}))
        print(f"{name:30s} {rows[-1]['seconds']:5.1f} s, imports before it {rows[-1]['imports_s']:.1f} s", flush=True)
    harness.write_record(arguments.out, {"searches": rows})


if __name__ == "__main__":
    main()
