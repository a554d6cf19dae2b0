"""Rows of the datasets library: folders that save_to_disk wrote, folders of data files, and data sets
of the Hugging Face hub.

A data set of the hub is downloaded once into the library's own cache (HF_HOME). It is also read
from this cache without a network, with HF_HUB_OFFLINE=1.

Source  huggingface.co/docs/datasets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tightfit.data.cache import stamps
from tightfit.errors import InputError
from tightfit.job import DataSpec, expand_path, is_hub_name
from tightfit.values import nearest

_SAVED = ("state.json", "dataset_info.json", "dataset_dict.json")  # files that only save_to_disk writes
_LONGEST = 200  # characters of a library's message that are shown


@dataclass(frozen=True)
class DatasetRows:
    """One split of a data set, as `data.dataset`, `data.subset` and `data.split` name it.

    Only the names are pickled: each worker process opens the rows itself.
    """

    name: str
    subset: str | None = None
    split: str | None = None

    def __reduce__(self) -> tuple[type, tuple[str, str | None, str | None]]:
        return type(self), (self.name, self.subset, self.split)

    @property
    def asked(self) -> str:
        """The job's fields, for messages."""
        return f"data: dataset={self.name}"

    @cached_property
    def rows(self) -> Any:
        """The datasets.Dataset. Raises InputError if it cannot be opened."""
        folder = expand_path(self.name)
        if any((folder / name).is_file() for name in _SAVED):
            return self._saved(folder).with_format(None)
        if folder.is_dir() or is_hub_name(self.name):
            return self._loaded(str(folder) if folder.is_dir() else self.name).with_format(None)
        raise InputError(self.asked, "no such folder", "name a folder, or a data set of the hub such as owner/name")

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
        import datasets

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
                f"not a folder written by datasets.save_to_disk ({error})",
                "save it with dataset.save_to_disk(folder)",
            ) from None
        if not isinstance(loaded, datasets.DatasetDict):
            if self.split is not None:
                raise InputError(f"data: split={self.split}", "this data set has no splits", "leave out data.split")
            return loaded
        split = self.split or "train"
        if split not in loaded:
            raise InputError(
                self.asked,
                f"has the splits {', '.join(loaded)}, but no split named {split}",
                f"set data.split ({nearest(split, list(loaded))})",
            )
        return loaded[split]

    def _loaded(self, name: str) -> Any:
        import datasets

        try:
            return datasets.load_dataset(name, self.subset, split=self.split or "train", keep_in_memory=False)
        except Exception as error:  # the library raises many classes, also of httpx and of arrow
            said = " ".join(str(error).split())[:_LONGEST] or type(error).__name__
            raise InputError(
                self.asked,
                f"datasets.load_dataset cannot load it ({type(error).__name__}: {said})",
                _fix(name, str(error)),
            ) from None


def dataset_rows(spec: DataSpec) -> DatasetRows:
    """Return the rows that `spec.dataset` names."""
    return DatasetRows(str(spec.dataset), spec.subset, spec.split)


def _fix(name: str, message: str) -> str:
    if "onfig name is missing" in message or "BuilderConfig" in message:
        return "set data.subset to the name of a subset"
    if "split" in message:
        return "set data.split to the name of a split"
    if Path(name).is_dir():
        return "name a folder with jsonl, csv, parquet or text files, or one that dataset.save_to_disk(folder) wrote"
    return "check the name, the network and your login (hf auth login), or name a folder with data.dataset"
