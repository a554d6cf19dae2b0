"""Named tensors in safetensors files of bounded size, written by many processes at once.

`engine/checkpoint/save.py` and `engine/checkpoint/resume.py` use it. The layout is transformers': a single file is
`model.safetensors`; several are numbered, `model-00001-of-00003.safetensors`, with an index beside
them that maps each tensor to its file. A process has at most two files in memory: the one that is
written, and the next one, which it fills.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tightfit.errors import InputError

FILE_BYTES = 2 * 2**30  # largest file
SMALLEST_BYTES = 2**26  # smallest limit of a file, if several processes write a checkpoint
CHECKSUMS = "checksums.json"
FILES_IN_MEMORY = 2  # files that a process has in memory at most

Layout = list[list[str]]  # for each file, the names of its tensors


def file_bytes(total: float, writers: int) -> float:
    """The size limit of one file, so that each of `writers` processes has its share of `total`
    bytes."""
    return min(FILE_BYTES, max(total / writers, SMALLEST_BYTES))


def distribute(sizes: Mapping[str, int], limit: float) -> Layout:
    """Distribute tensors, in their order, over files of at most `limit` bytes.

    sizes  by name: the tensor's bytes. A tensor larger than the limit has a file of its own
    """
    found: Layout = []
    filled = 0
    for name, size in sizes.items():
        if filled + size > limit or not found:
            found.append([])
            filled = 0
        found[-1].append(name)
        filled += size
    return found


def file_name(kind: str, number: int, count: int) -> str:
    """Name of file `number` (from 0) of `count` files."""
    return f"{kind}.safetensors" if count == 1 else f"{kind}-{number + 1:05d}-of-{count:05d}.safetensors"


def index_name(kind: str) -> str:
    return f"{kind}.safetensors.index.json"


def write_index(folder: Path, kind: str, layout: Layout, total: int) -> None:
    """Write the index that maps each tensor to its file, if there are several; total: bytes of
    all."""
    if len(layout) > 1:
        where = {name: file_name(kind, number, len(layout)) for number, names in enumerate(layout) for name in names}
        content = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / index_name(kind)).write_text(json.dumps(content, indent=1) + "\n")


class Writer:
    """Writes files one after another in a thread, while the caller fills the next one.

    errors     failed writes. They are not raised at once, because other processes wait for the
               caller's part in the collectives that follow
    checksums  by name: SHA-256 of the written files
    """

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.checksums: dict[str, str] = {}
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: Future[tuple[str, str]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.wait()
        self._pool.shutdown()

    def wait(self) -> None:
        if self._under_way is not None:
            try:
                name, checksum = self._under_way.result()
                self.checksums[name] = checksum
            except (OSError, SafetensorError) as error:
                self.errors.append(error)
            self._under_way = None

    def write(self, path: Path, tensors: dict[str, Tensor]) -> None:
        self.wait()
        self._under_way = self._pool.submit(_write, path, tensors)

    def fill(
        self, folder: Path, names: Mapping[str, list[str]], fetch: Callable[[str], Tensor], mine: Collection[str]
    ) -> None:
        """Fetch the tensors of these files in their order, and write the files that are this
        process's.

        names  by file: the names of its tensors
        fetch  name -> the full tensor. A collective: all ranks with a shard of it call it
        mine   the files that this process writes
        """
        for file, inside in names.items():
            kept: dict[str, Tensor] = {}
            pointers: set[int] = set()
            for name in inside:
                value = fetch(name)
                if file in mine:
                    value = value.to("cpu").contiguous()
                    if value.data_ptr() in pointers:  # tied: one storage under two names
                        value = value.clone()
                    pointers.add(value.data_ptr())
                    kept[name] = value
                del value
            if file in mine:
                self.write(folder / file, kept)


def _write(path: Path, tensors: dict[str, Tensor]) -> tuple[str, str]:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    finally:
        tensors.clear()  # free them before wait() returns
    return path.name, checksum(path)


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(folder: Path, known: Mapping[str, str]) -> None:
    """Write the checksums of all files of a folder into it; those in `known` are not computed
    again."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    found = {name: known[name] if name in known else checksum(folder / name) for name in names}
    (folder / CHECKSUMS).write_text(json.dumps({"sha256": found}, indent=1) + "\n")


def read_checksums(folder: Path) -> dict[str, str]:
    """The checksums in a folder, by file name. Raises OSError if their file is missing, ValueError
    or LookupError if it is damaged."""
    found = json.loads((folder / CHECKSUMS).read_text())["sha256"]
    if not isinstance(found, dict):
        raise ValueError("no table of checksums")
    return found


class Reader:
    """Reads the tensors of one kind (model or optimizer) in a folder. Files are memory-mapped, so
    that only the tensors that are used are read."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._files, self._open = folder, ExitStack(), {}  # type: ignore[var-annotated]
        self._where: dict[str, str]
        index = folder / index_name(kind)
        if index.exists():
            self._where = _read_index(index)
        else:
            one = file_name(kind, 0, 1)
            self._where = dict.fromkeys(self._file(one).keys(), one)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._files.close()

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = self._files.enter_context(safe_open(self._folder / name, "pt"))
            except SafetensorError as error:
                raise _damaged(self._folder / name, error) from error
        return self._open[name]

    @property
    def names(self) -> set[str]:
        return set(self._where)

    def files_of(self, names: Collection[str]) -> set[str]:
        """The files that these tensors are in."""
        return {self._where[name] for name in names if name in self._where}

    def get(self, name: str) -> Tensor:
        """A tensor in host memory. It is read-only: its memory is the mapped file's."""
        try:
            value: Tensor = self._file(self._where[name]).get_tensor(name)
        except SafetensorError as error:
            raise _damaged(self._folder / self._where[name], error) from error
        return value


def _read_index(path: Path) -> dict[str, str]:
    """By name of a tensor: its file in the same folder."""
    try:
        where = json.loads(path.read_text())["weight_map"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _damaged(path, error) from error
    if not isinstance(where, dict) or any(
        not isinstance(name, str) or Path(name).name != name or "\0" in name for name in where.values()
    ):
        raise _damaged(path, ValueError("its weight_map does not name files of this folder"))
    return where


def _damaged(path: Path, error: Exception) -> InputError:
    return InputError(str(path), f"is damaged ({error})", "use another copy of it, or another checkpoint")


__all__ = [
    "CHECKSUMS",
    "FILES_IN_MEMORY",
    "Layout",
    "Reader",
    "Writer",
    "checksum",
    "distribute",
    "file_bytes",
    "file_name",
    "index_name",
    "read_checksums",
    "write_checksums",
    "write_index",
]
