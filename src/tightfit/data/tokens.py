"""Tokenizes documents once into a token file, which is memory-mapped, and cuts training sequences
from this file.

`token_file` finds the token file in the cache, or makes it. `PackedSequences` and `PaddedSequences`
cut sequences from it. `data/sequences.py` turns the sequences into samples of the model's task.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tightfit.data.cache import cached_folder
from tightfit.data.document_chunks import PIECE, DocumentChunk, chunk_documents
from tightfit.data.order import Integers
from tightfit.data.samples import DamagePolicy
from tightfit.data.text import Document, TextSource
from tightfit.data.tokenizer import SpecialTokens
from tightfit.errors import InputError

_log = logging.getLogger(__name__)
_BATCH_CHARACTERS = 1_000_000
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class TokenFile:
    """The token ids of all documents of a source, one after another, in files of a cache folder.

    folder   the cache folder
    field    which text of each document the ids are from: "text", or "target" (the target text)
    ids      (tokens,) uint16 or uint32; each document ends with an end-of-text token
    offsets  (documents + 1,) int64; document i is ids[offsets[i] : offsets[i + 1]]
    labels   (documents,) int64: the class labels, if the source has labels
    facts    a dict: "dtype" is the type of the ids, "damaged" is how many documents were left out
             as damaged, and "classes" lists the names of the classes if the labels are text

    Only a token file of conversations has these:

    counted        (tokens,) bool: whether a token counts in the loss
    first_counted  (documents,) int64: in each conversation, the position, from 1 on, of the first
                   token that counts in the loss. Position 0 is left out, because no earlier token
                   predicts it. If there is no such token, the conversation's length
    facts          also has "roles", the list of the roles that occur in the messages

    Only the folder's path and the field are pickled: each worker process maps the files itself.
    """

    folder: Path
    field: str = "text"

    def __reduce__(self) -> tuple[type, tuple[Path, str]]:
        return type(self), (self.folder, self.field)

    @cached_property
    def facts(self) -> dict[str, Any]:
        return json.loads((self.folder / "facts.json").read_text())

    @cached_property
    def ids(self) -> NDArray[np.unsignedinteger]:
        return np.asarray(np.memmap(self.folder / f"{self.field}.bin", self.facts["dtype"], mode="r"))

    @cached_property
    def offsets(self) -> Integers:
        return np.load(self.folder / f"{self.field}-offsets.npy")

    @cached_property
    def labels(self) -> Integers:
        return np.load(self.folder / "labels.npy")

    @cached_property
    def counted(self) -> Mask:
        return np.asarray(np.memmap(self.folder / "counted.bin", np.bool_, mode="r"))

    @cached_property
    def first_counted(self) -> Integers:
        return np.load(self.folder / "first-counted.npy")


def token_file(source: TextSource, tokenizer: Any, special: SpecialTokens, skip_damaged: bool) -> TokenFile:
    """Return the token file of a source. The source is tokenized once, and the result is cached.

    tokenizer     a transformers tokenizer
    special       its special tokens
    skip_damaged  True leaves damaged documents out; False raises InputError at the first one

    Raises InputError also if some labels are text and some are numbers.
    """
    identity = [source.identity, tokenizer.backend_tokenizer.to_str(), special.end, skip_damaged]

    def make(folder: Path) -> None:
        damage = DamagePolicy(skip_damaged)
        writer = _Writer(folder, tokenizer, special)
        counted = writer.counted(source.documents(damage))
        for batch in batches(chunk_documents(counted, writer.encode, PIECE)):
            writer.write(batch)
            _log.info("tokenizing %s: %.0f million characters so far", source.name, writer.read)
        writer.finish(source.name, damage)

    return TokenFile(cached_folder("tokens", identity, make))


def batches(pieces: Iterable[DocumentChunk], characters: int = _BATCH_CHARACTERS) -> Iterator[list[DocumentChunk]]:
    """Yield the chunks in lists that have about so many characters each. The tokenizer encodes the
    chunks of a list in parallel, which needs about 200 bytes of memory per character."""
    batch: list[DocumentChunk] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size > characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def token_dtype(special: SpecialTokens) -> np.dtype[Any]:
    """Return the type in which token ids are stored."""
    return np.dtype(np.uint16 if special.vocabulary <= 1 << 16 else np.uint32)


def plain_backend(tokenizer: Any) -> Any:
    """Return the Rust tokenizer of a transformers tokenizer, which neither truncates nor pads."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # a tokenizer.json may switch on truncation and padding
    backend.no_padding()
    return backend


def leading_tokens(backend: Any) -> list[int]:
    """Return the ids of the special tokens that a tokenizer puts before a text, such as <s>.

    backend: the tokenizers.Tokenizer
    """
    plain, whole = (backend.encode("a", add_special_tokens=added).ids for added in (False, True))
    starts = [at for at in range(len(whole) - len(plain) + 1) if whole[at : at + len(plain)] == plain]
    return whole[: starts[0]] if starts else []


