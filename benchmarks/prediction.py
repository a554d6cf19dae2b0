"""Compare predicted and measured peak memory and step time of many (model, plan) pairs.

    .venv/bin/python benchmarks/prediction.py --out records/prediction.json
    .venv/bin/python benchmarks/prediction.py --only llama     # the pairs of one model
    .venv/bin/python benchmarks/prediction.py --single --out records/prediction_single.json    # the pairs in fp32
    .venv/bin/python benchmarks/prediction.py --others --out records/prediction_others.json    # other families

Each pair runs in a process of its own. It has three figures of memory:

    estimate_bytes  the estimate: every method's cost over the profiled ledger
    dry_run_bytes   the dry run: the assembled run on fake tensors
    measured_bytes  logical bytes of the live storages of a real step, or of the allocator's events where
               the plan compiles

Its time is predicted at the rates that `tightfit machine --calibrate` measured, and compared with the
median of real steps. Nothing is fitted to the pairs.

The machine is shared. A fixed piece of work (`calibration/clock_drift.py`) is timed before and after each
step. `measured_s` is the median of the steps' ratios to it, at the speed of the calibration; `step_s`
and `pace` keep both. A pair whose time is off by more than 20 % runs twice more, because another
tenant of the machine can slow a whole process. The median of the three counts, and `runs_s` keeps all.

`--others` takes other families of models (`benchmarks/other_models.py`).
`--single` is for CPUs without bf16 instructions, on which a step in bf16 takes minutes.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of this file's folder
from benchmarks import harness, other_models

ALLOW = ["bf16", "bf16-states", "8-bit-states", "4-bit-states", "stochastic-rounding"]
TEXT = {"synthetic": "tokens", "sequence_length": 128}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {  # model, data, batch
    "llama": (
        {"architecture": "llama", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
         "intermediate_size": 704, "vocab_size": 4096},
        TEXT, 16,
    ),
    "llama-long": (
        {"architecture": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
         "intermediate_size": 704, "vocab_size": 2048},
        {"synthetic": "tokens", "sequence_length": 512}, 4,
    ),
    "gpt2": (
        {"architecture": "gpt2", "n_embd": 256, "n_layer": 6, "n_head": 4, "vocab_size": 4096, "n_positions": 128},
        TEXT, 16,
    ),
    "bert": (
        {"architecture": "bert", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
         "intermediate_size": 1024, "vocab_size": 4096},
        TEXT, 16,
    ),
    "vit": (
        {"architecture": "vit", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
         "intermediate_size": 1024, "image_size": 96, "patch_size": 8, "num_labels": 10},
        {"synthetic": "images"}, 16,
    ),
    "t5": (
        {"architecture": "t5", "d_model": 256, "num_layers": 4, "num_decoder_layers": 4, "num_heads": 4, "d_kv": 64,
         "d_ff": 768, "vocab_size": 4096},
        TEXT, 8,
    ),
    "batchnorm": ({"python": f"{__file__}:convolutions"}, {"synthetic": "images", "image_size": 64}, 32),
}  # fmt: skip
PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"micro_batch": 4},
    {"precision": "bf16-mixed", "fused_optimizer": True, "allocator": "tuned"},
    {"precision": "bf16-mixed", "micro_batch": 4, "recompute": "full", "allocator": "tuned"},
    {"precision": "bf16-true", "rounding": "kahan", "allocator": "tuned"},
    {"precision": "bf16-true", "update_in_backward": True, "recompute": "every-2", "allocator": "tuned"},
    {"recompute": "selective"},
    {"states": "8-bit", "micro_batch": 2},
    {"states": "bf16", "materialize": "device"},
    {"precision": "bf16-mixed", "compile": "block", "allocator": "tuned", "fused_optimizer": True},
    {"fused_optimizer": True, "micro_batch": 2, "allocator": "tuned"},
    {"update_in_backward": True, "materialize": "device"},
    {"recompute": "full", "allocator": "tuned"},
    {"compile": "block", "fused_optimizer": True, "allocator": "tuned"},
)
OF_NO_BLOCKS: tuple[dict[str, Any], ...] = ({"compile": "model", "fused_optimizer": True},)
OF_LANGUAGE: tuple[dict[str, Any], ...] = (
    {"chunked_loss": 512, "precision": "bf16-mixed", "allocator": "tuned"},
    {"chunked_loss": 512, "micro_batch": 4, "recompute": "full"},
)
AGAIN = 0.2  # error of a step's time from which on a pair runs twice more
OPTIMIZERS = ("sgd", "lion", "lamb", "adafactor")


def convolutions() -> Any:
    """A small convolutional network with BatchNorm."""
    from torch import Tensor, nn

    def stage(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]

    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                *stage(3, 32), *stage(32, 32), nn.MaxPool2d(2), *stage(32, 64), *stage(64, 64), nn.MaxPool2d(2),
                *stage(64, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
            )  # fmt: skip

        def forward(self, pixel_values: Tensor) -> Tensor:
            return self.layers(pixel_values)

    return Convolutions()


def pairs() -> list[dict[str, Any]]:
    """Every (model, optimizer, plan) that the rules admit."""
    found = []
    for model in MODELS:
        plans = PLANS + (OF_LANGUAGE if model in ("llama", "llama-long", "gpt2", "bert", "t5") else ())
        plans += OF_NO_BLOCKS if model == "batchnorm" else ()
        for plan in plans:
            if model == "batchnorm" and ("recompute" in plan or plan.get("compile") == "block"):
                continue  # it has no repeated blocks
            found.append({"model": model, "optimizer": "adamw", "plan": plan})
    found += [{"model": "llama", "optimizer": name, "plan": {}} for name in OPTIMIZERS]
    return found


def job_of(pair: dict[str, Any], steps: int) -> Any:
    """The job of a pair."""
    import tightfit

    name, own = pair["model"], pair["model"] in MODELS
    batch = MODELS[name][2] if own else other_models.batch_of(name)
    train = tightfit.Train(optimizer=pair["optimizer"], batch=batch, steps=steps)
    if not own:
        return other_models.job_of(name, train)
    return tightfit.Job(model=MODELS[name][0], data=MODELS[name][1], allow=ALLOW, train=train)


def measure(pair: dict[str, Any], steps: int) -> dict[str, Any]:
    """Predict and run one pair in this process."""
    import torch

    import tightfit
    from tightfit.calibration.clock_drift import control_s
    from tightfit.engine.build import build
    from tightfit.engine.loop import train
    from tightfit.measure.observer import SAMPLED, Observer
    from tightfit.planner.dry_run import dry_run
    from tightfit.planner.estimator import Estimator
    from tightfit.planner.model_convolutions import measure_model

    job = job_of(pair, steps + SAMPLED + 1)
    plan, machine = tightfit.Plan(**pair["plan"]), tightfit.Machine.detect()
    estimator = Estimator(job, machine)
    measure_model(estimator, plan, pair["plan"])
    estimate = estimator.estimate(plan)
    dry_run_bytes = dry_run(job, plan).total
    settled = estimator.include_allocator(estimate)
    run = build(job, plan, machine)
    observer = Observer(run, 0)
    usual_s = harness.usual_control_s()
    controls = []
    for result in train(run, take=observer.take):
        observer.add(result)
        if result.step >= SAMPLED:
            controls.append(control_s(torch.device("cpu")))
    around = [(before + after) / 2 for before, after in itertools.pairwise(controls)]
    ratios = [step.seconds / control for step, control in zip(observer.timed, around, strict=True)]
    record = observer.record(machine)
    return {
        **pair,
        "estimate_bytes": round(estimate.peak.total - estimate.peak.rows["runtime"]),
        "dry_run_bytes": dry_run_bytes,
        "measured_bytes": record.peak_bytes.measured,
        "predicted_process_bytes": round(settled.peak_bytes),
        "process_bytes": record.peak_bytes.process,
        "predicted_s": estimate.time.step_s,
        "measured_s": statistics.median(ratios) * usual_s,
        "step_s": record.step_s,
        "pace": [usual_s / control for control in around],
    }


def show(rows: list[dict[str, Any]], memory: bool) -> dict[str, dict[str, float]]:
    """Print each pair and the errors' medians and worst; returns these. memory: alone"""
    errors: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        mistakes = {
            "estimate": row["estimate_bytes"] / row["measured_bytes"] - 1,
            "dry_run": row["dry_run_bytes"] / row["measured_bytes"] - 1,
        }
        if "process_bytes" in row:
            mistakes["process"] = row["predicted_process_bytes"] / row["process_bytes"] - 1
        if not memory:
            mistakes["time"] = time_error(row)
        for name, value in mistakes.items():
            errors[name].append(value)
        plan = ", ".join(f"{name}={value}" for name, value in row["plan"].items()) or "reference"
        said = "  ".join(f"{name} {value:+7.1%}" for name, value in mistakes.items())
        print(f"{row['model']:12s} {row['optimizer']:9s} {said}  {plan}")
    summary = {name: harness.error_summary(values) for name, values in errors.items()}
    if not memory:
        paces = [pace for row in rows for pace in row["pace"]]
        print(f"pace       {harness.spread(paces)} times that of the calibration")
    for name, both in summary.items():
        print(f"{name:10s} {len(errors[name])} pairs: median error {both['median']:.1%}, worst {both['worst']:.1%}")
    return summary


