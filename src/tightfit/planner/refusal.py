"""Refusal: what is said where no plan fits: the leanest plan's largest rows, and what would help."""

from __future__ import annotations

from tightfit.errors import DoesNotFit
from tightfit.job import Job
from tightfit.planner.estimate import Estimate
from tightfit.units import format_bytes


def does_not_fit(least: Estimate, job: Job) -> DoesNotFit:
    """What is said where nothing fits: the leanest plan's largest rows, and what would help."""
    if "memory" not in least.lacks():
        return _host_does_not_fit(least)
    rows = sorted(least.peak.rows.items(), key=lambda row: -row[1])[:3]
    largest = ", ".join(f"{row} {format_bytes(size)}" for row, size in rows if size)
    lines = [
        f"needs {format_bytes(least.peak_bytes)} at least, {format_bytes(least.limit_bytes)} are there",
        f"  leanest plan: {least.plan}",
        f"  largest: {largest} (in {least.peak_phase})",
    ]
    missing = [word for word in ("bf16", "8-bit-states", "4-bit-states", "offload") if word not in job.allowed]
    if missing:
        lines.append(f"  to allow: {', '.join(missing)}")
    fixed = sum(size for row, size in least.peak.rows.items() if row in ("parameters", "optimizer", "runtime"))
    if fixed < least.limit_bytes and job.train.batch > 1:
        lines.append("  or a smaller train.batch, shorter sequences, or a larger machine")
    else:
        lines.append("  or a larger machine, or a smaller model: parameters and their states alone do not fit")
    return DoesNotFit("\n".join(lines))


def _host_does_not_fit(least: Estimate) -> DoesNotFit:
    """What is said where devices have room enough, and their host or its disk does not."""
    lines = []
    for name, (needed, there) in least.lacks().items():
        rows = sorted((least.disk if name == "disk" else least.host).items(), key=lambda row: -row[1])[:3]
        largest = ", ".join(f"{row} {format_bytes(size)}" for row, size in rows if size)
        lines.append(f"needs {format_bytes(needed)} of {name} at least, {format_bytes(there)} are there")
        lines.append(f"  largest: {largest}")
        lines.append(
            "  fewer train.keep_checkpoints, or a larger limits.disk"
            if name == "disk"
            else "  materialize: device, fewer loader_workers or offload: [], or a host with more memory"
        )
    return DoesNotFit("\n".join([*lines, f"  leanest plan: {least.plan}"]))
