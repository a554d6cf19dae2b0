"""Measure what `tightfit.train` adds to each step of a plain training loop.

    .venv/bin/python benchmarks/loop_overhead.py --out records/loop_overhead.json

A net so small that a step is nearly only Python code trains on a CPU with one thread, in two loops:
`tightfit.train`, and a plain loop with torch's DataLoader. Both clip gradients, update the same two
parameter groups with fused AdamW, follow a learning rate with warm-up, and read the loss of each step.
Their losses are compared. Each round measures each loop once, in a process of its own; the overhead
is the difference of the processor times of a step.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of this file's folder
from benchmarks import harness

FEATURES, HIDDEN, CLASSES = 16, 32, 4
SAMPLES, BATCH = 4096, 8
STEPS, UNTIMED = 3000, 500
LEARNING_RATE, WARMUP, CLIP, DECAY, SEED = 1e-3, 100, 1.0, 0.1, 0
TIGHTFIT, PLAIN = "tightfit.train", "plain loop"


def make_model() -> Any:
    """Return the small net. It has no dropout, so equal samples give equal losses."""
    import torch

    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES), torch.nn.Flatten()
    )


def make_data() -> Any:
    """Return the dataset: random features (FEATURES,) and labels."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    features = torch.randn(SAMPLES, FEATURES, generator=generator)
    return torch.utils.data.TensorDataset(features, torch.randint(CLASSES, (SAMPLES,), generator=generator))


def make_run() -> Any:
    """Return the built run that trains the net with tightfit."""
    import tightfit

    train = tightfit.Train(
        optimizer="adamw",
        learning_rate=LEARNING_RATE,
        warmup=WARMUP,
        weight_decay=DECAY,
        clip=CLIP,
        batch=BATCH,
        steps=STEPS,
        seed=SEED,
    )
    job = tightfit.Job(model=make_model, data=make_data(), train=train)
    return tightfit.build(job, tightfit.Plan(fused_optimizer=True))


def losses_of_tightfit(run: Any) -> Iterator[float]:
    """Yield the loss of each step of `tightfit.train`."""
    import tightfit

    for step in tightfit.train(run):
        yield step.loss


def losses_of_plain_loop(run: Any) -> Iterator[float]:
    """Yield the loss of each step of a plain loop that trains the model of `run`, from its weights
    and with its samples in its order."""
    import torch

    indices, _ = run.data.order.training_samples(0, STEPS * BATCH)
    loader = torch.utils.data.DataLoader(make_data(), batch_size=BATCH, sampler=indices.tolist())
    model = run.model
    decayed = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / WARMUP, 1.0))
    for features, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(features), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield loss.item()


def measure(name: str) -> dict[str, Any]:
    """Train with the loop `name` in this process. Return seconds of processor time and of time per
    step, without the first UNTIMED steps, and the loss of the last step."""
    import torch

    torch.set_num_threads(1)
    losses = {TIGHTFIT: losses_of_tightfit, PLAIN: losses_of_plain_loop}[name](make_run())
    for _ in range(UNTIMED):
        next(losses)
    began, before = time.perf_counter(), time.process_time()
    for loss in losses:
        last = loss
    timed = STEPS - UNTIMED
    return {
        "cpu_s": (time.process_time() - before) / timed,
        "step_s": (time.perf_counter() - began) / timed,
        "loss": last,
    }


def line_of(name: str, found: dict[str, Any]) -> str:
    """Return a line that says what one loop needed."""
    return f"{name:15s} {1e3 * found['cpu_s']:.3f} ms of processor time a step"


def main() -> None:
    arguments = harness.make_parser(__doc__, rounds=5).parse_args()
    rounds = harness.interleaved(
        arguments.rounds,
        (TIGHTFIT, PLAIN),
        lambda name, number: harness.in_fresh_process(measure, name, environment={"OMP_NUM_THREADS": "1"}),
        line_of,
    )
    losses = [found[name]["loss"] for found in rounds for name in (TIGHTFIT, PLAIN)]
    overheads = [found[TIGHTFIT]["cpu_s"] - found[PLAIN]["cpu_s"] for found in rounds]
    print(
        f"overhead of a step: {1e3 * statistics.median(overheads):.3f} ms, the losses differ by {_spread(losses):.1e}"
    )
    harness.write_record(
        arguments.out,
        {
            "steps": STEPS - UNTIMED,
            "rounds": rounds,
            "overhead_s": statistics.median(overheads),
            "loss_difference": _spread(losses),
        },
    )


def _spread(losses: list[float]) -> float:
    """Return the largest relative difference of the losses."""
    return max(losses) / min(losses) - 1


if __name__ == "__main__":
    main()
