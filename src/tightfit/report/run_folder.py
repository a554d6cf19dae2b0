"""Trains in a folder: builds the run, trains, saves checkpoints, and writes these files:

job.yaml  plan.yaml  predicted.json  metrics.jsonl  record.json  checkpoints/  tensorboard/
"""

from __future__ import annotations

import json
import math
import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from rich.console import Console

from tightfit.distributed.processes import is_rank_zero
from tightfit.engine.agreement import StopPoll, all_ranks_true
from tightfit.engine.best import Selection
from tightfit.engine.build import build
from tightfit.engine.callbacks import FAILED, STOP, CallbackCalls
from tightfit.engine.checkpoint.resume import resume
from tightfit.engine.checkpoint.save import (
    all_gather_values,
    check_folder,
    checkpoints,
    folder_name,
    newest,
    save,
    step_of,
)
from tightfit.engine.clipping import shard_of
from tightfit.engine.evaluation import evaluate_metrics
from tightfit.engine.launch import PASSED_ON
from tightfit.engine.loop import total_steps, train
from tightfit.engine.step import Step
from tightfit.errors import InputError, TightfitError
from tightfit.job import Job
from tightfit.job_sections.selection import LOSS
from tightfit.machine import Machine
from tightfit.measure.memory import process_peak_bytes
from tightfit.measure.observer import Observer
from tightfit.models.batches import IGNORED
from tightfit.plan import Plan
from tightfit.record import BestCheckpoint, Record
from tightfit.report.heartbeat import never_silent
from tightfit.report.out_of_memory import memory_errors_named
from tightfit.report.progress import ProgressBar, ProgressLines, progress
from tightfit.report.sample_text import sample_text
from tightfit.report.trackers import Trackers, check_trackers
from tightfit.report.unexpected_errors import not_writable
from tightfit.runtime.run import Run, wait_for_weights
from tightfit.values import read_yaml

STOP_POLL_STEPS = 10  # how often ranks that do not wait for each other agree whether to stop
EVALUATION = "evaluation_"  # before the names of an evaluation's metrics in metrics.jsonl
OVERFLOWS = 25  # steps in a row; a dynamic loss scale needs fewer to fall from 2^16 to 1


def train_in_folder(
    job: Job,
    plan: Plan,
    machine: Machine,
    out: Path,
    resumes: bool = False,
    predicted: dict[str, Any] | None = None,
) -> tuple[Record, str | None, int | None]:
    """Train `job` with `plan`, and write the run's files to the folder `out`.

    resumes    whether to resume from the newest checkpoint in `out`
    predicted  the plan's prediction, which is written to predicted.json and to the record; None if
               there is none

    Returns (record, sample, stopped):

    record   the record of the run
    sample   a sample of generated text; None if the model cannot generate text
    stopped  the number of the signal that ended the training early; None if no signal did

    Raises DoesNotFit if memory runs out, and TightfitError if the loss or a weight becomes NaN or
    infinite.
    """
    console = Console(quiet=not is_rank_zero())
    check_trackers(job)
    callbacks = CallbackCalls(job.callbacks or ())
    if resumes:
        find_checkpoint(out)
    with memory_errors_named(plan, job, machine.device):
        with never_silent(
            partial(console.print, highlight=False, markup=False, soft_wrap=True), "preparing model and data"
        ):
            run = build(job, plan, machine)
        start, total = resume(run, out / "checkpoints") if resumes else 0, total_steps(run)
        if start >= total and (out / "record.json").exists():
            console.print(
                f"nothing left to train: {start} of {total} steps are done; raise train.steps to train longer"
            )
            return Record.parse(json.loads((out / "record.json").read_text())), _sample(run), None
        earlier = begin_files(job, plan, predicted, out, start) if is_rank_zero() else []
        saved = [step_of(path) for path in checkpoints(out / "checkpoints")]
        evaluated, saved = all_gather_values(run, (evaluations_in(earlier), saved))[0]  # rank 0 has the files
        selection = Selection(job.train, evaluated, saved)
        if selection.stops is not None and (out / "record.json").exists():
            console.print(f"nothing left to train: {selection.stops}; change train.early_stopping to train longer")
            return Record.parse(json.loads((out / "record.json").read_text())), _sample(run), None
        check_folder(run, out)
        observer = Observer(run, start)
        with progress(total, observer.unit, console) as view, ExitStack() as open_files:
            trackers = open_files.enter_context(Trackers(job, out, start)) if is_rank_zero() else None
            metrics = open_files.enter_context((out / "metrics.jsonl").open("a")) if is_rank_zero() else None
            report = _StepReport(run, out, observer, view, trackers, metrics, selection, callbacks)
            stopped = _train(run, start, out, report)
        record = observer.record(machine)
    if predicted is not None:
        tensors = [size for row, size in predicted["memory"].items() if row not in ("peak", "runtime", "allocator")]
        whole = _predicted_process(predicted, run.plan, machine) if machine.device == "cpu" else None
        peak = record.peak_bytes.replace(predicted=sum(tensors) + predicted["workspace_bytes"], predicted_process=whole)
        record = record.replace(peak_bytes=peak, predicted_step_s=predicted["time"]["step_s"])
    record = record.replace(
        loss=[*((line["step"], line["loss"]) for line in earlier), *record.loss],
        evaluations=_without_nan([*evaluated, *report.evaluations]),
        best=_best_checkpoint(selection, out),
        stopped_early=selection.stops,
    )
    if is_rank_zero():
        (out / "record.json").write_text(json.dumps(record.content(), indent=1) + "\n")
    callbacks.on_end(record)
    return record, _sample(run) if stopped is None else None, stopped


