"""A griffe extension: lays out docstrings for the API reference of the site.

Docstrings list fields and parameters in aligned columns:

    model  a callable that returns an nn.Module
    data   a dataset of samples, whose text
           continues on the next line

Markdown would join these lines, so they become a list here. A class derived from `Value` also gets
a table of its fields, with types and defaults, which its signature does not show.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

NAMES = r"[\w.()*-]+(?:, [\w.()*-]+)*"
ENTRY = re.compile(rf"(?P<names>{NAMES})(?: {{2,}}(?P<text>\S.*))?$")


class LaidOut(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = laid_out(obj.docstring.value)

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        if "Value" in [str(base) for base in cls.bases]:
            said = cls.docstring.value if cls.docstring else ""
            cls.docstring = griffe.Docstring(f"{said}\n\n{fields_of(cls)}", parent=cls)


def laid_out(docstring: str) -> str:
    """The docstring with its columns as Markdown lists."""
    paragraphs = re.split(r"\n{2,}", docstring)
    return "\n\n".join(
        "\n".join(_list(one.split("\n"))) if _is_columns(one.split("\n")[0]) else one for one in paragraphs
    )


def _is_columns(line: str) -> bool:
    match = ENTRY.match(line)
    return bool(match and match["text"])


def _list(lines: list[str], depth: int = 0) -> list[str]:
    """The list of a block in columns. Lines that are indented further than the first one continue
    an entry; if they are in columns themselves, they are a list within it."""
    base = _indent(lines[0])
    entries: list[list[str]] = []
    for line in lines:
        if _indent(line) > base and entries:
            entries[-1].append(line)
        else:
            entries.append([line.strip()])
    items = []
    for first, *more in entries:
        match = ENTRY.match(first)
        names, text = (match["names"], match["text"] or "") if match else first.split(" ", 1)
        inner = next((number for number, line in enumerate(more) if _is_columns(line.strip())), len(more))
        words = " ".join([text, *(line.strip() for line in more[:inner])]).strip()
        shown = ", ".join(f"`{name}`" for name in names.split(", "))
        items.append(f"{' ' * 4 * depth}- {shown}: {words}")
        if inner < len(more):
            items += ["", *_list(more[inner:], depth + 1), ""]
    return items


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def fields_of(cls: griffe.Class) -> str:
    """A Markdown table of the class's fields."""
    rows = [
        f"| `{one.name}` | {_code(one.annotation)} | {_default(one.value)} | {_description(one.value)} |"
        for one in cls.members.values()
        if isinstance(one, griffe.Attribute) and one.annotation is not None and not one.name.startswith("_")
        and "property" not in one.labels and "ClassVar" not in str(one.annotation)
    ]  # fmt: skip
    return "\n".join(["| field | type | default | |", "| --- | --- | --- | --- |", *rows])


def _code(what: object) -> str:
    return f"`{' '.join(str(what).split())}`"


def _description(value: object) -> str:
    found = re.search(r"""description=(["'])(.*?)\1""", " ".join(str(value).split()))
    return found[2].replace("*", "\\*") if found else ""


def _default(value: object) -> str:
    """The default of a field: of `Field(32, gt=0)` it is 32."""
    if value is None:
        return "required"
    text = " ".join(str(value).split())
    if not text.startswith("Field("):
        return _code(text)
    factory = re.search(r"default_factory=(\w+)", text)
    if factory:
        return _code({"dict": "{}", "list": "[]", "tuple": "()"}.get(factory[1], factory[1]))
    default = re.match(r"Field\(((?:\([^()]*\)|'[^']*'|[^,()'])+)[,)]", text)
    return _code(default[1]) if default and "=" not in default[1] else "required"
