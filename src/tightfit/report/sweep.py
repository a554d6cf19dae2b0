"""Implements `tightfit sweep`: predicts a job for every combination of values that the user gives
for fields of the job, fields of its plan, and the machine."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tightfit.calibration.this_machine import this_machine
from tightfit.errors import DoesNotFit, InputError
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.optional_packages import import_optional
from tightfit.plan import Plan
from tightfit.planner.whole_run import WholeRun, check_price, format_cost, format_hours, whole_run
from tightfit.report.command_inputs import read_job
from tightfit.report.heartbeat import never_silent
from tightfit.report.quiet import quiet_libraries, quiet_transformers
from tightfit.runtime.run_length import length_of
from tightfit.units import format_bytes, format_count, format_seconds

MOST = 400  # largest number of combinations
MACHINE = "machine"  # the only name in --over that is not a field of the job
UNTRACED = ("limits", "allow", "plan")  # sections of a job that do not change its traces


@dataclass(frozen=True)
class Combination:
    """One combination of a sweep's values, with the job, the pinned plan fields and the machine
    that follow from it.

    values  the varied values as text, by the names in --over: {"train.batch": "8"}
    pins    the plan fields that are fixed, by name
    """

    values: dict[str, str]
    job: Job
    pins: dict[str, Any]
    machine: Machine


@dataclass(frozen=True)
class Row:
    """The prediction for one combination of a sweep's values.

    values     the varied values as text, by the names in --over: {"train.batch": "8"}
    predicted  the prediction (the content of an Estimate) for the fastest plan that fits; if none
               fits, for the plan that needs the least memory; None if no plan could be predicted
    limit      bytes of device memory that a plan may use; None if no plan could be predicted
    run        time and cost of the whole training; None if no plan could be predicted
    why_not    why no plan fits or works; empty if the plan fits
    """

    values: dict[str, str]
    machine: Machine
    predicted: dict[str, Any] | None = None
    limit: float | None = None
    run: WholeRun | None = None
    why_not: str = ""

    @property
    def fits(self) -> bool:
        return not self.why_not

    @property
    def plan(self) -> Plan | None:
        return None if self.predicted is None else Plan.parse(self.predicted["plan"])

    def content(self) -> dict[str, Any]:
        """Return what `tightfit sweep --json` prints for this combination, as a dict."""
        predicted = self.predicted
        return {
            "over": self.values,
            "machine": self.machine.name,
            "devices": self.machine.devices_per_node * self.machine.nodes,
            "fits": self.fits,
            "why_not": self.why_not,
            "plan": predicted and predicted["plan"],
            "memory_bytes": predicted and predicted["memory"]["peak"],
            "limit_bytes": self.limit,
            "step_s": predicted and predicted["time"]["step_s"],
            "tokens_per_s": predicted and predicted["tokens_per_s"],
            "samples_per_s": predicted and predicted["samples_per_s"],
            "run": self.run and self.run.content(),
        }


def sweep_command(
    path: Path,
    plan: str | None,
    over: list[str],
    changes: list[str],
    price: float | None,
    table_file: Path | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    quiet_libraries()
    console = Console(stderr=True, soft_wrap=True) if as_json else Console()
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    check_price("--price", price)
    if picture is not None:
        import_optional("matplotlib", "--picture")
        from tightfit.report.figures import check_picture

        check_picture("--picture", picture)
    if table_file is not None and not table_file.absolute().parent.is_dir():
        raise InputError(f"--csv {table_file}", "its folder does not exist", "name a file in a folder that does")
    axes = read_axes(over)
    found = combinations(path, plan, axes, changes, lambda: this_machine(say))
    say(f"job      {found[0].job!r}\n{len(found)} combinations")
    quiet_transformers(found[0].job)
    rows = explain_all(found, price, say)
    if table_file is not None:
        write_csv(rows, table_file)
    if picture is not None:
        draw(rows, picture)
    if as_json:
        print(json.dumps({"over": axes, "rows": [row.content() for row in rows]}))
        return
    console.print()
    console.print(table_of(rows, price), highlight=False)
    for line in summary(rows, price):
        say(line)


def read_axes(over: Sequence[str]) -> dict[str, list[str]]:
    """Parse the texts of --over, such as "train.batch=8,16". Return the list of values of each
    name: {"train.batch": ["8", "16"]}.

    Commas inside brackets and quotes belong to a value: plan.offload=[],[states,gradients] has the
    two values [] and [states,gradients].

    Raises InputError for a text of another form, for a name or a value that is given twice, and for
    more than 400 combinations.
    """
    axes: dict[str, list[str]] = {}
    for text in over:
        name, equals, values = text.partition("=")
        name, parts = name.strip(), [part.strip() for part in _split(values)]
        if not equals or not name or not all(parts):
            raise InputError(f"--over {text}", "is not NAME=VALUE,VALUE", "write it like --over train.batch=8,16,32")
        if name in axes:
            raise InputError(f"--over {text}", f"{name} is varied twice", "give all of its values in one --over")
        if len(set(parts)) < len(parts):
            raise InputError(f"--over {text}", "has a value twice", "give each value once")
        if name != MACHINE and "." not in name:
            raise InputError(
                f"--over {text}",
                f"{name} is not a field of a job",
                "name a field with its section, such as train.batch, plan.zero or model.hidden_size, or machine",
            )
        axes[name] = parts
    if not axes:
        raise InputError("sweep", "nothing is varied", "add --over train.batch=8,16 or --over machine=l40s,h100-sxm")
    count = 1
    for parts in axes.values():
        count *= len(parts)
    if count > MOST:
        raise InputError("sweep", f"{count:,} combinations are more than {MOST}", "vary fewer values")
    return axes


def _split(text: str) -> list[str]:
    """Split a text at its commas, except those inside brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def combinations(
    path: Path, plan: str | None, axes: dict[str, list[str]], changes: list[str], detect: Callable[[], Machine]
) -> list[Combination]:
    """Return every combination of the varied values. The job of each one is read and checked, so
    that an error appears before the first prediction.

    path     the job file
    plan     a plan file, the word reference, or None for the plan section of the job file
    axes     the values of each varied name, from `read_axes`
    changes  KEY=VALUE texts that change the job of every combination
    detect   returns this machine; called only if the machine is not varied

    Raises InputError if a job, a plan or a machine's name is wrong.
    """
    named = {text: Machine.named(text) for text in axes.get(MACHINE, [])}
    jobs: list[tuple[dict[str, str], Job, dict[str, Any]]] = []
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        more = [f"{name}={value}" for name, value in chosen.items() if name != MACHINE]
        jobs.append((chosen, *read_job(path, plan, [*changes, *more])))
    without = None if named else detect()
    return [Combination(chosen, job, pins, without or named[chosen[MACHINE]]) for chosen, job, pins in jobs]


