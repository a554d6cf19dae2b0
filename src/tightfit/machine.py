"""Machine: the devices that a job runs on, their memory and their rates, each number with its
source.

`Machine.detect()` describes this machine, with the figures of its last calibration.
`Machine.named` describes a machine of the device table or of a machine file. This module imports
torch only if the system shows a GPU.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from tightfit.cache_folder import cache_folder, private_folder
from tightfit.errors import InputError
from tightfit.machines import ACHIEVED, LINK_ACHIEVED, MEMORY_ACHIEVED, NETWORK_ACHIEVED, USABLE, devices
from tightfit.machines.gpus import Gpu, estimated_achieved, estimated_bytes_per_s, estimated_flops_per_s, visible
from tightfit.machines.names import find_named
from tightfit.units import format_bytes, format_flops
from tightfit.values import Value, nearest, read_yaml


class Figure(Value):
    """One number of a machine, its source, and a detail about the source in words. The sources are:

    measured   by a calibration on this machine (four to five minutes)
    quick      by a quick calibration on this machine (seconds)
    published  by the maker
    system     read from the operating system
    estimated  from the GPU's number of processors and its clocks
    given      by the user, in a machine file
    """

    value: float = Field(gt=0)
    source: Literal["measured", "quick", "published", "system", "estimated", "given"] = "given"
    detail: str = ""


TYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")  # of matrix products
NVLINK = 100  # GB/s; a link of at least this bandwidth is NVLink, a slower link is PCIe
# by kind of link: seconds of a hop within a node, of a hop between nodes, and of a call, with the
# protocol that NCCL uses on that link
LATENCIES = {
    "NVLink": (1.9e-6, 4.0e-6, 14.0e-6, "NCCL's own model of a ring, LL128 (src/graph/tuning.cc)"),
    "PCIe": (5.7e-6, 9.6e-6, 8.4e-6, "NCCL's own model of a ring, Simple (src/graph/tuning.cc)"),
}


class Machine(Value):
    """What a job runs on: kind, number and memory of its devices, and the rates that they reach.

    architecture         GPUs: such as sm_90 for compute capability 9.0, or gfx942 for AMD
    processors           GPUs: number of streaming multiprocessors, or of AMD's compute units; 0 if
                         unknown
    attention_kernel     GPUs: the fused attention kernel to predict for: flash-1, flash-2, cudnn or
                         efficient; empty for the one that torch chooses
    devices_per_node, nodes  numbers of devices and of hosts
    cores                CPU cores
    memory_bytes         memory of one device that a process can use
    host_memory_bytes    memory of one host
    matrix_peak_flops_per_s  the dense peak that the maker publishes, by dtype, FLOP/s per device.
                         Used to compute MFU; predictions use it only to derive an unknown float8
                         rate
    matrix_flops_per_s   achieved rate of square matrix products by dtype, FLOP/s per device
    matrix_flops_per_s_by_size  achieved rate of square matrix products by dtype and matrix width
    memory_bytes_per_s   achieved bandwidth of device memory
    launch_s             seconds to start one operation
    host_to_device_bytes_per_s  bandwidth of copies from the host to one device
    process_bytes_per_s  bandwidth between two processes of a node, one way
    network_bytes_per_s  bandwidth between nodes, for each device
    process_latency_s, network_latency_s  seconds that each hop of a collective takes within a node
                         and between nodes, however small the message
    call_s               seconds to start a collective, once per call, before its first hop
    rates                measured rate of each kind of operation: "kind/dtype" -> size -> rate. For
                         matrix products and attention, the rate is FLOP/s and the size is the cube
                         root of rows x columns x depth of one product. For all other kinds, the
                         rate is bytes accessed per second and the size is the bytes accessed.
                         Causal attention counts only the pairs that are not masked
    control_s            seconds that a fixed workload took during the calibration. The same
                         workload is timed beside later measurements, to tell how fast the machine
                         is at that moment (see `calibration/clock_drift.py`)
    efficiency           fraction of these rates that training steps reach, fitted to the records of
                         runs, for compute, memory, launch and link
    explain_only         whether tightfit can predict for these devices but not train on them.
                         Predictions assume that they behave like a GPU
    """

    name: str
    device: Literal["cpu", "cuda"]
    architecture: str = ""
    processors: int = Field(0, ge=0)
    attention_kernel: Literal["", "flash-1", "flash-2", "cudnn", "efficient"] = ""
    devices_per_node: int = Field(1, gt=0)
    nodes: int = Field(1, gt=0)
    cores: int = Field(1, gt=0)
    memory_bytes: Figure
    host_memory_bytes: Figure
    matrix_peak_flops_per_s: dict[str, Figure] = Field(default_factory=dict)
    matrix_flops_per_s: dict[str, Figure] = Field(default_factory=dict)
    matrix_flops_per_s_by_size: dict[str, dict[int, float]] = Field(default_factory=dict)
    memory_bytes_per_s: Figure | None = None
    launch_s: Figure | None = None
    host_to_device_bytes_per_s: Figure | None = None
    process_bytes_per_s: Figure | None = None
    network_bytes_per_s: Figure | None = None
    process_latency_s: Figure | None = None
    network_latency_s: Figure | None = None
    call_s: Figure | None = None
    control_s: Figure | None = None
    rates: dict[str, dict[int, float]] = Field(default_factory=dict)
    efficiency: dict[str, Figure] = Field(default_factory=dict)
    explain_only: bool = False

    @model_validator(mode="after")
    def _known_types_and_rates(self) -> Self:
        for field in ("matrix_peak_flops_per_s", "matrix_flops_per_s", "matrix_flops_per_s_by_size"):
            for kind in getattr(self, field):
                if kind not in TYPES:
                    raise InputError(f"machine: {field}.{kind}", "unknown type", nearest(kind, list(TYPES)))
        for field in ("matrix_flops_per_s_by_size", "rates"):
            for kind, table in getattr(self, field).items():
                if (field == "rates" and not table) or any(min(size, rate) <= 0 for size, rate in table.items()):
                    raise InputError(
                        f"machine: {field}.{kind}",
                        "must map sizes to rates, all above 0",
                        "write it like {1024: 2.5e+12}",
                    )
        return self

    @classmethod
    def detect(cls) -> Machine:
        """Return a description of this machine: its devices and memory, with the figures of its
        last calibration, if there is one.

        Only the GPUs that torch can use in this process (CUDA_VISIBLE_DEVICES) count. torch is
        imported only if the system shows a GPU. If the GPUs differ, all figures are those of the
        GPU with the least memory.
        """
        found = _detect_cuda() or _detect_cpu()
        try:
            measured = cls.model_validate_json(calibration_path(found.name).read_text())
        except (OSError, ValueError):  # no calibration, or another version's
            return found
        if (measured.name, measured.memory_bytes.value) != (found.name, found.memory_bytes.value):
            return found
        return found.with_figures_of(measured)

    def with_figures_of(self, other: Machine) -> Machine:
        """Return `other`, such as the machine that a calibration has stored, with the facts that
        were detected for this machine: the GPU's architecture, number of devices, cores, memory and
        published peak."""
        return other.replace(**{field: getattr(self, field) for field in _SEEN})

    @classmethod
    def named(cls, text: str) -> Machine:
        """Return the machine with this name, or the machine that a file describes.

        h100-sxm          one device of the table; h100-sxm:8x4 is 4 nodes of 8 devices
        NVIDIA L40S:2     the name that the device's driver gives it
        p5.48xlarge:4     an instance type of a cloud; 4 hosts of it
        cluster.yaml      a machine file: see `load`

        Raises InputError for an unknown name, a wrong count or a wrong file.
        """
        if text.lower().endswith(FILES):
            return cls.load(text)
        found = find_named(text)
        return _of_table(found.device, found.row, found.per_node, found.nodes)

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """Read a machine from a YAML or JSON file with the fields of `tightfit schema machine`, and
        return it. The output of `tightfit machine --json` is such a file.

        Figures with the source system, which were detected on the machine that wrote the file, get
        the source given, because the machine of the file counts as another machine.

        Raises InputError if the file cannot be read or is not a valid machine.
        """
        machine = cls.parse(read_yaml(path), str(path))
        detected = {
            field: figure.replace(source="given")
            for field in ("memory_bytes", "host_memory_bytes")
            if (figure := getattr(machine, field)).source == "system"
        }
        return machine.replace(**detected)

    def per_process(self, per_node: int, nodes: int = 1) -> Machine:
        """Return a copy of this machine that describes what one process has if `per_node` processes
        run on each of `nodes` hosts.

        On GPUs, each process has one GPU. On a CPU, each process has an equal share of the memory,
        cores and rates: with per_node = 4, a quarter of them.
        """
        if self.device != "cpu" or per_node == 1:
            return self.replace(devices_per_node=per_node, nodes=nodes)

        def part(figure: Figure) -> Figure:
            return figure.replace(value=figure.value / per_node)

        return self.replace(
            devices_per_node=per_node,
            nodes=nodes,
            cores=max(self.cores // per_node, 1),
            memory_bytes=part(self.memory_bytes),
            matrix_flops_per_s={kind: part(figure) for kind, figure in self.matrix_flops_per_s.items()},
            memory_bytes_per_s=self.memory_bytes_per_s and part(self.memory_bytes_per_s),
            rates={
                kind: {size: value / per_node for size, value in table.items()} for kind, table in self.rates.items()
            },
        )

    def keep(self) -> None:
        """Write this machine's figures to the user's cache, for the next `detect`."""
        path = calibration_path(self.name)
        private_folder(path.parent)
        path.write_text(self.to_json())

    @property
    def speed_caveat(self) -> str:
        """A phrase that says why predicted times are uncertain, such as "an estimate from the GPU's
        processors and clock; ..."; empty if the machine's rates are published or measured."""
        if not self.matrix_flops_per_s:
            return "a guess until this machine is measured: tightfit machine --calibrate"
        sources = {figure.source for figure in self.matrix_flops_per_s.values()}
        if "estimated" in sources:
            return "an estimate from the GPU's processors and clock; tightfit machine --calibrate measures it"
        is_quick = "quick" in sources
        return (
            "from a quick calibration of seconds; tightfit machine --calibrate measures it closely" if is_quick else ""
        )

    @property
    def is_here(self) -> bool:
        """True if this object describes the machine on which this process runs, False for a machine
        of the device table or of a file."""
        return self.memory_bytes.source == "system"

    def rate(self, precision: str) -> float | None:
        """Return the rate that large matrix products achieve in this precision, in FLOP/s per
        device; None if it is unknown.

        precision  a plan's precision, such as bf16-mixed
        """
        figure = self.matrix_flops_per_s.get(precision.split("-")[0])
        return figure.value if figure else None

    def peak(self, precision: str) -> float | None:
        """Return the peak rate of matrix products in this precision that the maker publishes,
        without sparsity, in FLOP/s per device; None if it is unknown.

        precision  a plan's precision, such as bf16-mixed
        """
        figure = self.matrix_peak_flops_per_s.get(precision.split("-")[0])
        return figure.value if figure else None

    @property
    def training_caveat(self) -> str:
        """A sentence that says that tightfit does not train on these devices; empty if it does."""
        if not self.explain_only:
            return ""
        return (
            f"tightfit predicts for {self.name} but does not train on it; predictions assume that it behaves like a GPU"
        )

    def __repr__(self) -> str:
        rates = ", ".join(f"{kind} {format_flops(figure.value)}" for kind, figure in self.matrix_flops_per_s.items())
        count = self.devices_per_node * self.nodes
        kind = "device" if self.explain_only else self.device
        return f"Machine({self.name}, {count} x {kind}, {format_bytes(self.memory_bytes.value)}{', ' + rates if rates else ''})"

    __str__ = __repr__


