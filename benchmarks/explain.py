"""Ask `tightfit explain` about 30 pairs of a model and a machine, and measure how long it takes to answer.

    .venv/bin/python benchmarks/explain.py --out records/explain.json

Each question is answered in a process of its own with an empty cache. The time begins once torch, its compiler
and the model's code are imported.
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
class Question:
    """A job on a machine: samples in a step, tokens or pixels in a sample, what the job allows."""

    preset: str
    machine: str
    batch: int
    length: int = 0  # 0: images
    allow: list[str] = field(default_factory=lambda: ["bf16"])

    @property
    def name(self) -> str:
        more = "".join(f", {word}" for word in self.allow if word != "bf16")
        return f"{self.preset} on {self.machine}{more}"


OFFLOAD = ["bf16", "8-bit-states", "offload"]
QUESTIONS = [
    # one GPU
    Question("gpt2", "rtx-4090", 64, 1024),
    Question("bert-large", "t4", 64, 512, ["fp16"]),
    Question("vit-l-16", "rtx-3090", 256),
    Question("llama-2-7b", "rtx-4090", 64, 4096),
    Question("llama-2-7b", "rtx-4090", 64, 4096, OFFLOAD),
    Question("mistral-7b", "a100-80gb", 64, 4096, ["bf16", "8-bit-states"]),
    Question("qwen2.5-1.5b", "l4", 64, 2048),
    Question("gpt2-xl", "v100-32gb", 64, 1024, ["fp16"]),
    Question("llama-3-8b", "h200", 64, 8192),
    Question("qwen3-8b", "b200", 64, 8192),
    Question("llama-3-8b", "mi300x", 64, 8192),
    Question("t5-3b", "a10g", 64, 512, OFFLOAD),
    Question("olmoe-1b-7b", "h100-sxm", 64, 4096, ["bf16", "8-bit-states"]),
    Question("olmoe-1b-7b", "rtx-4090", 64, 4096, OFFLOAD),
    Question("gpt-oss-20b", "mi300x", 64, 4096, OFFLOAD),
    # a laptop, and devices that are only predicted for
    Question("gpt2-medium", "apple-m3-max", 32, 1024),
    Question("llama-2-7b", "apple-m4-max", 32, 2048),
    Question("gpt2-xl", "tpu-v5p", 64, 1024),
    Question("llama-3-8b", "tpu-v6e:8", 256, 8192),
    Question("qwen2.5-7b", "gaudi-3", 64, 4096),
    # hosts and clusters
    Question("mixtral-8x7b", "h100-sxm:8", 256, 4096),
    Question("mixtral-8x7b", "a100-80gb:8x8", 512, 4096),
    Question("qwen3-30b-a3b", "h100-sxm:8", 256, 4096),
    Question("qwen3-235b-a22b", "h200:8x16", 1024, 4096),
    Question("gpt-oss-120b", "h100-sxm:8x4", 512, 4096),
    Question("deepseek-v3", "h100-sxm:8x256", 15360, 4096),
    Question("llama-2-70b", "a100-80gb:8x8", 512, 4096),
    Question("llama-3-70b", "mi300x:8", 256, 8192),
    Question("gpt-3-175b", "v100-32gb:8x128", 1536, 2048, ["fp16"]),
    Question("llama-3-405b", "h100-sxm:8x2048", 2048, 8192),
]


def answer(number: int) -> dict[str, Any]:
    """The answer to a question, the seconds that it took, and the seconds of the imports before it."""
    began = time.perf_counter()
    import torch._inductor.compile_fx  # noqa: F401

    import tightfit
    from tightfit.errors import DoesNotFit, TightfitError
    from tightfit.machine import Machine
    from tightfit.models import model_config
    from tightfit.planner.estimator import Estimator
    from tightfit.planner.search import search
    from tightfit.planner.waterfall import waterfall
    from tightfit.report.explain import explained

    asked = QUESTIONS[number]
    data = {"synthetic": "tokens", "sequence_length": asked.length} if asked.length else {"synthetic": "images"}
    train = tightfit.Train(batch=asked.batch, steps=1000)
    job = tightfit.Job(model={"preset": asked.preset}, data=data, train=train, allow=asked.allow)
    architecture = model_config(job.model).model_type
    importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    found = {"question": asked.name, "batch": asked.batch, "length": asked.length}
    found["imports_s"] = time.perf_counter() - began
    began = time.perf_counter()
    try:
        estimator = Estimator(job, Machine.named(asked.machine))
        estimates = search(job, estimator.machine, estimator=estimator)
        waterfall(estimator, estimates[0].plan)
        content = explained(estimates)
    except DoesNotFit as error:
        content = error.content or {}
    except TightfitError as error:
        return {**found, "seconds": time.perf_counter() - began, "error": str(error)}
    seconds = time.perf_counter() - began
    plan = content["plans"][0]
    remedies = [one for one in content["remedies"] if one["fits"]]
    return {
        **found,
        "seconds": seconds,
        "fits": content["chosen"] is not None,
        "plan": tightfit.Plan.parse(plan["plan"], "plan").differences(),
        "step_s": plan["time"]["step_s"],
        "peak_bytes": plan["memory"]["peak"],
        "available_bytes": round(content["machine"]["memory_bytes"]["value"]),
        "mfu": plan["mfu"],
        "remedy": remedies[0]["change"] if remedies else None,
    }


def main() -> None:
    arguments = harness.make_parser(__doc__, only="questions whose name contains this").parse_args()
    rows = []
    for number, asked in enumerate(QUESTIONS):
        if arguments.only not in asked.name:
            continue
        with tempfile.TemporaryDirectory() as cache:
            one = harness.in_fresh_process(answer, number, environment={"XDG_CACHE_HOME": cache})
        rows.append(one)
        said = one.get("error") or f"{'fits' if one['fits'] else 'does not fit'}, {one['step_s']:.3g} s a step"
        print(f"{asked.name:45s} {one['seconds']:5.1f} s  {said}", flush=True)
        harness.write_record(arguments.out, {"answers": rows})


if __name__ == "__main__":
    main()
