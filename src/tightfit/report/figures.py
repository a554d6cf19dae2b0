"""Draws pictures: memory over a step, a pipeline schedule over time, and a comparison of plans. The
file's suffix selects the format: SVG, PNG or PDF."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tightfit.cost.ledger import ROWS
from tightfit.cost.pipeline_schedule import BACKWARD, FORWARD, WEIGHTS, ScheduledAction
from tightfit.errors import InputError
from tightfit.planner.estimate import Estimate
from tightfit.units import format_bytes, format_seconds

TITLE_WIDTH = 120  # characters of a title's line
FORMATS = (".svg", ".png", ".pdf")
_COLOURS = {  # from the bottom up
    "allocator": "#c9c9c9",
    "runtime": "#8d99ae",
    "parameters": "#2b6cb0",
    "optimizer": "#6b46c1",
    "gradients": "#c05621",
    "activations": "#2f855a",
    "temporaries": "#d69e2e",
    "communication": "#b83280",
}
assert set(_COLOURS) == set(ROWS)
_ACTIONS = {
    FORWARD: ("forward", "#bee3f8", "#2b6cb0"),
    BACKWARD: ("backward", "#c6f6d5", "#2f855a"),
    WEIGHTS: ("weights' gradients", "#fefcbf", "#b7791f"),
}
_SHADES = (0.0, 0.16, 0.32, 0.48)  # opacity of the shade over a rank's first, second, ... stage


def check_picture(option: str, file: Path) -> None:
    """Raise InputError if the file's suffix is not .svg, .png or .pdf, or if its folder does not
    exist.

    option  the command's option that names the file, such as --picture; the error message shows it
    """
    if file.suffix not in FORMATS:
        asked = f"use {option} {file.with_suffix('.svg')} (or {' or '.join(FORMATS[1:])})"
        raise InputError(f"{option} {file}", "does not end in .svg, .png or .pdf", asked)
    if not file.absolute().parent.is_dir():
        raise InputError(f"{option} {file}", "its folder does not exist", "name a file in a folder that does")


def draw_memory(estimate: Estimate, file: Path) -> None:
    """Draw the memory over one step into a file, with one coloured area for each row that `explain`
    prints (parameters, gradients, ...), and a mark at the peak. A line shows the memory limit if it
    is less than 1.6 times the peak. A dotted line shows where micro-batches are not drawn, because
    they are like the last one."""
    instants = list(estimate.ledger.instants())
    # what the allocator reserves beyond the tensors is known for the peak, and not returned after it
    reserved = {"allocator": estimate.peak.rows.get("allocator", 0.0)}
    held = [{**rows, **reserved} for _, _, rows in instants]
    shown = [row for row in _COLOURS if any(rows.get(row) for rows in held)]
    bytes_of = [[max(rows.get(row, 0.0), 0.0) for rows in held] for row in shown]
    totals = [sum(one) for one in zip(*bytes_of, strict=True)]
    most = max(totals)
    phases = [phase for phase, _, _ in instants]
    axes = _axes(9.5, 4.2, str(estimate.plan))
    axes.stackplot(range(len(instants)), bytes_of, labels=shown, colors=[_COLOURS[row] for row in shown], alpha=0.88)
    axes.set_xlim(0, max(len(instants) - 1, 1))
    axes.set_ylim(0, most * 1.16)
    if estimate.limit_bytes < 1.6 * most:
        axes.set_ylim(0, max(estimate.limit_bytes, most) * 1.16)
        axes.axhline(estimate.limit_bytes, color="#c53030", linestyle="--", linewidth=1.2)
        at_the_right = axes.get_yaxis_transform()  # across in shares of the axes, up in bytes
        axes.text(1.01, estimate.limit_bytes, "limit", color="#c53030", va="center", transform=at_the_right)
    _mark_peak(axes, totals, phases)
    _mark_omitted(axes, phases, estimate.ledger.micro_batches)
    top = axes.get_ylim()[1]
    step = next(2.0**power for power in range(64) if top / 2.0**power <= 9)  # whole KiB, MiB, GiB
    axes.set_yticks([step * number for number in range(int(top / step) + 1)])
    axes.yaxis.set_major_formatter(lambda size, position: format_bytes(size) if size else "0")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(False)
    _name_phases(axes, phases)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], loc="upper left", bbox_to_anchor=(1.01, 0.93), frameon=False)
    _write(axes, file)


def _mark_peak(axes: Axes, totals: Sequence[float], phases: Sequence[str]) -> None:
    """Mark the largest of `totals`, the bytes at each instant, with its bytes and its phase."""
    instant = max(range(len(totals)), key=totals.__getitem__)
    axes.plot([instant], [totals[instant]], "o", color="black", markersize=4, clip_on=False)
    right = instant > 0.6 * len(totals)
    axes.annotate(
        f"peak {format_bytes(totals[instant])} in {phases[instant]}",
        (instant, totals[instant]),
        xytext=(-6 if right else 6, 6),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize=9,
    )


def _mark_omitted(axes: Axes, phases: Sequence[str], micro_batches: int) -> None:
    """Mark where micro-batches of the step are not drawn: before the last forward.

    phases         for each instant on the x axis, its phase
    micro_batches  number of micro-batches of the step on this device
    """
    forwards = [n for n, phase in enumerate(phases) if phase == "forward" and (n == 0 or phases[n - 1] != "forward")]
    omitted = micro_batches - len(forwards)
    if len(forwards) < 2 or omitted < 1:
        return
    axes.axvline(forwards[-1], color="black", linestyle=":", linewidth=1.2)
    said = f"{omitted} micro-batch{'' if omitted == 1 else 'es'} not drawn, like the next"
    anchor: dict[str, Any] = {"xy": (forwards[-1], 1.0), "xycoords": axes.get_xaxis_transform(), "xytext": (-5, -2)}
    axes.annotate(said, **anchor, textcoords="offset points", ha="right", va="top", fontsize=8)


def _name_phases(axes: Axes, phases: Sequence[str]) -> None:
    """Write the names of the phases below the x axis, and set a tick where each phase begins.

    phases  for each instant on the x axis, its phase: forward, backward or optimizer
    """
    starts = [instant for instant, phase in enumerate(phases) if instant == 0 or phases[instant - 1] != phase]
    ends = [*starts[1:], len(phases) - 1]
    axes.set_xticks(starts, [""] * len(starts))
    for start, end in zip(starts, ends, strict=True):
        if end - start > 0.06 * len(phases):
            axes.annotate(
                phases[start], ((start + end) / 2, 0), xytext=(0, -8), textcoords="offset points", ha="center", va="top"
            )
    last = phases[starts[-1]]
    if ends[-1] - starts[-1] <= 0.06 * len(phases):
        axes.annotate(last, (ends[-1], 0), xytext=(0, -22), textcoords="offset points", ha="right", va="top")


def draw_timeline(slots: Sequence[ScheduledAction], title: str, file: Path) -> None:
    """Draw a pipeline schedule into a file: a row for each rank, with a bar for each of its actions
    over time. Each bar has the number of its micro-batch. If a rank has several stages, the bars of
    later stages are darker. At the right is the share of the time in which each rank computes, and
    the title has the bubble: the share of the time of all ranks in which they wait.

    slots  the actions of all ranks, each with its start and end
    """
    end, ranks = max(slot.end for slot in slots), 1 + max(slot.rank for slot in slots)
    busy = [sum(slot.end - slot.start for slot in slots if slot.rank == rank) / end for rank in range(ranks)]
    axes = _axes(11.0, 1.2 + 0.34 * ranks, f"{title}\nbubble: {1 - sum(busy) / ranks:.0%} of the ranks' time")
    for rank, share in enumerate(busy):
        axes.text(1.01, rank, f"{share:.0%} busy", va="center", fontsize=9, transform=axes.get_yaxis_transform())
    for slot in slots:
        _, fill, line = _ACTIONS[slot.action.kind]
        length = slot.end - slot.start
        bar: dict[str, Any] = {"color": fill, "edgecolor": line, "linewidth": 0.6, "height": 0.8}
        axes.barh(slot.rank, length, left=slot.start, **bar)
        virtual_stage = slot.action.stage // ranks
        if virtual_stage:
            shade = _SHADES[min(virtual_stage, len(_SHADES) - 1)]
            axes.barh(slot.rank, length, left=slot.start, height=0.8, color="black", alpha=shade, linewidth=0)
        if length > 0.014 * end:
            axes.text(slot.start + length / 2, slot.rank, str(slot.action.micro_batch), ha="center", va="center")
    axes.set_xlim(0, end)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.tick_params(length=0)
    axes.xaxis.set_major_formatter(lambda seconds, position: format_seconds(seconds) if seconds else "0")
    kinds = [kind for kind in _ACTIONS if any(slot.action.kind == kind for slot in slots)]
    legend = [
        Patch(facecolor=fill, edgecolor=line, label=name) for name, fill, line in map(_ACTIONS.__getitem__, kinds)
    ]
    axes.legend(
        handles=legend, loc="upper right", bbox_to_anchor=(1.0, -0.2 / ranks**0.5), ncols=len(legend), frameon=False
    )
    _write(axes, file)


@dataclass(frozen=True)
class Panel:
    """The values of one panel of horizontal bars, which has one bar for each row of a comparison.

    values  the length of each row's bar; None draws no bar
    form    formats a value as text
    limits  for each row, a value to mark on its bar; None draws no mark
    """

    title: str
    values: Sequence[float | None]
    form: Callable[[float], str]
    limits: Sequence[float | None] = ()


def draw_comparison(
    labels: Sequence[str], fits: Sequence[bool], panels: Sequence[Panel], title: str, file: Path
) -> None:
    """Draw panels of horizontal bars side by side into a file. All panels have the same rows.

    labels  the name of each row
    fits    for each row, whether its plan fits; if not, its bars are grey
    """
    figure = Figure((4.6 * len(panels) + 1.0, 1.1 + 0.34 * len(labels)), dpi=150)
    every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(every, panels, strict=True):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        shown = [value or 0.0 for value in panel.values]
        colours = ["#2b6cb0" if fit else "#c9c9c9" for fit in fits]
        axes.barh(range(len(labels)), shown, color=colours, height=0.66)
        for row, value in enumerate(panel.values):
            if value is not None:
                axes.annotate(panel.form(value), (value, row), xytext=(4, 0), textcoords="offset points", va="center")
        most = max(shown, default=0.0)
        for row, limit in enumerate(panel.limits):
            if limit is not None and limit < 1.6 * most:
                axes.vlines(limit, row - 0.42, row + 0.42, color="#c53030", linewidth=1.6)
        axes.set_xlim(0, 1.3 * most or 1.0)
        axes.set_xticks([])
        axes.set_title(panel.title, fontsize=10, loc="left")
    first = every[0]
    first.set_yticks(range(len(labels)), labels)
    first.set_ylim(len(labels) - 0.5, -0.5)
    figure.tight_layout()
    _write_title(figure, title)
    _write(first, file)


def _axes(width: float, height: float, title: str) -> Axes:
    figure = Figure((width, height), dpi=150)
    axes: Axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    _write_title(figure, title)
    return axes


def _write_title(figure: Figure, title: str) -> None:
    """Write the whole title above the figure, in as many lines as it needs."""
    lines = [part for line in title.splitlines() for part in textwrap.wrap(line, TITLE_WIDTH)]
    figure.text(0.01, 0.98, "\n".join(lines), ha="left", va="bottom", fontsize=9)


def _write(axes: Axes, file: Path) -> None:
    legend = axes.get_legend()
    for text in legend.get_texts() if legend is not None else ():
        text.set_fontsize(9)
    figure = axes.get_figure()
    assert figure is not None
    figure.savefig(file, bbox_inches="tight", metadata={"Date": None} if file.suffix == ".svg" else None)  # type: ignore[union-attr]
