"""Rows of the datasets library: folders that save_to_disk wrote, folders of data files, data sets
of the Hugging Face Hub, and files that are streamed.

A data set of the Hub is downloaded once into the library's own cache (HF_HOME), and is read from
this cache without a network. A stream reads the files while its rows are read, and keeps nothing.

Source  huggingface.co/docs/datasets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tightfit.data.cache import stamps
from tightfit.errors import InputError
from tightfit.job import DataSpec
from tightfit.job_sections.paths import expand_path, is_hub_id, refuse_mistyped_folder
from tightfit.optional_packages import import_optional
from tightfit.values import nearest

_SAVED = ("state.json", "dataset_info.json", "dataset_dict.json")  # files that only save_to_disk writes
_LONGEST = 200  # characters of a library's message that are shown
_SUBSETS = re.compile(r"(?:available configs|Available): \[(.*?)\]")  # in the library's messages
_SPLITS = re.compile(r"(?:Should be one of|Available splits:) \[(.*?)\]")


@dataclass(frozen=True)
class DatasetRows:
    """One split of a data set, as `data.dataset`, `data.subset` and `data.split` name it. Its rows
    are in files on this machine, which are memory-mapped.

    Only the names are pickled: each worker process opens the rows itself.
    """

    name: str
    subset: str | None = None
    split: str | None = None

    def __reduce__(self) -> tuple[type, tuple[str, str | None, str | None]]:
        return type(self), (self.name, self.subset, self.split)

    @property
    def asked(self) -> str:
        """The job's field, for messages."""
        return f"data: dataset={self.name}"

    @cached_property
    def rows(self) -> Any:
        """The datasets.Dataset. Raises InputError if it cannot be opened."""
        if is_saved(self.name):
            return self._saved(expand_path(self.name)).with_format(None)
        return _load_named(self.asked, self.name, self.subset, self.split, streaming=False).with_format(None)

    def read(self, rows: Any) -> Iterator[dict[str, Any]]:
        """Yield some columns of the rows."""
        return iter(rows)

    def class_names(self, column: str) -> tuple[str, ...]:
        """Return the names of the classes whose numbers a column holds (a ClassLabel of the library);
        empty if it has none."""
        return tuple(getattr((self.rows.features or {}).get(column), "names", None) or ())

    @property
    def identity(self) -> Any:
        """JSON-like content that changes when the rows change."""
        return [stamps(self._files), self.split, len(self.rows)]

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self._files)

    @cached_property
    def _files(self) -> list[Path]:
        """The Arrow files that hold the rows."""
        return [Path(file["filename"]) for file in self.rows.cache_files]

    def _saved(self, folder: Path) -> Any:
        datasets = import_optional("datasets", self.asked)
        if self.subset is not None:
            raise InputError(
                f"data: subset={self.subset}",
                "a folder written by datasets.save_to_disk has no subsets",
                "leave out data.subset",
            )
        try:
            loaded = datasets.load_from_disk(str(folder), keep_in_memory=False)
        except Exception as error:  # whatever arrow, json or fsspec raise for a damaged folder
            raise InputError(
                self.asked,
                f"not a folder written by datasets.save_to_disk ({_said(error)})",
                "save it with dataset.save_to_disk(folder)",
            ) from None
        if not isinstance(loaded, datasets.DatasetDict):
            if self.split is not None:
                raise InputError(f"data: split={self.split}", "this data set has no splits", "leave out data.split")
            return loaded
        split = self.split or "train"
        if split not in loaded:
            raise _no_split(self.asked, split, list(loaded))
        return loaded[split]


@dataclass(frozen=True)
class DatasetStream:
    """Rows that the datasets library reads from their files, here or in the network, while they are
    iterated over. The rows come in the order of the files.

    name    the name of the source, for messages: a data set of the Hub, a folder, or "json" or
            "parquet" for single files
    files   paths or URLs of the single files
    asked   the job's field, for messages
    """

    name: str
    asked: str
    subset: str | None = None
    split: str | None = None
    files: tuple[str, ...] = ()

    @cached_property
    def rows(self) -> Any:
        """The datasets.IterableDataset. Raises InputError if it cannot be opened."""
        if self.files:
            return _load(self.asked, self.name, None, None, streaming=True, data_files=list(self.files))
        return _load_named(self.asked, self.name, self.subset, self.split, streaming=True)

    def read(self, rows: Any) -> Iterator[dict[str, Any]]:
        """Yield some columns of the rows. Raises InputError if a file cannot be read."""
        number = 0
        try:
            for row in rows:
                yield row
                number += 1
        except InputError:
            raise
        except Exception as error:  # each file system and format raises classes of its own
            raise InputError(
                self.asked,
                f"cannot be read after row {number} ({_said(error)})",
                "check the files, the network and your credentials; a resumed run continues at its last checkpoint",
            ) from None