def explain_all(cases: Sequence[Combination], price: float | None, say: Callable[[str], None]) -> list[Row]:
    """Predict each combination, print a line about it, and return the predictions in the order of
    `cases`. Combinations with the same model, data and training share one trace of the model.

    price  price of one device per hour; None: no cost
    say    prints a line
    """
    from tightfit.planner.tracing.profiler import Profiler

    profilers: dict[str, Profiler] = {}
    rows = []
    for number, case in enumerate(cases, 1):
        label = ", ".join(f"{name}={value}" for name, value in case.values.items())
        with never_silent(say, f"explaining {label}"):
            row = explain_one(case, profilers, price)
        rows.append(row)
        said = row.why_not if not row.fits or row.predicted is None else _speed(row)
        say(f"{number}/{len(cases)}  {label}: {said}")
    return rows


def explain_one(case: Combination, profilers: dict[str, Any], price: float | None) -> Row:
    """Return the prediction for one combination: that of its fastest plan that fits, or why no plan
    fits or works.

    profilers  traces of the combinations so far, by a text that identifies what was traced; this
               function uses them and adds its own
    price      price of one device per hour; None: no cost
    """
    from tightfit.planner.estimator import Estimator
    from tightfit.planner.refusal import describe_shortages
    from tightfit.planner.search import search_or_estimate

    what = {name: value for name, value in case.job.content().items() if name not in UNTRACED}
    key = json.dumps([what, case.machine.device], sort_keys=True, default=str)
    row = partial(Row, case.values, case.machine)
    try:
        estimator = Estimator(case.job, case.machine, profilers.get(key))
        profilers[key] = estimator.profiler
        best = search_or_estimate(estimator, case.pins)[0]
        predicted, why_not = best.content(), describe_shortages(best)
    except DoesNotFit as refusal:
        if refusal.content is None:
            return row(why_not=str(refusal).splitlines()[0])
        predicted = refusal.content["plans"][0]
        why_not = predicted["rejected_because"]
    except InputError as error:  # the values contradict each other, or tracing failed
        return row(why_not=error.found)
    run = whole_run(case.job, predicted, length_of(case.job), price)
    return row(predicted=predicted, limit=estimator.limit_bytes, run=run, why_not=why_not)


def _speed(row: Row) -> str:
    assert row.predicted is not None
    memory, step_s = row.predicted["memory"]["peak"], row.predicted["time"]["step_s"]
    return f"{format_bytes(memory)}, {format_seconds(step_s)} a step"


def _per_s(row: Row) -> float | None:
    """Return the predicted tokens per second, or samples per second if the model has no tokens.
    Returns None if nothing is predicted."""
    if row.predicted is None:
        return None
    found: float | None = row.predicted["tokens_per_s"] or row.predicted["samples_per_s"]
    return found


def _unit(rows: Sequence[Row]) -> str:
    return "tokens/s" if any(row.predicted and row.predicted["tokens_per_s"] for row in rows) else "samples/s"


