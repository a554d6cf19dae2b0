"""Profiles that are kept on disk: a trace of the same model, of the same shapes, by the same code is not made twice.

A file is JSON: data, and no code. It names the trace that it is of and carries a checksum; what cannot be read or verified is made
again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tightfit
from tightfit.job import Job, ModelSpec
from tightfit.machine import cache_folder, private_folder
from tightfit.planner.programs import Programs, from_content, to_content
from tightfit.record import code_version

MOST = 400  # files; the ones that were not used for longest go
VERSION = 3  # of the files: raise it when what is written changes its meaning


def kept(what: Any, make: Callable[[], Programs]) -> Programs:
    """What `make` returns, from disk where it was made before of the same `what`. None is made each time."""
    if what is None:
        return make()
    name = hashlib.sha256(
        json.dumps([what, code_version(), _source()], default=str, sort_keys=True).encode()
    ).hexdigest()
    folder = cache_folder() / "profiles"
    path = folder / f"{name}.json"
    try:
        private_folder(folder)
        found = read(path)
        os.utime(path)
        return found
    except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError):
        made = make()
    try:
        private_folder(folder)
        write(path, made)
        _forget(folder)
    except OSError:  # a full or closed disk costs time, and nothing else
        pass
    return made


def write(path: Path, programs: Programs) -> None:
    """Write a profile, complete or not at all."""
    text = json.dumps(to_content(programs), separators=(",", ":"))
    header = {"version": VERSION, "trace": path.stem, "sha256": _checksum(path.stem, text)}
    half = path.with_suffix(f".{os.getpid()}")
    half.write_text(f"{json.dumps(header)}\n{text}\n", encoding="utf-8")
    half.replace(path)


def read(path: Path) -> Programs:
    """The profile in a file. Raises OSError, ValueError, TypeError, KeyError, IndexError or RecursionError for any other file."""
    first, _, text = path.read_text(encoding="utf-8").partition("\n")
    header, text = json.loads(first), text.removesuffix("\n")
    if (header["version"], header["trace"], header["sha256"]) != (VERSION, path.stem, _checksum(path.stem, text)):
        raise ValueError(f"{path} is not the profile that was written")
    return from_content(json.loads(text))


def _checksum(trace: str, text: str) -> str:
    return hashlib.sha256(f"{VERSION}\n{trace}\n{text}".encode()).hexdigest()


def identity(job: Job) -> Any:
    """What decides a job's traces, as far as it can be written down: None for models and losses of the user's own code."""
    spec = job.model
    if not isinstance(spec, ModelSpec) or spec.python is not None or spec.from_ is not None or job.loss is not None:
        return None
    return spec.model_dump(mode="json")


@functools.cache
def _source() -> str:
    """Of the package's own files: whoever changes one makes new profiles."""
    root = Path(tightfit.__file__).parent
    files = sorted(root.rglob("*.py"))
    return hashlib.sha256("".join(f"{path}{path.stat().st_mtime_ns}" for path in files).encode()).hexdigest()


def _forget(folder: Path) -> None:
    """Remove the oldest profiles, and those of versions that pickled them."""
    for path in folder.glob("*.pickle"):
        path.unlink(missing_ok=True)
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in files[: max(len(files) - MOST, 0)]:
        path.unlink(missing_ok=True)


__all__ = ["identity", "kept", "read", "write"]
