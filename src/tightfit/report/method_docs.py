"""Writes docs/methods.md from METHODS: python -m tightfit.report.method_docs.

The page begins with a table, whose rows show the first paragraphs of the method modules'
docstrings. Then it has one section for each method, with the whole docstring. A test checks that
the page agrees with METHODS.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from tightfit.methods import METHODS
from tightfit.runtime.method import name_of

PARTS = ("Saves", "Costs", "When", "Order", "Source")  # of every method's docstring
HEAD = """# The methods

Written by `python -m tightfit.report.method_docs` from the docstrings in `src/tightfit/methods`. Each method says what it
saves, what it costs, when to use it, its place in the order in which methods compose, and its source. They are listed in
that order.

"""


def table(methods: Iterable[ModuleType] = METHODS) -> str:
    """Return a Markdown table with one row for each method: its name, its plan fields and the first
    paragraph of its docstring.

    methods  the modules of the methods
    """
    rows = [
        f"| [{_title(method)}](#{_anchor(method)}) | {', '.join(f'`{field}`' for field in method.FIELDS)} | {_summary(method)} |"
        for method in methods
    ]
    return "\n".join(["| method | plan fields | what it is |", "| --- | --- | --- |", *rows]) + "\n"


def page(methods: Iterable[ModuleType] = METHODS) -> str:
    """Return the text of docs/methods.md: a table of the methods, and a section for each of them.

    methods  the modules of the methods
    """
    return HEAD + table(methods) + "".join(_section(method) for method in methods)


def _section(method: ModuleType) -> str:
    lines = [
        f"\n## {_title(method)}\n",
        f"Plan fields: {', '.join(f'`{f}`' for f in method.FIELDS)}\n",
    ]
    for paragraph in inspect.cleandoc(method.__doc__ or "").split("\n\n"):
        if re.match(rf"{PARTS[0]} {{2,}}", paragraph):
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


def _title(method: ModuleType) -> str:
    return name_of(method).replace("_", " ")


def _anchor(method: ModuleType) -> str:
    return name_of(method).replace("_", "-")


if __name__ == "__main__":
    (Path(__file__).parents[3] / "docs" / "methods.md").write_text(page())
