"""Prints what a run reached: its loss, speed and memory beside the predictions."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tightfit.units import format_bytes, format_count, format_seconds


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
