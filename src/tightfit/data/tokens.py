"""Token files: documents tokenized once, one after another in a memory-mapped file, and the rows cut from it."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tightfit.data.cache import cached
from tightfit.data.order import Integers
from tightfit.data.samples import Damage
from tightfit.data.text import Document, TextSource
from tightfit.data.tokenizer import SpecialTokens
from tightfit.errors import InputError

_BATCH_CHARACTERS = 4_000_000
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class TokenFile:
    """A folder of the cache: `ids` of all documents, each closed by an end-of-text token, and where they start.

    `part` is text or target. Pickles as its path: a worker maps the file itself.
    """

    folder: Path
    part: str = "text"

    def __reduce__(self) -> tuple[type, tuple[Path, str]]:
        return type(self), (self.folder, self.part)

    @cached_property
    def facts(self) -> dict[str, Any]:
        return json.loads((self.folder / "facts.json").read_text())

    @cached_property
    def ids(self) -> NDArray[np.unsignedinteger]:
        return np.asarray(np.memmap(self.folder / f"{self.part}.bin", self.facts["dtype"], mode="r"))

    @cached_property
    def offsets(self) -> Integers:
        return np.load(self.folder / f"{self.part}-offsets.npy")

    @cached_property
    def labels(self) -> Integers:
        return np.load(self.folder / "labels.npy")


def token_file(
    source: TextSource, tokenizer: Any, special: SpecialTokens, template: bool, skip_damaged: bool
) -> TokenFile:
    """The tokens of a source, from the cache or made now. `template`: with the tokenizer's own special tokens around.

    Raises InputError for damaged text.
    """
    identity = [source.identity, tokenizer.backend_tokenizer.to_str(), special.end, template, skip_damaged]

    def make(folder: Path) -> None:
        damage = Damage(skip_damaged)
        writer = _Writer(folder, tokenizer, special, template)
        for documents in _batches(source.documents(damage)):
            writer.write(documents)
        writer.finish(source.name, damage)

    return TokenFile(cached("tokens", identity, make))


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in lists of some 4 MB, which the tokenizer encodes in parallel."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text) + len(document.target or "")
        if size > _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Writer:
    """Writes the files of one TokenFile folder."""

    def __init__(self, folder: Path, tokenizer: Any, special: SpecialTokens, template: bool) -> None:
        self.folder, self.special, self.template = folder, special, template
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()  # a tokenizer.json may carry both, and would cut documents
        self.backend.no_padding()
        self.dtype = np.dtype(np.uint16 if special.vocabulary <= 1 << 16 else np.uint32)
        self.written = {"text": 0, "target": 0}
        self.offsets = {"text": array("q", [0]), "target": array("q", [0])}
        self.labels: list[int | str] = []

    def write(self, documents: list[Document]) -> None:
        self._append("text", [document.text for document in documents], [document.ends for document in documents])
        targets = [document.target for document in documents if document.target is not None]
        if targets:
            self._append("target", targets, [True] * len(targets))
        self.labels += [document.label for document in documents if document.label is not None]

    def _append(self, part: str, texts: list[str], ends: list[bool]) -> None:
        with (self.folder / f"{part}.bin").open("ab") as file:
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=self.template)
            for encoding, last in zip(encodings, ends, strict=True):
                ids = encoding.ids
                if last and ids[-1:] != [self.special.end]:
                    ids = [*ids, self.special.end]
                np.array(ids, dtype=self.dtype).tofile(file)
                self.written[part] += len(ids)
                if last:
                    self.offsets[part].append(self.written[part])

    def finish(self, name: str, damage: Damage) -> None:
        """Write what is known only at the end. Raises InputError for labels of two kinds."""
        for part, offsets in self.offsets.items():
            np.save(self.folder / f"{part}-offsets.npy", np.array(offsets, dtype=np.int64))
        classes = sorted({label for label in self.labels if isinstance(label, str)})
        if classes and len(classes) < len(set(self.labels)):
            raise InputError(
                f"data: {name}", "some labels are text and some are numbers", "write all of them as numbers from 0"
            )
        index = {label: number for number, label in enumerate(classes)}
        numbers = [index[label] if isinstance(label, str) else label for label in self.labels]
        np.save(self.folder / "labels.npy", np.array(numbers, dtype=np.int64))
        facts = {"dtype": self.dtype.name, "damaged": damage.count, "classes": classes}
        (self.folder / "facts.json").write_text(json.dumps(facts))


class Rows(Protocol):
    """Token sequences: `gather` (B,) indices -> (B, L) int64 ids and (B, L) bool, True where a token stands.

    length is that of a full sequence, and L where they are not ragged.
    """

    @property
    def length(self) -> int: ...

    @property
    def ragged(self) -> bool: ...

    def __len__(self) -> int: ...

    def gather(self, indices: Integers) -> tuple[Integers, Mask]: ...


@dataclass(frozen=True)
class Packed:
    """All documents as one text, cut in pieces of `length`; what remains after the last full piece is left out."""

    tokens: TokenFile
    length: int
    ragged: bool = False

    def __len__(self) -> int:
        return len(self.tokens.ids) // self.length

    def gather(self, indices: Integers) -> tuple[Integers, Mask]:
        pieces = self.tokens.ids[: len(self) * self.length].reshape(len(self), self.length)
        ids = pieces[indices].astype(np.int64)
        return ids, np.ones(ids.shape, dtype=bool)


@dataclass(frozen=True)
class Padded:
    """One document a row, truncated to `length`, filled on the right with `pad` to the longest of the batch."""

    tokens: TokenFile
    length: int
    pad: int
    ragged: bool = True

    def __len__(self) -> int:
        return len(self.tokens.offsets) - 1

    def gather(self, indices: Integers) -> tuple[Integers, Mask]:
        starts = self.tokens.offsets[indices]
        lengths = np.minimum(self.tokens.offsets[indices + 1] - starts, self.length)
        columns = np.arange(lengths.max())
        there = columns < lengths[:, None]
        ids = self.tokens.ids[np.where(there, starts[:, None] + columns, 0)].astype(np.int64)
        return np.where(there, ids, self.pad), there
