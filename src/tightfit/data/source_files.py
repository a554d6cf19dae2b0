"""Finds the files that a source of text names: files, folders, globs, URLs, and the source files
of the running Python's standard library."""

from __future__ import annotations

import glob
import os
import sysconfig
from pathlib import Path

from tightfit.data.remote import local_files, local_path, remote_files
from tightfit.errors import InputError
from tightfit.job import DataSpec
from tightfit.job_sections.paths import expand_path, is_url
from tightfit.values import nearest

PYTHON_STDLIB = "python-stdlib"
JSON_ENDINGS = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz")
PARQUET_ENDINGS = (".parquet",)
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def stdlib_files() -> list[Path]:
    """Return the source files of the running Python's standard library, without its tests: about
    12 MB of text that every machine has."""
    files: list[Path] = []
    for folder, inside, names in os.walk(sysconfig.get_paths()["stdlib"]):
        inside[:] = [name for name in inside if name not in _LEFT_OUT]  # os.walk visits only these
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def find_files(field: str, given: str | list[str], endings: tuple[str, ...] = ()) -> list[Path]:
    """Return the files that `given` names: a file, all files in a folder and its sub-folders
    (hidden ones excepted), the files that match a glob, or a list of these. Of a URL such as
    s3://bucket/folder, local copies of its files are returned.

    field    the field of the job's data that has this value, for messages
    endings  take only files with one of these endings from a folder; () takes all

    Raises InputError if there are no such files.
    """
    if isinstance(given, list):
        return [file for one in given for file in find_files(field, one, endings)]
    if is_remote(given):
        return local_files(field, given, endings)
    path = expand_path(local_path(given) if is_url(given) else given)
    if path.is_file():
        return [path]
    if path.is_dir():
        files = _files_below(path, endings)
        if not files:
            kinds = f" ending in {' or '.join(endings)}" if endings else ""
            raise InputError(
                f"data: {field}={given}", f"this folder contains no files{kinds}", "name a file, or another folder"
            )
        return files
    files = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
    if not files:
        raise InputError(f"data: {field}={given}", "no such file or folder", _nearest_path_fix(path))
    return files


def _files_below(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    inside = (file for file in folder.rglob("*") if file.is_file())
    shown = (file for file in inside if not any(part.startswith(".") for part in file.relative_to(folder).parts))
    return sorted(file for file in shown if not endings or file.name.lower().endswith(endings))


def _nearest_path_fix(path: Path) -> str:
    """Return the remedy that an error message gives for a path that does not exist, such as the
    nearest name in its folder."""
    if glob.has_magic(str(path)) or not path.parent.is_dir():
        return "check the path; relative paths start at the job file's folder"
    names = sorted(other.name for other in path.parent.iterdir())
    return nearest(path.name, names[:20]) if names else f"put data into {path.parent}, which is empty"


def readable_files(field: str, given: str, endings: tuple[str, ...]) -> list[str]:
    """Return the files that `given` names like `find_files`, but URLs instead of local copies."""
    if is_remote(given):
        return remote_files(field, given, endings)
    return [str(file) for file in find_files(field, given, endings)]


def as_list(given: str | list[str] | None) -> list[str]:
    """Return a path, several paths or none as a list."""
    return [given] if isinstance(given, str) else given or []


def is_remote(given: str) -> bool:
    """Return whether a file is at a URL that is no local path."""
    return is_url(given) and not given.startswith("file://")


def needs_copies(spec: DataSpec) -> bool:
    """Return whether a source of text names files at URLs, which would have to be copied."""
    return any(map(is_remote, as_list(spec.text or spec.jsonl or spec.parquet)))


__all__ = [
    "JSON_ENDINGS",
    "PARQUET_ENDINGS",
    "PYTHON_STDLIB",
    "as_list",
    "find_files",
    "is_remote",
    "needs_copies",
    "readable_files",
    "stdlib_files",
]
