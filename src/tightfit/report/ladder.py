"""Implements `tightfit ladder`: shows how each method changes the memory and the time of a job. The
rungs add one method after another to a plain training loop. A second table shows each method
alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tightfit.calibration.this_machine import this_machine
from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.measure.rung import Measured, measure_rung
from tightfit.optional_packages import import_optional
from tightfit.plan import Plan
from tightfit.planner.ladder import Ladder, Rung, climb, tensor_bytes, training_bytes
from tightfit.report.command_inputs import read_job
from tightfit.report.heartbeat import never_silent
from tightfit.report.quiet import quiet_libraries, quiet_transformers
from tightfit.units import format_bytes, format_seconds


def ladder_command(
    path: Path, machine_name: str | None, run: bool, changes: list[str], picture: Path | None, as_json: bool
) -> None:
    quiet_libraries()
    console = Console(stderr=True, soft_wrap=True) if as_json else Console()
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    if run and machine_name is not None:
        raise InputError(
            "--run", f"runs on this machine, but --machine is {machine_name}", "leave out --run or --machine"
        )
    if picture is not None:
        import_optional("matplotlib", "--picture")
        from tightfit.report.figures import check_picture

        check_picture("--picture", picture)
    job, _ = read_job(path, None, changes)
    machine = this_machine(say) if machine_name is None else Machine.named(machine_name)
    if machine.devices_per_node * machine.nodes > 1:
        say("a ladder is of one device; tightfit sweep compares numbers of devices")
    machine = machine.per_process(1)
    quiet_transformers(job)
    say(f"job      {job!r}\nmachine  {machine!r}")
    for caveat in (machine.speed_caveat, machine.training_caveat):
        if caveat:
            say(f"         {caveat}")
    with never_silent(say, "predicting the rungs"):
        ladder = climb(job, machine)
    measured = measure(ladder, job, machine, say) if run else {}
    if picture is not None:
        draw(ladder, measured, picture)
    if as_json:
        print(json.dumps(content(ladder, machine, measured)))
        return
    show(console, ladder, measured)


def measure(ladder: Ladder, job: Job, machine: Machine, say: Any) -> dict[Plan, Measured]:
    """Run a few steps with the plan of each rung and of each method alone, one plan after another,
    each in its own process. Return the measurement of each plan.

    say  prints a line
    """
    names = {rung.estimate.plan: f"{name_of(rung)} alone" for rung in ladder.alone}
    names |= {rung.estimate.plan: name_of(rung) for rung in ladder.rungs}  # some plans are both
    plans = dict.fromkeys(rung.estimate.plan for rung in (*ladder.rungs, *ladder.alone))
    found = {}
    for number, plan in enumerate(plans, 1):
        with never_silent(say, f"running {names[plan]}"):
            one = found[plan] = measure_rung(job, plan, machine)
        said = one.failed or f"{format_seconds(one.step_s or 0.0)} a step, loss {one.loss}"
        say(f"{number}/{len(plans)}  {names[plan]}: {said}")
    return found


def content(ladder: Ladder, machine: Machine, measured: Mapping[Plan, Measured]) -> dict[str, Any]:
    """Return the content that `tightfit ladder --json` prints.

    measured  the measurement of each plan; empty if nothing was measured
    """

    def told(rung: Rung) -> dict[str, Any]:
        one = measured.get(rung.estimate.plan)
        return {**rung.content(), **({} if one is None else {"measured": one.content()})}

    return {
        "machine": machine.model_dump(mode="json"),
        "rungs": [told(rung) for rung in ladder.rungs],
        "alone": [told(rung) for rung in ladder.alone],
        "left_out": [{"method": name, "why": why} for name, why in ladder.left_out],
    }


def name_of(rung: Rung) -> str:
    return "plain loop" if rung.option is None else str(rung.option)


def show(console: Console, ladder: Ladder, measured: Mapping[Plan, Measured]) -> None:
    """Print a table of the rungs, a table of each method alone, and which methods were left out and
    why.

    measured  the measurement of each plan; empty if nothing was measured
    """
    console.print()
    console.print(rungs_table(ladder, measured), highlight=False)
    console.print("\neach method alone, beside the plain loop")
    console.print(alone_table(ladder, measured), highlight=False)
    plain = ladder.rungs[0].estimate
    aside = plain.peak_bytes - training_bytes(plain)
    console.print(
        f"\nmemory is that of the training; its process holds {format_bytes(aside)} beside it", highlight=False
    )
    if ladder.left_out:
        console.print("\nleft out")
        for name, why in ladder.left_out:
            console.print(f"{name}: {why}", highlight=False, markup=False, soft_wrap=True)


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio >= 0.1 else f"{ratio:.2g}x"


MEASURED = ("measured step", "", "tensors, predicted", "tensors", "loss")  # columns of a measured ladder


def rungs_table(ladder: Ladder, measured: Mapping[Plan, Measured]) -> Table:
    """Return a table with a line for each rung: its predicted memory and step time, and their
    ratios to the plain loop. If there are measurements, the table shows them, too.

    The columns "tensors, predicted" and "tensors" (measured) can be compared. The column "memory"
    also counts memory outside of tensors.

    measured  the measurement of each plan; empty if nothing was measured
    """
    table = _table("rung", "memory", "", "step", "", *(MEASURED if measured else ()))
    for rung in ladder.rungs:
        name = name_of(rung) if rung.option is None else f"+ {name_of(rung)}"
        table.add_row(name, *_cells(rung, ladder, measured))
    return table


def _cells(rung: Rung, ladder: Ladder, measured: Mapping[Plan, Measured]) -> list[str]:
    cells = [
        format_bytes(training_bytes(rung.estimate)),
        _times(rung.memory_ratio),
        format_seconds(rung.estimate.time.step_s),
        _times(rung.time_ratio),
    ]
    if measured:
        cells += _measured_cells(rung, measured[rung.estimate.plan], measured[ladder.rungs[0].estimate.plan])
    return cells


def _measured_cells(rung: Rung, measured: Measured, plain: Measured) -> list[str]:
    if measured.failed or measured.step_s is None:
        return [measured.failed or "no step was timed", "", "", "", ""]
    ratio = _times(measured.step_s / plain.step_s) if plain.step_s else ""
    tensors = "" if measured.tensor_bytes is None else format_bytes(measured.tensor_bytes)
    loss = "" if measured.loss is None else f"{measured.loss:.4f}"
    return [format_seconds(measured.step_s), ratio, format_bytes(tensor_bytes(rung.estimate)), tensors, loss]


def alone_table(ladder: Ladder, measured: Mapping[Plan, Measured]) -> Table:
    """Return a table with a line for each method alone, with the columns of `rungs_table`, and the
    predicted verdict: faster, smaller, both or neither."""
    table = _table("method", "memory", "", "step", "", "verdict", *(MEASURED if measured else ()))
    for rung in ladder.alone:
        memory, less, step, faster, *more = _cells(rung, ladder, measured)
        table.add_row(name_of(rung), memory, less, step, faster, rung.verdict, *more)
    return table


def _table(*columns: str) -> Table:
    table = Table(*columns, box=None, pad_edge=False)
    for index, column in enumerate(table.columns):
        column.overflow = "fold"
        if index and column.header != "verdict" and len(columns) > 2:
            column.justify, column.no_wrap = "right", column.header != "measured step"
    return table


def draw(ladder: Ladder, measured: Mapping[Plan, Measured], file: Path) -> None:
    """Draw the memory and the predicted step time of the rungs into a file. If there are
    measurements, also draw the measured step times.

    measured  the measurement of each plan; empty if nothing was measured
    """
    from tightfit.report.figures import Panel, draw_comparison

    rungs = ladder.rungs
    labels = [name_of(rung) if rung.option is None else f"+ {name_of(rung)}" for rung in rungs]
    limits = [rung.estimate.limit_bytes for rung in rungs]
    panels = [
        Panel("peak memory, and its limit", [rung.estimate.peak_bytes for rung in rungs], format_bytes, limits),
        Panel("a step, predicted", [rung.estimate.time.step_s for rung in rungs], format_seconds),
    ]
    if measured:
        steps = [measured[rung.estimate.plan].step_s for rung in rungs]
        panels.append(Panel("a step, measured", steps, format_seconds))
    draw_comparison(labels, [rung.estimate.fits for rung in rungs], panels, "tightfit ladder", file)
