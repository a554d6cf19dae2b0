"""Writes the README's table of methods and docs/methods.md from METHODS: python -m
tightfit.report.method_docs.

A row of the table is the first paragraph of a method module's docstring; a section of the page is
the whole docstring. A test checks that both agree with METHODS.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from tightfit.methods import METHODS
from tightfit.runtime.method import name_of

BEGIN, END = "<!-- methods: begin -->\n", "<!-- methods: end -->\n"
PARTS = ("Saves", "Costs", "When", "Order", "Source")  # of every method's docstring
HEAD = """# The methods

Written by `python -m tightfit.report.method_docs` from the docstrings in `src/tightfit/methods`. Each method says what it
saves, what it costs, when to use it, its place in the order in which methods compose, and its source. They are listed in
that order.
"""


def table(methods: Iterable[ModuleType] = METHODS) -> str:
    """A Markdown table: each method's name, its plan fields, and its summary."""
    rows = [
        f"| `{name_of(one)}` | {', '.join(f'`{field}`' for field in one.FIELDS)} | {_summary(one)} |" for one in methods
    ]
    return "\n".join(["| module in `methods/` | plan fields | what it is |", "| --- | --- | --- |", *rows]) + "\n"


def page(methods: Iterable[ModuleType] = METHODS) -> str:
    """The text of docs/methods.md."""
    return HEAD + "".join(_section(one) for one in methods)


def _section(method: ModuleType) -> str:
    lines = [
        f"\n## {name_of(method).replace('_', ' ')}\n",
        f"Plan fields: {', '.join(f'`{f}`' for f in method.FIELDS)}\n",
    ]
    for paragraph in inspect.cleandoc(method.__doc__ or "").split("\n\n"):
        if paragraph.startswith(PARTS[0]):
            parts = re.split(rf"^({'|'.join(PARTS)}) +", paragraph, flags=re.M)[1:]
            lines += [f"- **{name}**: {_joined(text)}" for name, text in zip(parts[::2], parts[1::2], strict=True)]
            lines.append("")
        else:
            lines.append(_joined(paragraph) + "\n")
    return "\n".join(lines).rstrip("\n") + "\n"


def _summary(method: ModuleType) -> str:
    return _joined(inspect.cleandoc(method.__doc__ or "").split("\n\n")[0])


def _joined(text: str) -> str:
    return " ".join(text.split())


def with_table(readme: str) -> str:
    """The README's text with the table replaced by the current one."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    root = Path(__file__).parents[3]
    readme = root / "README.md"
    readme.write_text(with_table(readme.read_text()))
    (root / "docs" / "methods.md").write_text(page())
