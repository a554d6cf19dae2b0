"""Lets only one run at a time write to a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tightfit.errors import InputError
from tightfit.report.unexpected_errors import not_writable

try:
    import fcntl
except ImportError:  # a system without such locks
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"


@contextmanager
def folder_held(out: Path) -> Iterator[None]:
    """Context manager that holds the run folder `out`, and creates it if it does not exist. The
    system releases it if this process is killed.

    Raises InputError if another process holds the folder, or if it is not writable. On a file system
    without locks, nothing is held.
    """
    if fcntl is None:
        yield
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise not_writable(out, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InputError(
                f"--out {out}",
                f"another run is writing to it (process {file.read().strip() or 'unknown'})",
                "wait until it has ended, or name another folder",
            ) from None
        except OSError:
            pass
        with suppress(OSError):  # a full disk: the lock holds without the number of the process
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"{os.getpid()}\n".encode())
        yield


__all__ = ["folder_held"]
