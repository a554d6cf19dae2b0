"""Defines how a job holds Python objects: a function, a class or another object may take the place
of a section or of a word, such as an optimizer's name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import PlainSerializer, WithJsonSchema, WrapValidator

from tightfit.values import Value


def where_defined(thing: Any) -> dict[str, str] | None:
    """Return the mapping that a job file gets in place of a Python object.

    A top-level function or class becomes {python: "module:name"}, from which a job file can import
    it. Any other object becomes a description, such as {python: "<a list of 4 made in Python>"};
    reading such a file raises an error. None stays None, and a section of a job becomes its
    content.
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
    """Names a function, class or other object of the user: "file.py:name" or
    "package.module:name"."""

    python: str


def _name_or_function(value: Any, by_name: Callable[[Any], Any]) -> Any:
    """Validate the value of a field that is a word or a function. A function is returned unchanged,
    and a mapping such as {python: "file.py:function"} as a PythonSpec.

    by_name  validates and returns any other value, which must be a word
    """
    if callable(value) or isinstance(value, PythonSpec):
        return value
    return PythonSpec.parse(value) if isinstance(value, dict) else by_name(value)


def word_or_place(value: Any) -> Any:
    return value if isinstance(value, str) else where_defined(value)


def or_function(words: Any) -> tuple[Any, ...]:
    """Return pydantic annotations for a field whose value is one of `words` or a function. They
    validate the value, write it to a job file, and describe it in the JSON schema.

    words  the allowed words, a Literal
    """
    function_schema = {"type": "object", "properties": {"python": {"type": "string"}}, "required": ["python"]}
    schema = {
        "anyOf": [{"enum": list(get_args(words)), "type": "string"}, {**function_schema, "additionalProperties": False}]
    }
    return (
        WrapValidator(_name_or_function),
        PlainSerializer(word_or_place, when_used="json"),
        WithJsonSchema(schema),
    )
