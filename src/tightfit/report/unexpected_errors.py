"""Makes the message for an unexpected error: what failed, where, and how to see the whole
traceback."""

from __future__ import annotations

import errno
import sysconfig
import traceback
from pathlib import Path

from tightfit.errors import InputError

LINES = 4  # lines of the message: errors that torch wraps are on the second or third
_HOME = str(Path(__file__).parent.parent)
_OTHERS = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def describe_failure(error: Exception) -> str:
    """Return the message that the command prints for an unexpected error. It has the error's type
    and first lines, the innermost line of the user's or tightfit's code, and how to get the whole
    traceback."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    where = f"\n  at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
    said = [line.rstrip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    message = "\n    ".join(said[:LINES])
    return f"{type(error).__name__}: {message}{where}\n  for the whole traceback: tightfit --traceback ..."


def not_writable(out: Path, error: OSError) -> InputError:
    """Return the InputError for a run's folder `out` that cannot be created or written to, for
    example because permission is missing or the disk is full.

    error  the error of the operating system
    """
    return InputError(
        f"--out {out}",
        f"cannot be written to ({error.strerror or error})",
        f"{'free some disk space, or ' if error.errno == errno.ENOSPC else ''}name another folder with --out",
    )


def _is_own(filename: str) -> bool:
    """Return whether a file of Python code belongs to tightfit or the user. Files of the standard
    library and of other installed packages do not."""
    return filename.startswith(_HOME) or not (filename.startswith(("<", *_OTHERS)) or "site-packages" in filename)