def is_saved(name: str) -> bool:
    """Return whether `name` is a folder that datasets.save_to_disk wrote."""
    folder = expand_path(name)
    return any((folder / file).is_file() for file in _SAVED)


def dataset_rows(spec: DataSpec) -> DatasetRows:
    """Return the rows that `spec.dataset` names."""
    return DatasetRows(str(spec.dataset), spec.subset, spec.split)


def dataset_stream(spec: DataSpec) -> DatasetRows | DatasetStream:
    """Return the rows that `spec.dataset` names as a stream. A folder that save_to_disk wrote is
    memory-mapped, so it needs no stream."""
    rows = dataset_rows(spec)
    return rows if is_saved(rows.name) else DatasetStream(rows.name, rows.asked, rows.subset, rows.split)


def file_stream(asked: str, kind: str, files: list[str]) -> DatasetStream:
    """Return the rows of files as a stream.

    asked  the job's field, for messages
    kind   "json" or "parquet"
    files  paths or URLs
    """
    return DatasetStream(kind, asked, files=tuple(files))


def _load_named(asked: str, name: str, subset: str | None, split: str | None, streaming: bool) -> Any:
    """Load a folder of data files, or a data set of the Hub. Without a network, its snapshot in the
    cache of the Hub is loaded."""
    folder = check_folder(asked, name)
    if folder.is_dir():
        return _load(asked, str(folder), subset, split, streaming)
    refuse_mistyped_folder("data.dataset", name, Path())
    try:
        return _load(asked, name, subset, split, streaming)
    except _Unreachable:
        snapshot = _snapshot(name)
        if snapshot is None:
            raise
    return _load(asked, str(snapshot), subset, split, streaming)


def check_folder(asked: str, name: str) -> Path:
    """Return `name` as the path of a folder. Raise InputError if there is no such folder, and `name` cannot be a
    data set of the Hub either."""
    folder = expand_path(name)
    if folder.exists() and not folder.is_dir():
        raise InputError(
            asked, "is a file, not a folder", f"name it with data.jsonl, data.parquet or data.text: {name}"
        )
    if not folder.exists() and not is_hub_id(name):
        raise InputError(asked, "no such folder", "name a folder, or a data set of the Hub such as org/name")
    return folder


def _snapshot(name: str) -> Path | None:
    """Return the folder in which `hf download --repo-type dataset` put a data set, or None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _load(asked: str, path: str, subset: str | None, split: str | None, streaming: bool, **files: Any) -> Any:
    datasets = import_optional("datasets", asked)
    try:
        return datasets.load_dataset(
            path, subset, split=split or "train", streaming=streaming, keep_in_memory=False, **files
        )
    except Exception as error:  # the library raises many classes, also of httpx and of arrow
        text = str(error)
        if found := _SUBSETS.search(text):
            raise _no_subset(asked, subset, _names(found[1])) from None
        if found := _SPLITS.search(text):
            raise _no_split(asked, split or "train", _names(found[1])) from None
        kind = _Unreachable if isinstance(error, ConnectionError) else InputError
        raise kind(
            asked, f"datasets.load_dataset cannot load it ({_said(error)})", _fix(path, files.get("data_files"))
        ) from None


class _Unreachable(InputError):
    """The Hub cannot be reached."""


def _fix(path: str, files: list[str] | None) -> str:
    if files:
        return "check the files, the network and your credentials"
    if Path(path).is_dir():
        return "name a folder with jsonl, csv, parquet or text files, or one that dataset.save_to_disk(folder) wrote"
    return (
        "check the name, the network and your login (hf auth login), or download it where there is a network: "
        f"hf download --repo-type dataset {path}"
    )


def _names(listed: str) -> list[str]:
    return re.findall(r"'([^']*)'", listed)


def _no_subset(asked: str, subset: str | None, known: list[str]) -> InputError:
    if subset is None:
        return InputError(asked, f"has the subsets {', '.join(known)}", f"name one: data.subset: {known[0]}")
    fix = f"set data.subset ({nearest(subset, known)})" if known else "leave out data.subset"
    return InputError(asked, f"has no subset {subset!r}; it has {', '.join(known)}", fix)


def _no_split(asked: str, split: str, known: list[str]) -> InputError:
    return InputError(
        asked,
        f"has the splits {', '.join(known)}, but no split named {split}",
        f"set data.split ({nearest(split, known)})",
    )


def _said(error: Exception) -> str:
    """Return the class and the message of an error, on one line. The library wraps some errors in
    another one that says less."""
    cause = error.__cause__ if type(error).__name__.startswith("DatasetGeneration") else None
    error = cause if isinstance(cause, Exception) else error
    said = " ".join(str(error).split())[:_LONGEST]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


__all__ = ["DatasetRows", "DatasetStream", "dataset_rows", "dataset_stream", "file_stream", "is_saved"]
