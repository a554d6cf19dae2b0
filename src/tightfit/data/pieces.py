"""Pieces of long documents, so that memory for tokenizing does not grow with them.

A document is cut where one white-space character stands between two others, and where the tokenizer makes of both sides together
what it makes of each: the tokens are those of the whole document. Some tokenizers (Llama 2's) put a space before every text; they
are given the right side without its own. A word that is longer than half a piece is cut inside, and its halves are tokenized as
words of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tightfit.data.text import Document

PIECE = 1 << 17  # characters
CONTEXT = 64  # characters on each side of a cut that tell whether it changes tokens
TRIED = 50  # places

_GAP = re.compile(r"(?<=\S)\s(?=\S)")

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Piece:
    """A stretch of a document's text or target; `begins` and `ends` say whether it is the first and the last of these."""

    part: str
    text: str
    begins: bool
    ends: bool


def pieces_of(documents: Iterable[Document], encode: Encode, piece: int) -> Iterator[Piece]:
    """The documents in pieces of at most `piece` characters. encode: the tokenizer, without special tokens."""
    text = _Cutter("text", encode, piece)
    for document in documents:
        yield from text.cut(document.text, document.ends)
        if document.ends and document.target is not None:
            yield from _Cutter("target", encode, piece).cut(document.target, True)


class _Cutter:
    """Cuts one document's text, which comes in parts of any length."""

    def __init__(self, part: str, encode: Encode, piece: int) -> None:
        self.part, self.encode, self.piece = part, encode, piece
        self.held, self.begins = "", True

    def cut(self, text: str, ends: bool) -> Iterator[Piece]:
        for place in range(0, len(text), self.piece):
            self.held += text[place : place + self.piece]
            while len(self.held) > 2 * self.piece:
                yield self._first()
        if ends:
            while len(self.held) > self.piece:
                yield self._first()
            yield Piece(self.part, self.held, self.begins, True)
            self.held, self.begins = "", True

    def _first(self) -> Piece:
        left, self.held = _split(self.held, self.encode, self.piece)
        found = Piece(self.part, left, self.begins, False)
        self.begins = False
        return found


def _split(text: str, encode: Encode, piece: int) -> tuple[str, str]:
    """The beginning of a text, at most `piece` characters, and what follows."""
    places = [match.start() for match in _GAP.finditer(text, piece // 2, piece)][-TRIED:]
    for place in reversed(places):
        left, right = text[max(place - CONTEXT, 0) : place], text[place : place + CONTEXT]
        whole = encode(left + right)
        for dropped in (0, 1):  # of the right side
            if whole == encode(left) + encode(right[dropped:]):
                return text[:place], text[place + dropped :]
    place = places[-1] if places else piece
    return text[:place], text[place:]


__all__ = ["PIECE", "Piece", "pieces_of"]
