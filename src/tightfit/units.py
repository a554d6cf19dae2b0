"""Parses and formats sizes, counts, rates and durations: GiB for memory, s and ms for time."""

from __future__ import annotations

import math
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
_MOST_BYTES = 2**63 - 1
_NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e\+?[0-9]+)?"


def parse_bytes(text: str | int | float) -> int:
    """Return a size as a number of bytes.

    text  a number of bytes, or a text such as '24GiB', '1.5 GB' or '8e9'

    Raises InputError if `text` is not a size, is negative or is more than 2**63 - 1 bytes.
    """
    if isinstance(text, str):
        match = re.fullmatch(rf"\s*({_NUMBER})\s*([a-z]*)\s*", text, re.IGNORECASE)
        size = _BYTES.get(match.group(2).lower() or "b") if match else None
        number = float(match.group(1)) if match else math.nan
    else:
        number, size = (math.nan if isinstance(text, bool) or not isinstance(text, int | float) else text), 1
    if size is None or not 0 <= number * size <= _MOST_BYTES:  # the comparison is False for NaN
        raise InputError(f"size {text!r}", "not a number of bytes", "write it like 24GiB, 512MiB or 8e9")
    return int(number * size)


def format_bytes(count: float) -> str:
    """Return a number of bytes as text in binary units: '13.7 GiB', '512 MiB', '96 B'."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            value = count / size
            return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"
    return f"{count:.0f} B"


def format_count(count: float) -> str:
    """Return a number of parameters, tokens or FLOPs as text: '13.8M', '6.74B', '96'."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= 0.9995 * size:  # three digits would round it up to this unit
            return f"{_three_digits(count / size)}{unit}"
    return f"{count:.0f}"


def format_flops(rate: float) -> str:
    """Return a rate of arithmetic, given in FLOP/s, as text: '205 GFLOP/s', '1.98 PFLOP/s'."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if rate >= 0.9995 * size:
            return f"{_three_digits(rate / size)} {unit}FLOP/s"
    return f"{_three_digits(rate / 1e6)} MFLOP/s"


def format_seconds(seconds: float) -> str:
    """Return a duration as text: '2 h 05 min', '3 min 20 s', '1.25 s', '830 ms', '12 us'; '?' if it
    is not finite."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    if seconds >= 59.95:
        return f"{whole // 60} min {whole % 60:02d} s"
    if seconds >= 0.9995:
        return f"{_three_digits(seconds)} s"
    return f"{_three_digits(seconds * 1e3)} ms" if seconds >= 0.9995e-3 else f"{_three_digits(seconds * 1e6)} us"


def _three_digits(value: float) -> str:
    """Return a number as text with three significant digits, such as '1.25'. A number of 100 or
    more is rounded to a whole number, such as '12345'."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"
