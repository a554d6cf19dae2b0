"""The command line: one verb for each command, each a few lines that call `report/`.

Heavy imports are inside the commands, so that `tightfit --help` is fast.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="tightfit",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train models that barely fit, as fast as the hardware allows.",
)

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="the job file (YAML)")]
PlanFile = Annotated[
    str | None, typer.Option("--plan", metavar="PLAN", help="a plan file (YAML), or the word reference")
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="change the job or its plan: train.steps=20, plan.micro_batch=4"),
]
MachineName = Annotated[
    str | None,
    typer.Option(
        "--machine",
        metavar="NAME",
        help="a known machine (tightfit machine --list) or a machine file; left out, this one",
    ),
]
Timeout = Annotated[
    float,
    typer.Option("--timeout", min=0.01, metavar="MINUTES", help="how long to wait for a process that does not answer"),
]
Interface = Annotated[
    str | None,
    typer.Option("--interface", metavar="NAME", help="the network interface that leads to the other hosts"),
]
Price = Annotated[
    float | None,
    typer.Option(
        "--price", metavar="NUMBER", help="of an hour of one device, in any currency: adds the training's cost"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON and nothing else")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from tightfit.record import code_version

        versions = code_version()
        typer.echo(", ".join(f"{name} {versions[name]}" for name in ("tightfit", "torch", "transformers", "python")))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="print versions and exit")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    job: JobFile,
    plan: PlanFile = None,
    machine: Annotated[
        str | None,
        typer.Option(
            "--machine",
            metavar="NAME",
            help="figures to plan with, instead of this machine's: a name or a machine file",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="where the run's files go; left out, runs/<job name>")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue from the newest checkpoint in --out")] = False,
    nproc: Annotated[
        int,
        typer.Option("--nproc", min=1, metavar="N", help="processes on this host that train together, a device each"),
    ] = 1,
    timeout: Timeout = 10.0,
    interface: Interface = None,
    requeue_code: Annotated[
        int | None,
        typer.Option(
            "--requeue-code",
            min=1,
            max=255,
            metavar="CODE",
            help="exit code after SIGTERM or SIGUSR1 has ended the run and it was saved; left out, 143 or 138",
        ),
    ] = None,
    changes: Changes = None,
) -> None:
    """Train a job: choose what its plan leaves open, train, checkpoint, and write a record."""
    from tightfit.report.commands import train_command
    from tightfit.report.processes import LaunchOptions

    launched = LaunchOptions(timeout * 60, interface, requeue_code)
    train_command(job, plan, out, resume, changes or [], nproc, launched, machine)


@app.command(name="import")
def import_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="another tool's configuration: YAML, JSON or TOML")],
    tool: Annotated[
        str | None, typer.Option("--from", metavar="TOOL", help="deepspeed, axolotl, ...; left out, the keys tell it")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="where job.yaml and plan.yaml go; left out, imported/<file name>"),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option("--devices", min=1, metavar="N", help="devices that trained together, if the file does not say"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Turn another tool's configuration into a job and a plan, and say what became of each key."""
    from tightfit.report.importing import import_command

    import_command(file, tool, out, devices, as_json)


@app.command()
def launch(
    job: JobFile,
    slurm: Annotated[bool, typer.Option("--slurm", help="a script for sbatch")] = False,
    torchrun: Annotated[bool, typer.Option("--torchrun", help="a script to run on each host")] = False,
    skypilot: Annotated[bool, typer.Option("--skypilot", help="a task for sky launch")] = False,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="hosts")] = 1,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="devices of each host")] = 8,
    accelerator: Annotated[str, typer.Option("--accelerator", help="the GPUs of SkyPilot's hosts")] = "H100",
    changes: Changes = None,
) -> None:
    """Write the script that starts a training on several hosts."""
    from tightfit.report.commands import launch_command

    kinds = [name for name, asked in (("slurm", slurm), ("torchrun", torchrun), ("skypilot", skypilot)) if asked]
    launch_command(job, kinds, nodes, nproc, accelerator, changes or [])