class ChunkEncoder:
    """Tokenizes documents in chunks, and puts special tokens around each document: those of the
    tokenizer, such as <s> before it or [CLS] and [SEP] around it, and the end-of-text token last."""

    def __init__(self, tokenizer: Any, special: SpecialTokens) -> None:
        self.special = special
        self.backend = plain_backend(tokenizer)
        self._closing: list[int] = []  # the special tokens that follow the current document
        self._last = -1  # the last token of the current document

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def tokens(self, batch: list[DocumentChunk]) -> Iterator[tuple[DocumentChunk, list[int]]]:
        """Yield each chunk with its token ids. Chunks of a document must come one after another."""
        encodings = self.backend.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
        for piece, encoding in zip(batch, encodings, strict=True):
            yield piece, self._ids(piece, encoding)

    def _ids(self, piece: DocumentChunk, encoding: Any) -> list[int]:
        ids = encoding.ids
        if piece.begins:
            before, self._closing = self._template_tokens(encoding)
            ids = [*before, *ids]
        if piece.ends:
            ids = [*ids, *self._closing]
            if (ids[-1] if ids else self._last) != self.special.end:
                ids = [*ids, self.special.end]
        self._last = -1 if piece.ends else ids[-1] if ids else self._last
        return ids

    def _template_tokens(self, encoding: Any) -> tuple[list[int], list[int]]:
        """Return (the ids of the special tokens that the tokenizer puts before a text, the ids of
        those that it puts after a text).

        encoding: the text's encoding without special tokens. If the tokenizer's template also
        changes the text's own tokens, return ([], []).
        """
        ids, whole = encoding.ids, self.backend.post_process(encoding, None, True).ids
        for before in range(len(whole) - len(ids) + 1):
            if whole[before : before + len(ids)] == ids:
                return whole[:before], whole[before + len(ids) :]
        return [], []


class _Writer(ChunkEncoder):
    """Tokenizes documents and writes the files of one TokenFile folder.

    Wrap the documents in `counted`, call `write` for each list of chunks, and `finish` at the end.
    """

    def __init__(self, folder: Path, tokenizer: Any, special: SpecialTokens) -> None:
        super().__init__(tokenizer, special)
        self.folder = folder
        self.dtype = token_dtype(special)
        self.written = {"text": 0, "target": 0}
        self.offsets = {"text": array("q", [0]), "target": array("q", [0])}
        self.labels: list[int | str] = []
        self.read = 0.0  # millions of characters

    def counted(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield the documents unchanged. As a side effect, collect their labels and count their
        characters, for the log."""
        for document in documents:
            self.read += len(document.text) / 1e6
            if document.is_last_part and document.label is not None:
                self.labels.append(document.label)
            yield document

    def write(self, batch: list[DocumentChunk]) -> None:
        """Tokenize chunks, and append the token ids of each to the file of its field, text.bin or
        target.bin."""
        with (self.folder / "text.bin").open("ab") as text, (self.folder / "target.bin").open("ab") as target:
            for piece, ids in self.tokens(batch):
                np.array(ids, dtype=self.dtype).tofile(target if piece.field == "target" else text)
                self.written[piece.field] += len(ids)
                if piece.ends:
                    self.offsets[piece.field].append(self.written[piece.field])

    def finish(self, name: str, damage: DamagePolicy) -> None:
        """Write the files that are complete only after the last document: offsets, labels, facts.
        Labels that are text become numbers, in alphabetical order.

        name    the source's name, for the error message
        damage  the policy that counted the damaged documents

        Raises InputError if some labels are text and some are numbers.
        """
        for part, offsets in self.offsets.items():
            np.save(self.folder / f"{part}-offsets.npy", np.array(offsets, dtype=np.int64))
        classes = sorted({label for label in self.labels if isinstance(label, str)})
        if classes and len(classes) < len(set(self.labels)):
            raise InputError(
                f"data: {name}", "some labels are text and some are numbers", "write all labels as numbers from 0"
            )
        index = {label: number for number, label in enumerate(classes)}
        numbers = [index[label] if isinstance(label, str) else label for label in self.labels]
        np.save(self.folder / "labels.npy", np.array(numbers, dtype=np.int64))
        facts = {"dtype": self.dtype.name, "damaged": damage.count, "classes": classes}
        (self.folder / "facts.json").write_text(json.dumps(facts))


class TokenSequences(Protocol):
    """Interface of a list of token sequences, from which batches of B sequences are read.

    length  the most tokens that a sequence has
    gather  returns the sequences at the indices (B,): their token ids, (B, L) int64, and a mask,
            (B, L) bool, which is False at padding
    ragged  True if L varies from batch to batch; False if L is always `length`
    """

    @property
    def length(self) -> int: ...

    @property
    def ragged(self) -> bool: ...

    def __len__(self) -> int: ...

    def gather(self, indices: Integers) -> tuple[Integers, Mask]: ...


@dataclass(frozen=True)
class PackedSequences:
    """TokenSequences that are cut from all documents joined together. Each has exactly `length`
    tokens, and may contain the end of one document and the beginning of the next.

    The tokens after the last full sequence are not used. Example: 1,000 tokens with length 300 give
    3 sequences, and 100 tokens are unused.
    """

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
class PaddedSequences:
    """TokenSequences with one document each, truncated to `length` tokens. `gather` pads the
    sequences of a batch on the right with the token id `pad`, to the longest of them."""

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
        mask = columns < lengths[:, None]
        ids = self.tokens.ids[np.where(mask, starts[:, None] + columns, 0)].astype(np.int64)
        return np.where(mask, ids, self.pad), mask
