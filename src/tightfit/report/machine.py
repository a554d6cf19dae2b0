"""Implements `tightfit machine`: shows the figures of a machine, calibrates this machine, and lists
the known devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tightfit.errors import InputError
from tightfit.machine import Figure, Machine
from tightfit.machines import devices, instances
from tightfit.machines.gpus import unused
from tightfit.record import Record
from tightfit.report.quiet import quiet_libraries
from tightfit.units import format_bytes, format_flops, format_seconds


def machine_command(name: str | None, known: bool, calibrate: bool, records: list[Path], as_json: bool) -> None:
    quiet_libraries()
    console = Console(stderr=as_json)
    if known:
        list_machines(console, as_json)
        return
    if (calibrate or records) and name is not None:
        raise InputError(f"machine {name}", "only this machine can be calibrated", "leave out the name")
    machine = Machine.detect() if name is None else Machine.named(name)
    without = unused() if name is None else ""
    if without:
        console.print(f"warning  {without}", highlight=False, markup=False, soft_wrap=True)
    if calibrate:
        from tightfit.calibration.calibrate import calibrate as measure

        machine = measure(machine, lambda line: console.print(f"measuring {line}", highlight=False))
    if records:
        from tightfit.planner.fit_machine import fit_machine

        machine = fit_machine(machine, [read_record(path) for path in records])
        machine.keep()
    if as_json:
        print(json.dumps(machine.content()))
        return
    table = Table("what", "value", "source", box=None)
    for row in machine_rows(machine):
        table.add_row(*row)
    console.print(table)
    if machine.speed_caveat:
        console.print(f"its speed is {machine.speed_caveat}")
    if machine.training_caveat:
        console.print(machine.training_caveat, highlight=False, soft_wrap=True)


def read_record(path: Path) -> Record:
    try:
        return Record.parse(json.loads(path.read_text()), str(path))
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        said = error.strerror if isinstance(error, OSError) else "is no JSON"
        raise InputError(f"--record {path}", str(said), "name the record.json of a run") from error


def list_machines(console: Console, as_json: bool) -> None:
    """Print the figures of each device that tightfit knows, by group, and the names of the cloud
    instance types. With `as_json`, print the devices alone, as JSON."""
    machines = [Machine.named(name) for name in devices()]
    if as_json:
        print(json.dumps([machine.content() for machine in machines]))
        return
    table = Table("name", "memory", "bandwidth", "fp32", "bf16 or fp16", "link", "", box=None)
    for column in table.columns[1:6]:
        column.justify, column.no_wrap = "right", True
    table.columns[0].no_wrap = True
    group = ""
    for machine in machines:
        if group != devices()[machine.name]["group"]:
            group = devices()[machine.name]["group"]
            if machine is not machines[0]:
                table.add_row()
            table.add_row(f"[bold]{group}[/bold]")
        peak = machine.matrix_peak_flops_per_s
        half = peak.get("bf16") or peak["fp16"]
        assert machine.memory_bytes_per_s is not None
        assert machine.process_bytes_per_s is not None
        table.add_row(
            machine.name,
            format_bytes(machine.memory_bytes.value),
            f"{machine.memory_bytes_per_s.value / 1e9:.0f} GB/s",
            format_flops(peak["fp32"].value),
            format_flops(half.value),
            f"{machine.process_bytes_per_s.value / 1e9:.3g} GB/s",
            "explain only" if machine.explain_only else "",
        )
    console.print(table)
    console.print("\ninstance types", style="bold")
    for device, names in instance_types().items():
        console.print(f"{device:<15} {', '.join(names)}", highlight=False)
    console.print(
        "\nNAME:8 is a node of 8 devices, NAME:8x4 four such nodes; INSTANCE:4 is four hosts. Instead of NAME you can write\n"
        "the name that the driver reports, or a machine file (.yaml, .json). FLOP/s are published peaks; tightfit machine\n"
        "NAME shows the achieved rates and the sources of the figures. Explain only: tightfit does not train there.",
        highlight=False,
        soft_wrap=True,
    )


def instance_types() -> dict[str, list[str]]:
    """Return, for each device, the names of the cloud instance types that have it. Devices and
    names are in the order of the table."""
    found: dict[str, list[str]] = {}
    for name, facts in instances().items():
        found.setdefault(facts["device"], []).append(name)
    return found


def machine_rows(machine: Machine) -> list[tuple[str, str, str]]:
    """Return (name, value, source) as text for each figure of a machine, such as its memory and its
    bandwidths."""
    count = machine.devices_per_node * machine.nodes
    kind = f"{machine.device}, {machine.architecture}" if machine.architecture else machine.device
    rows = [("device", f"{count} x {machine.name} ({kind})", machine.memory_bytes.source)]
    figures: list[tuple[str, Figure, Callable[[float], str]]] = [
        ("memory", machine.memory_bytes, format_bytes),
        ("host memory", machine.host_memory_bytes, format_bytes),
    ]
    figures += [
        (f"matrix products {kind}{said}", figure, format_flops)
        for said, table in ((", peak", machine.matrix_peak_flops_per_s), ("", machine.matrix_flops_per_s))
        for kind, figure in table.items()
    ]

    def rate(value: float) -> str:
        return f"{value / 1e9:.3g} GB/s" if value < 1e11 else f"{value / 1e9:.0f} GB/s"

    for name, figure in (
        ("memory bandwidth", machine.memory_bytes_per_s),
        ("host to device", machine.host_to_device_bytes_per_s),
        ("between devices of a node", machine.process_bytes_per_s),
        ("between nodes", machine.network_bytes_per_s),
    ):
        if figure:
            figures.append((name, figure, rate))
    if machine.launch_s:
        figures.append(("launch of an operation", machine.launch_s, format_seconds))
    figures += [
        (f"efficiency in {name}", figure, lambda value: f"{value:.2f}") for name, figure in machine.efficiency.items()
    ]
    return rows + [
        (name, form(figure.value), f"{figure.source} ({figure.detail})" if figure.detail else figure.source)
        for name, figure, form in figures
    ]
