"""Implements the commands that `cli.py` calls: train, explain, verify and launch. They use the
library's functions and print text, or JSON with --json."""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table

from tightfit._torch.loggers import PYTREE, WRAPPED_OPERATIONS
from tightfit.calibration.this_machine import this_machine
from tightfit.engine.launch import enter_environment, read_launcher, start_processes
from tightfit.errors import DoesNotFit, InputError, TightfitWarning
from tightfit.job import Job, ModelSpec, apply_change
from tightfit.machine import Machine
from tightfit.optional_packages import import_optional
from tightfit.plan import Plan, read_pins
from tightfit.planner.defaults import ALLOCATOR
from tightfit.report.folder_lock import folder_held
from tightfit.report.heartbeat import never_silent
from tightfit.report.processes import (
    LaunchOptions,
    barrier,
    check_start,
    destroy_group,
    errors_printed_once,
    on_rank_zero,
    watched_process,
)
from tightfit.report.unexpected_errors import not_writable
from tightfit.rules import needed_permissions
from tightfit.units import format_bytes, format_count, format_seconds, parse_bytes

if TYPE_CHECKING:
    from tightfit.planner.estimate import Estimate


def quiet_libraries() -> None:
    """Silence the log messages of other libraries, and print each of tightfit's warnings as one
    line, once and on rank 0 only.

    This changes the logging and warnings of the whole process, so only commands call it.
    """
    warnings.showwarning = _show_in_a_line
    _SHOWN.clear()
    # WRAPPED_OPERATIONS warns about in-place writes under selective recomputation, which tightfit
    # checks itself
    for name in ("torchao", PYTREE, "torch.utils.flop_counter", WRAPPED_OPERATIONS):
        logging.getLogger(name).setLevel(logging.ERROR)


_show = warnings.showwarning
_SHOWN: set[str] = set()  # tightfit's warnings that this command has printed


def _show_in_a_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if not issubclass(category, TightfitWarning):
        _show(message, category, filename, lineno, file, line)
    elif os.environ.get("RANK", "0") == "0" and str(message) not in _SHOWN:
        _SHOWN.add(str(message))
        print(f"warning  {message}", file=sys.stderr)


def quiet_transformers(job: Job) -> None:
    """Silence transformers' log messages and progress bars, if the job's model comes from
    transformers."""
    if job.of_transformers:
        from transformers.utils import logging as notes

        notes.set_verbosity_error()
        notes.disable_progress_bar()


def read_job(path: Path, plan: str | None, changes: list[str]) -> tuple[Job, dict[str, Any]]:
    """Read a job file. Return the job, and a dict of the plan fields that the user has fixed
    (pinned).

    plan     a plan file, the word reference, or None for the plan section of the job file
    changes  KEY=VALUE texts that change the job. plan.x=... changes one field of the plan, plan=...
             replaces the whole plan

    Raises InputError if a file or a change is wrong.
    """
    is_field = {change: change.partition("=")[0].strip().startswith("plan.") for change in changes}
    job = Job.load(path, [change for change in changes if not is_field[change]])
    named = any(change.partition("=")[0].strip() == "plan" for change in changes)
    source = job.plan if plan is None or named else plan if plan == "reference" else Path(plan)
    fields: dict[str, Any] = {"plan": {}}
    for change in changes:
        if is_field[change]:
            apply_change(fields, change)
    pins = {**read_pins(source), **read_pins(fields["plan"])}
    return job.replace(plan="reference" if pins == read_pins("reference") else pins or None), pins