def plan_fields(rows: Sequence[Row]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return (common, own). `common` has the plan fields that are equal in all rows, {name: value}.
    `own` has one such dict for each row, with the other plan fields of this row.

    Fields with the value of the reference plan and fields that the sweep varies are left out.
    """
    plans = [row.plan.content() for row in rows if row.plan is not None]
    same = (
        {name: value for name, value in plans[0].items() if all(plan[name] == value for plan in plans)} if plans else {}
    )
    reference = Plan().content()
    varied = {name.removeprefix("plan.") for row in rows for name in row.values}
    common = {name: value for name, value in same.items() if value != reference[name] and name not in varied}
    own = []
    for row in rows:
        found = {} if row.plan is None else row.plan.content()
        own.append(
            {
                name: value
                for name, value in found.items()
                if name not in same and name not in varied and value != reference[name]
            }
        )
    return common, own


def _said(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in fields.items())


def table_of(rows: Sequence[Row], price: float | None) -> Table:
    names, unit = list(rows[0].values), _unit(rows)
    numbers = ["memory", "step", unit, "hours", *(["cost"] if price is not None else [])]
    table = Table(*names, "plan", *numbers, "fits", box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
        if column.header in numbers:
            column.justify, column.no_wrap = "right", True
    _, own = plan_fields([row for row in rows if row.fits])
    plans = iter(own)
    numbered = {why: number for number, why in enumerate(reasons(rows), 1)}
    for row in rows:
        cells = [""] * len(numbers)
        if row.predicted is not None and row.run is not None:
            per_s = _per_s(row)
            cells = [
                format_bytes(row.predicted["memory"]["peak"]),
                format_seconds(row.predicted["time"]["step_s"]),
                "" if per_s is None else format_count(per_s),
                format_hours(row.run.hours, "").strip(),
                *([format_cost(row.run.cost)] if row.run.cost is not None else []),
            ]
        if not row.fits:  # the leanest plan is not one that runs
            cells = [cells[0], *([""] * (len(numbers) - 1))]
        verdict = "yes" if row.fits else f"no ({numbered[row.why_not]})"
        table.add_row(*row.values.values(), _said(next(plans)) if row.fits else "", *cells, verdict)
    return table


def reasons(rows: Sequence[Row]) -> list[str]:
    """Return the reasons why combinations do not fit or work. A reason of several combinations is
    listed once."""
    return list(dict.fromkeys(row.why_not for row in rows if not row.fits))


def summary(rows: Sequence[Row], price: float | None) -> list[str]:
    """Return the lines below the table: the numbered reasons why combinations do not fit, the
    fields that all plans have in common, and the fastest combination. If there is a price, also
    return the cheapest combination.

    price  price of one device per hour; None: no cost
    """
    common, _ = plan_fields([row for row in rows if row.fits])
    lines = [f"({number})  {why}" for number, why in enumerate(reasons(rows), 1)]
    lines += [f"all plans: {_said(common)}"] if common else []
    fitting = [row for row in rows if row.fits and row.run is not None]
    if not fitting:
        return [*lines, "none of the combinations fits"]
    fastest = min(fitting, key=lambda row: row.run.seconds if row.run else 0.0)
    lines.append(f"fastest:   {_said(fastest.values)}: {fastest.run}")
    if price is not None:
        cheapest = min(fitting, key=lambda row: (row.run.cost or 0.0) if row.run else 0.0)
        lines.append(f"cheapest:  {_said(cheapest.values)}: {cheapest.run}")
    return lines


def write_csv(rows: Sequence[Row], file: Path) -> None:
    """Write a CSV file with a header and one line for each combination. Bytes, seconds and hours
    are plain numbers. Raises InputError if the file cannot be written."""
    try:
        with file.open("w", newline="", encoding="utf-8") as opened:
            lines = [_csv_line(row) for row in rows]
            writer = csv.DictWriter(opened, list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)
    except OSError as error:
        raise InputError(f"--csv {file}", f"cannot be written ({error.strerror})", "name another file") from None


def _csv_line(row: Row) -> dict[str, Any]:
    content, run = row.content(), row.run
    return {
        **row.values,
        "devices": content["devices"],
        "fits": row.fits,
        "plan": "" if row.plan is None else _said(row.plan.differences()) or "reference",
        **{name: content[name] for name in ("memory_bytes", "limit_bytes", "step_s", "tokens_per_s", "samples_per_s")},
        "hours": run and run.hours,
        "device_hours": run and run.device_hours,
        "cost": run and run.cost,
        "why_not": row.why_not,
    }


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw the memory and the speed of all combinations into a file. If there is a price, also draw
    the cost."""
    from tightfit.report.figures import Panel, draw_comparison

    labels = [_said(row.values) for row in rows]
    memory = [None if row.predicted is None else row.predicted["memory"]["peak"] for row in rows]
    panels = [
        Panel("memory of a device, and its limit", memory, format_bytes, [row.limit for row in rows]),
        Panel(_unit(rows), [_per_s(row) if row.fits else None for row in rows], format_count),
    ]
    costs = [row.run.cost if row.run is not None and row.fits else None for row in rows]
    if any(cost is not None for cost in costs):
        panels.append(Panel("cost of the training", costs, format_cost))
    draw_comparison(labels, [row.fits for row in rows], panels, "tightfit sweep", file)
