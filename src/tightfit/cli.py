"""The command line. Each command is a function of a few lines that calls `report/`.

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
        help="a known machine (tightfit machine --list) or a machine file; default: this machine",
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
        "--price",
        metavar="NUMBER",
        help="price of one device per hour, in any currency, such as 2.5: adds the training's cost",
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
            help="plan with the figures of another machine: its name, or a machine file",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="folder for the run's files; default: runs/<job name>")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue from the newest checkpoint in --out")] = False,
    nproc: Annotated[
        int,
        typer.Option("--nproc", min=1, metavar="N", help="processes on this host that train together, one device each"),
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
            help="exit code if SIGTERM or SIGUSR1 ends the run after a checkpoint is saved; default: 143 or 138",
        ),
    ] = None,
    changes: Changes = None,
) -> None:
    """Train a job: choose the plan fields that are not fixed, train, save checkpoints, and write a
    record of what was measured."""
    from tightfit.report.commands import train_command
    from tightfit.report.processes import LaunchOptions

    launched = LaunchOptions(timeout * 60, interface, requeue_code)
    train_command(job, plan, out, resume, changes or [], nproc, launched, machine)


RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run, such as runs/name")]


@app.command()
def export(
    run: RunFolder,
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="a new folder for the model's files")],
    merge: Annotated[
        bool, typer.Option("--merge", help="add the adapters to the weights; default: write only the adapters")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="TYPE", help="fp32, bf16 or fp16; default: as in the checkpoint")
    ] = None,
) -> None:
    """Write the model and tokenizer of a run's newest checkpoint, as transformers and peft read
    them."""
    from tightfit.report.export import export_command

    export_command(run, to, merge, dtype)


@app.command()
def generate(
    run: RunFolder,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="the text that the model continues")],
    tokens: Annotated[int, typer.Option("--tokens", min=1, metavar="N", help="largest number of new tokens")] = 100,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 takes the most likely token each time")
    ] = 0.0,
    chat: Annotated[bool, typer.Option("--chat", help="put the prompt into the tokenizer's chat template")] = False,
) -> None:
    """Continue a prompt with the model of a run's newest checkpoint."""
    from tightfit.report.export import generate_command

    generate_command(run, prompt, tokens, temperature, chat)


@app.command(name="import")
def import_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="another tool's configuration: YAML, JSON or TOML")],
    tool: Annotated[
        str | None,
        typer.Option("--from", metavar="TOOL", help="deepspeed, axolotl, ...; default: recognized by the file's keys"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="folder for job.yaml and plan.yaml; default: imported/<file name>"),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices", min=1, metavar="N", help="number of devices that train together, if the file does not say it"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Translate another tool's configuration into a job and a plan, and print how each key was
    translated."""
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
    accelerator: Annotated[str, typer.Option("--accelerator", help="SkyPilot: the type of GPU of the hosts")] = "H100",
    changes: Changes = None,
) -> None:
    """Write a script that trains the job on several hosts, and print the script's name. Give one of
    --slurm, --torchrun and --skypilot."""
    from tightfit.report.commands import launch_command

    kinds = [name for name, asked in (("slurm", slurm), ("torchrun", torchrun), ("skypilot", skypilot)) if asked]
    launch_command(job, kinds, nodes, nproc, accelerator, changes or [])


@app.command()
def explain(
    job: JobFile,
    plan: PlanFile = None,
    machine: MachineName = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="largest memory that a device may use, such as 24GiB")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="how many plans to show")] = 6,
    analyze: Annotated[
        bool, typer.Option("--analyze", help="also run a few steps, and print measured beside predicted figures")
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
    """Choose the fastest plan that fits the machine's memory, and print the predicted memory and
    time of a training step."""
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
            help="a field to vary, and its values: train.batch=8,16, plan.zero=2,3, machine=l40s,h100-sxm; may be repeated",
        ),
    ] = None,
    plan: PlanFile = None,
    price: Price = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="also write the table to this file")] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="draw the table: FILE.svg, .png or .pdf")
    ] = None,
    changes: Changes = None,
    as_json: AsJson = False,
) -> None:
    """Predict every combination of the given values of a job, its plan and the machine, and print a
    table."""
    from tightfit.report.sweep import sweep_command

    sweep_command(job, plan, over or [], changes or [], price, csv, picture, as_json)


@app.command()
def ladder(
    job: JobFile,
    machine: MachineName = None,
    run: Annotated[
        bool,
        typer.Option("--run", help="also run a few steps of each rung on this machine, each rung in its own process"),
    ] = False,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="draw the rungs: FILE.svg, .png or .pdf")
    ] = None,
    changes: Changes = None,
    as_json: AsJson = False,
) -> None:
    """Show how each method changes the memory and time of a job: added one after another to a plain
    training loop (the rungs), and each method alone."""
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
    """Train a few steps with the plan and with the reference plan (fp32, one device, no method),
    and print the largest differences in loss, gradients and weights."""
    from tightfit.report.commands import verify_command
    from tightfit.report.processes import LaunchOptions

    verify_command(job, plan, steps, changes or [], as_json, nproc, LaunchOptions(timeout * 60, interface))


@app.command()
def machine(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME[:COUNT[xNODES]]]", help="a known machine, or a machine file; default: this machine"
        ),
    ] = None,
    known: Annotated[bool, typer.Option("--list", help="list the machines that are known by name")] = False,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="measure this machine (four to five minutes)")] = False,
    records: Annotated[
        list[Path] | None,
        typer.Option(
            "--record", metavar="FILE", help="record.json of a run on this machine; predicted times are fitted to it"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Show the figures of this machine, or of a known machine, and where each figure comes from."""
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