def main() -> None:
    parser = harness.make_parser(__doc__, only="the pairs of one model; pairs that --out has are not run again")
    parser.add_argument("--single", action="store_true", help="the pairs that compute in fp32")
    parser.add_argument("--others", action="store_true", help="other families of models")
    parser.add_argument("--memory", action="store_true", help="memory alone, in fewer steps")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each pair")
    arguments = parser.parse_args()
    there = harness.read_record(arguments.out).get("pairs", [])
    rows = []
    for pair in other_models.pairs() if arguments.others else pairs():
        if arguments.only and pair["model"] != arguments.only:
            continue
        if arguments.single and "precision" in pair["plan"]:
            continue
        same = [row for row in there if "pace" in row and all(row[name] == value for name, value in pair.items())]
        row = same[0] if same else run_alone(pair, 1 if arguments.memory else arguments.steps)
        if not arguments.memory and "runs_s" not in row and abs(time_error(row)) > AGAIN:
            row = median_of([row, *(run_alone(pair, arguments.steps) for _ in range(2))])
        rows.append(row)
        harness.write_record(arguments.out, {"summary": None, "pairs": rows})
        harness.show_progress(f"{len(rows)} pairs")
    harness.show_progress("")
    summary = show(rows, arguments.memory)
    harness.write_record(arguments.out, {"summary": summary, "pairs": rows})


def time_error(row: dict[str, Any]) -> float:
    return row["predicted_s"] / row["measured_s"] - 1


def median_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run whose step took the median time of all."""
    runs = sorted(runs, key=lambda run: run["measured_s"])
    return {**runs[len(runs) // 2], "runs_s": [run["measured_s"] for run in runs]}


def run_alone(pair: dict[str, Any], steps: int) -> dict[str, Any]:
    """The pair in a process that starts as `tightfit train` would start it."""
    from tightfit.engine.launch import environment
    from tightfit.plan import Plan

    added = environment(Plan(allocator=pair["plan"].get("allocator", "default")), "cpu", os.environ)
    return harness.in_fresh_process(measure, pair, steps, environment=added)


if __name__ == "__main__":
    main()
