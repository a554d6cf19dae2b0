"""Machine: the devices that a job runs on, their memory and their rates, each number with its
source.

`Machine.detect()` describes this machine, with the figures of its last calibration.
`Machine.named` describes a machine of the device table or of a machine file. This module imports
torch only if the system shows a GPU.
"""

from __future__ import annotations

import bisect
import errno
import math
import os
import platform
import stat
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from tightfit.errors import InputError
from tightfit.machines import ACHIEVED, LINK_ACHIEVED, MEMORY_ACHIEVED, NETWORK_ACHIEVED, USABLE, devices
from tightfit.machines.gpus import Gpu, estimated_achieved, estimated_bytes_per_s, estimated_flops_per_s, visible
from tightfit.machines.names import find_named
from tightfit.machines.shapes import (
    ALIGNMENT,
    IN_TENSOR_CORES,
    cache_speedup,
    kernel_of,
    product_share,
    unaligned_share,
)
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
FLOAT8 = "float8"  # the 8-bit types, whose products are equally fast
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

    def achieved(self, kind: str, dtype: str, size: float) -> float:
        """Return the rate that a kind of operation achieves at a size: FLOP/s for matrix products,
        convolutions and attention, bytes accessed per second for all other kinds.

        kind   a name in `calibration/operation_rates.py`, such as "product" or "causal attention
               backward"
        dtype  torch's name, such as bfloat16, or tf32
        size   of products and attention, the cube root of rows x columns x depth of one product; of
               convolutions, the geometric mean of the channels of input and output, or for depthwise
               ones the pixels of the window; of what is counted in bytes, the bytes accessed

        The rate comes from a measurement of this kind and dtype. If there is none, it comes from a
        similar kind that was measured, else from the device's matrix rate or bandwidth. Arithmetic
        inside compiled kernels that was not measured takes no time (infinite rate), because a GPU's
        kernels wait for memory.
        """
        if dtype.startswith(FLOAT8) and f"{kind}/{dtype}" not in self.rates:
            return self._in_float8(kind, size)
        dtype = {"bool": "float32", "int64": "float32", "float64": "float32"}.get(dtype, dtype)
        if dtype == "tf32" and f"{kind}/tf32" not in self.rates and "tf32" in self.matrix_flops_per_s:
            return self._matrix_rate(dtype) * self._share_of_products(kind)
        if dtype == "float16" and f"{kind}/float16" not in self.rates:
            return self._in_fp16(kind, size)
        for key in (f"{kind}/{dtype}", f"{_NEAREST.get(kind, kind)}/{dtype}", f"{kind}/float32"):
            if key in self.rates:
                return _interpolated(self.rates[key], size)
        if kind in COMPILED_ARITHMETIC and self.device == "cpu" and f"{_COMPUTED[kind]}/float32" in self.rates:
            return _interpolated(self.rates[f"{_COMPUTED[kind]}/float32"], size)
        if kind in COMPILED_ARITHMETIC:
            return math.inf
        if kind in _ARITHMETIC:
            return self._matrix_rate(dtype) * self._share_of_products(kind)
        if self.device == "cuda" and kind in _SHARE_OF_BANDWIDTH and "elementwise/float32" not in self.rates:
            return self.bandwidth(size) * _SHARE_OF_BANDWIDTH[kind][dtype in ("bfloat16", "float16")]
        return self.bandwidth(size)

    def achieved_by_shape(
        self,
        kind: str,
        dtype: str,
        sizes: tuple[float, float, float, float],
        causal: bool,
        alignment: int = ALIGNMENT,
        flash: bool = True,
    ) -> float:
        """Return the rate, in FLOP/s, that a GPU achieves in a matrix product or in attention of one
        shape. Attention counts only the pairs of queries and keys that are not masked.

        kind    product, batched product, attention or attention backward
        dtype   torch's name, such as bfloat16, or tf32
        sizes   (batches, rows, columns, depth) of the product; for attention those of query x key:
                (samples x heads, queries, keys, width of a head)
        causal  whether a causal mask hides half of the pairs
        alignment  of a product: bytes of which the beginnings of its matrices' rows are multiples
        flash   of attention: whether FlashAttention can compute it (see `machines/shapes.py`)

        A measured rate is that of the calibration's shape with the same size, times the ratio of
        the two shapes' rates by `machines/shapes.py`. Without a measurement, it is the rate of
        large products times the shape's share of that rate.
        """
        batches, rows, columns, depth = sizes
        size = (rows * columns * depth) ** (1 / 3)
        if not kind.startswith("attention"):
            processors = self.processors or _USUAL_PROCESSORS
            units = dtype if _TYPE_OF.get(dtype, "fp8") in self.matrix_flops_per_s else "float32"
            share = partial(product_share, processors=processors)
            rate, found = self.achieved("product", dtype, size), share(batches, rows, columns, depth)
            if units in IN_TENSOR_CORES:
                rate *= unaligned_share(alignment, self.architecture)
            if f"product/{dtype}" not in self.rates:
                return rate * found
            # the calibration's products have 4 x side, side and side
            side = 64.0 * max(round(size / 4 ** (1 / 3) / 64), 1)
            timed = [share(1.0, *shape) for shape in ((4 * side, side, side), (side, side, 4 * side))]
            return rate * min(found / (3 / (2 / timed[0] + 1 / timed[1])), _MOST_RATIO)
        kernel = kernel_of(self.architecture, dtype, depth, self.attention_kernel, flash)
        backward = kind.endswith("backward")
        found = kernel.share(rows, columns, depth, causal, backward)
        name = f"causal {kind}" if causal else kind
        if f"{name}/{dtype}" not in self.rates:
            return self._matrix_rate(dtype) * found
        length = (size**3 / CALIBRATED_WIDTH) ** (1 / 2)
        timed_kernel = kernel_of(self.architecture, dtype, CALIBRATED_WIDTH, self.attention_kernel)
        as_timed = timed_kernel.share(length, length, CALIBRATED_WIDTH, causal, backward)
        return self.achieved(name, dtype, size) * min(found / as_timed, _MOST_RATIO)

    def _share_of_products(self, kind: str) -> float:
        """Return the assumed rate of a kind of arithmetic that was not measured, as a fraction of
        the rate of large matrix products. Example: 0.6 for the kind "convolution"."""
        return _SHARE_OF_PRODUCTS.get(kind.removeprefix("causal "), 1.0)

    def _in_fp16(self, kind: str, size: float) -> float:
        """Return the rate in fp16 of an operation that was not measured in fp16. It is the rate in
        bf16, which has as many bits, times the ratio of the two dtypes' known matrix rates. `kind`
        and `size` are those of `achieved`."""
        known = self.matrix_flops_per_s
        if kind not in _ARITHMETIC or "fp16" not in known:
            return self.achieved(kind, "bfloat16", size)
        if "bf16" not in known:  # no bf16 units
            return known["fp16"].value * self._share_of_products(kind)
        return self.achieved(kind, "bfloat16", size) * known["fp16"].value / known["bf16"].value

    def _in_float8(self, kind: str, size: float) -> float:
        """Return the rate in float8 of an operation that was not measured in float8. `kind` and
        `size` are those of `achieved`.

        It is the rate in bf16. For products it is multiplied by the ratio of the two dtypes'
        achieved matrix rates, or of their published peaks if an achieved rate is unknown.
        """
        bf16 = self.achieved(kind, "bfloat16", size)
        if kind not in _ARITHMETIC:
            return bf16
        for known in (self.matrix_flops_per_s, self.matrix_peak_flops_per_s):
            if "fp8" in known and "bf16" in known:
                return bf16 * known["fp8"].value / known["bf16"].value
        return bf16

    def bandwidth(self, bytes_accessed: float) -> float:
        """Return the bandwidth (bytes/s) for an operation that accesses `bytes_accessed` bytes: that
        of device memory, or of a GPU's L2 cache for few bytes."""
        for key in ("elementwise/float32",):
            if key in self.rates:
                return _interpolated(self.rates[key], bytes_accessed)
        known = self.memory_bytes_per_s.value if self.memory_bytes_per_s else _UNKNOWN_BANDWIDTH[self.device]
        return known * cache_speedup(self.architecture, bytes_accessed)

    def _matrix_rate(self, dtype: str) -> float:
        name = _TYPE_OF.get(dtype, "fp32")
        figure = self.matrix_flops_per_s.get(name)
        if figure is None and name in ("bf16", "tf32"):  # without such units: fp32
            figure = self.matrix_flops_per_s.get("fp32")
        if figure is not None:
            return figure.value
        return (
            _UNKNOWN_FLOPS[self.device] * (2.0 if name != "fp32" else 1.0) * (self.cores if self.device == "cpu" else 1)
        )

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

    within_s, between_s, call_s, said = LATENCIES["NVLink" if row["link"] >= NVLINK else "PCIe"]
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
        process_latency_s=figure(within_s, said),
        network_latency_s=figure(between_s, said),
        call_s=figure(call_s, said),
        explain_only=row.get("explain_only", False),
    )


