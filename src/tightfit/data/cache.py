"""Caches prepared data on disk: token files, tokenizers, lists of damaged images.

Each entry of the cache is a folder. Its name contains a fingerprint (a hash) of everything that the
content depends on, such as the paths, sizes and times of the data files. The folder is either
complete or absent. A JSON file next to it, the manifest, holds the size and checksum of each of its
files. If these do not match the files, the folder is made again.
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

from tightfit.cache_folder import cache_folder, private_folder
from tightfit.errors import InputError

_FORMAT_VERSION = 2  # increase it when the meaning of the stored files changes
_FULL_HASH_BYTES = 2**26  # bytes; a larger file's checksum covers only its first and last _END_BYTES
_END_BYTES = 2**20


def fingerprint(content: Any) -> str:
    """Return a hash of JSON-like content, as 32 hex digits. Equal content has equal fingerprints.
    Values that JSON does not know are hashed as str() writes them."""
    text = json.dumps([_FORMAT_VERSION, content], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def stamps(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return (path, size in bytes, modification time in ns) of each file. After a file has been
    changed, the result differs."""
    return [(str(file), (facts := file.stat()).st_size, facts.st_mtime_ns) for file in files]


def cached_folder(kind: str, identity: Any, make: Callable[[Path], None]) -> Path:
    """Return the cache folder for `identity`. If the cache has no valid folder for it, make one.

    kind      the kind of content, such as "tokens"; the folder's name begins with it
    identity  JSON-like: everything that the content depends on
    make      writes the content into the empty folder that it is given; called only if the cache
              has no valid folder

    The folder is filled under another name and renamed when it is complete, so an interrupted run
    leaves no incomplete folder. A second process that needs the same folder waits for the first.
    Raises InputError if the cache cannot be read or written.
    """
    final = cache_folder() / "data" / f"{kind}-{fingerprint(identity)}"
    if _is_valid(final):
        return final
    try:
        private_folder(final.parent)
        with _locked(final.with_suffix(".lock")):
            if not _is_valid(final):
                shutil.rmtree(final, ignore_errors=True)
                _fill(final, make)
    except OSError as error:
        raise InputError(
            str(error.filename or final),
            f"cannot be read or written: {error.strerror or error}",
            "make it readable, free some disk space, or set XDG_CACHE_HOME to a folder with free space",
        ) from None
    return final


def _fill(final: Path, make: Callable[[Path], None]) -> None:
    partial = final.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed run: a live one would hold the lock
    partial.mkdir()
    try:
        make(partial)
        _manifest(final).write_text(json.dumps(_checksums(partial)))
        partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _manifest(folder: Path) -> Path:
    return folder.with_suffix(".json")


def _is_valid(folder: Path) -> bool:
    """Return whether the folder exists and its files match its manifest."""
    try:
        return folder.exists() and json.loads(_manifest(folder).read_text()) == _checksums(folder)
    except (OSError, ValueError):
        return False


def _checksums(folder: Path) -> dict[str, list[Any]]:
    """Return {path within the folder: [size in bytes, checksum]} for all files in the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): [path.stat().st_size, _checksum(path)] for path in files}


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        if path.stat().st_size <= _FULL_HASH_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        found = hashlib.sha256(file.read(_END_BYTES))
        file.seek(-_END_BYTES, 2)
        found.update(file.read(_END_BYTES))
        return found.hexdigest()


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Inside this context, hold an exclusive lock on the file `lock`. Other processes that enter it
    with the same file wait. If this process dies, the operating system releases the lock."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
