"""Reads one JSON object that is too long to be held in memory: its short fields as usual, and one
long text in parts. The file is memory-mapped.

`data/text.py` uses this module for lines of JSON of 4 MiB and more. The object is scanned twice:
first to check it and to read its short fields, then to read the text.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONG = 1 << 22  # bytes; a line of at least this length is scanned in the mapped file
PART = 1 << 20  # bytes of a text that are held in memory at once
MOST = 1 << 26  # the most bytes of a field other than the text

_SPACE = re.compile(rb"[ \t\n\r]*")
# the inside of a string
_STRING_BODY = re.compile(rb'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
_FIRST_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}$")  # the first half of a surrogate pair
_LITERAL = re.compile(rb"[-+0-9.eEa-zA-Z]+")
_BRACKETS = {b"{": b"}", b"[": b"]"}


@dataclass(frozen=True)
class LongRecord:
    """A JSON object in a file, from byte `start` to byte `stop` - 1. The methods raise a ValueError
    that says why if the object is not valid JSON."""

    file: Path
    start: int
    stop: int

    def fields(self, text: str | None) -> dict[str, Any]:
        """Return {name: value} for all fields of the object. Raise ValueError if the object is not
        valid JSON, or if a field other than the long one has more than 64 MiB.

        text: the name of the long field; None if there is none. If the value of this field is a
        string, the result has only its first character, or "" if it is empty. This shows that the
        value is a string; the method `text` reads the full string.
        """
        with self.file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            values: dict[str, Any] = {}
            for name, at, is_text in _Scanner(data, self.start, self.stop).members():
                if name == text and is_text:
                    values[name] = next(iter(self._parts(data, at)), "")
                    for part in self._parts(data, at):
                        part.encode()  # half of a surrogate pair raises a ValueError
                    values[name] = values[name][:1]
                else:
                    end = _Scanner(data, at, self.stop).after_value()
                    if end - at > MOST:
                        raise ValueError(f"field {name!r} has more than {MOST} bytes")
                    values[name] = json.loads(data[at:end])
            return values

    def text(self, name: str) -> Iterator[str]:
        """Yield the string in the field `name`, in parts of about 1 MiB. Call `fields` first, which
        checks the object and shows whether the field is a string."""
        with self.file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            offsets = [at for known, at, _ in _Scanner(data, self.start, self.stop).members() if known == name]
            # of several fields with the same name, json uses the last one
            yield from self._parts(data, offsets[-1])

    def _parts(self, data: mmap.mmap, at: int) -> Iterator[str]:
        """Yield the decoded JSON string whose opening quote is at byte `at` of the file, in parts
        of at most about 1 MiB. Raises ValueError if a character or an escape in it is not valid."""
        offset = at + 1
        while data[offset : offset + 1] != b'"':
            match = _STRING_BODY.match(data, offset, min(offset + PART, self.stop))
            assert match is not None
            end = match.end()
            end -= incomplete(data[max(offset, end - 4) : end])
            half = _FIRST_SURROGATE.search(data, max(offset, end - 6), end)
            if half and _backslashes(data, offset, half.start()) % 2 == 0 and half.start() > offset:
                end = half.start()
            if end == offset:
                raise ValueError(f"a string with {data[offset : offset + 1]!r} in it")
            yield json.loads(b'"' + data[offset:end] + b'"')
            offset = end


class _Scanner:
    """Finds where the members of a JSON object begin and end, without copying their values.

    data         the memory-mapped file
    start, stop  the bytes of the object are `start` to `stop` - 1
    """

    def __init__(self, data: mmap.mmap, start: int, stop: int) -> None:
        self.data, self.at, self.stop = data, start, stop

    def members(self) -> Iterator[tuple[str, int, bool]]:
        """Yield (name, offset of the value in the file, whether the value is a string) for each
        member of the object. Raises ValueError if the object is not valid JSON."""
        self._expect(b"{")
        while self._peek() != b"}":
            if self._peek() != b'"':
                raise ValueError("a field without a name in quotes")
            begin = self.at
            self.at = self.after_value()
            if self.at - begin > PART:
                raise ValueError("a field whose name is too long")
            name = json.loads(self.data[begin : self.at])
            self._expect(b":")
            kind = self._peek()
            value_offset = self.at
            self.at = self.after_value()
            yield name, value_offset, kind == b'"'
            if self._peek() == b",":
                self.at += 1
                if self._peek() == b"}":
                    raise ValueError("a comma before the end")
            elif self._peek() != b"}":
                raise ValueError("no comma between fields")
        self.at += 1
        if _SPACE.match(self.data, self.at, self.stop).end() != self.stop:  # type: ignore[union-attr]
            raise ValueError("more after its end")

    def after_value(self) -> int:
        """Return the offset just after the value that begins at `self.at`. `self.at` does not
        change. Raises ValueError if the value is cut off or is not valid JSON."""
        offset, open_brackets = self.at, []
        while True:
            offset = _SPACE.match(self.data, offset, self.stop).end()  # type: ignore[union-attr]
            letter = self.data[offset : offset + 1] if offset < self.stop else b""
            if letter == b'"':
                offset = self._after_string(offset)
            elif letter in _BRACKETS:
                open_brackets.append(_BRACKETS[letter])
                offset += 1
            elif open_brackets and letter in (open_brackets[-1], b",", b":"):
                if letter == open_brackets[-1]:
                    open_brackets.pop()
                offset += 1
            else:
                match = _LITERAL.match(self.data, offset, self.stop)
                if match is None:
                    raise ValueError("it ends too early" if not letter else f"{letter!r} where a value should be")
                offset = match.end()
            if not open_brackets:
                return offset

    def _after_string(self, offset: int) -> int:
        match = _STRING_BODY.match(self.data, offset + 1, self.stop)
        assert match is not None
        end = match.end()
        if end >= self.stop or self.data[end : end + 1] != b'"':
            raise ValueError("a string without an end, or with a control character or a wrong escape")
        return end + 1

    def _peek(self) -> bytes:
        self.at = _SPACE.match(self.data, self.at, self.stop).end()  # type: ignore[union-attr]
        return self.data[self.at : self.at + 1] if self.at < self.stop else b""

    def _expect(self, letter: bytes) -> None:
        if self._peek() != letter:
            raise ValueError(f"no {letter.decode()!r} where one should be")
        self.at += 1


def incomplete(tail: bytes) -> int:
    """Return how many bytes at the end of `tail` belong to a UTF-8 character whose other bytes are
    missing: 1 to 3, or 0 if the last character is complete."""
    for length in range(1, min(len(tail), 3) + 1):
        byte = tail[-length]
        if byte >= 0xC0:
            return length if length < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else 0
        if byte < 0x80:
            return 0
    return 0


def _backslashes(data: mmap.mmap, start: int, stop: int) -> int:
    """Return how many backslashes are directly before byte `stop`. Only bytes from `start` on are
    counted."""
    count = 0
    while stop - count > start and data[stop - count - 1 : stop - count] == b"\\":
        count += 1
    return count


__all__ = ["LONG", "LongRecord", "incomplete"]
