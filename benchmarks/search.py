"""Measure how long a search takes when nothing was traced before, and how long the same search takes again.

    .venv/bin/python benchmarks/search.py --out records/search.json

Each search runs in a process of its own with an empty cache, and then in another with the cache of the
first. The time begins once torch, its compiler and the model's code are imported.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of this file's folder
from benchmarks import harness


@dataclass(frozen=True)
class Search:
    """A job on a machine, and the plan fields that the user has fixed.

    preset  name of the model; None: the demo's job, which has a batch and a length of its own
    batch   samples in a step
    length  tokens in a sample
    allow   what the job allows; None: the default
    pins    plan field -> its value
    model   other fields of the job's model
    """

    preset: str | None
    machine: str
    batch: int = 0
    length: int = 0
    allow: list[str] | None = None
    pins: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)


OFFLOAD = ["bf16", "8-bit-states", "offload"]
MICRO_BATCHES = {"pp": 8, "tp": 1, "dp_replicate": 1, "dp_shard": 1, "micro_batch": 1, "schedule": "1f1b"}
LONG = {"max_position_embeddings": 131072}
SEARCHES = {
    "the demo's job on an RTX 4090": Search(None, "rtx-4090"),
    "GPT-2 XL on an A100": Search("gpt2-xl", "a100-80gb", 16, 1024),
    "GPT-2 on an RTX 4090, compile: model": Search("gpt2", "rtx-4090", 64, 1024, pins={"compile": "model"}),
    "Llama-2-7B on an RTX 4090, offload": Search("llama-2-7b", "rtx-4090", 64, 4096, OFFLOAD),
    "Llama-3-8B on an RTX 4090, offload": Search("llama-3-8b", "rtx-4090", 64, 8192, OFFLOAD),
    "Qwen2.5-1.5B on an L4, refused": Search("qwen2.5-1.5b", "l4", 64, 2048),
    "Mixtral-8x7B on 8 H100, refused": Search("mixtral-8x7b", "h100-sxm:8", 256, 4096),
    "Llama-2-7B on 8 H100, 2,048 micro-batches": Search("llama-2-7b", "h100-sxm:8", 2048, 4096, pins=MICRO_BATCHES),
    "Llama-2-70B on 64 H100": Search("llama-2-70b", "h100-sxm:8x8", 512, 4096),
    "Llama-3-70B on 64 H100, 131,072 tokens": Search("llama-3-70b", "h100-sxm:8x8", 64, 131072, model=LONG),
    "DeepSeek-V3 on 2,048 H100": Search("deepseek-v3", "h100-sxm:8x256", 15360, 4096),
    "Llama-3-405B on 16,384 H100": Search("llama-3-405b", "h100-sxm:8x2048", 2048, 8192),
}


def measure(name: str) -> dict[str, Any]:
    """Seconds of one search in this process, seconds of the imports before it, and the plan that it
    found. For a job that does not fit, the plan is the leanest one, and `fits` is False."""
    began = time.perf_counter()
    import torch._inductor.compile_fx  # noqa: F401

    import tightfit
    from tightfit.errors import DoesNotFit
    from tightfit.machine import Machine
    from tightfit.models import model_config
    from tightfit.planner.search import search

    asked = SEARCHES[name]
    if asked.preset is None:
        job = tightfit.Job.load(harness.ROOT / "examples" / "demo.yaml")
    else:
        job = tightfit.Job(
            model={"preset": asked.preset, **asked.model},
            data={"synthetic": "tokens", "sequence_length": asked.length},
            train=tightfit.Train(batch=asked.batch, steps=1000),
            **({} if asked.allow is None else {"allow": asked.allow}),
        )
    architecture = model_config(job.model).model_type
    importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    imports_s = time.perf_counter() - began
    began = time.perf_counter()
    before_s = time.process_time()
    try:
        best = search(job, Machine.named(asked.machine), asked.pins)[0].content()
        fits = True
    except DoesNotFit as error:
        best, fits = (error.content or {})["plans"][0], False
    return {
        "search": name,
        "seconds": time.perf_counter() - began,
        "cpu_s": time.process_time() - before_s,
        "imports_s": imports_s,
        "fits": fits,
        "plan": tightfit.Plan.parse(best["plan"], "plan").differences(),
        "step_s": best["time"]["step_s"],
        "peak_bytes": best["memory"]["peak"],
    }


def main() -> None:
    arguments = harness.make_parser(__doc__, only="searches whose name contains this").parse_args()
    rows = []
    for name in SEARCHES:
        if arguments.only not in name:
            continue
        with tempfile.TemporaryDirectory() as cache:
            first, again = (
                harness.in_fresh_process(measure, name, environment={"XDG_CACHE_HOME": cache}) for _ in range(2)
            )
        if again["plan"] != first["plan"]:
            raise AssertionError(f"{name}: the second search found another plan")
        rows.append({**first, "again_s": again["seconds"]})
        print(
            f"{name:42s} {first['seconds']:5.1f} s, imports before it {first['imports_s']:.1f} s, "
            f"the same again {again['seconds']:.1f} s",
            flush=True,
        )
    harness.write_record(arguments.out, {"searches": rows})


if __name__ == "__main__":
    main()
