"""Writes and reads named tensors in safetensors files of limited size; many processes can write at
once.

`engine/checkpoint/save.py` and `engine/checkpoint/resume.py` use this module. The layout is that of
transformers: a single file is `model.safetensors`; several files are numbered, such as
`model-00001-of-00003.safetensors`, and an index file in the same folder maps each tensor to its
file. A process has at most two files in memory: the file that is being written, and the next file,
which is being filled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tightfit._torch.tensors import storage_id
from tightfit.errors import InputError

FILE_BYTES = 2 * 2**30  # size limit of a file
SMALLEST_BYTES = 2**26  # the size limit is never smaller, however many processes write
CHECKSUMS = "checksums.json"
FILES_IN_MEMORY = 2  # files that a process has in memory at most

Layout = list[list[str]]  # for each file, the names of its tensors


def file_bytes(total: float, writers: int) -> float:
    """Return the size limit of one file in bytes, chosen so that each process has files to write:
    `total / writers`, but at least 64 MiB and at most 2 GiB.

    total    bytes of all tensors together
    writers  number of processes that write files
    """
    return min(FILE_BYTES, max(total / writers, SMALLEST_BYTES))


def distribute(sizes: Mapping[str, int], limit: float) -> Layout:
    """Distribute tensors, in their order, over files of at most `limit` bytes. Return, for each
    file, the list of the names of its tensors. A tensor larger than the limit gets a file of its
    own.

    sizes  bytes of each tensor, by name
    """
    layout: Layout = []
    filled = 0
    for name, size in sizes.items():
        if filled + size > limit or not layout:
            layout.append([])
            filled = 0
        layout[-1].append(name)
        filled += size
    return layout


def file_name(kind: str, number: int, count: int) -> str:
    """Return the name of one of `count` files, such as "model-00001-of-00003.safetensors".

    kind    the first part of the name: model or optimizer
    number  the number of the file, from 0; the name counts from 1
    """
    return f"{kind}.safetensors" if count == 1 else f"{kind}-{number + 1:05d}-of-{count:05d}.safetensors"


def index_name(kind: str) -> str:
    return f"{kind}.safetensors.index.json"


def write_index(folder: Path, kind: str, layout: Layout, total: int) -> None:
    """Write a file into `folder` that maps each tensor to its file. Write nothing if there is only
    one file.

    kind    the first part of the files' names: model or optimizer
    layout  for each file, the names of its tensors
    total   bytes of all tensors together
    """
    if len(layout) > 1:
        where = {name: file_name(kind, number, len(layout)) for number, names in enumerate(layout) for name in names}
        content = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / index_name(kind)).write_text(json.dumps(content, indent=1) + "\n")


class Writer:
    """Writes files of tensors one after another in a thread, while the caller fills the next file.

    errors     errors of failed writes. They are collected instead of raised, because the process
               must still take part in the collectives that follow
    checksums  SHA-256 of the written files, by file name
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
        """Fetch the tensors of all files in order, and write the files that belong to this process
        into `folder`.

        names  for each file, by file name, the names of its tensors
        fetch  a function that returns the full tensor with a name. It is a collective: all ranks
               that have a shard of the tensor must call it
        mine   names of the files that this process writes
        """
        for file, inside in names.items():
            own: dict[str, Tensor] = {}
            storages: set[int] = set()
            for name in inside:
                value = fetch(name)
                if file in mine:
                    value = value.to("cpu").contiguous()
                    if storage_id(value) in storages:  # tied, or parts of one tensor
                        value = value.clone()
                    storages.add(storage_id(value))
                    own[name] = value
                del value
            if file in mine:
                self.write(folder / file, own)


def _write(path: Path, tensors: dict[str, Tensor]) -> tuple[str, str]:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    finally:
        tensors.clear()  # free them before wait() returns
    sync(path)
    return path.name, checksum(path)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the list of the files in a folder, is on the disk, so that it is
    there after a failure of power. Some file systems cannot do this for folders."""
    with suppress(OSError):
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(folder: Path, known: Mapping[str, str]) -> None:
    """Compute the SHA-256 checksum of each file in `folder`, and write the checksums into the file
    checksums.json in this folder.

    known  checksums by file name that need not be computed again
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    found = {name: known[name] if name in known else checksum(folder / name) for name in names}
    (folder / CHECKSUMS).write_text(json.dumps({"sha256": found}, indent=1) + "\n")


def read_checksums(folder: Path) -> dict[str, str]:
    """Return the checksums that `write_checksums` wrote into a folder: file name -> SHA-256.
    Raises OSError if their file is missing, and ValueError or LookupError if it is damaged."""
    found = json.loads((folder / CHECKSUMS).read_text())["sha256"]
    if not isinstance(found, dict):
        raise ValueError("no table of checksums")
    return found


class Reader:
    """Reads the tensors of a model or optimizer from the safetensors files in a folder, such as a
    checkpoint. Files are memory-mapped, so only tensors that are used are read from the disk.

    kind  the first part of the files' names: model or optimizer

    Raises InputError if a file is damaged.
    """

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
        """Return the names of the files that contain these tensors. Unknown tensors are ignored."""
        return {self._where[name] for name in names if name in self._where}

    def get(self, name: str) -> Tensor:
        """Return the tensor with this name, in host memory. Do not write to it, because its memory
        is that of the mapped file. Raises InputError if the file is damaged."""
        try:
            value: Tensor = self._file(self._where[name]).get_tensor(name)
        except SafetensorError as error:
            raise _damaged(self._folder / self._where[name], error) from error
        return value


def _read_index(path: Path) -> dict[str, str]:
    """Read an index file and return a dict: name of a tensor -> name of its file. Raises InputError
    if the index is damaged."""
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
    return InputError(str(path), f"is damaged ({error})", "use another copy of this file, or another checkpoint")


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
    "sync",
    "write_checksums",
    "write_index",
]
