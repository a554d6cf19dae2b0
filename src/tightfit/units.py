"""Sizes and durations, read and written the way people say them: GiB for memory, s and ms for time."""

from __future__ import annotations

import re

from tightfit.errors import InputError

_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_bytes(text: str | int | float) -> int:
    """'24GiB', '1.5 GB' or a plain number of bytes, as an int. Raises InputError."""
    if isinstance(text, int | float):
        return int(text)
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
    unit = match.group(2).lower() or "b" if match else ""
    if match is None or unit not in _BYTES:
        raise InputError(f"size {text!r}", "not a number of bytes", "write it like 24GiB, 512MiB or 8e9")
    return int(float(match.group(1)) * _BYTES[unit])


def format_bytes(count: float) -> str:
    """A number of bytes as people read memory: '13.7 GiB', '512 MiB', '96 B'."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            value = count / size
            return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"
    return f"{count:.0f} B"


def format_count(count: float) -> str:
    """A number of parameters, tokens or FLOPs: '13.8M', '6.74B', '96'."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def format_seconds(seconds: float) -> str:
    """A duration: '2 h 05 min', '3 min 20 s', '1.25 s', '830 ms', '12 us'."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
