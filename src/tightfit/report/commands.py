"""Implements the commands that `cli.py` calls: train, explain, verify and launch. They use the
library's functions and print text, or JSON with --json."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tightfit.calibration.this_machine import this_machine
from tightfit.engine.launch import enter_environment, read_launcher, start_processes
from tightfit.errors import DoesNotFit, InputError
from tightfit.machine import Machine
from tightfit.optional_packages import import_optional
from tightfit.plan import Plan, read_pins
from tightfit.planner.defaults import ALLOCATOR
from tightfit.report.announce import choose_and_announce, tensor_bytes_of
from tightfit.report.command_inputs import check_inputs, check_model, check_out, figures_for_training, read_job
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
from tightfit.report.quiet import quiet_libraries, quiet_transformers
from tightfit.report.run_summary import summary
from tightfit.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from tightfit.planner.estimate import Estimate


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