def machine_of(given: Machine | str | None) -> Machine:
    """Return the machine that a caller of the library means.

    given  a machine, or the name of one or of a machine file, as `Machine.named` takes it; None:
           the machine that runs this process

    Raises InputError for an unknown name or a wrong file, or if `given` is of another type.
    """
    if given is None:
        return Machine.detect()
    if isinstance(given, Machine):
        return given
    if isinstance(given, str):
        return Machine.named(given)
    raise InputError(
        "machine",
        f"is of type {type(given).__name__}",
        'give a tightfit.Machine, or the name of one, such as "l4" or "h100-sxm:8"',
    )


def _of_table(name: str, row: dict[str, Any], count: int, nodes: int) -> Machine:
    """Return the machine that one row of the device table describes. Its rates are an assumed
    fraction of the published peak.

    name   the device's name in the table
    row    the row: published figures of one device
    count  number of devices of a node
    nodes  number of nodes
    """
    shares, source = row.get("achieved", {}), row["source"]
    if not isinstance(shares, dict):
        shares = dict.fromkeys(row["flops"], shares)
    of = row.get("instance", "a usual node of this device")
    host, host_of = 4 * row["memory"], "four times the devices' memory, as nodes usually have"
    if "host_memory" in row:
        host, host_of = row["host_memory"], of if "instance" in row else source

    def figure(value: float, detail: str) -> Figure:
        return Figure(value=value, source="published", detail=detail)

    within_s, between_s, call_s, latency_source = LATENCIES["NVLink" if row["link"] >= NVLINK else "PCIe"]
    return Machine(
        name=name,
        device="cuda",
        architecture=row["architecture"],
        processors=row.get("processors", 0),
        devices_per_node=count,
        nodes=nodes,
        memory_bytes=figure(row["memory"] * 2**30 * row.get("usable", USABLE), source),
        host_memory_bytes=figure(host * 2**30 * count, host_of),
        matrix_peak_flops_per_s={kind: figure(value * 1e12, source) for kind, value in row["flops"].items()},
        matrix_flops_per_s={
            kind: figure(value * 1e12 * (share := shares.get(kind, ACHIEVED)), f"{share:.0%} of the peak")
            for kind, value in row["flops"].items()
        },
        memory_bytes_per_s=figure(row["bandwidth"] * 1e9 * MEMORY_ACHIEVED, f"{MEMORY_ACHIEVED:.0%} of {source}"),
        host_to_device_bytes_per_s=figure(row["host"] * 1e9, source),
        process_bytes_per_s=figure(row["link"] * 1e9 * LINK_ACHIEVED, f"{LINK_ACHIEVED:.0%} of {source}"),
        network_bytes_per_s=figure(row["network"] * 1e9 * NETWORK_ACHIEVED, f"{NETWORK_ACHIEVED:.0%} of that of {of}"),
        process_latency_s=figure(within_s, latency_source),
        network_latency_s=figure(between_s, latency_source),
        call_s=figure(call_s, latency_source),
        explain_only=row.get("explain_only", False),
    )


