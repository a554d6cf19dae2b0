"""A training loop of your own: your `for` decides what is logged, evaluated and saved.

    python examples/own_loop/own_loop.py examples/demo.yaml --out runs/own_loop

It logs a line of JSON every `--log-every` steps and evaluates every `--evaluate-every` steps. It
keeps the weights with the lowest loss on held-out data, and ends early when the last `--patience`
evaluations brought no lower one. Started again with the same --out, it goes on from its newest
checkpoint, with the same losses as a run that never stopped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import tightfit
from tightfit.plan import read_pins


class Log:
    """Lines of JSON in a file.

    start  the step to continue from. Lines of later steps, which are done again, are removed.
    """

    def __init__(self, path: Path, start: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        earlier: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.lines = [line for line in earlier if line["step"] <= start]
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        self.path = path

    def add(self, **line: Any) -> None:
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print("  ".join(f"{name} {value:.6g}" for name, value in line.items()), flush=True)

    def evaluations(self) -> list[float]:
        return [line["evaluation_loss"] for line in self.lines if "evaluation_loss" in line]


def is_stuck(losses: list[float], patience: int) -> bool:
    """Whether the last `patience` losses are all no better than the best one before them."""
    return len(losses) > patience and min(losses[-patience:]) >= min(losses[:-patience])


def train(job: tightfit.Job, given: argparse.Namespace) -> None:
    """Train until the job's last step, or until evaluations do not improve."""
    best_estimate, *_ = tightfit.search(job, pins=read_pins(job.plan))  # keeps what the job pins
    run = tightfit.build(job, best_estimate.plan)
    checkpoints, best = given.out / "checkpoints", given.out / "best"
    start = tightfit.resume(run, checkpoints) if checkpoints.exists() else 0
    log = Log(given.out / "log.jsonl", start)
    done = saved = start

    for result in tightfit.train(run, start):
        done = result.step + 1
        if done % given.log_every == 0:  # not in every step: reading the loss waits for the GPU
            log.add(step=done, loss=result.loss, rate=result.learning_rate, seconds=result.seconds)
        if done % given.evaluate_every == 0:
            log.add(step=done, evaluation_loss=tightfit.evaluate(run))
            losses = log.evaluations()
            if losses[-1] == min(losses):
                tightfit.save(run, best, done)
            if is_stuck(losses, given.patience):
                break
        if done % given.save_every == 0:
            tightfit.save(run, checkpoints, done)
            saved = done

    if done > saved:
        tightfit.save(run, checkpoints, done)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a job in a loop of your own.")
    parser.add_argument("job", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], help="change the job: train.steps=20")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--evaluate-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--patience", type=int, default=3)
    given = parser.parse_args()
    train(tightfit.Job.load(given.job, given.set), given)


if __name__ == "__main__":
    main()
