"""A training in a folder: build, train, checkpoint, and leave the files that people and scripts read.

job.yaml  plan.yaml  metrics.jsonl  record.json  checkpoints/  tensorboard/
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tightfit.engine.build import build
from tightfit.engine.checkpoint import resume, save
from tightfit.engine.loop import evaluate, total_steps, train
from tightfit.engine.step import Step
from tightfit.errors import DoesNotFit, TightfitError
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.measure.memory import process_peak_bytes
from tightfit.measure.observer import Observer
from tightfit.methods.run import Run
from tightfit.plan import Plan
from tightfit.record import Record
from tightfit.report.progress import Bar, Lines, progress
from tightfit.report.sample import sample_text
from tightfit.report.trackers import Trackers


def train_in_folder(
    job: Job, plan: Plan, machine: Machine, out: Path, again: bool = False
) -> tuple[Record, str | None]:
    """Train `job` with `plan`, leaving its files in `out`; `again` goes on from the newest checkpoint there.

    Returns the record, and a sample of generated text where the model is a causal language model.
    Raises DoesNotFit where memory ends, TightfitError where the loss stops being a number.
    """
    with memory_errors_named(plan, job):
        run = build(job, plan, machine)
        start = resume(run, out / "checkpoints") if again else 0
        out.mkdir(parents=True, exist_ok=True)
        (out / "job.yaml").write_text(job.to_yaml())
        (out / "plan.yaml").write_text(plan.to_yaml())
        observer = Observer(run, start)
        if start < total_steps(run):
            with progress(total_steps(run), run.objective.unit) as view, Trackers(job, out) as trackers:
                _train(run, start, out, observer, view, trackers)
        record = observer.record(machine)
        sample = sample_text(run)
    (out / "record.json").write_text(json.dumps(record.content(), indent=1) + "\n")
    return record, sample


def _train(run: Run, start: int, out: Path, observer: Observer, view: Bar | Lines, trackers: Trackers) -> None:
    train_settings, last, done = run.job.train, total_steps(run), start
    with (out / "metrics.jsonl").open("a" if start else "w") as metrics, stop_signals() as stop:
        for result in train(run, start, take=observer.take):
            done = result.step + 1
            observer.see(result)
            _check_loss(result, out)
            line = metrics_line(result, observer)
            if train_settings.evaluate_every and done % train_settings.evaluate_every == 0:
                line["evaluation_loss"] = evaluate(run)
                view.say(f"step {done}  evaluation loss {line['evaluation_loss']:.4f}")
            metrics.write(json.dumps(line) + "\n")
            metrics.flush()
            trackers.log(line)
            view.show(result, observer.speed(result), line["peak_bytes"])
            if stop.asked:
                view.say(f"stopped after step {done}; go on with --resume")
                break
            if train_settings.checkpoint_every and done % train_settings.checkpoint_every == 0 and done < last:
                save(run, out / "checkpoints", done)
    save(run, out / "checkpoints", done)


def metrics_line(result: Step, observer: Observer) -> dict[str, Any]:
    """One line of metrics.jsonl."""
    return {
        "step": result.step + 1,
        "loss": result.loss,
        "learning_rate": result.learning_rate,
        "gradient_norm": result.gradient_norm,
        "samples": result.samples,
        "items": result.items,
        "seconds": result.seconds,
        "items_per_s": result.processed / result.seconds,
        "peak_bytes": observer.peak_bytes(),
        "process_bytes": process_peak_bytes(),
        "skipped": result.skipped,
    }


def _check_loss(result: Step, out: Path) -> None:
    if not math.isfinite(result.loss) and not result.skipped:
        raise TightfitError(
            f"the loss became {result.loss} at step {result.step + 1} (learning rate {result.learning_rate:.3g}); "
            f"the checkpoints in {out / 'checkpoints'} are from before\n"
            "  fix: a smaller train.learning_rate, more train.warmup, or train.clip: 1.0"
        )


@dataclass
class Stop:
    """Whether somebody asked the training to end after the step under way."""

    asked: bool = False


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Within, the first Ctrl-C or SIGTERM asks for a stop after the step; a second one ends at once."""
    stop = Stop()

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def memory_errors_named(plan: Plan, job: Job) -> Iterator[None]:
    """Turn the device's or the host's out-of-memory errors into DoesNotFit, with what takes less."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        ours = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text
        if not ours:
            raise
        raise DoesNotFit(
            f"{plan}: memory ended ({text.splitlines()[0][:160] if text else 'MemoryError'})\n"
            f"  smallest changes to try: {lighter(plan, job)}"
        ) from None


def lighter(plan: Plan, job: Job) -> str:
    """Changes of a plan that take less memory, the cheapest in time first."""
    micro_batch = plan.micro_batch_of(job.train.batch)
    changes = []
    if plan.materialize == "host":
        changes.append("materialize: device")
    if plan.chunked_loss is None and job.loss is None:
        changes.append("chunked_loss: 1024")
    if plan.precision == "fp32" and "bf16" in job.allowed:
        changes.append("precision: bf16-mixed")
    if micro_batch > 1:
        changes.append(f"micro_batch: {micro_batch // 2}")
    if plan.recompute == "none":
        changes.append("recompute: full")
    return ", ".join(changes) or "a smaller model, or a machine with more memory"
