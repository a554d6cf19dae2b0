"""The message for an unexpected error: what failed, where, and how to see the whole traceback."""

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
    """Return a message with the error, the innermost line of the user's or tightfit's code, and how
    to get the whole traceback."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    where = f"\n  at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
    said = [line.rstrip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    message = "\n    ".join(said[:LINES])
    return f"{type(error).__name__}: {message}{where}\n  for the whole traceback: tightfit --traceback ..."


def not_writable(out: Path, error: OSError) -> InputError:
    """Return the InputError for a run's folder that cannot be created or written to, for example
    without permission or on a full disk."""
    return InputError(
        f"--out {out}",
        f"cannot be written to ({error.strerror or error})",
        f"{'free some disk space, or ' if error.errno == errno.ENOSPC else ''}name another folder with --out",
    )


def _is_own(filename: str) -> bool:
    """Whether a file belongs to tightfit or the user, and not to the standard library or an
    installed package."""
    return filename.startswith(_HOME) or not (filename.startswith(("<", *_OTHERS)) or "site-packages" in filename)