def train_command(
    path: Path,
    plan: str | None,
    out: Path | None,
    resume: bool,
    changes: list[str],
    nproc: int = 1,
    launch_options: LaunchOptions | None = None,
    machine_name: str | None = None,
) -> None:
    """Run `tightfit train`: choose a plan, train with it in the folder `out`, and print the prediction, the
    progress and the record. With `nproc` above 1 this process only starts the others, which run this function
    again; rank 0 chooses the plan for all.

    path            the job file
    plan            a plan file, or "reference"; None: the fastest plan that fits
    out             the folder of the run; None: runs/ and the name of the job file
    resume          whether to continue from the last checkpoint in `out`, with its plan
    changes         changes of the job or plan, such as "train.steps=20"
    nproc           number of processes on this host
    launch_options  how the processes find each other
    machine_name    predict for this machine; None: this one
    """
    quiet_libraries()
    local_world, world = read_launcher()
    out, options = out or Path("runs") / path.stem, launch_options or LaunchOptions()
    with errors_printed_once(world, options):
        job, pins = read_job(path, plan, changes)
        check_start(nproc, world, options)
        figures = None if machine_name is None else figures_for_training(machine_name)
    if nproc > 1 and world == 1:
        check_out(out, resume)  # before processes are started, so that it is printed once
        check_inputs(job)
        this_machine(print)
        sys.exit(start_processes(nproc))
    enter_environment(Plan(allocator=pins.get("allocator", ALLOCATOR)), Machine.detect().device)
    if world == 1:
        check_inputs(job)
    console = Console(quiet=os.environ.get("RANK", "0") != "0")
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    machine = figures or (this_machine(say) if world == 1 else Machine.detect())
    machine = machine.per_process(local_world, max(world // local_world, 1))

    def choose() -> tuple[dict[str, Any] | None, Plan]:
        check_out(out, resume)
        if resume:
            from tightfit.report.run_folder import find_checkpoint

            find_checkpoint(out)
        saved = out / "plan.yaml"
        keeps = resume and plan is None and saved.exists()
        try:
            found = choose_and_announce(job, machine, _resumed(read_pins(saved), pins) if keeps else pins, say)
        except InputError as error:
            if not keeps:
                raise
            explained = f"{error.found}. --resume keeps the fields of {saved} that --set does not change"
            raise InputError(error.asked, explained, error.fix) from error
        held.enter_context(folder_held(out))
        return found

    with watched_process(world, options) as join, ExitStack() as held:
        predicted, chosen = choose() if world == 1 else on_rank_zero(choose, partial(join, machine.device))
        if predicted is not None:
            say(
                f"predict  {format_bytes(tensor_bytes_of(predicted))} of tensors at the peak, "
                f"{format_seconds(predicted['time']['step_s'])} a step{f' ({machine.speed_caveat})' if machine.speed_caveat else ''}"
            )
        quiet_transformers(job)
        from tightfit.report.explain import slow_attention
        from tightfit.report.run_folder import train_in_folder

        record, sample, stopped = train_in_folder(job, chosen, machine, out, resume, predicted)
        if sample is not None:
            say("\n  ".join(["sample", *sample.splitlines()]))
        say(summary(record.content(), out))
        if warning := slow_attention(record):
            say(f"warning  {warning}")
        barrier()
    destroy_group()
    if stopped is not None:
        sys.exit(options.code_of(stopped))


def launch_command(path: Path, kinds: list[str], nodes: int, nproc: int, accelerator: str, changes: list[str]) -> None:
    if len(kinds) != 1:
        raise InputError(
            "launch", f"needs one kind of script, found {len(kinds)}", "give one of --slurm, --torchrun, --skypilot"
        )
    from tightfit.report.scripts import script

    name, text = script(kinds[0], path, nodes, nproc, accelerator, changes)
    Path(name).write_text(text, encoding="utf-8")
    print(name)


def _resumed(saved: dict[str, Any], pins: dict[str, Any]) -> dict[str, Any]:
    """Return the plan fields of a resumed run: those `saved` in its folder, and in their place the user's
    `pins`. Without a pipeline, the fields that divide one are left out."""
    fields = {**saved, **pins}
    if pins.get("pp") == 1:
        for name in {"split", "schedule", "virtual_stages"} - set(pins):
            fields.pop(name, None)
    return fields


def choose_and_announce(
    job: Job, machine: Machine, pins: dict[str, Any], say: Callable[[str], None]
) -> tuple[dict[str, Any] | None, Plan]:
    """Choose the plan, print it with the reasons, and check that as many processes run as it needs.

    pins  the plan fields that the user has fixed, by name
    say   prints a line

    Returns (the plan's prediction or None, the plan). Errors: see `planner.choose.choose_plan`.
    """
    check_inputs(job)
    say(f"job      {job!r}\nmachine  {machine!r}")
    with never_silent(say, "predicting plans"):
        from tightfit.planner.choose import choose_plan

        choice = choose_plan(job, machine, pins)
    if choice.untraced:
        say(f"predict  not possible: {choice.untraced}")
    announce(say, job, choice.plan, choice.reasons, machine)
    for note in choice.predicted["notes"] if choice.predicted is not None else ():
        say(f"advice   {note}")
    from tightfit.distributed.processes import check_world

    check_world(choice.plan)
    return choice.predicted, choice.plan


def tensor_bytes_of(predicted: dict[str, Any]) -> float:
    """Return the predicted bytes of tensors at the peak: the sum over all kinds of memory except
    runtime and allocator.

    predicted  a plan's prediction; its "memory" has the bytes of each kind, such as parameters and
               activations
    """
    return sum(size for row, size in predicted["memory"].items() if row not in ("peak", "runtime", "allocator"))


def explain_command(
    path: Path,
    plan: str | None,
    machine_name: str | None,
    memory: str | None,
    top: int,
    analyze: bool,
    picture: Path | None,
    changes: list[str],
    as_json: bool,
    timeline: Path | None = None,
    price: float | None = None,
) -> None:
    """Run `tightfit explain`: print the fastest plan that fits, or the given one, with its memory and time.

    path          the job file
    plan          a plan file, or "reference"; None: search for one
    machine_name  predict for this machine; None: this one
    memory        the device memory that a plan may use, such as "16GiB"; None: all
    top           how many plans to list
    analyze       whether to train some steps here and print what was measured beside it
    picture, timeline  files to draw the memory of a step and a pipeline's schedule to; None: neither
    changes       changes of the job or plan, such as "train.steps=20"
    as_json       whether to print JSON
    price         price of one device per hour; None: no cost
    """
    quiet_libraries()
    limit = [] if memory is None else [f"limits.memory={_bytes_of('--memory', memory)}"]
    job, pins = read_job(path, plan, [*changes, *limit])
    from tightfit.planner.whole_run import check_price

    check_price("--price", price)
    console = Console(stderr=True, soft_wrap=True) if as_json else Console()
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    _check_explain_options(machine_name, analyze, picture, timeline)
    check_model(job)
    from tightfit.data.missing_files import missing_files

    if (missing := missing_files(job)) is not None:
        say(f"warning  {missing.asked}: {missing.found}; explained without it")
    machine = this_machine(say) if machine_name is None else Machine.named(machine_name)
    if analyze:  # it runs in this process, on one device
        machine = machine.per_process(1)
    from tightfit.planner.estimator import Estimator
    from tightfit.planner.refusal import describe_shortages
    from tightfit.planner.search import search_or_estimate
    from tightfit.planner.waterfall import waterfall
    from tightfit.report.explain import explained, show, show_analysis, with_whole_runs

    estimator = Estimator(job, machine)
    try:
        with never_silent(say, "predicting plans"):
            estimates = search_or_estimate(estimator, pins)
    except DoesNotFit as refusal:
        if as_json and refusal.content is not None:
            plans = with_whole_runs(job, refusal.content["plans"][:top], price)
            print(json.dumps({**refusal.content, "plans": plans}))
        raise
    estimates, best = estimates[:top], estimates[0]
    _draw(best, picture, timeline)
    if as_json:
        print(json.dumps(explained(estimates, price)))
    else:
        say(f"job      {job!r}\nmachine  {machine!r}")
        with never_silent(say, "predicting the plan method by method"):
            stages = waterfall(estimator, best.plan)
        show(console, estimates, stages, price)
    if analyze:
        from tightfit.measure.analyze import analyze as run_steps

        show_analysis(console, best, run_steps(job, best.plan, machine))
    if not best.fits:
        raise DoesNotFit(describe_shortages(best))


def _check_explain_options(machine: str | None, analyze: bool, picture: Path | None, timeline: Path | None) -> None:
    """Raise InputError, before anything is predicted, for options of `tightfit explain` that cannot
    work: `analyze` with another machine's name, or a file for a drawing with an unknown suffix.

    machine   the name given with --machine; None: this machine
    picture   the file for the drawing of the memory, or None
    timeline  the file for the drawing of the pipeline, or None
    """
    if analyze and machine is not None:
        raise InputError(
            "--analyze", f"runs on this machine, but --machine is {machine}", "leave out --analyze or --machine"
        )
    for option, file in (("--picture", picture), ("--timeline", timeline)):
        if file is not None:
            import_optional("matplotlib", option)
            from tightfit.report.figures import check_picture

            check_picture(option, file)


def _draw(estimate: Estimate, picture: Path | None, timeline: Path | None) -> None:
    """Draw a plan's memory into the file `picture`, and the timeline of its pipeline into the file
    `timeline`. A file that is None is not drawn. Raises InputError if a timeline is asked for and
    the plan has no pipeline."""
    if picture is not None:
        from tightfit.report.figures import draw_memory

        draw_memory(estimate, picture)
    if timeline is not None:
        if not estimate.schedule:
            raise InputError(f"--timeline {timeline}", "the plan has no pipeline", "set plan.pp: --set plan.pp=4")
        from tightfit.report.figures import draw_timeline

        draw_timeline(estimate.schedule, str(estimate.plan), timeline)


def _bytes_of(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except InputError as error:
        raise InputError(f"{option} {text}", error.found, error.fix) from None


def figures_for_training(name: str) -> Machine:
    """Return a Machine with the rates (FLOP/s, bandwidths) of the machine called `name`, and with
    the devices, cores and memory that are detected on this machine.

    Raises InputError if tightfit cannot train on the named machine, or if its kind of device (cpu,
    cuda) is not that of this machine.
    """
    named, detected = Machine.named(name), Machine.detect()
    if named.explain_only:
        raise InputError(
            f"--machine {name}",
            "tightfit cannot train on this device; it only estimates for it",
            f"use tightfit explain --machine {name}",
        )
    if named.device != detected.device:
        raise InputError(
            f"--machine {name}", f"training runs on this machine, which is {detected.name}", "leave out --machine"
        )
    return detected.with_figures_of(named)


def check_inputs(job: Job) -> None:
    """Raise InputError if the job's model, or a local file of its data, is not there or is wrong. This takes
    a moment, and is done before the machine is measured and plans are searched."""
    check_model(job)
    from tightfit.data.missing_files import missing_files

    if (missing := missing_files(job)) is not None:
        raise missing


def check_model(job: Job) -> None:
    """Raise InputError if the job's model is one of transformers, and its folder or its config is wrong."""
    if isinstance(job.model, ModelSpec):
        quiet_transformers(job)
        from tightfit.models import model_config

        model_config(job.model)


def check_out(out: Path, resume: bool) -> None:
    """Raise InputError if a run cannot write to the folder `out`, or if `out` has the checkpoints
    of an earlier run and `resume` is false."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out}", "is a file", "name a folder")
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise InputError(f"--out {out}", f"{existing} is a file", "name another folder")
    try:
        # checking permissions is not enough: a disk may be full, and /proc accepts no files
        with tempfile.TemporaryFile(dir=existing) as trial:
            trial.write(bytes(4096))
    except OSError as error:
        raise not_writable(out, error) from error
    if not resume and any((out / "checkpoints").glob("step-*")):
        raise InputError(
            f"--out {out}",
            "contains the checkpoints of an earlier run, which the new run would overwrite",
            "add --resume to continue the earlier run, or name another folder",
        )


def announce(say: Callable[[str], None], job: Job, plan: Plan, reasons: dict[str, str], machine: Machine) -> None:
    """Print the plan, the reason for each field that tightfit chose, the changes of numerics that
    the plan makes, or that would make use of the machine's fp16, and the fields of the job that
    have no effect.

    say      prints a line
    reasons  the reason for each chosen plan field, by name
    """
    from tightfit.methods import precision

    say("plan     " + (", ".join(f"{name}={value}" for name, value in plan.differences().items()) or "reference"))
    for name, reason in reasons.items():
        say(f"           {name}={getattr(plan, name)}: {reason}")
    changed = sorted(needed_permissions(plan))
    if changed:
        why = "the default of `allow`; write allow: [] to keep fp32" if job.allow is None else "as the job allows"
        say(f"         changes numerics: {', '.join(changed)} ({why})")
    for hint in [*precision.advice(plan, job, machine), *job.train.without_effect]:
        say(f"advice   {hint}")


def summary(record: dict[str, Any], out: Path) -> str:
    """Return a text of several lines with a run's loss, speed and memory. Predicted values are
    shown beside measured ones.

    record  the content of record.json
    out     the run's folder
    """
    peak, loss = record["peak_bytes"], [(step, value) for step, value in record["loss"] if value is not None]
    lines = []
    if loss:
        lines.append("loss     " + ", ".join(f"{value:.4f} at step {step}" for step, value in (loss[0], loss[-1])))
    if best := record["best"]:
        lines.append(
            f"best     {best['metric']} {best['value']:.4f} at step {best['step']}, kept in {best['checkpoint']}"
        )
    if record["step_s"]:
        speed = (
            f"{format_count(record['tokens_per_s'])} tokens/s"
            if record["tokens_per_s"]
            else f"{record['samples_per_s']:.4g} samples/s"
        )
        mfu = f", {record['mfu']:.0%} MFU" if record["mfu"] else ""
        share = record["matrix_utilization"]
        reached = f", {share:.0%} of the achieved matrix rate" if share else ""
        lines.append(f"speed    {speed} (median of {len(record['step_s'])} steps){mfu}{reached}")
        measured_s, predicted_s = statistics.median(record["step_s"]), record["predicted_step_s"]
        if predicted_s:
            lines.append(f"         {_beside(predicted_s, measured_s, format_seconds)} a step")
    if record["compile_s"]:
        lines.append(f"compile  {format_seconds(record['compile_s'])} in the first step, not counted in the speed")
    if peak["measured"]:
        rows = ", ".join(f"{name} {format_bytes(value)}" for name, value in peak["rows"].items() if value)
        lines.append(f"memory   {format_bytes(peak['measured'])} at the peak ({rows})")
        if peak["predicted"]:
            lines.append(f"         {_beside(peak['predicted'], peak['measured'], format_bytes)}")
    if peak["predicted_process"]:
        lines.append(f"process  {_beside(peak['predicted_process'], peak['process'], format_bytes)}")
    elif peak["process"]:
        lines.append(f"process  {format_bytes(peak['process'])}")
    for name, words in (
        ("skipped_steps", "steps skipped because fp16 overflowed"),
        ("damaged_samples", "damaged samples skipped"),
    ):
        if record[name]:
            lines.append(f"         {record[name]} {words}")
    return "\n".join([*lines, f"record   {out / 'record.json'}"])


def _beside(predicted: float, measured: float, form: Callable[[float], str]) -> str:
    return f"predicted {form(predicted)}, measured {form(measured)} ({predicted / measured - 1:+.1%})"


def verify_command(
    path: Path,
    plan: str | None,
    steps: int,
    changes: list[str],
    as_json: bool,
    nproc: int = 1,
    launch_options: LaunchOptions | None = None,
) -> None:
    """Run `tightfit verify`: train `steps` steps with the plan and without, print how far losses, gradients
    and weights are apart, and exit with 1 if it is too far. Other arguments: see `train_command`."""
    quiet_libraries()
    local_world, world = read_launcher()
    options = launch_options or LaunchOptions()
    with errors_printed_once(world, options):
        job, pins = read_job(path, plan, changes)
        check_start(nproc, world, options)
    if world == 1:
        check_inputs(job)
    if nproc > 1 and world == 1:
        this_machine(partial(print, file=sys.stderr))
        sys.exit(start_processes(nproc))
    first = os.environ.get("RANK", "0") == "0"
    console = Console(stderr=as_json, quiet=not first)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    machine = (this_machine(say) if world == 1 else Machine.detect()).per_process(
        local_world, max(world // local_world, 1)
    )

    choose = partial(choose_and_announce, job, machine, pins, say)
    from tightfit.report.out_of_memory import memory_errors_named

    with watched_process(world, options) as join:
        _, chosen = choose() if world == 1 else on_rank_zero(choose, partial(join, machine.device))
        quiet_transformers(job)
        from tightfit.measure.verify import verify

        with memory_errors_named(chosen, job, machine.device), never_silent(say, "training with the plan and without"):
            result = verify(job, chosen, machine, steps)
        barrier()
    if as_json and first:
        print(json.dumps(result.content()))
    elif not as_json:
        table = Table("largest relative difference", "found", "allowed", box=None, title_justify="left")
        for name, (found, allowed) in result.compared().items():
            table.add_row(name, f"{found:.3g}", f"{allowed:.3g}")
        console.print(table)
        console.print("passed" if result.passed else "FAILED: the plan does not train the same job")
    destroy_group()
    sys.exit(0 if result.passed else 1)
