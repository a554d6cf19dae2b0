"""Strategies: values that a JSON schema allows, now and then one that it does not, and valid files
with mistakes in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

WILD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 2**31, 2**63, -(2**63) - 1, 10**30, 10**400]),
    st.floats(),
    st.sampled_from([1e308, -0.0, 5e-324]),
    st.text(max_size=12),
    st.sampled_from(
        [
            "",
            " ",
            "\0",
            "\ud800",
            "\u202e",
            "1:30",
            "nan",
            "010",
            "1e5",
            "none",
            "~",
            "a" * 5000,
            "~nobody-is-called-so/x",
            "file.py:",
            ":f",
            "a.py:f",
            "../..",
            "/",
            "*",
        ]
    ),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=3),
    st.integers(1, 200).map(lambda depth: json.loads("[" * depth + "]" * depth)),
    st.binary(max_size=6),
    st.dates(),
)


def of_schema(
    schema: dict[str, Any], known: dict[str, Any] | None = None, wild: float = 0.04
) -> st.SearchStrategy[Any]:
    """Values of a JSON schema as pydantic writes it; each value in it is with a small probability any other."""
    known = schema.get("$defs", {}) if known is None else known
    right = _right(schema, known, wild)
    return st.integers(0, 999).flatmap(lambda number: WILD if number < wild * 1000 else right)


def _right(schema: dict[str, Any], known: dict[str, Any], wild: float) -> st.SearchStrategy[Any]:
    def inner(one: dict[str, Any]) -> st.SearchStrategy[Any]:
        return of_schema(one, known, wild)

    if "$ref" in schema:
        return st.deferred(lambda: _right(known[schema["$ref"].rpartition("/")[2]], known, wild))
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return st.one_of([_right(one, known, wild) for one in schema[word]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    kinds: dict[str, Callable[[], st.SearchStrategy[Any]]] = {
        "string": lambda: st.text(max_size=10),
        "integer": lambda: st.integers(_least(schema, 0), _least(schema, 0) + 40),
        "number": lambda: st.one_of(st.floats(0, 2), st.sampled_from([1e-4, 0.5, 0.9, 1])),
        "boolean": st.booleans,
        "null": st.none,
        "array": lambda: _array(schema, inner),
        "object": lambda: _object(schema, inner),
    }
    return kinds[schema["type"]]() if "type" in schema else WILD


def _least(schema: dict[str, Any], otherwise: int) -> int:
    return schema.get("minimum", schema.get("exclusiveMinimum", otherwise - 1) + 1)


def _array(schema: dict[str, Any], inner: Callable[[dict[str, Any]], st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    if "prefixItems" in schema:
        return st.tuples(*map(inner, schema["prefixItems"])).map(list)
    return st.lists(inner(schema.get("items", {})), max_size=3)


def _object(
    schema: dict[str, Any], inner: Callable[[dict[str, Any]], st.SearchStrategy[Any]]
) -> st.SearchStrategy[Any]:
    fields = {name: inner(one) for name, one in schema.get("properties", {}).items()}
    needed = set(schema.get("required", ()))
    extra = schema.get("additionalProperties")
    some = st.fixed_dictionaries(
        {name: one for name, one in fields.items() if name in needed},
        optional={name: one for name, one in fields.items() if name not in needed},
    )
    if not fields:
        values = inner(extra) if isinstance(extra, dict) else WILD
        return st.dictionaries(st.one_of(st.text(max_size=5), st.integers(1, 2**20).map(str)), values, max_size=3)
    return st.tuples(some, st.dictionaries(st.text(max_size=3), WILD, max_size=1), st.integers(0, 19)).map(
        lambda drawn: {**drawn[0], **drawn[1]} if drawn[2] == 0 else drawn[0]
    )


PIECES = st.one_of(
    st.sampled_from(
        [
            b"",
            b"\0",
            b"\xff",
            b"\n",
            b"\r",
            b"\t",
            b": ",
            b"- ",
            b"&a ",
            b"*a",
            b"<<: ",
            b"!!int ",
            b"!!python/name:os.system ",
            b"{",
            b"}",
            b"[",
            b"]",
            b'"',
            b"'",
            b"|",
            b">",
            b"%",
            b"@",
            b"#",
            b"? ",
            b"---\n",
            b"null",
            b"~",
            b"true",
            b"1:30",
            b"0x1",
            b".inf",
            b".nan",
            b"\xef\xbb\xbf",
            "\u2028".encode(),
            "\u202e🙂".encode(),
            b"\\ud800",
            b"[" * 600,
            b"9" * 400,
            b"9" * 5000,
            b"x" * 20_000,
            b"-1",
            b"1e999",
        ]
    ),
    st.binary(max_size=8),
)


@st.composite
def mistaken(draw: st.DrawFn, valid: bytes) -> bytes:
    """A valid file after a few mistakes: lines and words dropped, doubled, moved or replaced, bytes put in, the end cut off."""
    content = valid
    for _ in range(draw(st.integers(0, 4))):
        content = _mistake(draw, content)
    return content


def _mistake(draw: st.DrawFn, content: bytes) -> bytes:
    kind = draw(st.sampled_from(["drop", "double", "swap", "word", "put", "cut", "repeat", "byte"]))
    lines = content.split(b"\n")
    line, other = draw(st.integers(0, len(lines) - 1)), draw(st.integers(0, len(lines) - 1))
    place = draw(st.integers(0, len(content)))
    if kind == "drop":
        lines.pop(line)
    elif kind == "double":
        lines.insert(other, lines[line])
    elif kind == "swap":
        lines[line], lines[other] = lines[other], lines[line]
    elif kind == "repeat":
        lines[line : line + 1] = [lines[line]] * draw(st.integers(2, 300))
    elif kind == "word":
        words = lines[line].split(b" ")
        words[draw(st.integers(0, len(words) - 1))] = draw(PIECES)
        lines[line] = b" ".join(words)
    elif kind == "put":
        return content[:place] + draw(PIECES) + content[place:]
    elif kind == "cut":
        return content[:place]
    elif content:
        place = min(place, len(content) - 1)
        return content[:place] + bytes([draw(st.integers(0, 255))]) + content[place + 1 :]
    return b"\n".join(lines)