def evaluations_in(lines: list[dict[str, Any]]) -> list[tuple[int, dict[str, float]]]:
    """Return (step, {metric: value}) for each evaluation that is written in the lines of
    metrics.jsonl. A value of null becomes NaN.

    lines  the parsed lines, one dict each
    """
    found = []
    for line in lines:
        named = {name.removeprefix(EVALUATION): value for name, value in line.items() if name.startswith(EVALUATION)}
        if named:
            values = {name: math.nan if value is None else value for name, value in named.items()}
            found.append((line["step"], values))
    return found


def _without_nan(
    evaluations: list[tuple[int, dict[str, float]]],
) -> list[tuple[int, dict[str, float | None]]]:
    return [(step, {name: _finite(value) for name, value in metrics.items()}) for step, metrics in evaluations]


def _best_checkpoint(selection: Selection, out: Path) -> BestCheckpoint | None:
    best = selection.best
    if best is None:
        return None
    folder = out / "checkpoints" / folder_name(best.step)
    return BestCheckpoint(step=best.step, metric=best.metric, value=best.value, checkpoint=str(folder))


def find_checkpoint(out: Path) -> None:
    """Raise InputError if the folder `out` has no checkpoint to resume from. Called before anything
    is built."""
    described = read_yaml(out / "job.yaml") if (out / "job.yaml").exists() else {}
    told = (described.get("train") or {}).get("checkpoint_every")
    if told == "never" and not checkpoints(out / "checkpoints"):
        raise InputError(
            f"resume from {out}",
            "has no checkpoint, because the run had train.checkpoint_every=never",
            "leave out --resume to start again, with train.checkpoint_every=end or a number of steps",
        )
    newest(out / "checkpoints")


def _sample(run: Run) -> str | None:
    """Return a sample of generated text, or None if the model cannot generate text. All devices
    must call this function together.

    The training is already done and saved. So an error does not fail the run: the function returns
    the error's text instead.
    """
    try:
        return sample_text(run)
    except Exception as error:
        return f"could not be made ({type(error).__name__}: {error})"


