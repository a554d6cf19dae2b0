"""What the benchmarks share: fresh processes, rounds in which contenders take turns, medians, records and tables.

A benchmark defines functions that measure one thing and return values of JSON. `in_fresh_process` calls such a function in
a process of its own. `interleaved` measures several contenders in rounds. `write_record` adds to the results what they
depend on: the versions of the code, its commit and the machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
RESULT = "RESULT "  # begins the line of a process that is its result; libraries print others
ERROR_CHARACTERS = 3000  # of a failed process's output in the error

K = TypeVar("K")
T = TypeVar("T")


def make_parser(description: str | None, only: str = "", rounds: int = 0) -> argparse.ArgumentParser:
    """A parser with --out; with --only and its help where `only` is given, with --rounds where `rounds` is a default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the record to this JSON file")
    if only:
        parser.add_argument("--only", default="", help=only)
    if rounds:
        parser.add_argument("--rounds", "--turns", type=int, default=rounds, help="how often each contender runs")
    return parser


# --- processes ------------------------------------------------------------------------------------------------------


class MeasurementFailed(SystemExit):
    """A process ended without a result. It ends the benchmark with the process's last output, unless it is caught."""

    def __init__(self, what: str, output: str) -> None:
        super().__init__(f"{what}: {output[-ERROR_CHARACTERS:]}")
        self.output = output


def in_fresh_process(
    function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None, processes: int = 0
) -> Any:
    """Call a function of a benchmark's file in a process of its own and return its result.

    Arguments and result travel as JSON. environment: variables on top of this process's. processes: where given, torchrun
    starts so many, and the result is that of the first.
    """
    target = f"{Path(sys.modules[function.__module__].__file__ or '').stem}:{function.__name__}"
    start = [sys.executable]
    if processes:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*start, str(Path(__file__).resolve()), target, json.dumps(arguments)]
    variables = {**os.environ, **(environment or {})}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if not lines:
        raise MeasurementFailed(f"{target} {arguments}", done.stderr)
    return json.loads(lines[-1].removeprefix(RESULT))


def main() -> None:
    """The other end of `in_fresh_process`: python benchmarks/harness.py FILE:FUNCTION ARGUMENTS."""
    sys.path[0] = str(ROOT)  # in place of this file's folder
    target, arguments = sys.argv[1:]
    name, _, function = target.partition(":")
    found = getattr(importlib.import_module(f"benchmarks.{name}"), function)(*json.loads(arguments))
    if os.environ.get("RANK", "0") == "0":
        print(RESULT + json.dumps(found), flush=True)


# --- rounds, and what is made of them -------------------------------------------------------------------------------


def interleaved(
    rounds: int, contenders: Sequence[K], measure: Callable[[K, int], T], line_of: Callable[[K, T], str] | None = None
) -> list[dict[K, T]]:
    """What each contender measured in each round. Contenders take turns, so that a slow spell of the machine hits all.

    measure: is given the contender and the number of the round. line_of: a line to print about a measurement.
    """
    found: list[dict[K, T]] = []
    for number in range(rounds):
        found.append({})
        for name in contenders:
            show_progress(f"round {number + 1} of {rounds}: {name}")
            found[-1][name] = measure(name, number)
            show_progress("")
            line = line_of(name, found[-1][name]) if line_of is not None else ""
            if line:
                print(f"round {number + 1}/{rounds}  {line}", flush=True)
    return found


def show_progress(text: str) -> None:
    """Replace the line that says what is measured now."""
    print(f"\r{text:100s}" if text else f"\r{'':100s}\r", end="", file=sys.stderr, flush=True)


def ratios(above: Iterable[float], below: Iterable[float]) -> list[float]:
    """Pair by pair: of measurements of the same round."""
    return [one / other for one, other in zip(above, below, strict=True)]


def median_of_each(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure over several measurements of it."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def spread(values: Sequence[float]) -> str:
    """The median, and the least and the largest value."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def error_summary(errors: Iterable[float]) -> dict[str, float]:
    """The median and the worst of relative errors, whatever their sign."""
    sizes = [abs(error) for error in errors]
    return {"median": statistics.median(sizes), "worst": max(sizes)}


def usual_control_s() -> float:
    """Seconds that the calibration of this machine took for the fixed piece of work of calibration/clock_drift.py."""
    from tightfit.machine import Machine

    usual = Machine.detect().control_s
    if usual is None:
        raise SystemExit("this machine is not calibrated: run tightfit machine --calibrate")
    return usual.value


# --- records and tables ---------------------------------------------------------------------------------------------


def write_record(path: Path | None, content: Mapping[str, Any]) -> None:
    """Write results with what they depend on. path: None where no record is asked for."""
    from benchmarks.provenance import provenance  # not at the top: this file also runs as a script

    if path is not None:
        write_json(path, {**provenance(), **content})


def read_record(path: Path | None) -> dict[str, Any]:
    """What an earlier run has written there, to go on with; nothing where there is no file."""
    return json.loads(path.read_text()) if path is not None and path.exists() else {}


def write_json(path: Path, content: Any) -> None:
    """Replace the file at once: one that is cut short would be of no use."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, width: int = 150) -> None:
    """Print rows of text, the first `left` columns on the left; plain lines where rich is not installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print("\n".join("  ".join(part.replace("\n", "; ") for part in row) for row in rows))
        return
    table = Table(*columns, box=None)
    for column in table.columns[left:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    Console(width=width, highlight=False, markup=False).print(table)


if __name__ == "__main__":
    main()
