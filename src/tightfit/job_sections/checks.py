"""Checks that several sections of a job have in common."""

from __future__ import annotations

from typing import Any

from tightfit.errors import InputError


def check_one_source(section: str, sources: dict[str, Any]) -> None:
    given = [name for name, value in sources.items() if value is not None]
    for name in given:
        if not sources[name]:
            raise InputError(
                f"job: {section}.{name}",
                f"is {sources[name]!r}, which names nothing",
                f"give {section}.{name} a value, or leave it out",
            )
    if len(given) != 1:
        found = "gives none of its sources" if not given else f"gives {' and '.join(given)}"
        raise InputError(f"job: {section}", found, f"give exactly one of: {', '.join(sources)}")


def refuse_plain(content: dict[str, Any], name: str, example: str, asked: str = "") -> None:
    """Raise InputError if section `name` of a job is a word, a number or a list instead of a
    mapping. Only the section named "data" may be a list.

    content  the job, or the section that contains section `name`
    name     the section's key in `content`
    example  how to write the section, for the error message
    asked    the section's full name, for the error message; if empty, `name`
    """
    section = content.get(name)
    if isinstance(section, str | int | float) or (isinstance(section, list) and name != "data"):
        raise InputError(
            f"job: {asked or name}", f"expected a mapping, found {section!r}", f"write it like {name}: {example}"
        )
