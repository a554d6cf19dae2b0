"""Python objects in a job: a function, a class or another object in place of a section or a word."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import PlainSerializer, WithJsonSchema, WrapValidator

from tightfit.values import Value


def where_defined(thing: Any) -> dict[str, str] | None:
    """Return the mapping that a job file gets for a Python object that stands in place of a
    section.

    A top-level function or class becomes {python: "module:name"}, which a job file can name. Any
    other object becomes a description such as "<a list of 4 made in Python>"; reading such a file
    raises an error.
    """
    if thing is None or isinstance(thing, Value):
        return None if thing is None else thing.content()
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if isinstance(module, str) and isinstance(name, str) and name.isidentifier():
        script = getattr(sys.modules.get(module), "__file__", None) if module == "__main__" else None
        return {"python": f"{Path(script).resolve() if script else module}:{name}"}
    size = f" of {len(thing)}" if isinstance(thing, Sized) else ""
    return {"python": f"<a {type(thing).__qualname__}{size} made in Python>"}


PythonObject = Annotated[
    Any, PlainSerializer(where_defined), WithJsonSchema({"not": {}, "description": "a Python object, only in Python"})
]


class PythonSpec(Value):
    """A function, class or object of the user: "file.py:name" or "package.module:name"."""

    python: str


def _name_or_function(value: Any, by_name: Callable[[Any], Any]) -> Any:
    """Return a function as it is, and the function's place for a mapping such as
    {python: "file.py:function"}. `by_name` checks all other values, which are words."""
    if callable(value) or isinstance(value, PythonSpec):
        return value
    return PythonSpec.parse(value) if isinstance(value, dict) else by_name(value)


def word_or_place(value: Any) -> Any:
    return value if isinstance(value, str) else where_defined(value)


def or_function(words: Any) -> tuple[Any, ...]:
    """Return the annotations of a field that is one of `words` (a Literal) or a function."""
    place = {"type": "object", "properties": {"python": {"type": "string"}}, "required": ["python"]}
    schema = {"anyOf": [{"enum": list(get_args(words)), "type": "string"}, {**place, "additionalProperties": False}]}
    return (
        WrapValidator(_name_or_function),
        PlainSerializer(word_or_place, when_used="json"),
        WithJsonSchema(schema),
    )