@app.command()
def explain(
    job: JobFile,
    plan: PlanFile = None,
    machine: MachineName = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="the most a device may use: 24GiB")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="how many plans to show")] = 6,
    analyze: Annotated[
        bool, typer.Option("--analyze", help="run a few steps and set measured beside predicted")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="draw memory over the step: FILE.svg, .png or .pdf")
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            "--timeline", metavar="FILE", help="draw the pipeline's schedule over time: FILE.svg, .png or .pdf"
        ),
    ] = None,
    price: Price = None,
    changes: Changes = None,
    as_json: AsJson = False,
) -> None:
    """Predict where each byte and millisecond of a step will go, and choose the fastest plan that
    fits."""
    from tightfit.report.commands import explain_command

    explain_command(job, plan, machine, memory, top, analyze, picture, changes or [], as_json, timeline, price)


@app.command()
def sweep(
    job: JobFile,
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over",
            metavar="NAME=VALUE,VALUE",
            help="what is varied: train.batch=8,16, plan.zero=2,3, machine=l40s,h100-sxm; may be given several times",
        ),
    ] = None,
    plan: PlanFile = None,
    price: Price = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="write the table there, too")] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="draw the table: FILE.svg, .png or .pdf")
    ] = None,
    changes: Changes = None,
    as_json: AsJson = False,
) -> None:
    """Explain every combination of some values of a job, its plan and the machine, as a table."""
    from tightfit.report.sweep import sweep_command

    sweep_command(job, plan, over or [], changes or [], price, csv, picture, as_json)


@app.command()
def ladder(
    job: JobFile,
    machine: MachineName = None,
    run: Annotated[
        bool, typer.Option("--run", help="run a few steps of each rung on this machine, each in its own process")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="draw the rungs: FILE.svg, .png or .pdf")
    ] = None,
    changes: Changes = None,
    as_json: AsJson = False,
) -> None:
    """Show what each method does to a job: from the plain loop up, one more at a time, and each
    alone."""
    from tightfit.report.ladder import ladder_command

    ladder_command(job, machine, run, changes or [], picture, as_json)


@app.command()
def verify(
    job: JobFile,
    plan: PlanFile = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="optimizer steps to compare")] = 3,
    nproc: Annotated[
        int, typer.Option("--nproc", min=1, metavar="N", help="processes on this host, for a plan of several devices")
    ] = 1,
    timeout: Timeout = 10.0,
    interface: Interface = None,
    changes: Changes = None,
    as_json: AsJson = False,
) -> None:
    """Run the plan beside the reference plan and print the largest differences."""
    from tightfit.report.commands import verify_command
    from tightfit.report.processes import LaunchOptions

    verify_command(job, plan, steps, changes or [], as_json, nproc, LaunchOptions(timeout * 60, interface))


@app.command()
def machine(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME[:COUNT[xNODES]]]", help="or a machine file; left out: this machine")
    ] = None,
    known: Annotated[bool, typer.Option("--list", help="list the machines that are known by name")] = False,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="measure this machine (about a minute)")] = False,
    records: Annotated[
        list[Path] | None,
        typer.Option(
            "--record", metavar="FILE", help="record.json of a run on this machine, to fit predicted times to"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Show this machine's figures and their sources, or those of a known machine."""
    from tightfit.report.machine import machine_command

    machine_command(name, known, calibrate, records or [], as_json)


@app.command()
def schema(noun: Annotated[str, typer.Argument(help="job, plan, machine or record")] = "job") -> None:
    """Print the JSON schema of a job, plan, machine or record, for editors."""
    from tightfit import errors, job, plan, record
    from tightfit import machine as machines

    nouns: dict[str, Any] = {"job": job.Job, "plan": plan.Plan, "machine": machines.Machine, "record": record.Record}
    if noun not in nouns:
        raise errors.InputError(f"schema {noun}", "no such noun", f"use one of: {', '.join(nouns)}")
    typer.echo(json.dumps(nouns[noun].model_json_schema(), indent=1))


@app.command()
def cache(
    clear: Annotated[
        str | None, typer.Option("--clear", metavar="PART", help="remove machines, profiles, data or all")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what is stored for later runs, such as calibrations and tokens, or remove it."""
    from tightfit.report.cache import cache_command

    cache_command(clear, as_json)
