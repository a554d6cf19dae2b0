"""Implements `tightfit cache`: shows what is stored for later runs, and removes it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tightfit.cache_folder import cache_folder
from tightfit.errors import InputError
from tightfit.units import format_bytes

CONTENTS = {
    "machines": "calibrations of machines; removing them makes the next calibration take minutes",
    "profiles": "traces and dry runs of models; removing them makes the next explain repeat them",
    "data": "tokenizers and tokens; removing them makes the next training tokenize again",
}


def cache_command(clear: str | None, as_json: bool) -> None:
    """Print the parts of the cache with their sizes. If `clear` is given, first remove the part
    with this name, or all parts for "all".

    Raises InputError if no part has that name.
    """
    if clear is not None:
        _clear(clear)
    found = contents()
    if as_json:
        print(json.dumps({"folder": str(cache_folder()), "parts": found}))
        return
    print(cache_folder())
    for name, part in found.items():
        size = format_bytes(part["bytes"])
        print(f"{name:10s} {size:>10s}  {part['files']:5d} files  {part['what']}")


def contents() -> dict[str, dict[str, Any]]:
    """Return, for each part of the cache, {"bytes": size on disk, "files": number of files, "what":
    description}, by the part's name."""
    found = {}
    for name, what in CONTENTS.items():
        files = [path for path in _folder(name).rglob("*") if path.is_file()]
        found[name] = {"bytes": sum(path.stat().st_size for path in files), "files": len(files), "what": what}
    return found


def _folder(name: str) -> Path:
    return cache_folder() / name


def _clear(name: str) -> None:
    if name != "all" and name not in CONTENTS:
        raise InputError(f"--clear {name}", "the cache has no such part", f"use one of: {', '.join(CONTENTS)}, all")
    for part in CONTENTS if name == "all" else (name,):
        if _folder(part).exists():
            shutil.rmtree(_folder(part))
