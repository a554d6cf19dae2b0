"""What a record says of its origin: versions, commit, date, machine and processor."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CPU_INFO = Path("/proc/cpuinfo")


def provenance() -> dict[str, Any]:
    """The first fields of a record."""
    from tightfit.machine import Machine
    from tightfit.record import code_version

    return {
        "code": code_version(),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": Machine.detect().name,
        "processor": processor(CPU_INFO.read_text() if CPU_INFO.exists() else ""),
    }


def commit() -> str | None:
    """The commit of the source tree, with a + if files have changed since; None outside of git."""
    try:
        head, changed = (
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def processor(cpu_info: str) -> str | None:
    """The generation of the processor and whether it has bf16 instructions, from /proc/cpuinfo. A
    virtual machine's model name often hides the generation. None if it is not known."""
    fields = dict(
        (part.strip() for part in line.split(":", 1)) for line in cpu_info.split("\n\n")[0].splitlines() if ":" in line
    )
    if "flags" not in fields:
        return None
    flags = fields["flags"].split()
    bf16 = "with" if {"avx512_bf16", "amx_bf16"} & set(flags) else "without"
    name = fields.get("model name", "processor")
    if fields.get("vendor_id") == "AuthenticAMD":
        name = _zen(int(fields.get("cpu family", 0)), int(fields.get("model", 0))) or name
    if fields.get("vendor_id") == "GenuineIntel" and fields.get("cpu family") == "6":
        name = INTEL.get(int(fields.get("model", 0)), name)
    return f"{name}, {bf16} bf16 instructions"


# by the model number of family 6
INTEL = {
    85: "Skylake or Cascade Lake",
    106: "Ice Lake",
    143: "Sapphire Rapids",
    173: "Granite Rapids",
    207: "Emerald Rapids",
}


def _zen(family: int, model: int) -> str | None:
    if family == 26:
        return "Zen 5"
    if family == 25:
        return "Zen 4" if model // 16 in (1, 6, 7, 10) else "Zen 3"
    return "Zen 2" if family == 23 and model >= 48 else None
