"""Capabilities of a machine: which precisions are fast, and whether torch.compile finds the
compiler that it needs.

This module does not import torch, because commands use it before they set the environment of the
training process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

from tightfit.achieved_rates import FLOAT8, achieved
from tightfit.machine import Machine
from tightfit.machines.gpus import GENERATIONS, multiplies_float8

LARGE = 4096  # rows, columns and depth of a large product
WORTH = 1.2  # a precision is fast if its matrix products are at least 1.2 times as fast as in fp32


def has_fast_fp16(machine: Machine) -> bool:
    """Return whether matrix products are faster in fp16 than in fp32, by the machine's known rates.
    Without known rates, return True for a GPU. Return False for a CPU."""
    if machine.device != "cuda":
        return False
    known = machine.matrix_flops_per_s
    return "fp16" not in known or "fp32" not in known or known["fp16"].value > WORTH * known["fp32"].value


def has_fast_tf32(machine: Machine) -> bool:
    """Return whether matrix products are faster in tf32 than in fp32, by the rates of the device
    table or of a calibration. Return False if a rate is unknown."""
    known = machine.matrix_flops_per_s
    return "tf32" in known and "fp32" in known and known["tf32"].value > WORTH * known["fp32"].value


def has_fast_bf16(machine: Machine) -> bool:
    """Return whether matrix products are faster in bf16 than in fp32.

    Measured or published rates decide this. If there are none, or only those of a quick
    calibration, the GPU's architecture or the CPU's instructions decide.
    """
    measured = machine.matrix_flops_per_s
    is_quick = any(figure.source == "quick" for figure in measured.values())
    if "fp32" in measured and not is_quick:  # both sources have every dtype of the device
        return "bf16" in measured and measured["bf16"].value > WORTH * measured["fp32"].value
    if machine.device == "cuda":
        generation = GENERATIONS.get(machine.architecture)
        return generation is not None and "bf16" in generation.flops
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def has_fast_float8(machine: Machine, recipe: str) -> bool:
    """Return whether large matrix products are faster in float8 than in bf16.

    recipe  how the factors are scaled: tensorwise (a scale for each tensor) or rowwise (for each
            row)
    """
    if machine.device != "cuda" or not multiplies_float8(machine.architecture, recipe == "rowwise"):
        return False
    return achieved(machine, "product", FLOAT8, LARGE) > achieved(machine, "product", "bfloat16", LARGE)


def can_compile(machine: Machine) -> bool:
    return not missing_for_compile(machine)


def missing_for_compile(machine: Machine) -> str:
    """Return the names of the programs and files that torch.compile needs and that are missing on
    this machine, as a phrase such as "a compiler (g++, clang++, c++)". Return "" if nothing is
    missing.

    A machine of the device table or of a machine file is assumed to have everything. For CPUs,
    torch.compile generates C++. For CUDA devices, it uses Triton, which compiles a C stub for each
    kernel.
    """
    if not machine.is_here:
        return ""
    compilers, named = _COMPILERS[machine.device]
    chosen = os.environ.get(named, "")  # as torch and Triton read it
    found = [path for name in (*chosen.split()[:1], *compilers) if (path := shutil.which(name))]
    lacks = []
    if not found:
        lacks.append(f"a compiler ({', '.join(compilers)})")
    if not _has_headers(found, "c" if machine.device == "cuda" else "c++"):
        lacks.append("Python's headers (python3-dev, or python3-devel)")
    return " and ".join(lacks)


def _has_headers(compilers: list[str], language: str) -> bool:
    """Return whether Python.h is where Python expects it, or where the first of the compilers finds
    it without being told: in a folder of the variable CPATH, for example.

    language  of what is compiled: c or c++
    """
    if (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return True
    if not compilers:
        return False
    asked = subprocess.run(
        [compilers[0], "-E", "-x", language, "-"],
        input="#include <Python.h>\n",
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.returncode == 0


_COMPILERS = {"cpu": (("g++", "clang++", "c++"), "CXX"), "cuda": (("gcc", "clang", "cc"), "CC")}