def begin_files(job: Job, plan: Plan, predicted: dict[str, Any] | None, out: Path, start: int) -> list[dict[str, Any]]:
    """Write the files that a run's folder `out` has before the first step: job.yaml, plan.yaml and
    predicted.json. Truncate metrics.jsonl to the first `start` steps, and return their lines as
    dicts.

    predicted  the plan's prediction, or None
    start      number of steps that are already done; 0 for a new run

    Raises InputError if a file cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "job.yaml").write_text(job.to_yaml(), encoding="utf-8")
        (out / "plan.yaml").write_text(plan.to_yaml(), encoding="utf-8")
        (out / "predicted.json").write_text(json.dumps(predicted, indent=1) + "\n", encoding="utf-8")
        return keep_metrics(out / "metrics.jsonl", start)
    except OSError as error:
        raise not_writable(out, error) from error


def _predicted_process(predicted: Mapping[str, Any], plan: Plan, machine: Machine) -> float:
    """Return the predicted bytes of a training process on a CPU: its peak, and the buffer of a stream
    that no worker reads."""
    stream = predicted["host_memory"].get("stream", 0) / min(machine.devices_per_node, plan.devices)
    return predicted["memory"]["peak"] + (stream if plan.loader_workers == 0 else 0)


def _train(run: Run, start: int, out: Path, report: _StepReport) -> int | None:
    """Train, report each step, and save checkpoints in `out`. Return the number of the signal that
    ended the training early; None if no signal did.

    On CUDA, the figures of a step, such as its loss, are read after the next step has begun, so
    that the device does not wait. They are read at once for the last step, and for a step after
    which an evaluation or a checkpoint is due.

    start  number of steps that are already done
    """
    settings, last, done, stopped = run.job.train, total_steps(run), start, 0
    every = settings.checkpoint_every if isinstance(settings.checkpoint_every, int) else None
    view, selection, callbacks = report.view, report.selection, report.callbacks
    unread: deque[Step] = deque()
    with stop_signals() as stop:
        poll = StopPoll(run)
        for result in train(run, start, report.observer.take, False) if selection.stops is None else ():
            done = result.step + 1
            unread.append(result)
            saves = _is_due(every, done)
            at_once = saves or done == last or _is_due(run.job.evaluate_every, done) or not _reads_late(run)
            while len(unread) > (0 if at_once else 1):
                report.add(unread.popleft())
            asks = run.executor is None or not run.executor.unsynchronized or done % STOP_POLL_STEPS == 0
            wish = stop.signal + FAILED if stop.signal else callbacks.asks  # signals come first
            stopped = poll.largest(wish) if asks else 0  # all ranks stop after the same step
            if stopped or selection.stops is not None:
                break
            if (saves or report.is_best) and done < last:
                _check_weights(run, out, done)
                save(run, out / "checkpoints", done, selection.kept_steps)
                report.is_best = False  # on CUDA, the next step is added only after the one that follows it
        while unread:
            report.add(unread.popleft())
        saved = settings.checkpoint_every != "never"
        if stopped:
            way_on = "continue with --resume" if saved else "nothing was saved: train.checkpoint_every is never"
            view.say(f"stopped after step {done} by {_stopper(stopped)}; {way_on}")
        elif selection.stops is not None:
            view.say(f"stopped early after step {done}: {selection.stops}")
        _check_weights(run, out, done)
        if saved:
            save(run, out / "checkpoints", done, selection.kept_steps)
        callbacks.raise_failure(run)
    return stopped - FAILED if stopped > FAILED else None


def _reads_late(run: Run) -> bool:
    """Return whether the figures of a step are read after the next step has begun."""
    return run.device.type == "cuda"


def _stopper(code: int) -> str:
    """Return, as text, what asked the training to stop: a callback, a callback that failed, or the
    name of a signal.

    code  STOP, FAILED, or FAILED plus the number of the signal
    """
    if code <= FAILED:
        return "a callback" if code == STOP else "a callback that failed"
    return signal.Signals(code - FAILED).name


class _StepReport:
    """Reports each step of a training: shows its figures, writes them to metrics.jsonl and to the
    trackers, evaluates the model when an evaluation is due, and calls the job's callbacks.

    trackers, metrics  the open trackers and the open file metrics.jsonl; None except on rank 0
    overflows          number of steps in a row, up to the latest, whose update was skipped because
                       fp16 overflowed
    told_unlabelled    whether it was said that a step has no label that counts
    evaluations        (step, {metric: value}) of each evaluation since the start
    is_best            whether the evaluation after the latest step was the best one so far by
                       train.keep_best
    """

    def __init__(
        self,
        run: Run,
        out: Path,
        observer: Observer,
        view: ProgressBar | ProgressLines,
        trackers: Trackers | None,
        metrics: TextIO | None,
        selection: Selection,
        callbacks: CallbackCalls,
    ) -> None:
        self.run, self.out, self.observer, self.view = run, out, observer, view
        self.trackers, self.metrics = trackers, metrics
        self.selection, self.callbacks = selection, callbacks
        self.overflows = 0
        self.told_unlabelled = False
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.is_best = False

    def add(self, result: Step) -> None:
        number, observer = result.step + 1, self.observer
        self.overflows = self.overflows + 1 if result.skipped else 0
        self._note_unlabelled(result)
        observer.add(result)
        line = metrics_line(result, observer)
        found = self._evaluate(number) if math.isfinite(result.loss) else {}
        line |= {f"{EVALUATION}{name}": value for name, value in found.items()}
        if self.metrics is not None and self.trackers is not None:
            self.metrics.write(json.dumps({name: _finite(value) for name, value in line.items()}) + "\n")
            self.metrics.flush()
            self.trackers.log(line)
        _check_loss(result, self.overflows, self.out)
        left_s = observer.step_s(result) * (total_steps(self.run) - number)
        self.view.show(result, line["items_per_s"], line["peak_bytes"], left_s)
        self.callbacks.on_step(result)
        if found:
            self.callbacks.on_evaluation(found)

    def _note_unlabelled(self, result: Step) -> None:
        """Say it when the first step comes in which no label counts: its loss is shown as 0."""
        if result.items == 0 and not self.told_unlabelled:
            self.told_unlabelled = True
            self.view.say(
                f"step {result.step + 1}: none of its labels counts (all are {IGNORED}), so its loss is shown as 0 and its "
                "gradients are zero; look at the labels of the data"
            )

    def _evaluate(self, number: int) -> dict[str, float]:
        """Evaluate the model if an evaluation is due after step `number`, and return {metric:
        value}. Returns an empty dict if none is due."""
        self.is_best = False
        if not _is_due(self.run.job.evaluate_every, number):
            return {}
        found = evaluate_metrics(self.run)
        self.evaluations.append((number, found))
        self.is_best = self.selection.add(number, found)
        others = [f"{name} {value:.4f}" for name, value in found.items() if name != LOSS]
        self.view.say(f"step {number}  " + ", ".join([f"evaluation loss {found[LOSS]:.4f}", *others]))
        return found


def _is_due(every: int | None, done: int) -> bool:
    return every is not None and done % every == 0


def metrics_line(result: Step, observer: Observer) -> dict[str, Any]:
    """Return the figures of one step as a dict, which becomes a line of metrics.jsonl."""
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
    """Return None for infinity and NaN, which JSON does not have. Return any other value
    unchanged."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def keep_metrics(path: Path, start: int) -> list[dict[str, Any]]:
    """Truncate the file metrics.jsonl at `path` to the first `start` steps, and return their lines
    as dicts.

    A killed run may have written lines for steps after its last checkpoint. These steps are trained
    again, so their lines are removed.
    """
    kept_lines = []
    for text in path.read_text().splitlines() if start and path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:  # the process was killed while it wrote this line
            break
        if line["step"] <= start:
            kept_lines.append(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in kept_lines))
    return kept_lines


