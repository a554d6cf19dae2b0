"""Cache traces and the results of dry runs on disk: the same model with the same shapes and the same
code is traced only once.

A cache file is JSON, so loading it runs no code. It contains the key of its trace and a checksum.
A file that cannot be read, or whose checksum is wrong, is replaced by a new trace.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import tightfit
from tightfit.cache_folder import cache_folder, private_folder
from tightfit.job import Job
from tightfit.planner.tracing.plain_data import RecordedStep, from_content, to_content
from tightfit.record import code_version

MAX_FILES = 2000  # about 70 MB; beyond that, the least recently used files are removed
VERSION = 7  # of the file format: raise it when the meaning of the content changes

Result = TypeVar("Result")


def cached(key: Any, make: Callable[[], RecordedStep]) -> RecordedStep:
    """Return the trace that is cached on disk for `key`. If there is none, make it by `make()`,
    write it to the cache and return it.

    key   everything that the trace depends on, as plain data; None: do not use the cache
    make  function that makes the trace
    """
    return _cached(key, make, read, write)


def cached_number(key: Any, make: Callable[[], float]) -> float:
    """As `cached`, for a number in place of a trace."""
    return _cached(key, make, lambda path: float(_read_content(path)), _write_content)


def _cached(
    key: Any, make: Callable[[], Result], read: Callable[[Path], Result], write: Callable[[Path, Result], None]
) -> Result:
    if key is None:
        return make()
    folder = _folder()
    path = folder / f"{file_name(key)}.json"
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
        _evict(folder)
    except OSError:  # the disk is not writable: the next run makes the trace again
        pass
    return made


def _folder() -> Path:
    return cache_folder() / "profiles"


def is_writable() -> bool:
    """Return whether traces can be stored on disk."""
    try:
        private_folder(_folder())
        with tempfile.TemporaryFile(dir=_folder()):
            return True
    except OSError:
        return False


def file_name(key: Any) -> str:
    """Return the name, without its ending, of the file in which the trace for `key` is stored."""
    return hashlib.sha256(
        json.dumps([key, code_version(), _source_hash()], default=str, sort_keys=True).encode()
    ).hexdigest()


def write(path: Path, step: RecordedStep) -> None:
    """Write a trace to the file `path` atomically: after a failure, the file does not exist or is
    unchanged."""
    _write_content(path, to_content(step))


def read(path: Path) -> RecordedStep:
    """Read the trace in the file `path`. Raises OSError, ValueError, TypeError, KeyError,
    IndexError or RecursionError if the file is not one that `write` wrote."""
    return from_content(_read_content(path))


def _write_content(path: Path, content: Any) -> None:
    text = json.dumps(content, separators=(",", ":"))
    header = {"version": VERSION, "trace": path.stem, "sha256": _checksum(path.stem, text)}
    half = path.with_suffix(f".{os.getpid()}")
    half.write_text(f"{json.dumps(header)}\n{text}\n", encoding="utf-8")
    half.replace(path)


def _read_content(path: Path) -> Any:
    first, _, text = path.read_text(encoding="utf-8").partition("\n")
    header, text = json.loads(first), text.removesuffix("\n")
    if (header["version"], header["trace"], header["sha256"]) != (VERSION, path.stem, _checksum(path.stem, text)):
        raise ValueError(f"{path} is not the profile that was written")
    return json.loads(text)


def _checksum(trace: str, text: str) -> str:
    return hashlib.sha256(f"{VERSION}\n{trace}\n{text}".encode()).hexdigest()


def cache_key(job: Job) -> Any:
    """Return everything in the job's model that its traces depend on, as plain data. Return None if
    the traces are not to be cached, because the model or the loss is the user's own code, or the
    model comes from a folder."""
    spec = job.model
    if not job.of_transformers or spec.from_ is not None or job.loss is not None:
        return None
    return spec.model_dump(mode="json")


@functools.cache
def _source_hash() -> str:
    """Return a hash of the paths and modification times of the package's files, so that a change of
    the code leads to new traces."""
    root = Path(tightfit.__file__).parent
    files = sorted(root.rglob("*.py"))
    return hashlib.sha256("".join(f"{path}{path.stat().st_mtime_ns}" for path in files).encode()).hexdigest()


def _evict(folder: Path) -> None:
    """Delete the least recently used traces in `folder`, so that MAX_FILES remain. Also delete the
    pickle files that earlier versions of tightfit wrote there."""
    for path in folder.glob("*.pickle"):
        path.unlink(missing_ok=True)
    files = list(folder.glob("*.json"))
    if len(files) > MAX_FILES:
        for path in sorted(files, key=_last_use)[: len(files) - MAX_FILES]:
            path.unlink(missing_ok=True)


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process has deleted it
        return 0.0


__all__ = ["cache_key", "cached", "cached_number", "file_name", "is_writable", "read", "write"]
