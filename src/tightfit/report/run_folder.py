"""Trains in a folder: builds the run, trains, saves checkpoints, and writes these files:

job.yaml  plan.yaml  predicted.json  metrics.jsonl  record.json  checkpoints/  tensorboard/
"""

from __future__ import annotations

import json
import math
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from rich.console import Console

from tightfit.distributed.processes import is_rank_zero
from tightfit.engine.build import build
from tightfit.engine.checkpoint.resume import resume
from tightfit.engine.checkpoint.save import check_folder, checkpoints, newest, save
from tightfit.engine.launch import PASSED_ON
from tightfit.engine.loop import evaluate, total_steps, train
from tightfit.engine.step import Step, StopPoll, holds_everywhere, local
from tightfit.errors import InputError, TightfitError
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.measure.memory import process_peak_bytes
from tightfit.measure.observer import Observer
from tightfit.plan import Plan
from tightfit.record import Record
from tightfit.report.heartbeat import never_silent
from tightfit.report.out_of_memory import memory_errors_named
from tightfit.report.progress import ProgressBar, ProgressLines, progress
from tightfit.report.sample_text import sample_text
from tightfit.report.trackers import Trackers, check_trackers
from tightfit.report.unexpected_errors import not_writable
from tightfit.runtime.run import Run, wait_for_weights
from tightfit.values import read_yaml

STOP_POLL_STEPS = 10  # how often ranks that do not wait for each other agree whether to stop
OVERFLOWS = 25  # steps in a row; a dynamic loss scale needs fewer to fall from 2^16 to 1


def train_in_folder(
    job: Job,
    plan: Plan,
    machine: Machine,
    out: Path,
    again: bool = False,
    predicted: dict[str, Any] | None = None,
) -> tuple[Record, str | None, int | None]:
    """Train `job` with `plan`, and write the run's files to `out`.

    again      whether to resume from the newest checkpoint in `out`
    predicted  the plan's prediction, which is written to predicted.json and to the record; None if
               the model cannot be traced

    Returns the record, a sample of generated text (None if the model cannot generate text), and the
    number of the signal that ended the training early (None if it ran to its last step).
    Raises DoesNotFit if memory runs out, TightfitError if the loss becomes NaN or infinite.
    """
    console = Console(quiet=not is_rank_zero())
    check_trackers(job)
    if again:
        _find_checkpoint(out)
    with memory_errors_named(plan, job, machine.device):
        with never_silent(
            partial(console.print, highlight=False, markup=False, soft_wrap=True), "preparing model and data"
        ):
            run = build(job, plan, machine)
        start, total = resume(run, out / "checkpoints") if again else 0, total_steps(run)
        if start >= total and (out / "record.json").exists():
            console.print(
                f"nothing left to train: {start} of {total} steps are done; raise train.steps to train longer"
            )
            return Record.parse(json.loads((out / "record.json").read_text())), _sample(run), None
        earlier = begin_files(job, plan, predicted, out, start) if is_rank_zero() else []
        check_folder(run, out)
        observer = Observer(run, start)
        with progress(total, observer.unit, console) as view, ExitStack() as open_files:
            trackers = open_files.enter_context(Trackers(job, out, start)) if is_rank_zero() else None
            metrics = open_files.enter_context((out / "metrics.jsonl").open("a")) if is_rank_zero() else None
            stopped = _train(run, start, out, observer, view, trackers, metrics)
        record = observer.record(machine)
    if predicted is not None:
        tensors = [size for row, size in predicted["memory"].items() if row not in ("peak", "runtime", "allocator")]
        whole = predicted["memory"]["peak"] if machine.device == "cpu" else None
        peak = record.peak_bytes.replace(predicted=sum(tensors) + predicted["workspace_bytes"], predicted_process=whole)
        record = record.replace(peak_bytes=peak, predicted_step_s=predicted["time"]["step_s"])
    record = record.replace(loss=[*((line["step"], line["loss"]) for line in earlier), *record.loss])
    if is_rank_zero():
        (out / "record.json").write_text(json.dumps(record.content(), indent=1) + "\n")
    return record, _sample(run) if stopped is None else None, stopped


