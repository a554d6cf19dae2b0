"""The best plain loop and tightfit on seven families of models, each in a process of its own, in turns.

    .venv/bin/python benchmarks/single_device.py --family all --out records/families.json
    .venv/bin/python benchmarks/single_device.py --family gpt2-124m,bert-base

The plain loops have what an experienced user writes for speed: the whole model compiled, fused AdamW, fp32
weights under bf16 autocast in one and bf16 weights in the other, and the allocator settings with which
`tightfit train` starts. A CPU without bf16 instructions multiplies matrices faster in fp32 than in bf16. On such
a CPU there is one plain loop, in fp32. tightfit trains with the plan that its search returns for the same job.
The job allows bf16 weights that are rounded to nearest, because the plain loop with bf16 weights rounds so.

All train the same samples from the same initial weights, with gradients clipped to 1. Dropout draws other
numbers in other compiled code, so losses are equal only about. A row's time is the median of its steps in a
round. Ratios are medians over rounds of the ratio within a round. RSS is the process's largest.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of this file's folder
from benchmarks import harness
from benchmarks.contenders import batches_of, make_model

Family = tuple[dict[str, Any], dict[str, Any], int]  # model, data, batch


def _llama(width: int, inner: int, layers: int, vocabulary: int) -> dict[str, Any]:
    return {
        "architecture": "llama",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }


def _tokens(length: int) -> dict[str, Any]:
    return {"synthetic": "tokens", "sequence_length": length}


FAMILIES: dict[str, Family] = {
    "llama-14m": (_llama(384, 1024, 6, 8192), _tokens(512), 8),
    "llama-49m": (_llama(640, 1728, 8, 16384), _tokens(512), 8),
    "gpt2-124m": ({"preset": "gpt2"}, _tokens(256), 4),
    "bert-base": ({"preset": "bert-base"}, _tokens(128), 8),
    "vit-b-16": ({"preset": "vit-b-16"}, {"synthetic": "images"}, 8),
    "t5-small": (
        {"architecture": "t5", "d_model": 512, "d_ff": 2048, "d_kv": 64, "num_layers": 6, "num_heads": 8},
        _tokens(128),
        8,
    ),
    "resnet-50": ({"architecture": "resnet", "num_labels": 1000}, {"synthetic": "images", "image_size": 224}, 8),
}
AUTOCAST, NARROW, SINGLE = "plain loop, bf16 autocast", "plain loop, bf16 weights", "plain loop, fp32"
TIGHTFIT = "tightfit"
WARM_UP = 5


def job_of(family: str, steps: int) -> Any:
    import tightfit

    model, data, batch = FAMILIES[family]
    train = tightfit.Train(
        batch=batch,
        steps=steps,
        learning_rate=1e-4,
        weight_decay=0.1,
        clip=1.0,
        schedule="constant",
        warmup=0,
        trackers=(),
    )
    return tightfit.Job(model=model, data=data, train=train, allow=["bf16", "nearest-rounding"])


PLANNED_STEPS = 5000  # a run in which compiling pays


def choose(family: str) -> dict[str, Any]:
    """The plan that the search returns for this machine, and what it predicts."""
    import tightfit

    best = tightfit.search(job_of(family, PLANNED_STEPS))[0]
    return {"plan": best.plan.content(), "predicted_s": best.time.step_s, "differences": best.plan.differences()}


def plain_loops() -> tuple[str, ...]:
    """The names of the plain loops for this machine."""
    from tightfit.machine import Machine

    machine = Machine.detect()
    narrow, single = machine.rate("bf16"), machine.rate("fp32")
    return (SINGLE,) if narrow and single and single > narrow else (AUTOCAST, NARROW)


def run_plain(family: str, contender: str, steps: int) -> dict[str, Any]:
    """The loop of a tutorial with the usual options for speed."""
    import torch

    narrow = contender == NARROW
    job = job_of(family, steps)
    model = make_model(job)
    model = model.to(torch.bfloat16) if narrow else model
    settings = job.train
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    forward = torch.compile(model)
    times, losses = [], []
    for batch in batches_of(job, steps):
        began = time.perf_counter()
        if narrow:
            batch = {name: one.to(torch.bfloat16) if one.is_floating_point() else one for name, one in batch.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=contender == AUTOCAST):
            loss = forward(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        times.append(time.perf_counter() - began)
    return measured(times, losses)


def run_tightfit(family: str, plan: dict[str, Any], steps: int) -> dict[str, Any]:
    import tightfit

    run = tightfit.build(job_of(family, steps), tightfit.Plan.parse(plan, "plan"))
    times, losses = [], []
    began = time.perf_counter()
    for result in itertools.islice(tightfit.train(run), steps):
        losses.append(result.loss)
        now = time.perf_counter()
        times.append(now - began)
        began = now
    return measured(times, losses)


def measured(times: list[float], losses: list[float]) -> dict[str, Any]:
    import resource

    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"step_s": times[WARM_UP:], "loss": statistics.mean(losses[-4:]), "rss_bytes": rss}


def measure(family: str, contender: str, plan: dict[str, Any], steps: int) -> dict[str, Any]:
    """One contender's figures, in a process that starts with the settings of allocator: tuned."""
    from tightfit import Plan
    from tightfit.engine import launch

    added = launch.environment(Plan(allocator="tuned"), "cpu", os.environ)
    if contender == TIGHTFIT:
        if plan["allocator"] != "tuned":
            added = launch.environment(Plan.parse(plan, "plan"), "cpu", os.environ)
        return harness.in_fresh_process(run_tightfit, family, plan, steps + WARM_UP, environment=added)
    return harness.in_fresh_process(run_plain, family, contender, steps + WARM_UP, environment=added)


