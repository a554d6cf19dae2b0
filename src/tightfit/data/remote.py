"""Files at URLs that fsspec reads, such as s3://bucket/folder: they are copied into the cache once,
and read from there.

Training reads samples many times and in any order, and memory-maps long files, so it needs local
files. A file is copied again when its size, its time or its checksum changes.

Source  fsspec, filesystem-spec.readthedocs.io.
"""

from __future__ import annotations

import errno
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from tightfit.data.cache import cached_folder
from tightfit.errors import InputError
from tightfit.values import nearest

_PACKAGES = {  # the package that reads a protocol; fsspec itself reads the others
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "oci": "ocifs",
    "http": "aiohttp",
    "https": "aiohttp",
}


def local_files(field: str, url: str, endings: tuple[str, ...] = ()) -> list[Path]:
    """Return local copies of the files at a URL, sorted by their paths at the URL.

    field    the data field that has this value, for messages
    url      a file, a folder or a glob, such as s3://bucket/folder/*.jsonl
    endings  from a folder, only files with one of these endings are taken; () takes all

    Raises InputError if the URL has no such files, if they cannot be read, or if a package is
    missing.
    """
    asked = f"data: {field}={url}"
    system, files = _found(asked, url, endings)
    try:
        versions = [system.ukey(file) for file in files]
    except Exception as error:  # each back end raises classes of its own
        raise _unreadable(asked, error) from None
    names = _names(files)

    def copy(folder: Path) -> None:
        for file, name in zip(files, names, strict=True):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                system.get_file(file, str(target))
            except Exception as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise  # the cache's own message names the disk
                raise _unreadable(asked, error) from None

    folder = cached_folder("remote", [url.split("://")[0], files, versions], copy)
    return [folder / name for name in names]


def remote_files(field: str, url: str, endings: tuple[str, ...] = ()) -> list[str]:
    """Return the URLs of the files that `local_files` would copy, without copying them. Raises
    InputError like `local_files`."""
    system, files = _found(f"data: {field}={url}", url, endings)
    return [system.unstrip_protocol(file) for file in files]


def local_path(url: str) -> str:
    """Return the path of a file:// URL."""
    return unquote(urlsplit(url).path)


def _found(asked: str, url: str, endings: tuple[str, ...]) -> tuple[Any, list[str]]:
    """Return (the file system of a URL, the paths of its files in it). Raises InputError if there
    are none."""
    system, path = _file_system(asked, url)
    try:
        files = _listed(system, path, endings)
        known = bool(files) or system.isdir(path)
        beside = [] if known else sorted(system.ls(path.rpartition("/")[0], detail=False))
    except FileNotFoundError:
        files, beside = [], []
    except Exception as error:  # each back end raises classes of its own
        raise _unreadable(asked, error) from None
    if not files:
        kinds = f" ending in {' or '.join(endings)}" if endings else ""
        raise InputError(asked, f"there are no files{kinds} at this URL", _near(url, beside))
    return system, files


def _near(url: str, beside: list[str]) -> str:
    """Return the remedy for a URL without files. beside: the paths in its parent folder."""
    names = [PurePosixPath(one).name for one in beside]
    return nearest(PurePosixPath(url).name, names[:20]) if names else "check the URL"


def _file_system(asked: str, url: str) -> tuple[Any, str]:
    """Return (the fsspec file system of a URL, the path within it)."""
    from fsspec.core import url_to_fs

    protocol = url.split("://")[0]
    try:
        return url_to_fs(url)
    except ImportError as error:
        package = _PACKAGES.get(protocol, error.name or protocol)
        raise InputError(
            asked, f"reading {protocol}:// needs the package {package}", f"run: pip install {package}"
        ) from None
    except ValueError as error:
        raise InputError(
            asked,
            f"fsspec cannot read this URL ({error})",
            "use a protocol such as s3://, gs://, https:// or file://, or a local path",
        ) from None
    except Exception as error:
        raise _unreadable(asked, error) from None


def _listed(system: Any, path: str, endings: tuple[str, ...]) -> list[str]:
    if system.isfile(path):
        return [path]
    if any(letter in path for letter in "*?["):
        return sorted(file for file in system.glob(path) if system.isfile(file))
    inside = sorted(system.find(path))
    shown = (file for file in inside if not any(part.startswith(".") for part in _below(file, path).parts))
    return [file for file in shown if not endings or PurePosixPath(file).name.lower().endswith(endings)]


def _below(file: str, folder: str) -> PurePosixPath:
    return PurePosixPath(file.removeprefix(folder.rstrip("/")).lstrip("/"))


def _names(files: list[str]) -> list[str]:
    """Return a relative path for each file: its path below the folder that all files are in. In it,
    ".." is replaced, which would lead out of the folder."""
    parts = [[part for part in file.split("/") if part] for file in files]
    common = 0
    while all(len(part) > common + 1 and part[common] == parts[0][common] for part in parts):
        common += 1
    return ["/".join(part.replace("..", "__") for part in one[common:]) for one in parts]


def _unreadable(asked: str, error: Exception) -> InputError:
    said = " ".join(str(error).split()) or type(error).__name__
    return InputError(
        asked, f"cannot be read ({type(error).__name__}: {said})", "check the URL, the network and your credentials"
    )
