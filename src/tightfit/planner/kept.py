"""Profiles that are kept on disk: a trace of the same model, of the same shapes, by the same code is not made twice."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tightfit
from tightfit.job import Job, ModelSpec
from tightfit.machine import cache_folder
from tightfit.record import code_version

MOST = 400  # files; the ones that were not used for longest go


def kept(what: Any, make: Callable[[], Any]) -> Any:
    """What `make` returns, from disk where it was made before of the same `what`. None is made each time."""
    if what is None:
        return make()
    name = hashlib.sha1(json.dumps([what, code_version(), _source()], default=str, sort_keys=True).encode()).hexdigest()
    path = cache_folder() / "profiles" / f"{name}.pickle"
    try:
        made = pickle.loads(path.read_bytes())
        os.utime(path)
        return made
    except (OSError, EOFError, pickle.UnpicklingError, ValueError, AttributeError, ImportError, IndexError, TypeError):
        made = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(f".{os.getpid()}")
        half.write_bytes(pickle.dumps(made))
        half.replace(path)
        _forget(path.parent)
    except OSError:  # a full or closed disk costs time, and nothing else
        pass
    return made


def identity(job: Job) -> Any:
    """What decides a job's traces, as far as it can be written down: None for models and losses of the user's own code."""
    spec = job.model
    if not isinstance(spec, ModelSpec) or spec.python is not None or spec.from_ is not None or job.loss is not None:
        return None
    return spec.model_dump(mode="json")


@functools.cache
def _source() -> str:
    """Of the package's own files: whoever changes one makes new profiles."""
    root = Path(tightfit.__file__).parent
    files = sorted(root.rglob("*.py"))
    return hashlib.sha1("".join(f"{path}{path.stat().st_mtime_ns}" for path in files).encode()).hexdigest()


def _forget(folder: Path) -> None:
    files = sorted(folder.glob("*.pickle"), key=lambda path: path.stat().st_mtime)
    for path in files[: max(len(files) - MOST, 0)]:
        path.unlink(missing_ok=True)
