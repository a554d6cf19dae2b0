"""Reads files of settings in YAML, JSON or TOML. The file's suffix decides which format is read."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from tightfit.errors import InputError
from tightfit.values import read_yaml
from tightfit.yaml_input import MOST_BYTES, check_plain


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in a file as a dict. A file whose suffix is .json or .toml is read as
    JSON or TOML, any other file as YAML.

    Raises InputError if the file is missing, too large or not valid, or if it does not contain a
    mapping.
    """
    suffix = path.suffix.lower()
    if suffix not in (".json", ".toml") or not path.is_file():
        return read_yaml(path)
    raw = _bytes(path)
    try:
        written = raw.decode("utf-8-sig")
        content = json.loads(written, object_pairs_hook=_once) if suffix == ".json" else tomllib.loads(written)
    except (ValueError, RecursionError) as error:  # of UTF-8, JSON and TOML
        kind = "JSON" if suffix == ".json" else "TOML"
        raise InputError(str(path), f"not valid {kind} ({error})", "correct the file; JSON has no comments") from None
    if not isinstance(content, dict):
        raise InputError(
            str(path), f"expected a mapping of settings, found {type(content).__name__}", "name a file of settings"
        )
    check_plain(content, str(path))
    return content


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror})", "check the file's permissions") from None
    if len(raw) > MOST_BYTES:
        raise InputError(str(path), f"has more than {MOST_BYTES} bytes", "name a file of settings, not of data")
    return raw


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is written twice")
    return content
