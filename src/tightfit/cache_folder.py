"""The user's folder for data that can be computed again."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

PRIVATE = 0o700  # mode of the cache's folders


def cache_folder() -> Path:
    """Return the user's folder for data that can be computed again, such as calibrations and token
    files: $XDG_CACHE_HOME/tightfit, or ~/.cache/tightfit if this variable is not set."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tightfit"


def private_folder(folder: Path) -> None:
    """Create a folder in the cache, if it does not exist, and let only this user enter it.

    Raises OSError if the folder cannot be created or belongs to another user.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for part in (cache_folder(), folder):
        found = part.stat()
        if hasattr(os, "getuid") and found.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "belongs to another user", str(part))
        if stat.S_IMODE(found.st_mode) != PRIVATE:
            part.chmod(PRIVATE)
