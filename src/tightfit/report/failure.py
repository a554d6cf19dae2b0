"""What a command says when it failed for a reason outside tightfit: what, where, and how to see more."""

from __future__ import annotations

import errno
import sysconfig
import traceback
from pathlib import Path

from tightfit.errors import InputError

LINES = 4  # of the message: what torch wraps stands on the second or third
_HOME = str(Path(__file__).parent.parent)
_OTHERS = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def describe_failure(error: Exception) -> str:
    """The error, the place in the user's or tightfit's code nearest to it, and the way to the whole traceback."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    where = f"\n  at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
    said = [line.rstrip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    message = "\n    ".join(said[:LINES])
    return f"{type(error).__name__}: {message}{where}\n  for the whole traceback: tightfit --traceback ..."


def not_writable(out: Path, error: OSError) -> InputError:
    """What is said of a run's folder that cannot be made or written into: no rights, no such place, no room."""
    return InputError(
        f"--out {out}",
        f"cannot be written to ({error.strerror or error})",
        f"{'make room there, or ' if error.errno == errno.ENOSPC else ''}name another folder with --out",
    )


def _is_own(filename: str) -> bool:
    """Whether a file is tightfit's, or anything but a library of Python's or an installed one."""
    return filename.startswith(_HOME) or not (filename.startswith(("<", *_OTHERS)) or "site-packages" in filename)
