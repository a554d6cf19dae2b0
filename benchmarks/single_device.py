"""The demo's job run by plain PyTorch loops, transformers' Trainer and tightfit, each in a process of its own, in one go.

    .venv/bin/python -m pip install -e ".[benchmarks]"
    .venv/bin/python benchmarks/single_device.py --out records/single_device.json

Every contender trains the same 13.8M-parameter Llama on the same tokens (16 x 256 a step, gradient clipped to 1).
Contenders take turns for `--rounds` rounds, so that a slow spell of the machine falls on all; tokens/s is that of the
median step of all rounds, ratios are medians over rounds of the ratio within a round. RSS is the process's largest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

JOB = Path(__file__).parent.parent / "examples" / "demo.yaml"
KEEP_MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=1099511627776:"
    "glibc.malloc.mmap_threshold=1099511627776:glibc.malloc.top_pad=67108864"
}

CONTENDERS: dict[str, dict[str, Any]] = {
    "plain loop, defaults (fp32)": {"kind": "plain"},
    "plain loop, bf16 autocast, compiled, fused": {"kind": "plain", "autocast": True, "compile": True, "fused": True, "environment": KEEP_MEMORY},
    "plain loop, bf16 weights, compiled, fused": {"kind": "plain", "bf16": True, "compile": True, "fused": True, "environment": KEEP_MEMORY},
    "Trainer, defaults": {"kind": "trainer"},
    "Trainer, bf16 autocast, compiled, fused": {"kind": "trainer", "autocast": True, "compile": True, "fused": True, "environment": KEEP_MEMORY},
    "Trainer, bf16 weights, compiled, fused": {"kind": "trainer", "bf16": True, "compile": True, "fused": True, "environment": KEEP_MEMORY},
    "tightfit, reference plan": {"kind": "tightfit", "plan": {}},
    "tightfit, best plan": {"kind": "tightfit", "plan": "best"},
    "tightfit, lean plan": {"kind": "tightfit", "plan": "lean"},
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16, help="timed steps of each contender in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="contenders whose name contains this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


# --- one contender, in a process of its own -------------------------------------------------------------------------


def run_child(contender: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train `steps` timed steps after three to warm up; step times, final loss and this process's largest RSS."""
    kind = {"plain": run_plain, "trainer": run_trainer, "tightfit": run_tightfit}[contender["kind"]]
    times, loss = kind(contender, steps + WARM_UP)
    return {"step_s": times[WARM_UP:], "loss": loss, "rss_bytes": peak_rss()}


WARM_UP = 3


def peak_rss() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def demo_job() -> Any:
    import tightfit

    return tightfit.Job.load(JOB, ["train.schedule=constant", "train.warmup=0", "train.trackers=[]"])


def token_batches(job: Any) -> Iterator[Any]:
    """The job's own samples, (16, 256) tokens a step, as tightfit's loader gives them to everyone."""
    import tightfit

    run = tightfit.build(job)
    for (batch,) in run.data.steps(0, None):
        yield batch["input_ids"]


def make_model(job: Any) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(job.train.seed)
    config = AutoConfig.for_model(job.model.architecture, **job.model.config)
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config)


def run_plain(contender: dict[str, Any], steps: int) -> tuple[list[float], float]:
    """The loop of a tutorial: forward with labels, backward, clip, step."""
    import torch

    job = demo_job()
    model = make_model(job)
    if contender.get("bf16"):
        model = model.to(torch.bfloat16)
    model.train()
    train = job.train
    optimizer = torch.optim.AdamW(model.parameters(), lr=train.learning_rate, betas=train.betas, weight_decay=train.weight_decay, fused=contender.get("fused") or None)
    forward = torch.compile(model) if contender.get("compile") else model
    times, loss = [], None
    for _, tokens in zip(range(steps), tokens_of(job), strict=False):
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(contender.get("autocast"))):
            loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    return times, float(loss)


def run_trainer(contender: dict[str, Any], steps: int) -> tuple[list[float], float]:
    """transformers' Trainer with its defaults, or with the options its documentation recommends for speed."""
    import tempfile

    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    job = demo_job()
    model = make_model(job)
    if contender.get("bf16"):
        model = model.to(torch.bfloat16)
    batches = [tokens for _, tokens in zip(range(steps), tokens_of(job), strict=False)]
    samples = [{"input_ids": row, "labels": row} for tokens in batches for row in tokens]

    class Clock(TrainerCallback):
        times: list[float]

        def on_step_begin(self, *arguments: Any, **named: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            self.times.append(time.perf_counter() - self.began)

    clock = Clock()
    clock.times = []
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=job.train.batch, max_steps=steps, learning_rate=job.train.learning_rate,
            weight_decay=job.train.weight_decay, adam_beta1=job.train.betas[0], adam_beta2=job.train.betas[1], lr_scheduler_type="constant",
            report_to=[], save_strategy="no", logging_strategy="steps", logging_steps=steps, use_cpu=True, disable_tqdm=True,
            bf16=bool(contender.get("autocast")), torch_compile=bool(contender.get("compile")),
            **({"optim": "adamw_torch_fused"} if contender.get("fused") else {}),
        )
        trainer = Trainer(model=model, args=options, train_dataset=samples, callbacks=[clock])
        trainer.train()
    with torch.no_grad():
        loss = model(input_ids=batches[-1], labels=batches[-1]).loss
    return clock.times, float(loss)
