"""The cache of prepared data: folders named by a fingerprint of what went in, complete or absent.

Beside each stands what its files are: sizes and checksums. A folder that is not what was made is made again.
"""

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
from tightfit.machine import cache_folder, private_folder

_LAYOUT = 2  # raise it when what is stored changes its meaning
_HASHED_WHOLE = 2**26  # bytes of a file that is read whole for its checksum; of a larger one both ends
_END = 2**20


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
    if _is_as_made(final):
        return final
    try:
        private_folder(final.parent)
        with _alone(final.with_suffix(".lock")):
            if not _is_as_made(final):
                shutil.rmtree(final, ignore_errors=True)
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
        _manifest(final).write_text(json.dumps(_checksums(partial)))
        partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _manifest(folder: Path) -> Path:
    return folder.with_suffix(".json")


def _is_as_made(folder: Path) -> bool:
    """Whether the folder is there, and its files are those that were made."""
    try:
        return folder.exists() and json.loads(_manifest(folder).read_text()) == _checksums(folder)
    except (OSError, ValueError):
        return False


def _checksums(folder: Path) -> dict[str, list[Any]]:
    """Size and checksum of each file, by its path within the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): [path.stat().st_size, _checksum(path)] for path in files}


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        if path.stat().st_size <= _HASHED_WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        found = hashlib.sha256(file.read(_END))
        file.seek(-_END, 2)
        found.update(file.read(_END))
        return found.hexdigest()


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Only one process at a time is inside; the system lets go of the lock when a process dies."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
