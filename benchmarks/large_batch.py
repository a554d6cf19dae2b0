"""Large batches: LAMB and LARS at 16 times the batch, beside AdamW at the base batch, after as many samples.

    .venv/bin/python benchmarks/large_batch.py --out records/large_batch.json

The task is real and small: scikit-learn's handwritten digits by a small convolutional network of matrices alone (LARS gives
biases and gains the plain rate, which is far above theirs), and held-out samples that no run trains on. Every contender has
as many learning rates to choose from (powers of two about its own usual one), so none is tuned more than another; AdamW and
SGD at the large batch are there as controls. Medians over seeds, and of the seeds' pairs. About ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tightfit
from tightfit.record import code_version

BASE, TIMES, EPOCHS, SEEDS = 4, 16, 24, (0, 1, 2, 3, 4)
TRAINING, HELD_OUT = 1258, 539  # samples
GRID = (0.25, 0.5, 1.0, 2.0)
CONTENDERS: dict[str, dict[str, Any]] = {
    "adamw, base batch": {"optimizer": "adamw", "learning_rate": 1e-3, "batch": BASE},
    "lamb, 16 times": {"optimizer": "lamb", "learning_rate": 1e-2, "batch": BASE * TIMES},
    "lars, 16 times": {"optimizer": "lars", "learning_rate": 8.0, "batch": BASE * TIMES},
    "adamw, 16 times": {"optimizer": "adamw", "learning_rate": 2e-3, "batch": BASE * TIMES},
    "sgd, 16 times": {"optimizer": "sgd", "learning_rate": 0.1, "batch": BASE * TIMES},
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
        train=tightfit.Train(
            **settings, steps=steps, schedule="cosine", warmup=max(steps // 10, 1), weight_decay=1e-2, seed=seed
        ),
        allow=[],
    )


def held_out_loss(settings: dict[str, Any], seed: int) -> float:
    torch.set_num_threads(1)
    run = tightfit.build(job_of(settings, seed))
    for step in tightfit.train(run):
        if not step.loss < 1e4:
            return float("inf")
    return tightfit.evaluate(run, HELD_OUT)


def best_of_grid(settings: dict[str, Any], pool: ProcessPoolExecutor) -> dict[str, Any]:
    rates = [settings["learning_rate"] * factor for factor in GRID]
    runs = {
        (rate, seed): pool.submit(held_out_loss, {**settings, "learning_rate": rate}, seed)
        for rate in rates
        for seed in SEEDS
    }
    found = {rate: [runs[rate, seed].result() for seed in SEEDS] for rate in rates}
    rate = min(found, key=lambda one: statistics.median(found[one]))
    return {
        "batch": settings["batch"],
        "learning_rate": rate,
        "held_out_loss": statistics.median(found[rate]),
        "of_seeds": found[rate],
        "grid": {str(one): statistics.median(losses) for one, losses in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = {}
    pool = ProcessPoolExecutor(mp_context=get_context("spawn"))
    for name, settings in CONTENDERS.items():
        one = results[name] = best_of_grid(settings, pool)
        print(
            f"{name:20} batch {one['batch']:4} rate {one['learning_rate']:<7.3g} loss {one['held_out_loss']:.4f}",
            flush=True,
        )
    record = {"code": code_version(), "samples": EPOCHS * TRAINING, "seeds": list(SEEDS), "results": results}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
