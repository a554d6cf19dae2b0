"""Splits long documents into chunks, so that the memory for tokenizing does not grow with their
length.

A document is split before a single white-space character, at a place where tokenizing the two sides
separately gives the same tokens as tokenizing them together. The chunks together then have the same
tokens as the full document. Some tokenizers (Llama 2's) put a space before every text; for these,
the space at the start of the right side is dropped.

Two cases may change the tokens. If none of the last 50 spaces of a chunk is such a place, the
document is split before the last space. If the second half of a chunk has no space at all, the
document is split inside a word, and the word's parts are tokenized as separate words.

Example: "the cat sat" splits into "the cat" and " sat" for a tokenizer whose tokens are
"the", " cat" and " sat". For a tokenizer that adds a space itself, it splits into "the cat" and
"sat".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tightfit.data.text import Document

PIECE = 1 << 17  # characters
CONTEXT = 64  # characters on each side of a split that are tokenized to see whether it changes tokens
TRIED = 50  # how many places are tried for a split

_GAP = re.compile(r"(?<=\S)\s(?=\S)")

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class DocumentChunk:
    """A chunk of a document's text or target text.

    field   which of the two the chunk is from: "text" or "target"
    text    the chunk itself
    begins  whether this is the first chunk of the text or target text
    ends    whether this is the last chunk of it
    """

    field: str
    text: str
    begins: bool
    ends: bool


def chunk_documents(documents: Iterable[Document], encode: Encode, piece: int) -> Iterator[DocumentChunk]:
    """Yield the texts and target texts of documents, in order, split into chunks of at most `piece`
    characters.

    encode: returns the token ids of a text, without special tokens. It is used to find places at
    which a split does not change the tokens.
    """
    text = _Splitter("text", encode, piece)
    for document in documents:
        yield from text.split(document.text, document.is_last_part)
        if document.is_last_part and document.target is not None:
            yield from _Splitter("target", encode, piece).split(document.target, True)


class _Splitter:
    """Splits texts, one after another, into chunks. A text may be given in parts of any length.

    part    the field that the texts are from: "text" or "target"
    encode  returns the token ids of a text, without special tokens
    piece   the most characters of a chunk
    """

    def __init__(self, part: str, encode: Encode, piece: int) -> None:
        self.part, self.encode, self.piece = part, encode, piece
        self.buffer, self.begins = "", True

    def split(self, text: str, ends: bool) -> Iterator[DocumentChunk]:
        for start in range(0, len(text), self.piece):
            self.buffer += text[start : start + self.piece]
            while len(self.buffer) > 2 * self.piece:
                yield self._take_chunk()
        if ends:
            while len(self.buffer) > self.piece:
                yield self._take_chunk()
            yield DocumentChunk(self.part, self.buffer, self.begins, True)
            self.buffer, self.begins = "", True

    def _take_chunk(self) -> DocumentChunk:
        left, self.buffer = _split(self.buffer, self.encode, self.piece)
        found = DocumentChunk(self.part, left, self.begins, False)
        self.begins = False
        return found


def _split(text: str, encode: Encode, piece: int) -> tuple[str, str]:
    """Split off the first chunk of a text, of at most `piece` characters. Return (the chunk, the
    rest of the text).

    encode: returns the token ids of a text, without special tokens
    """
    offsets = [match.start() for match in _GAP.finditer(text, piece // 2, piece)][-TRIED:]
    for offset in reversed(offsets):
        left, right = text[max(offset - CONTEXT, 0) : offset], text[offset : offset + CONTEXT]
        whole = encode(left + right)
        for dropped in (0, 1):  # how many characters of the right side are dropped
            if whole == encode(left) + encode(right[dropped:]):
                return text[:offset], text[offset + dropped :]
    offset = offsets[-1] if offsets else piece
    return text[:offset], text[offset:]


__all__ = ["PIECE", "DocumentChunk", "chunk_documents"]