_SEEN = (  # fields that are always detected; their values in the calibration's file are ignored
    "architecture", "processors", "devices_per_node", "cores", "memory_bytes", "host_memory_bytes", "matrix_peak_flops_per_s",
)  # fmt: skip
FILES = (".yaml", ".yml", ".json")  # endings of a machine file's name
CALIBRATION_VERSION = 3  # files of another version are not read


def calibration_path(name: str) -> Path:
    """Return the path of the file in the user's cache that holds a machine's measured figures.

    name  the machine's name, such as "Intel Xeon x16"
    """
    plain = "".join(c if c.isalnum() else "-" for c in name.lower())
    return cache_folder() / "machines" / f"{plain}.{CALIBRATION_VERSION}.json"


def _detect_cpu() -> Machine:
    memory = Figure(value=host_memory(), source="system", detail="usable physical memory")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(
        name=f"{_processor()} x{cores}", device="cpu", cores=cores, memory_bytes=memory, host_memory_bytes=memory
    )


def _detect_cuda() -> Machine | None:
    gpus = visible()
    if not gpus:
        return None
    gpu = min(gpus, key=lambda one: one.memory)
    kinds = sorted({one.name for one in gpus})
    detail = "device memory" if len(kinds) == 1 else f"device memory, the least of {', '.join(kinds)}"
    detected = Machine(
        name=gpu.name,
        device="cuda",
        architecture=gpu.architecture,
        processors=gpu.processors,
        devices_per_node=len(gpus),
        cores=os.cpu_count() or 1,
        memory_bytes=Figure(value=gpu.memory, source="system", detail=detail),
        host_memory_bytes=Figure(value=host_memory(), source="system", detail="usable physical memory"),
    )
    for name, row in devices().items():
        if gpu.name in row["called"]:
            detected_fields = ("name", "cores", "memory_bytes", "host_memory_bytes")
            return _of_table(name, row, len(gpus), 1).replace(
                **{field: getattr(detected, field) for field in detected_fields}
            )
    return _with_estimates(detected, gpu)


def _with_estimates(machine: Machine, gpu: Gpu) -> Machine:
    """Return `machine` with rates estimated from the GPU's number of processors and the clocks of
    processors and memory, as far as they are known.

    Used for a GPU that is not in the device table. It has no published peak, so MFU is unknown.
    """

    def figure(value: float, detail: str) -> Figure:
        return Figure(value=value, source="estimated", detail=detail)

    flops, (bytes_per_s, of) = estimated_flops_per_s(gpu), estimated_bytes_per_s(gpu)
    processors = f"of what {gpu.processors} processors of {gpu.architecture} compute"
    achieved = {kind: estimated_achieved(gpu, kind) for kind in flops}
    moved = bytes_per_s and figure(MEMORY_ACHIEVED * bytes_per_s, f"{MEMORY_ACHIEVED:.0%} of {of}")
    return machine.replace(
        matrix_flops_per_s={
            kind: figure(share * flops[kind], f"{share:.0%} {processors}") for kind, share in achieved.items()
        },
        memory_bytes_per_s=moved,
    )


def host_memory() -> int:
    """Return the physical memory in bytes, or the limit of the control group (cgroup) if that limit
    is smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = Path(path).read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            total = min(total, int(limit))
    return total


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
