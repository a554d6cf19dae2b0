"""The demo's job run by plain PyTorch loops, transformers' Trainer and tightfit, each in a process of its own, in one go.

    .venv/bin/python -m pip install -e ".[benchmarks]"
    .venv/bin/python benchmarks/single_device.py --out records/single_device.json
    .venv/bin/python benchmarks/single_device.py --only lean --out records/lean.json    # the lean ones among themselves
    .venv/bin/python benchmarks/single_device.py --family all --out records/families.json    # of benchmarks/families.py

Every contender trains the same 13.8M-parameter Llama on the same tokens (16 x 256 a step, gradient clipped to 1).
The lean plan has lean peers: bf16 weights and 8 micro-batches of 2 sequences, with and without checkpointing.

Every tuned peer starts with exactly the allocator settings that tightfit's plans start with (`GLIBC_TUNABLES` in
`tightfit/engine/launch.py`). The record keeps them in each row's `environment`. The lean plain loops also run with glibc's
defaults, because either setting may take less memory.

Contenders take turns for `--rounds` rounds, so that a slow period of the machine affects all of them. tokens/s is that of
the median step of all rounds. Ratios are medians over rounds of the ratio within a round. RSS is the process's largest.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of this file's folder
from benchmarks import harness
from benchmarks.contenders import batches_of
from benchmarks.families import FAMILIES, compare

JOB = harness.ROOT / "examples" / "demo.yaml"

BEST = {
    "precision": "bf16-mixed",
    "compile": "block",
    "attention": "blocked",
    "chunked_loss": 1024,
    "fused_optimizer": True,
    "materialize": "device",
    "allocator": "tuned",
}
LEAN = {
    "precision": "bf16-true",
    "attention": "blocked",
    "chunked_loss": 256,
    "fused_optimizer": True,
    "materialize": "device",
    "micro_batch": 2,
    "allocator": "tuned",
}

CONTENDERS: dict[str, dict[str, Any]] = {
    "plain loop, defaults (fp32)": {"kind": "plain"},
    "plain loop, bf16 autocast, compiled, fused": {
        "kind": "plain",
        "autocast": True,
        "compile": True,
        "fused": True,
        "allocator": "tuned",
    },
    "plain loop, bf16 weights, compiled, fused": {
        "kind": "plain",
        "bf16": True,
        "compile": True,
        "fused": True,
        "allocator": "tuned",
    },
    "Trainer, defaults": {"kind": "trainer"},
    "Trainer, bf16 autocast, compiled, fused": {
        "kind": "trainer",
        "autocast": True,
        "compile": True,
        "fused": True,
        "allocator": "tuned",
    },
    "Trainer, bf16 weights, compiled, fused": {
        "kind": "trainer",
        "bf16": True,
        "compile": True,
        "fused": True,
        "allocator": "tuned",
    },
    "plain loop, lean: bf16 weights, compiled, fused, 8 x 2": {
        "kind": "plain",
        "bf16": True,
        "compile": True,
        "fused": True,
        "micro_batch": 2,
        "allocator": "tuned",
    },
    "plain loop, lean: as above, checkpointing": {
        "kind": "plain",
        "bf16": True,
        "compile": True,
        "fused": True,
        "micro_batch": 2,
        "recompute": True,
        "allocator": "tuned",
    },
    "plain loop, lean, glibc's defaults": {
        "kind": "plain",
        "bf16": True,
        "compile": True,
        "fused": True,
        "micro_batch": 2,
    },
    "plain loop, lean, checkpointing, glibc's defaults": {
        "kind": "plain",
        "bf16": True,
        "compile": True,
        "fused": True,
        "micro_batch": 2,
        "recompute": True,
    },
    "Trainer, lean: bf16 weights, compiled, fused, 8 x 2, checkpointing": {
        "kind": "trainer",
        "bf16": True,
        "compile": True,
        "fused": True,
        "micro_batch": 2,
        "recompute": True,
        "allocator": "tuned",
    },
    "tightfit, reference plan": {"kind": "tightfit", "plan": {}},
    "tightfit, best plan": {"kind": "tightfit", "plan": BEST},
    "tightfit, lean plan": {"kind": "tightfit", "plan": LEAN},
    "tightfit, lean plan, every second block recomputed": {
        "kind": "tightfit",
        "plan": {**LEAN, "recompute": "every-2"},
    },
}


# --- one contender, in a process of its own -------------------------------------------------------------------------


def run_contender(name: str, steps: int) -> dict[str, Any]:
    """Train `steps` timed steps after three to warm up; step times, final loss and this process's largest RSS."""
    contender = CONTENDERS[name]
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
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=train.learning_rate,
        betas=train.betas,
        weight_decay=train.weight_decay,
        fused=contender.get("fused") or None,
    )
    if contender.get("recompute"):
        model.gradient_checkpointing_enable()
    forward = torch.compile(model) if contender.get("compile") else model
    size = contender.get("micro_batch", train.batch)
    times, loss = [], torch.zeros(())
    for tokens in tokens_of(job, steps):
        began = time.perf_counter()
        loss = torch.zeros(())
        for part in tokens.split(size):
            with torch.autocast("cpu", torch.bfloat16, enabled=bool(contender.get("autocast"))):
                mean = forward(input_ids=part, labels=part).loss * (size / train.batch)
            mean.backward()
            loss += mean.detach()
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
    size = contender.get("micro_batch", job.train.batch)
    batches = tokens_of(job, steps)
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
            output_dir=folder,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=job.train.batch // size,
            gradient_checkpointing=bool(contender.get("recompute")),
            max_steps=steps,
            learning_rate=job.train.learning_rate,
            weight_decay=job.train.weight_decay,
            adam_beta1=job.train.betas[0],
            adam_beta2=job.train.betas[1],
            lr_scheduler_type="constant",
            report_to=[],
            save_strategy="no",
            logging_strategy="steps",
            logging_steps=steps,
            use_cpu=True,
            disable_tqdm=True,
            bf16=bool(contender.get("autocast")),
            torch_compile=bool(contender.get("compile")),
            **({"optim": "adamw_torch_fused"} if contender.get("fused") else {}),
        )
        trainer = Trainer(model=model, args=options, train_dataset=samples, callbacks=[clock])
        trainer.train()
    with torch.no_grad():
        loss = model(input_ids=batches[-1], labels=batches[-1]).loss
    return clock.times, float(loss)


