"""The cache of prepared data: folders named by a fingerprint of what went in, complete or absent."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tightfit.errors import InputError
from tightfit.machine import cache_folder

_LAYOUT = 2  # raise it when what is stored changes its meaning


def fingerprint(content: Any) -> str:
    """A short name for JSON-like content: equal content, equal name."""
    text = json.dumps([_LAYOUT, content], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def stamps(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Path, size and time of change of each file: what tells that a file is another one now."""
    return [(str(file), (facts := file.stat()).st_size, facts.st_mtime_ns) for file in files]


def cached(kind: str, identity: Any, make: Callable[[Path], None]) -> Path:
    """The folder that `make(folder)` filled for this identity, made now if it is not there.

    It is filled under another name and renamed when complete, so an interrupted run leaves nothing half done. A
    second process that wants the same folder waits for the first. Raises InputError where it cannot be written.
    """
    final = cache_folder() / "data" / f"{kind}-{fingerprint(identity)}"
    if final.exists():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _alone(final.with_suffix(".lock")):
            if not final.exists():
                _fill(final, make)
    except OSError as error:
        raise InputError(
            str(error.filename or final),
            f"cannot be read or written: {error.strerror or error}",
            "make it readable, free some disk, or set XDG_CACHE_HOME to a folder with room",
        ) from None
    return final


def _fill(final: Path, make: Callable[[Path], None]) -> None:
    partial = final.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed: whoever lives holds the lock
    partial.mkdir()
    try:
        make(partial)
        partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Only one process at a time is inside; the system lets go of the lock when a process dies."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