_CONVOLUTIONS = (
    "convolution",
    "convolution backward",
    "channels-last convolution",
    "channels-last convolution backward",
)
_ARITHMETIC = (
    "product",
    "batched product",
    *_CONVOLUTIONS,
    *(which + kind for which in ("pointwise ", "depthwise ", "transposed ") for kind in _CONVOLUTIONS),
    "attention",
    "attention backward",
    "causal attention",
    "causal attention backward",
    "blocked attention",
    "blocked attention backward",
)
_NEAREST = {
    "causal attention": "attention",
    "causal attention backward": "attention backward",
    "blocked attention": "batched product",
    "blocked attention backward": "batched product",
    **{
        f"{which}{kind}": f"{which}{other}"
        for which in ("", "pointwise ", "depthwise ", "transposed ")
        for kind, other in zip(_CONVOLUTIONS[1:], ("convolution", "convolution", "convolution backward"), strict=True)
    },
    "channels-last pooling": "pooling",
    **{
        f"{layout}{which}average pooling{way}": "reduction"
        for layout in ("", "channels-last ")
        for which in ("", "overlapping ")
        for way in ("", " backward")
    },
    **{
        f"{layout}{which} interpolation{way}": "elementwise"
        for layout in ("", "channels-last ")
        for which in ("nearest", "linear")
        for way in ("", " backward")
    },
    "index": "gather",
    "index select": "gather",
    "element gather": "gather",
    "element scatter": "scatter",
    "index add": "scatter",
    "copy between formats": "copy",
    "elementwise between formats": "elementwise",
    "batch norm": "reduction",
    "channels-last batch norm": "batch norm",
    "grid sample backward": "grid sample",
    "indexed sum": "scatter",
    "gelu backward": "gelu",
    "16-bit dropout": "random",
}
# arithmetic inside compiled kernels, beside their memory access -> the nearest eager operation on a
# CPU
_COMPUTED = {
    "compiled random": "random",
    "compiled exp": "transcendental",
    "compiled tanh": "tanh",
    "compiled erf": "gelu",
    "compiled pooling": "pooling",
    "compiled mask": "elementwise",
    "compiled mask read": "elementwise",
}
COMPILED_ARITHMETIC = tuple(_COMPUTED)
_SHARE_OF_PRODUCTS = {
    "attention": 0.6,
    "attention backward": 0.5,
    "batched product": 0.7,
    **dict.fromkeys(_CONVOLUTIONS, 0.6),
    **{f"{which} {kind}": 0.6 for which in ("pointwise", "transposed") for kind in _CONVOLUTIONS},
    # a depthwise convolution has few FLOPs for each byte: about the median of what a Zen 4 processor reached
    **{f"depthwise {kind}": 0.05 if "backward" in kind else 0.2 for kind in _CONVOLUTIONS},
}
# Rates of kernels on a GPU that was not calibrated, as fractions of its memory bandwidth: in 32 bits
# and in 16 bits. They were measured on an H100 at the largest size of the calibration
# (records/gpu.json). The bytes are those that `calibration/operation_rates.py` counts; an update, for
# example, counts 4 of the 7 tensors that it reads or writes. Kinds whose rate depends on the length of
# a row (reductions, softmax, transposed copies) are left out: the calibration's rows are shorter
# than those of large models
_SHARE_OF_BANDWIDTH = {
    "cast": (0.69, 1.0),
    "scatter": (0.49, 0.31),
    "indexed sum": (0.49, 0.31),  # not measured there: as a scatter
    "search": (0.33, 0.33),
    "pooling": (0.77, 0.51),
    "channels-last pooling": (0.61, 0.5),
    "batch norm": (0.39, 0.25),
    "update": (0.52, 0.43),
    "16-bit dropout": (0.17, 0.11),
}
_TYPE_OF = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "tf32": "tf32"}
CALIBRATED_WIDTH = 128  # of a head, in the calibration of attention on a GPU
_USUAL_PROCESSORS = 108
# the largest factor by which a shape's rate may exceed the measured one: the measured sizes end at a
# large product, whose rate is near the device's best
_MOST_RATIO = 1.25
_SEEN = (  # fields that are always detected; their values in the calibration's file are ignored
    "architecture", "processors", "devices_per_node", "cores", "memory_bytes", "host_memory_bytes", "matrix_peak_flops_per_s",
)  # fmt: skip
FILES = (".yaml", ".yml", ".json")  # endings of a machine file's name
CALIBRATION_VERSION = 3  # files of another version are not read
PRIVATE = 0o700  # mode of the cache's folders
_UNKNOWN_FLOPS = {"cpu": 5e10, "cuda": 1e13}  # fp32, of one core or one GPU, if nothing is known
_UNKNOWN_BANDWIDTH = {"cpu": 1e10, "cuda": 5e11}