def summarise(family: str, chosen: dict[str, Any], rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """One family's rows, and the ratios of tightfit to the best plain loop of the same round."""
    medians = {name: [statistics.median(one[name]["step_s"]) for one in rounds] for name in rounds[0]}
    plain = [name for name in medians if name != TIGHTFIT]
    best = [min(medians[name][number] for name in plain) for number in range(len(rounds))]
    fastest = min(plain, key=lambda name: statistics.median(medians[name]))
    of_precision = {"bf16-true": NARROW, "fp32": SINGLE}.get(chosen["plan"]["precision"], AUTOCAST)
    rss = {name: max(one[name]["rss_bytes"] for one in rounds) for name in rounds[0]}
    return {
        "family": family,
        "plan": chosen["differences"],
        "predicted_s": chosen["predicted_s"],
        "best_plain": fastest,
        "faster": statistics.median(harness.ratios(best, medians[TIGHTFIT])),
        "faster_by_round": harness.ratios(best, medians[TIGHTFIT]),
        "rss_to_plain": rss[TIGHTFIT] / rss[of_precision if of_precision in rss else fastest],
        "contenders": {
            name: {
                "step_s": statistics.median(medians[name]),
                "steps_s": [one[name]["step_s"] for one in rounds],
                "rss_bytes": rss[name],
                "loss": rounds[-1][name]["loss"],
            }
            for name in rounds[0]
        },
    }


def show(rows: list[dict[str, Any]]) -> None:
    columns = (
        "family",
        *(name.replace(" loop", "") for name in rows[0]["contenders"]),
        "predicted",
        "x best plain",
        "RSS",
        "losses",
    )
    lines = []
    for row in rows:
        of = row["contenders"]
        lines.append(
            [
                row["family"],
                *(f"{1000 * one['step_s']:.0f} ms" for one in of.values()),
                f"{1000 * row['predicted_s']:.0f} ms",
                f"{row['faster']:.2f}",
                f"x {row['rss_to_plain']:.2f}",
                " ".join(f"{one['loss']:.3f}" for one in of.values()),
            ]
        )
    harness.print_table(columns, lines, width=150)


def compare(families: list[str], rounds: int, steps: int, out: Path | None) -> None:
    """Run the contenders of each family in turns, print the table and write the record as families end. The record
    keeps its rows of other families."""
    from tightfit.machine import Machine

    rows: list[dict[str, Any]] = []
    others = [row for row in harness.read_record(out).get("families", []) if row["family"] not in families]
    contenders = [*plain_loops(), TIGHTFIT]
    for family in families:
        harness.show_progress(f"{family}: search")
        chosen = harness.in_fresh_process(choose, family)
        harness.show_progress("")
        print(f"{family}: {chosen['differences']}", flush=True)

        def one(name: str, _: int, family: str = family, plan: dict[str, Any] = chosen["plan"]) -> dict[str, Any]:
            return measure(family, name, plan, steps)

        rows.append(summarise(family, chosen, harness.interleaved(rounds, contenders, one, line_of)))
        harness.write_record(out, {"machine": Machine.detect().name, "families": sorted(rows + others, key=in_order)})
    show(rows)


def in_order(row: dict[str, Any]) -> int:
    return list(FAMILIES).index(row["family"])


def line_of(name: str, found: dict[str, Any]) -> str:
    seconds = statistics.median(found["step_s"])
    return f"{name:30s} {1000 * seconds:7.1f} ms  {found['rss_bytes'] / 1e9:.2f} GB  loss {found['loss']:.3f}"