def _find_checkpoint(out: Path) -> None:
    """Raise InputError, before anything is built, if `out` has no checkpoint to resume from."""
    described = read_yaml(out / "job.yaml") if (out / "job.yaml").exists() else {}
    told = (described.get("train") or {}).get("checkpoint_every")
    if told == "never" and not checkpoints(out / "checkpoints"):
        raise InputError(
            f"resume from {out}",
            "has no checkpoint, because train.checkpoint_every was never",
            "leave out --resume to start again, and set train.checkpoint_every to end or a number of steps",
        )
    newest(out / "checkpoints")


def _sample(run: Run) -> str | None:
    """Return a sample of generated text; all devices call this function together.

    The training is already done and saved, so an error is returned as text and does not fail the
    run.
    """
    try:
        return sample_text(run)
    except Exception as error:
        return f"could not be made ({type(error).__name__}: {error})"


def begin_files(job: Job, plan: Plan, predicted: dict[str, Any] | None, out: Path, start: int) -> list[dict[str, Any]]:
    """Write the files of a run that exist before its first step. Raises InputError if that fails.

    start  number of steps that are already done

    Returns the lines of metrics.jsonl of these `start` steps.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "job.yaml").write_text(job.to_yaml(), encoding="utf-8")
        (out / "plan.yaml").write_text(plan.to_yaml(), encoding="utf-8")
        (out / "predicted.json").write_text(json.dumps(predicted, indent=1) + "\n", encoding="utf-8")
        return keep_metrics(out / "metrics.jsonl", start)
    except OSError as error:
        raise not_writable(out, error) from error


def _train(
    run: Run,
    start: int,
    out: Path,
    observer: Observer,
    view: ProgressBar | ProgressLines,
    trackers: Trackers | None,
    metrics: TextIO | None,
) -> int | None:
    """Train, report each step, and save checkpoints. Returns the number of the signal that ended
    the training early, or None.

    On CUDA the figures of a step are read when the next step has begun, so that the device does not
    wait. The figures of the last step, and of a step after which an evaluation or a checkpoint is
    due, are read at once.

    start              number of steps that are already done
    trackers, metrics  None on all ranks but rank 0
    """
    settings, last, done, stopped = run.job.train, total_steps(run), start, 0
    every = settings.checkpoint_every if isinstance(settings.checkpoint_every, int) else None
    report = _StepReport(run, out, observer, view, trackers, metrics)
    unread: deque[Step] = deque()
    with stop_signals() as stop:
        poll = StopPoll(run)
        for result in train(run, start, take=observer.take, weights_at_yield=False):
            done = result.step + 1
            unread.append(result)
            saves = _is_due(every, done) and done < last
            at_once = saves or done == last or _is_due(settings.evaluate_every, done) or run.device.type != "cuda"
            while len(unread) > (0 if at_once else 1):
                report.add(unread.popleft())
            asks = run.executor is None or not run.executor.unsynchronized or done % STOP_POLL_STEPS == 0
            stopped = poll.largest(stop.signal or 0) if asks else 0  # all ranks stop after the same step
            if stopped:
                break
            if saves:
                _check_weights(run, out, done)
                save(run, out / "checkpoints", done)
        while unread:
            report.add(unread.popleft())
        saved = settings.checkpoint_every != "never"
        if stopped:
            way_on = "continue with --resume" if saved else "nothing was saved: train.checkpoint_every is never"
            view.say(f"stopped after step {done} by {signal.Signals(stopped).name}; {way_on}")
        _check_weights(run, out, done)
        if saved:
            save(run, out / "checkpoints", done)
    return stopped or None


class _StepReport:
    """Shows the figures of each step, writes them to metrics.jsonl and to the trackers, and
    evaluates every `train.evaluate_every` steps.

    overflows  number of steps in a row whose update was skipped because fp16 overflowed
    """

    def __init__(
        self,
        run: Run,
        out: Path,
        observer: Observer,
        view: ProgressBar | ProgressLines,
        trackers: Trackers | None,
        metrics: TextIO | None,
    ) -> None:
        self.run, self.out, self.observer, self.view = run, out, observer, view
        self.trackers, self.metrics = trackers, metrics
        self.overflows = 0

    def add(self, result: Step) -> None:
        number, observer = result.step + 1, self.observer
        self.overflows = self.overflows + 1 if result.skipped else 0
        observer.add(result)
        line = metrics_line(result, observer)
        if _is_due(self.run.job.train.evaluate_every, number) and math.isfinite(result.loss):
            line["evaluation_loss"] = evaluate(self.run)
            self.view.say(f"step {number}  evaluation loss {line['evaluation_loss']:.4f}")
        if self.metrics is not None and self.trackers is not None:
            self.metrics.write(json.dumps({name: _finite(value) for name, value in line.items()}) + "\n")
            self.metrics.flush()
            self.trackers.log(line)
        _check_loss(result, self.overflows, self.out)
        left_s = observer.step_s(result) * (total_steps(self.run) - number)
        self.view.show(result, line["items_per_s"], line["peak_bytes"], left_s)


def _is_due(every: int | None, done: int) -> bool:
    return every is not None and done % every == 0


def metrics_line(result: Step, observer: Observer) -> dict[str, Any]:
    """Return the figures of one step, as metrics.jsonl contains them."""
    return {
        "step": result.step + 1,
        "loss": result.loss,
        "learning_rate": result.learning_rate,
        "gradient_norm": result.gradient_norm,
        "samples": result.samples,
        "items": result.items,
        "seconds": result.seconds,
        "items_per_s": observer.speed(result),
        "peak_bytes": observer.peak_bytes(),
        "process_bytes": process_peak_bytes(),
        "skipped": result.skipped,
        **({} if result.staleness is None else {"staleness": result.staleness}),
    }


def _finite(value: Any) -> Any:
    """Return None for infinity and NaN, which JSON does not have, and any other value unchanged."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def keep_metrics(path: Path, start: int) -> list[dict[str, Any]]:
    """Truncate metrics.jsonl to its first `start` steps and return their lines.

    A killed run may have written lines of steps after its last checkpoint; these steps are trained
    again.
    """
    kept = []
    for text in path.read_text().splitlines() if start and path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:  # the process was killed while it wrote this line
            break
        if line["step"] <= start:
            kept.append(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    return kept


def _check_loss(result: Step, overflows: int, out: Path) -> None:
    """Raise TightfitError if the training cannot recover: after too many fp16 overflows in a row,
    or if the loss is NaN or infinite.

    overflows  number of steps in a row whose update was skipped
    """
    step = f"step {result.step + 1} (learning rate {result.learning_rate:.3g})"
    if overflows >= OVERFLOWS:
        raise TightfitError(
            f"fp16 overflowed in {overflows} steps in a row, up to {step}; the model does not learn\n"
            "  fix: precision: bf16-mixed, loss_scale: dynamic, or a smaller train.learning_rate"
        )
    if not math.isfinite(result.loss) and not result.skipped:
        raise _diverged(f"the loss became {result.loss} at {step}", out, updated=result.step > 0)


def _diverged(what: str, out: Path, updated: bool = True) -> TightfitError:
    """Return the error for a training that diverged.

    updated  whether an update was made before; if not, a smaller learning rate cannot help
    """
    saved = checkpoints(out / "checkpoints")
    before = f"the newest checkpoint, {saved[-1]}, is from before" if saved else "no checkpoint was written before"
    rate = "a smaller train.learning_rate, more train.warmup, or train.clip: 1.0; else "
    where = "look for NaN, infinite or very large values in the data"
    beside = "" if updated else ", the initial weights and the loss: no update has been made yet"
    return TightfitError(f"{what}; {before}\n  fix: {rate if updated else ''}{where}{beside}")


def _check_weights(run: Run, out: Path, done: int) -> None:
    """Raise TightfitError if weights are NaN or infinite, because a checkpoint with them would
    replace a good checkpoint."""
    wait_for_weights(run)
    if not holds_everywhere(run, all(bool(local(parameter).isfinite().all()) for parameter in run.model.parameters())):
        raise _diverged(f"weights became infinite or NaN in step {done}", out)


@dataclass
class Stop:
    """Number of the signal that asked the training to stop after the current step; None if no
    signal came."""

    signal: int | None = None


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Inside this context, the first Ctrl-C, SIGTERM or SIGUSR1 asks the training to stop after the
    current step. A second signal ends the process at once, even if it waits for other processes."""
    stop = Stop()
    here = threading.current_thread() is threading.main_thread()  # only it can set handlers

    def ask(number: int, frame: FrameType | None) -> None:
        stop.signal = number
        for one in before:
            signal.signal(one, signal.SIG_DFL)

    before = {number: signal.signal(number, ask) for number in (PASSED_ON if here else ())}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