def _interpolated(table: Mapping[int, float], size: float) -> float:
    """Return the rate at `size`, interpolated in the logarithms of size and rate. Outside the
    measured sizes, it is the rate of the nearest measured size.

    table  maps a measured size to its rate
    """
    sizes = sorted(table)
    place = bisect.bisect_left(sizes, size)
    if place in (0, len(sizes)):
        return table[sizes[min(place, len(sizes) - 1)]]
    below, above = sizes[place - 1], sizes[place]
    share = math.log(size / below) / math.log(above / below)
    return table[below] ** (1 - share) * table[above] ** share


def cache_folder() -> Path:
    """Return the user's folder for data that can be computed again, such as calibrations and token
    files: $XDG_CACHE_HOME/tightfit, or ~/.cache/tightfit if this variable is not set."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tightfit"


def private_folder(folder: Path) -> None:
    """Create a folder in the cache, if it does not exist, and let only this user enter it.

    Raises OSError if the folder cannot be created or belongs to another user.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for part in (cache_folder(), folder):
        found = part.stat()
        if hasattr(os, "getuid") and found.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "belongs to another user", str(part))
        if stat.S_IMODE(found.st_mode) != PRIVATE:
            part.chmod(PRIVATE)


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
    found = Machine(
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
            seen = ("name", "cores", "memory_bytes", "host_memory_bytes")
            return _of_table(name, row, len(gpus), 1).replace(**{field: getattr(found, field) for field in seen})
    return _with_estimates(found, gpu)


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
