"""Shows the progress of a training: a live bar on a terminal, plain lines in a file or pipe. Both
show the same figures: loss, learning rate, speed, peak memory and remaining time."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from tightfit.engine.step import Step
from tightfit.units import format_bytes, format_count, format_seconds

LINE_EVERY_S = 5.0


class View(Protocol):
    def show(self, step: Step, items_per_s: float, peak_bytes: int | None, left_s: float) -> None: ...

    def say(self, line: str) -> None: ...


def describe(step: Step, items_per_s: float, unit: str, peak_bytes: int | None, left_s: float) -> str:
    """Return one line with loss, learning rate, speed, peak memory and remaining time after a step.

    items_per_s  tokens or samples per second
    unit         what is counted: tokens or samples
    peak_bytes   peak memory; None if it is unknown, then it is left out
    left_s       remaining seconds
    """
    peak = "" if peak_bytes is None else f"peak {format_bytes(peak_bytes)}  "
    return (
        f"loss {step.loss:.4f}  lr {step.learning_rate:.2e}  {format_count(items_per_s)} {unit}/s  "
        f"{peak}left {format_seconds(left_s)}"
    )


class ProgressLines:
    """Prints a line for the first step, for the last step, and for a step in between whenever 5
    seconds have passed since the last line.

    total  number of steps
    unit   what is counted: tokens or samples
    """

    def __init__(self, total: int, unit: str, console: Console) -> None:
        self.total, self.unit, self.console, self.shown_at = total, unit, console, -math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, step: Step, items_per_s: float, peak_bytes: int | None, left_s: float) -> None:
        now = time.monotonic()
        if step.step + 1 == self.total or now - self.shown_at >= LINE_EVERY_S:
            self.shown_at = now
            self.say(f"step {step.step + 1}/{self.total}  {describe(step, items_per_s, self.unit, peak_bytes, left_s)}")

    def say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


class ProgressBar:
    """Shows a progress bar that is redrawn in place. Lines printed with `say` appear above the bar.

    total  number of steps
    unit   what is counted: tokens or samples
    """

    def __init__(self, total: int, unit: str, console: Console) -> None:
        self.total, self.unit = total, unit
        self.progress = Progress(
            BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}"), console=console
        )
        self.task = self.progress.add_task("preparing the first step", total=total)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def show(self, step: Step, items_per_s: float, peak_bytes: int | None, left_s: float) -> None:
        text = describe(step, items_per_s, self.unit, peak_bytes, left_s)
        self.progress.update(self.task, completed=step.step + 1, description=text)

    def say(self, line: str) -> None:
        self.progress.console.print(line, highlight=False, markup=False, soft_wrap=True)


def progress(total: int, unit: str, console: Console | None = None) -> ProgressBar | ProgressLines:
    """Return a ProgressBar if the output is a terminal, or ProgressLines if it is a file or a pipe.

    total    number of steps
    unit     what is counted: tokens or samples
    console  where to print; None: the standard output
    """
    console = console or Console()
    return ProgressBar(total, unit, console) if console.is_terminal else ProgressLines(total, unit, console)
