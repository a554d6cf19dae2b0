"""Makes the text that `tightfit explain` prints: the chosen plan, its memory and time row by row,
and why other plans were not chosen."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from tightfit.calibration.this_machine import measured_machine_of
from tightfit.cost.ledger import ROWS
from tightfit.data import describe_tokenizer
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.models.lora import lora_of
from tightfit.models.nf4 import element_count
from tightfit.optim.groups import first_match, full_rate
from tightfit.plan import Plan, plan_of, read_pins
from tightfit.planner.estimate import MARGIN, Estimate
from tightfit.planner.estimator import Estimator
from tightfit.planner.refusal import describe_shortages
from tightfit.planner.search import search_or_estimate
from tightfit.planner.waterfall import WaterfallRow, waterfall
from tightfit.planner.whole_run import whole_run
from tightfit.record import Record
from tightfit.report.schedule_text import timeline_text
from tightfit.runtime.run_length import length_of
from tightfit.units import format_bytes, format_count, format_seconds

WIDTH = 72  # characters of a line of the chart
HEIGHT = 8
_BARS = " ▁▂▃▄▅▆▇█"


def explain(
    job: Job,
    plan: Plan | Mapping[str, Any] | None = None,
    machine: Machine | str | None = None,
    price: float | None = None,
) -> str:
    """Return the text that `tightfit explain` prints for a job.

    plan     the plan to explain, or a mapping of its fields, in which fields that are left out have
             the values of the reference plan `Plan()`. None: the fastest plan that fits the machine
             and has the fields that the job's `plan` sets
    machine  the machine to predict for, or its name, such as "h100-sxm:8"; None: this machine
    price    price of one device per hour; with it, the text has the cost of the whole training

    Raises DoesNotFit if no plan fits, and InputError if the model cannot be traced.
    """
    pins = read_pins(job.plan) if plan is None else plan_of(plan).model_dump()
    estimator = Estimator(job, measured_machine_of(machine))
    estimates = search_or_estimate(estimator, pins)
    console = Console(width=120, file=io.StringIO())
    show(console, estimates, waterfall(estimator, estimates[0].plan), price)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def explained(estimates: list[Estimate], price: float | None = None) -> dict[str, Any]:
    """Return the content that `tightfit explain --json` prints. The first of the estimates is that
    of the chosen plan.

    In the result, `plans` has one entry for each estimate. `chosen` is 0, the index of the chosen
    plan in `plans`, or None if that plan does not fit.

    price  price of one device per hour; None: no cost
    """
    chosen = estimates[0]
    said = [
        estimate.rejected_because or ("" if estimate.fits else describe_shortages(estimate)) for estimate in estimates
    ]
    plans = [{**estimate.content(), "rejected_because": why} for estimate, why in zip(estimates, said, strict=True)]
    return {
        "machine": chosen.machine.model_dump(mode="json"),
        "chosen": 0 if chosen.fits else None,
        "plans": with_whole_runs(chosen.job, plans, price),
        "margin_bytes": round(chosen.margin_bytes),
        "remedies": [],
    }


def with_whole_runs(job: Job, plans: list[dict[str, Any]], price: float | None) -> list[dict[str, Any]]:
    """Return copies of `plans`, each with a new entry `run`: the time and the cost of the whole
    training.

    plans  contents of estimates, as `Estimate.content` returns them
    price  price of one device per hour; None: no cost
    """
    length = length_of(job)
    return [{**plan, "run": whole_run(job, plan, length, price).content()} for plan in plans]


def show(console: Console, estimates: list[Estimate], stages: list[WaterfallRow], price: float | None = None) -> None:
    """Print the explanation of the first estimate, which is the chosen plan's, and a table of the
    other estimates.

    stages  estimates of the chosen plan as its methods are added one after another
    price   price of one device per hour; with it, the cost of the whole training is printed
    """
    chosen = estimates[0]
    say = _say(console)
    say(f"plan     {_fields(chosen)}")
    low, high = (format_bytes(size) for size in chosen.peak_range)
    between = f" ({low} to {high})" if low != high else ""
    say(
        f"memory   {format_bytes(chosen.peak_bytes)}{between} of {format_bytes(chosen.limit_bytes)}: {_verdict(chosen)}"
    )
    say(f"states   {_states(chosen)}")
    if sum(chosen.host.values()):
        say(f"host     {_beside(chosen.host, chosen.limits.get('host memory'))}")
    if chosen.ledger.disk or "disk" in chosen.limits:
        say(f"disk     {_beside(chosen.disk, chosen.limits.get('disk'))}")
    say(f"speed    {_speed(chosen)}{_made_up_for(chosen, stages)}")
    say(f"run      {whole_run(chosen.job, chosen.content(), length_of(chosen.job), price)}")
    for caveat in (chosen.machine.speed_caveat, chosen.machine.training_caveat):
        if caveat:
            say(f"         {caveat}")
    changes = ", ".join(chosen.changes_math)
    say(f"numerics {changes + ': changed, as the job allows' if changes else 'unchanged'}{_layers_in_float8(chosen)}")
    if trained := _trained(chosen):
        say(f"trained  {trained}")
    if tokenizer := describe_tokenizer(chosen.job):
        say(f"tokens   from {tokenizer}")
    for line in _groups(chosen):
        say(f"groups   {line}")
    for line in _experts(chosen):
        say(f"experts  {line}")
    for advice in chosen.advice:
        say(f"advice   {advice}")
    say("")
    console.print(waterfall_table(stages), highlight=False)
    say("")
    console.print(rows_table(chosen), highlight=False)
    say("")
    for line in picture(chosen):
        say(line)
    if chosen.schedule:
        say("")
        for line in timeline_text(chosen.schedule, WIDTH):
            say(line)
    if len(estimates) > 1:
        say("")
        console.print(others_table(estimates[1:], chosen), highlight=False)


def _states(estimate: Estimate) -> str:
    """Return, as text, the bytes per parameter of parameters, gradients and optimizer states: their
    sum, and each part. The parts are listed because publications do not all count the same ones."""
    parts = estimate.bytes_per_parameter
    said = f"{sum(parts.values()):.3g} bytes a parameter: " + ", ".join(
        f"{row} {size:.3g}" for row, size in parts.items()
    )
    return said + (", and 2 of its 16-bit copy while it is used" if estimate.plan.precision.endswith("mixed") else "")


def _trained(estimate: Estimate) -> str:
    """Return, as text, how many of the weights are trained. Returns an empty text if the job has no
    adapters and more than half of the weights are trained."""
    lora = lora_of(estimate.job.model)
    total = sum(
        element_count(parameter.name, parameter.shape)
        for parameter in estimate.ledger.parameters
        if not parameter.buffer
    )
    count = sum(parameter.count for parameter in estimate.ledger.parameters if parameter.trainable)
    if lora is None and 2 * count > total:
        return ""
    return f"{count:,} of {total:,} weights ({count / max(total, 1):.2%})" + ("" if lora is None else f": {lora}")


def _made_up_for(chosen: Estimate, stages: list[WaterfallRow]) -> str:
    """Return, as text, after how many steps the faster compiled steps have saved as much time as
    compiling took. Returns an empty text if the plan does not compile or if compiled steps are not
    faster.

    stages  estimates of the plan as its methods are added one after another
    """
    for before, stage in itertools.pairwise(stages):
        if stage.method == "+ compile" and stage.step_s < before.step_s:
            return f" (made up for in {math.ceil(chosen.compile_s / (before.step_s - stage.step_s)):,} steps)"
    return ""


def _say(console: Console) -> Any:
    return lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True)


def _fields(estimate: Estimate) -> str:
    return ", ".join(f"{name}={value}" for name, value in estimate.plan.differences().items()) or "reference"


def _verdict(estimate: Estimate) -> str:
    free = 1 - estimate.peak_bytes / estimate.limit_bytes
    if estimate.fits:
        where = "" if estimate.peak_phase == estimate.peak.phase else f", the most of it in {estimate.peak_phase}"
        high = estimate.peak_range[1]
        if high > estimate.limit_bytes:
            where += f"; of runs like it, some need up to {format_bytes(high)}"
        failed = f"; not confirmed, its dry run failed: {estimate.not_confirmed}" if estimate.not_confirmed else ""
        return f"fits, {free:.0%} free{where}{failed}"
    if "memory" not in estimate.shortages():
        return f"fits, {free:.0%} free, but the plan {describe_shortages(estimate)}"
    return "does not fit" if free < 0 else f"does not fit with the {MARGIN:.0%} that are kept free"


def _beside(rows: dict[str, float], limit: float | None) -> str:
    """Return, as text, the bytes that a plan needs in host memory or on disk: their sum, the limit,
    and the bytes of each purpose, largest first.

    rows   bytes by purpose
    limit  bytes that may be used; None: unknown
    """
    said = ", ".join(
        f"{name} {format_bytes(size)}" for name, size in sorted(rows.items(), key=lambda row: -row[1]) if size
    )
    return f"{format_bytes(sum(rows.values()))}{f' of {format_bytes(limit)}' if limit else ''}: {said}"


def _groups(estimate: Estimate) -> list[str]:
    """Return one line of text for each parameter group of the job: its pattern, how many parameters
    match it, and its learning rate and weight decay if it sets them."""
    train, lines = estimate.job.train, []
    trained = [parameter for parameter in estimate.ledger.parameters if parameter.trainable]
    for number, group in enumerate(train.groups):
        matched = [parameter for parameter in trained if first_match(train, [parameter.name]) == number]
        noun = "parameter" if len(matched) == 1 else "parameters"
        parts = [f"{len(matched)} {noun} of {format_count(sum(parameter.count for parameter in matched))} elements"]
        if group.learning_rate is not None:
            parts.append(f"learning rate {full_rate(train, number):g}")
        if group.weight_decay is not None:
            parts.append(f"weight decay {group.weight_decay:g}")
        lines.append(f"{group.match}: {', '.join(parts)}")
    return lines


def _experts(estimate: Estimate) -> list[str]:
    """Return one line of text for each kind of mixture-of-experts layer: how many experts each
    token uses, and how evenly the prediction spreads the tokens over the experts."""
    imbalance = estimate.job.train.expert_imbalance
    spread = "evenly" if imbalance == 1 else f"with {imbalance:g} times the mean for the busiest expert"
    return [
        f"{chosen} of {count} for each token; predicted for tokens that are spread {spread} (train.expert_imbalance)"
        for count, chosen in estimate.ledger.experts
    ]


def _layers_in_float8(estimate: Estimate) -> str:
    """Return, as text, how many linear layers of one device multiply in float8; an empty text if
    none does."""
    forward = [segment.timeline for segment in estimate.ledger.training if segment.phase == "forward"]
    count = sum(operation.name == "aten._scaled_mm" for timeline in forward for operation in timeline.operations)
    return f"; {count} linear layers multiply in float8" if count else ""


def _speed(estimate: Estimate) -> str:
    per_s = (
        f"{format_count(estimate.tokens_per_s)} tokens/s"
        if estimate.tokens_per_s
        else f"{estimate.samples_per_s:.3g} samples/s"
    )
    low, high = (format_seconds(seconds) for seconds in estimate.step_interval.around(estimate.time.step_s))
    between = f" ({low} to {high})" if low != high else ""
    parts = [f"{format_seconds(estimate.time.step_s)} a step{between}, {per_s}"]
    if estimate.mfu:
        parts.append(f"{estimate.mfu:.0%} MFU")
    if estimate.matrix_utilization:
        parts.append(f"{estimate.matrix_utilization:.0%} of the matrix rate")
    if estimate.compile_s:
        parts.append(f"{format_seconds(estimate.compile_s)} to compile")
    return ", ".join(parts)


def waterfall_table(stages: list[WaterfallRow]) -> Table:
    table = _table("", "", "peak", "", "step", "")
    before = None
    for stage in stages:
        change = [f"{_signed_bytes(stage.peak_bytes - before.peak_bytes)}"] if before else [""]
        slower = f"{stage.step_s / before.step_s - 1:+.0%}" if before else ""
        table.add_row(
            stage.method, stage.changes, format_bytes(stage.peak_bytes), *change, format_seconds(stage.step_s), slower
        )
        before = stage
    return table


def _signed_bytes(size: float) -> str:
    if abs(size) < 1:
        return "="
    return ("+" if size > 0 else "-") + format_bytes(abs(size))


LEAST_DIFFERENCE = 0.01  # share of the peak by which a dry run has to differ to be shown


def rows_table(estimate: Estimate) -> Table:
    """Return a table with the bytes of each row of the ledger (parameters, gradients, ...) at the
    peak and, beside them, the largest times of a step. If the plan's dry run found another peak, a last
    row has the difference."""
    peak, time = estimate.peak, estimate.time
    table = _table(f"at the peak ({peak.phase}, {peak.part})", "bytes", "in a step", "time")
    bytes_rows = [(row, format_bytes(peak.rows[row])) for row in ROWS if peak.rows.get(row)]
    more = (estimate.dry_run_bytes or peak.total) - peak.total
    if abs(more) > LEAST_DIFFERENCE * peak.total:
        bytes_rows.append(("found by the dry run", _signed_bytes(more)))
    times = [
        (f"{phase} {kind}", format_seconds(seconds)) for phase, kind, seconds, _ in time.rows[: max(len(bytes_rows), 6)]
    ]
    for index in range(max(len(bytes_rows), len(times))):
        left = bytes_rows[index] if index < len(bytes_rows) else ("", "")
        right = times[index] if index < len(times) else ("", "")
        table.add_row(*left, *right)
    return table


def others_table(others: list[Estimate], chosen: Estimate) -> Table:
    """Return a table of the plans that were not chosen: the fields in which each one differs from
    the chosen plan, its peak memory, its step time, and why it was not chosen."""
    table = _table("other plans, instead of this", "peak", "step", "why not")
    ours = chosen.plan.content()
    for other in others:
        said = ", ".join(f"{name}={value}" for name, value in other.plan.content().items() if value != ours[name])
        table.add_row(said, format_bytes(other.peak_bytes), format_seconds(other.time.step_s), other.rejected_because)
    return table


def _table(*columns: str) -> Table:
    table = Table(*columns, box=None, pad_edge=False)
    for index, column in enumerate(table.columns):
        column.overflow = "fold"
        if index and column.header in ("peak", "step", "bytes", "time", ""):
            column.justify = "right"
    if len(table.columns) > 1 and columns[1] == "":
        table.columns[1].justify = "left"
    return table


def picture(estimate: Estimate) -> list[str]:
    """Return the lines of a bar chart of memory over a step. Each column shows one instant of the
    step; the last line names its phase."""
    instants = [(phase, sum(rows.values())) for phase, _, rows in estimate.ledger.instants()]
    columns = [instants[column * len(instants) // WIDTH] for column in range(WIDTH)]
    most = max(size for _, size in instants)
    lines = []
    for level in range(HEIGHT, 0, -1):
        cells = (_BARS[max(0, min(8, round((size / most * HEIGHT - level + 1) * 8)))] for _, size in columns)
        label = format_bytes(most) if level == HEIGHT else "0 B" if level == 1 else ""
        lines.append(f"{label:>9} {''.join(cells)}")
    names = "".join({"forward": "f", "backward": "b", "optimizer": "o"}.get(phase, " ") for phase, _ in columns)
    lines.append(f"{'':9} {names}   f forward, b backward, o optimizer")
    return lines


def show_analysis(console: Console, estimate: Estimate, record: Record) -> None:
    """Print a table of predicted and measured bytes of tensors at the peak, row by row, then the
    peak and the step time with the errors of their predictions.

    estimate  the prediction
    record    the measurement
    """
    table = _table("", "predicted", "measured", "error")
    predicted, measured = logical_rows(estimate), record.peak_bytes.rows
    for row in [row for row in ROWS if predicted.get(row) or measured.get(row)]:
        table.add_row(row, format_bytes(predicted.get(row, 0.0)), format_bytes(measured.get(row, 0)), "")
    total = sum(predicted.values())
    if record.peak_bytes.measured:
        measured_peak = record.peak_bytes.measured
        table.add_row("peak", format_bytes(total), format_bytes(measured_peak), f"{total / measured_peak - 1:+.1%}")
    step_s = record.median_step_s
    if step_s:
        expected = estimate.time.step_s
        table.add_row("step", format_seconds(expected), format_seconds(step_s), f"{expected / step_s - 1:+.0%}")
    console.print(table, highlight=False)
    if record.attention:
        console.print(f"attention {record.attention}", highlight=False)
    if warning := slow_attention(record):
        console.print(f"warning  {warning}", highlight=False)


def slow_attention(record: Record) -> str:
    """Return a warning if the measured training ran on a GPU and torch used no fused kernel for the
    attention; an empty text otherwise."""
    if record.attention != "math" or record.machine.device != "cuda":
        return ""
    return (
        "torch uses no fused kernel for this model's attention, so attention is slower and saves length x length scores; "
        "the usual causes are wide heads, or a mask or bias in addition to the causal mask"
    )


def logical_rows(estimate: Estimate) -> dict[str, float]:
    """Return the predicted bytes of tensors at the peak, by row of the ledger (parameters,
    gradients, ...). The rows runtime and allocator, which have no tensors, are left out.

    On CUDA, torch allocates the workspaces of libraries such as cuBLAS, and measurements count them
    as temporaries. So this function adds them to the row temporaries.
    """
    rows = {row: size for row, size in estimate.peak.rows.items() if row not in ("runtime", "allocator")}
    rows["temporaries"] = rows.get("temporaries", 0.0) + estimate.workspace_bytes
    return {row: size for row, size in rows.items() if size}
