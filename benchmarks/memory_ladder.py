"""Measure the memory ladder of ViT-L/16 at 224 x 224: the peak of a step, with one more change at each
rung.

    .venv/bin/python benchmarks/memory_ladder.py --out records/memory_ladder.json
    .venv/bin/python benchmarks/memory_ladder.py --real      # a small ViT: real tensors beside fake ones

Each rung is a job and a plan. tightfit's own `build` and engine run it on fake tensors, which have
shapes and types but no values, so any machine can measure a step that takes 25 GB. The bytes are
logical: those of the storages that are alive at once. The published bytes beside them are what an
allocator had reserved on a GPU, which is more: S. Raschka, github.com/rasbt/pytorch-memory-optim at
f6eddcd (2023-07-14), ViT-L/16 with a head of 10 classes. Its mixed precision is fp16's.

The published ladder ends with SGD without momentum. AdamW's 8-bit states come before it, because SGD
has no states. The last rung processes the batch in one piece again: an update in backward sees each
gradient once, so it excludes micro-batches. With recompute, the larger piece costs less memory than
the gradients that it saves.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tightfit
from tightfit.engine.step import accumulate, update
from tightfit.planner.tracing.live_storages import ROWS, Peak, track_peak
from tightfit.runtime.run import Run

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of this file's folder
from benchmarks import harness

ALLOW = ["bf16", "8-bit-states"]


@dataclass(frozen=True)
class Rung:
    """The changes to the job's Train and to the plan, on top of those before; and the published GB."""

    name: str
    train: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    published: float | None = None


RUNGS = (
    Rung("fp32, AdamW, batch 64", {"batch": 64}, published=26.84),
    Rung("+ bf16-mixed", plan={"precision": "bf16-mixed"}, published=18.21),
    Rung("+ bf16-true", plan={"precision": "bf16-true"}, published=13.82),
    Rung("+ batch 16", {"batch": 16}, published=5.69),
    Rung("+ micro-batches, 4 x 4", plan={"micro_batch": 4}, published=3.91),
    Rung("+ states in 8 bits", plan={"states": "8-bit"}),
    Rung("+ SGD for AdamW, cosine", {"optimizer": "sgd", "momentum": 0.0, "schedule": "cosine"}, published=2.02),
    Rung("+ recompute", plan={"recompute": "full"}),
    Rung("+ update in backward, 1 x 16", plan={"update_in_backward": True, "micro_batch": None}),
)
LARGE = {"preset": "vit-l-16", "num_labels": 10}
SMALL = {
    "preset": "vit-b-16",
    "num_hidden_layers": 6,
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_attention_heads": 3,
    "image_size": 64,
}


def climb(spec: dict[str, Any], fake: bool) -> list[dict[str, Any]]:
    """A row for each rung: its name, job and plan, the published bytes, the peak, its rows and its phase."""
    rows, train, plan = [], dict[str, Any](), dict[str, Any]()
    for rung in RUNGS:
        train, plan = {**train, **rung.train}, {**plan, **rung.plan}
        peak = second_step(spec, tightfit.Train(steps=2, **train), tightfit.Plan(**plan), fake)
        rows.append(
            {
                "name": rung.name,
                "train": train,
                "plan": tightfit.Plan(**plan).differences(),
                "published_bytes": None if rung.published is None else round(rung.published * 1e9),
                "peak_bytes": peak.total,
                "rows": peak.rows,
                "phase": peak.phase,
            }
        )
    return rows


def second_step(spec: dict[str, Any], train: tightfit.Train, plan: tightfit.Plan, fake: bool) -> Peak:
    """The peak of a job's second step: the first makes the optimizer's states."""
    with FakeTensorMode() if fake else nullcontext():
        samples = [{"pixel_values": torch.zeros(1), "labels": 0}]  # only shapes matter: see `take_step`
        job = tightfit.Job(model=spec, data=samples, allow=ALLOW, train=train)
        run = tightfit.build(job, plan)
        size = run.model.config.image_size
        take_step(run, size)
        return track_peak(run, [], lambda watched: take_step(watched, size))[1]


def take_step(run: Run, size: int) -> None:
    """The engine's own step on black images of `size` x `size`; every image counts, as no label needs to be read."""
    batch = run.job.train.batch
    micro_batch = run.plan.micro_batch_of(batch)
    micro_batches = [
        {"pixel_values": torch.zeros(micro_batch, 3, size, size), "labels": torch.zeros(micro_batch, dtype=torch.long)}
        for _ in range(batch // micro_batch)
    ]
    accumulate(run, micro_batches, lambda: batch)
    update(run)


def show(rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        published = "" if row["published_bytes"] is None else f"{row['published_bytes'] / 1e9:.2f}"
        peaks = [f"{row['peak_bytes'] / 1e9:.2f}", f"{row['peak_bytes'] / 2**30:.2f}", published]
        parts = [f"{row['rows'][name] / 1e9:.2f}" for name in ROWS]
        lines.append([row["name"], *peaks, *parts, row["phase"]])
    harness.print_table(["rung", "GB", "GiB", "published", *ROWS, "phase"], lines)
    print(f"GB at the peak, and its rows; {times_less(rows):.1f} times less from the first rung to the last")


def times_less(rows: list[dict[str, Any]]) -> float:
    return rows[0]["peak_bytes"] / rows[-1]["peak_bytes"]


def show_both(real: list[dict[str, Any]], fake: list[dict[str, Any]]) -> None:
    """Peak of real and of fake tensors, rung by rung."""
    for one, other in zip(real, fake, strict=True):
        ratio = other["peak_bytes"] / one["peak_bytes"]
        sizes = f"real {one['peak_bytes'] / 1e6:8.1f} MB   fake {other['peak_bytes'] / 1e6:8.1f} MB"
        print(f"{one['name']:30s} {sizes}   ratio {ratio:.4f}")


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--real", action="store_true", help="a small ViT, real tensors beside fake ones")
    arguments = parser.parse_args()
    if arguments.real:
        show_both(climb(SMALL, fake=False), climb(SMALL, fake=True))
        return
    rows = climb(LARGE, fake=True)
    show(rows)
    found = {"model": LARGE, "bytes": "logical", "times_less": times_less(rows), "rungs": rows}
    harness.write_record(arguments.out, found)


if __name__ == "__main__":
    main()