def run_tightfit(contender: dict[str, Any], steps: int) -> tuple[list[float], float]:
    """The same job through tightfit: the reference plan, or one of the two named ones."""
    import itertools

    import tightfit

    job = demo_job().replace(train=demo_job().train.replace(steps=steps))
    run = tightfit.build(job, tightfit.Plan(**contender["plan"]))
    results = list(itertools.islice(tightfit.train(run), steps))
    return [result.seconds for result in results], results[-1].loss


def tokens_of(job: Any, steps: int) -> list[Any]:
    """The job's own samples, (16, 256) tokens a step, as tightfit's loader gives them to every contender."""
    return [batch["input_ids"] for batch in batches_of(job, steps)]


# --- all of them, in turns ------------------------------------------------------------------------------------------


def measure(name: str, steps: int) -> dict[str, Any]:
    """Run one contender in a new process, in the environment of its allocator setting."""
    added = environment(CONTENDERS[name])
    return {**harness.in_fresh_process(run_contender, name, steps, environment=added), "environment": added}


def environment(contender: dict[str, Any]) -> dict[str, str]:
    """The variables that `tightfit train` would add for this allocator setting: the same for peers
    and plans."""
    from tightfit import Plan
    from tightfit.engine import launch

    allocator = contender.get("plan", contender).get("allocator", "default")
    return launch.environment(Plan(allocator=allocator), "cpu", os.environ)


