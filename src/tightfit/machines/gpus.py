"""Detects the GPUs that torch can use, finds the reason if torch cannot use a GPU of the host, and
estimates the rates of GPUs that are not in the table of devices.

This module imports torch only if the system shows a GPU.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.machines import ACHIEVED, GEFORCE_ACHIEVED

DRIVER = Path("/proc/driver/nvidia")
DEVICES = Path("/dev")
SIGNS = (  # names in /dev that show a GPU
    "nvidia[0-9]*",  # NVIDIA's driver; a container may have any of them, not only the first
    "dxg",  # WSL2
    "kfd",  # ROCm
    "nvhost-gpu",  # Jetson
    "nvgpu",  # Jetson, later ones
)


@dataclass(frozen=True)
class Gpu:
    """A GPU, with the properties that torch reports.

    architecture     sm_90 for compute capability 9.0; for AMD the LLVM name, such as gfx942
    memory           bytes of device memory
    processors       number of streaming multiprocessors, or of AMD's compute units
    clock_hz         clock of the processors in Hz
    memory_clock_hz  clock of the memory in Hz
    bus_bits         width of the memory bus in bits

    The last three are None if this version of torch does not report them.
    """

    name: str
    architecture: str
    memory: int
    processors: int
    clock_hz: float | None = None
    memory_clock_hz: float | None = None
    bus_bits: int | None = None


@dataclass(frozen=True)
class Generation:
    """Figures that the GPUs of one architecture have in common.

    flops          dense FLOPs of one processor in one clock cycle, by dtype
    clock_hz       a typical boost clock, used if torch does not report the device's own clock
    bytes_per_s    memory bandwidth of a small device of the architecture, used if torch does not
                   report the memory's clock and bus width
    geforce_share  16-bit and tf32 rate of a GeForce card as a fraction of the rate of other cards:
                   0.5 if GeForce cards accumulate in fp32 at half the rate
    """

    flops: dict[str, int]
    clock_hz: float
    bytes_per_s: float
    geforce_share: float = 1.0


def _nvidia(
    fp32: int,
    half: int,
    clock: float,
    bandwidth: float,
    narrow: bool = True,
    geforce: float = 1.0,
    float8: bool = False,
) -> Generation:
    types = {"fp32": fp32, "fp16": half, **({"tf32": half // 2, "bf16": half} if narrow else {})}
    return Generation(types | ({"fp8": 2 * half} if float8 else {}), clock * 1e9, bandwidth * 1e9, geforce)


def _amd(half: int, clock: float, bandwidth: float, float8: bool = False) -> Generation:
    types = {"fp32": 256, "fp16": half, "bf16": half, **({"fp8": 2 * half} if float8 else {})}
    return Generation(types, clock * 1e9, bandwidth * 1e9)


# From NVIDIA's whitepapers on Volta, Turing, Ampere (GA100, GA102), Ada, Hopper and Blackwell, and
# AMD's on CDNA 1 to 4. Processors x clock x these FLOPs gives the peak in the device table within
# 10 %, except for devices that are sold with slower tensor cores (A10G, L40, H20).
GENERATIONS = {
    "sm_70": _nvidia(128, 1024, 1.53, 900, narrow=False),
    "sm_72": _nvidia(128, 1024, 1.4, 137, narrow=False),
    "sm_75": _nvidia(128, 1024, 1.59, 320, narrow=False, geforce=0.5),
    "sm_80": _nvidia(128, 2048, 1.41, 1555),
    "sm_86": _nvidia(256, 1024, 1.7, 450, geforce=0.5),
    "sm_87": _nvidia(256, 1024, 1.3, 200),
    "sm_89": _nvidia(256, 1024, 2.3, 300, geforce=0.5, float8=True),
    "sm_90": _nvidia(256, 4096, 1.83, 2000, float8=True),
    "sm_100": _nvidia(256, 8192, 1.85, 8000, float8=True),
    "sm_103": _nvidia(256, 8192, 1.85, 8000, float8=True),
    "sm_120": _nvidia(256, 1024, 2.4, 670, geforce=0.5, float8=True),
    "sm_121": _nvidia(256, 1024, 2.4, 273, float8=True),
    "gfx908": _amd(1024, 1.5, 1200),
    "gfx90a": _amd(1024, 1.7, 1600),
    "gfx942": _amd(2048, 2.1, 5300, float8=True),
    "gfx950": _amd(4096, 2.4, 8000, float8=True),
}


def shows_signs() -> bool:
    """Return whether the system shows a GPU, through a driver or a device file, that torch may be
    able to use."""
    return DRIVER.exists() or any(True for sign in SIGNS for _ in DEVICES.glob(sign))


def visible() -> list[Gpu]:
    """Return the GPUs that torch can use in this process, in torch's order; an empty list if there
    are none."""
    if not shows_signs():
        return []
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `unused` reports the problem
        if not torch.cuda.is_available():
            return []
    return [_described(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())]


def architecture_of(properties: object) -> str:
    """Return a device's architecture: sm_90 for compute capability 9.0, or AMD's LLVM name, such as
    gfx942.

    properties  the device's properties, from torch.cuda.get_device_properties
    """
    arch = (getattr(properties, "gcnArchName", None) or "").partition(":")[0]
    if arch.startswith("gfx"):
        return arch
    return f"sm_{getattr(properties, 'major', None)}{getattr(properties, 'minor', None)}"


def multiplies_float8(architecture: str, rowwise: bool = False) -> bool:
    """Return whether torch's kernels can multiply in float8 on devices of an architecture, such as
    "sm_90".

    rowwise  if True, with one scale for each row: Hopper (9.0) and later, AMD's MI300 (gfx94) and
             MI350 (gfx95) can. If False, with one scale for each tensor: Ada (8.9) can, too
    """
    if architecture.startswith("gfx"):
        return architecture.startswith(("gfx94", "gfx95"))
    capability = architecture.removeprefix("sm_")
    return capability.isdigit() and int(capability) >= (90 if rowwise else 89)


def _described(properties: object) -> Gpu:
    """Return a Gpu from the properties that torch reports for a device. Clocks and bus width are
    None if torch does not report them."""
    has: dict[str, Any] = {name: getattr(properties, name, None) for name in _ASKED}
    khz = {name: has[name] * 1e3 if has[name] else None for name in ("clock_rate", "memory_clock_rate")}
    return Gpu(
        name=str(has["name"]),
        architecture=architecture_of(properties),
        memory=int(has["total_memory"] or 0),
        processors=int(has["multi_processor_count"] or 0),
        clock_hz=khz["clock_rate"],
        memory_clock_hz=khz["memory_clock_rate"],
        bus_bits=has["memory_bus_width"] or None,
    )


_ASKED = (
    "name", "total_memory", "multi_processor_count", "clock_rate", "memory_clock_rate",
    "memory_bus_width",
)  # fmt: skip


def unused() -> str:
    """Return why torch cannot use the GPU that the system shows. Returns an empty text if torch can
    use a GPU or if the system shows none."""
    if not shows_signs():
        return ""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return ""
    return f"this host shows a GPU, and torch {torch.__version__} does not use it: {_reason(torch, caught)}"


def _reason(torch: object, caught: Iterable[warnings.WarningMessage]) -> str:
    version = torch.version  # type: ignore[attr-defined]
    if version.cuda is None and version.hip is None:
        return "it is a CPU build; install one for CUDA or ROCm (see pytorch.org)"
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if os.environ.get(name) in ("", "-1", "NoDevFiles"):
            return f"{name}={os.environ[name]} hides every GPU"
    return next((str(one.message).splitlines()[0] for one in caught), "the driver reports none")


def estimated_flops_per_s(gpu: Gpu) -> dict[str, float]:
    """Return the estimated dense peak in FLOP/s, by dtype: processors x clock x FLOPs of a
    processor in one clock cycle. Returns an empty dict for an unknown architecture."""
    generation = GENERATIONS.get(gpu.architecture)
    if generation is None or not gpu.processors:
        return {}
    whole = gpu.processors * (gpu.clock_hz or generation.clock_hz)
    share = generation.geforce_share if "GeForce" in gpu.name else 1.0
    return {kind: whole * flops * (1.0 if kind == "fp32" else share) for kind, flops in generation.flops.items()}


def estimated_achieved(gpu: Gpu, kind: str) -> float:
    """Return the share of the estimated peak that large matrix products of the dtype `kind` are
    assumed to reach."""
    generation = GENERATIONS.get(gpu.architecture)
    halved = generation is not None and generation.geforce_share < 1 and "GeForce" in gpu.name and kind != "fp32"
    return GEFORCE_ACHIEVED if halved else ACHIEVED


def estimated_bytes_per_s(gpu: Gpu) -> tuple[float | None, str]:
    """Return (peak memory bandwidth in bytes/s, where the number comes from).

    The bandwidth follows from the memory's clock and bus width, because the memory transfers data
    twice in a clock cycle. If torch does not report them, the number is the bandwidth of a small
    device of the same architecture, or None if the architecture is unknown.
    """
    if gpu.memory_clock_hz and gpu.bus_bits:
        return 2 * gpu.memory_clock_hz * gpu.bus_bits / 8, "what the memory's clock and width give"
    generation = GENERATIONS.get(gpu.architecture)
    return generation.bytes_per_s if generation else None, f"a smaller device of {gpu.architecture}"
