"""Reads the job and the plan fields of a command, and checks them before anything takes long."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tightfit.errors import InputError
from tightfit.job import Job, ModelSpec, apply_change
from tightfit.machine import Machine
from tightfit.plan import read_pins
from tightfit.report.quiet import quiet_transformers
from tightfit.report.unexpected_errors import not_writable


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