def summarise(rounds: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each contender: tokens/s of the median step, largest RSS, loss, ratios to three controls round by round."""
    rows = []
    rate = {n: [TOKENS / statistics.median(r[n]["step_s"]) for r in rounds] for n in rounds[0]}
    tuned = [n for n in rate if CONTENDERS[n]["kind"] != "tightfit" and CONTENDERS[n].get("compile")]
    for name, rates in rate.items():
        best_peer = [max(rate[n][i] for n in tuned) if tuned else float("nan") for i in range(len(rounds))]
        rows.append(
            {
                "name": name,
                "tokens_per_s": TOKENS / statistics.median([s for r in rounds for s in r[name]["step_s"]]),
                "step_s": [r[name]["step_s"] for r in rounds],
                "rss_bytes": max(r[name]["rss_bytes"] for r in rounds),
                "loss": rounds[-1][name]["loss"],
                "environment": rounds[-1][name]["environment"],
                "to_trainer_default": _ratio(rates, rate.get("Trainer, defaults")),
                "to_plain_default": _ratio(rates, rate.get("plain loop, defaults (fp32)")),
                "to_best_tuned_other": _ratio(rates, best_peer),
            }
        )
    return rows


TOKENS = 16 * 256


def _ratio(rates: list[float], control: list[float] | None) -> float | None:
    return statistics.median(harness.ratios(rates, control)) if control else None


def product_limit() -> dict[str, float]:
    """Tokens/s if a step were nothing but its matrix products in bf16, at their own shapes; and the square matrix rate.

    Each product writes where one has been written before. `head_tokens_per_s` is the whole step at the rate that the
    output layer's product reaches when it takes new memory for what it makes, as it does in a loop that keeps none.
    """
    import torch

    def timed(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(12):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return statistics.median(times[2:])

    def seconds(m: int, k: int, n: int, batch: int = 1) -> float:
        left, right = torch.randn(batch, m, k).bfloat16(), torch.randn(batch, k, n).bfloat16()
        out = torch.empty(batch, m, n, dtype=torch.bfloat16)
        if batch == 1:  # another kernel than a batch of products
            return timed(lambda: torch.mm(left[0], right[0], out=out[0]))
        return timed(lambda: torch.bmm(left, right, out=out))

    def layer(k: int, n: int) -> float:
        """Forward, gradient of the input, gradient of the weight of a (k, n) linear layer over a step's tokens."""
        return seconds(TOKENS, k, n) + seconds(TOKENS, n, k) + seconds(n, TOKENS, k)

    def attention(heads: int, length: int, width: int, rows: int = 64) -> float:
        """Scores and sums of values by blocks of queries that see no later key, and the four products of backward."""
        pairs = [
            (seconds(rows, width, keys, heads), seconds(rows, keys, width, heads), seconds(keys, rows, width, heads))
            for keys in range(rows, length + 1, rows)
        ]
        return sum(2 * scores + 2 * summed + 2 * turned for scores, summed, turned in pairs)

    total = 6 * (4 * layer(384, 384) + 2 * layer(384, 1024) + layer(1024, 384)) + layer(384, 8192)
    total += 6 * attention(16 * 6, 256, 64)
    size = 2048
    hidden, head = torch.randn(TOKENS, 384).bfloat16(), torch.randn(384, 8192).bfloat16()
    rate = 2 * TOKENS * 384 * 8192 / timed(lambda: torch.mm(hidden, head))
    return {
        "products_tokens_per_s": TOKENS / total,
        "head_tokens_per_s": rate / FLOPS_PER_TOKEN,
        "head_flops_per_s": rate,
        "square_flops_per_s": 2 * size**3 / seconds(size, size, size),
    }


LIMIT = "matrix products alone"
FLOPS_PER_TOKEN = 6 * 13.77e6 + 12 * 6 * 384 * 256


def show(rows: list[dict[str, Any]], limit: dict[str, float]) -> None:
    columns = (
        "tokens/s",
        "x Trainer",
        "x best other",
        "RSS GB",
        "loss",
        "of products",
        "of the head's",
        "of square rate",
    )
    lines = []
    for row in rows:
        compared = [f"{row[n]:.2f}" if row[n] else "" for n in ("to_trainer_default", "to_best_tuned_other")]
        shares = [
            f"{row['tokens_per_s'] / limit['products_tokens_per_s']:.0%}",
            f"{row['tokens_per_s'] / limit['head_tokens_per_s']:.0%}",
            f"{row['tokens_per_s'] * FLOPS_PER_TOKEN / limit['square_flops_per_s']:.0%}",
        ]
        figures = [f"{row['rss_bytes'] / 1e9:.2f}", f"{row['loss']:.3f}"]
        lines.append([row["name"], f"{row['tokens_per_s']:.0f}", *compared, *figures, *shares])
    harness.print_table(("contender", *columns), lines, width=160)
    print(
        f"limits: {limit['products_tokens_per_s']:.0f} tokens/s from the step's own bf16 products, "
        f"{limit['head_tokens_per_s']:.0f} at the {limit['head_flops_per_s'] / 1e9:.0f} GFLOP/s of its output layer, "
        f"{limit['square_flops_per_s'] / 1e9:.0f} GFLOP/s for square ones of 2048"
    )


def line_of(name: str, found: dict[str, Any]) -> str:
    if name == LIMIT:
        return ""
    rate = TOKENS / statistics.median(found["step_s"])
    return f"{name:45s} {rate:6.0f} tokens/s  {found['rss_bytes'] / 1e9:.2f} GB"


def main() -> None:
    parser = harness.make_parser(__doc__, only="contenders whose name contains this", rounds=3)
    parser.add_argument("--steps", type=int, default=16, help="timed steps of each contender in a round")
    parser.add_argument(
        "--family", help=f"compare on these families of models instead: all, or of {', '.join(FAMILIES)}"
    )
    arguments = parser.parse_args()
    if arguments.family:
        asked = list(FAMILIES) if arguments.family == "all" else arguments.family.split(",")
        if unknown := [name for name in asked if name not in FAMILIES]:
            parser.exit(2, f"--family {','.join(unknown)}: unknown; use all, or of {', '.join(FAMILIES)}\n")
        compare(asked, arguments.rounds, arguments.steps, arguments.out)
        return
    names = [name for name in CONTENDERS if arguments.only in name]
    if importlib.util.find_spec("accelerate") is None:  # transformers' Trainer needs it
        parser.exit(2, 'accelerate is not installed; run pip install -e ".[benchmarks]" first\n')

    def measured(name: str, _: int) -> dict[str, Any]:
        return product_limit() if name == LIMIT else measure(name, arguments.steps)

    rounds = harness.interleaved(arguments.rounds, [LIMIT, *names], measured, line_of)
    limit = harness.median_of_each([one.pop(LIMIT) for one in rounds])
    rows = summarise(rounds)
    show(rows, limit)
    if arguments.out:
        from tightfit.machine import Machine

        machine = Machine.detect().content()
        harness.write_record(arguments.out, {"machine": machine, "limits": limit, "contenders": rows})


if __name__ == "__main__":
    main()
