"""Compare LAMB and LARS at 16 times the batch with AdamW at the base batch, after as many samples.

    .venv/bin/python benchmarks/large_batch.py --out records/large_batch.json

The task is real and small: scikit-learn's handwritten digits, a small convolutional network that has
only matrices (LARS gives biases and gains the plain learning rate, which is far too high for them),
and held-out samples on which no run trains.

Every contender chooses among equally many learning rates (powers of two around its usual one, with
two seeds) and has its family's usual weight decay, so none is tuned more than another. AdamW and SGD
at the large batch are controls. The losses are means over eight other seeds, each of which also draws
the held-out samples. The record has the mean difference of the pairs and its standard error. It takes
about a quarter of an hour on two cores.
"""

from __future__ import annotations

import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tightfit

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of this file's folder
from benchmarks import harness

BASE, TIMES, EPOCHS = 4, 16, 48
CHOOSING, SEEDS = (0, 1), tuple(range(2, 10))
TRAINING, HELD_OUT = 1258, 539  # samples
GRID = (0.25, 0.5, 1.0, 2.0)
CONTENDERS: dict[str, dict[str, Any]] = {
    "adamw, base batch": {"optimizer": "adamw", "learning_rate": 5e-4, "weight_decay": 1e-2, "batch": BASE},
    "lamb, 16 times": {"optimizer": "lamb", "learning_rate": 5e-3, "weight_decay": 1e-2, "batch": BASE * TIMES},
    "lars, 16 times": {"optimizer": "lars", "learning_rate": 16.0, "weight_decay": 1e-3, "batch": BASE * TIMES},
    "adamw, 16 times": {"optimizer": "adamw", "learning_rate": 2e-3, "weight_decay": 1e-2, "batch": BASE * TIMES},
    "sgd, 16 times": {"optimizer": "sgd", "learning_rate": 0.1, "weight_decay": 1e-3, "batch": BASE * TIMES},
}


class Net(nn.Module):
    """(samples, 1, 8, 8) -> (samples, 10)"""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.GroupNorm(8, 32, affine=False), nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.GroupNorm(8, 64, affine=False), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(64 * 16, 10, bias=False)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(self.body(pixel_values))


def job_of(settings: dict[str, Any], seed: int) -> tightfit.Job:
    steps = EPOCHS * TRAINING // settings["batch"]
    return tightfit.Job(
        model=Net,
        data={"images": "digits", "held_out": 0.3, "image_size": 8},
        train=tightfit.Train(**settings, steps=steps, schedule="cosine", warmup=max(steps // 10, 1), seed=seed),
        allow=[],
    )


def held_out_loss(settings: dict[str, Any], seed: int) -> float:
    torch.set_num_threads(1)
    run = tightfit.build(job_of(settings, seed))
    for step in tightfit.train(run):
        if not step.loss < 1e4:
            return float("inf")
    return tightfit.evaluate(run, HELD_OUT)


def of_seeds(
    settings: dict[str, Any], rates: list[float], seeds: tuple[int, ...], pool: ProcessPoolExecutor
) -> dict[float, list[float]]:
    """Held-out losses of each seed, by learning rate."""
    runs = {
        rate: [pool.submit(held_out_loss, {**settings, "learning_rate": rate}, seed) for seed in seeds]
        for rate in rates
    }
    return {rate: [run.result() for run in those] for rate, those in runs.items()}


def measured(settings: dict[str, Any], pool: ProcessPoolExecutor) -> dict[str, Any]:
    """The rate that is best by some seeds, and the losses of others at that rate."""
    grid = of_seeds(settings, [settings["learning_rate"] * factor for factor in GRID], CHOOSING, pool)
    rate = min(grid, key=lambda one: statistics.mean(grid[one]))
    losses = of_seeds(settings, [rate], SEEDS, pool)[rate]
    return {
        "batch": settings["batch"],
        "learning_rate": rate,
        "held_out_loss": statistics.mean(losses),
        "of_seeds": losses,
        "grid": {str(one): statistics.mean(found) for one, found in grid.items()},
    }


def above(one: dict[str, Any], base: dict[str, Any]) -> tuple[float, float]:
    """Mean difference of the same seeds' losses, and its standard error."""
    pairs = [ours - theirs for ours, theirs in zip(one["of_seeds"], base["of_seeds"], strict=True)]
    return statistics.mean(pairs), statistics.stdev(pairs) / len(pairs) ** 0.5


def main() -> None:
    arguments = harness.make_parser(__doc__).parse_args()
    results: dict[str, dict[str, Any]] = {}
    pool = ProcessPoolExecutor(mp_context=get_context("spawn"))
    for name, settings in CONTENDERS.items():
        one = results[name] = measured(settings, pool)
        more, error = above(one, next(iter(results.values())))
        one |= {"above_base": more, "standard_error": error}
        print(
            f"{name:20} batch {one['batch']:4} rate {one['learning_rate']:<7.3g} loss {one['held_out_loss']:.4f}, "
            f"{more:+.4f} (standard error {error:.4f}) of the base batch's",
            flush=True,
        )
    harness.write_record(arguments.out, {"samples": EPOCHS * TRAINING, "seeds": list(SEEDS), "results": results})


if __name__ == "__main__":
    main()