def _check_loss(result: Step, overflows: int, out: Path) -> None:
    """Raise TightfitError if the training cannot recover: if fp16 overflowed in 25 steps in a row,
    or if the loss is NaN or infinite.

    overflows  number of steps in a row, up to this one, whose update was skipped because fp16
               overflowed
    out        the run's folder; the message names its newest checkpoint
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
    """Return the error for a training whose loss or weights became NaN or infinite. Its message has
    the newest checkpoint and what to change.

    what     what became NaN or infinite, and in which step
    updated  whether the weights were updated before; if not, the message does not propose a smaller
             learning rate
    """
    saved = checkpoints(out / "checkpoints")
    before = f"the newest checkpoint, {saved[-1]}, is from before" if saved else "no checkpoint was written before"
    rate = "a smaller train.learning_rate, more train.warmup, or train.clip: 1.0; else "
    where = "look for NaN, infinite or very large values in the data"
    beside = "" if updated else ", the initial weights and the loss: no update has been made yet"
    return TightfitError(f"{what}; {before}\n  fix: {rate if updated else ''}{where}{beside}")


def _check_weights(run: Run, out: Path, done: int) -> None:
    """Raise TightfitError if a weight is NaN or infinite on any device. Called before a checkpoint
    is saved, because older, good checkpoints are then deleted.

    done  number of steps that are done
    """
    wait_for_weights(run)
    if not all_ranks_true(run, all(bool(shard_of(parameter).isfinite().all()) for parameter in run.model.parameters())):
        raise _diverged(f"weights became infinite or NaN in step {done}", out)


@dataclass
class Stop:
    """Remembers whether a signal, such as Ctrl-C, has asked the training to stop after the current
    step.

    signal  the number of that signal; None if no signal came
    """

    signal: int | None = None


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """A context manager that yields a `Stop`. Inside it, the first Ctrl-C, SIGTERM or SIGUSR1 does
    not end the process but sets `Stop.signal`, so that the training can stop after the current
    step. A second signal ends the process at once, even if it waits for other processes."""
    stop = Stop()
    on_main_thread = threading.current_thread() is threading.main_thread()  # only it can set handlers

    def ask(number: int, frame: FrameType | None) -> None:
        stop.signal = number
        for one in before:
            signal.signal(one, signal.SIG_DFL)

    before = {number: signal.signal(number, ask) for number in (PASSED_ON if on_main_thread else ())}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
