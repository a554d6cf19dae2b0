"""Value, the base of Job, Machine, Plan and Record: a frozen, validated value that reads and writes
YAML and JSON.

Wrong input raises an InputError that names the field and the nearest valid input.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from tightfit.errors import InputError
from tightfit.other_words import tightfits_word
from tightfit.yaml_input import MOST_BYTES, check_plain, parse_yaml, write_yaml


class Value(BaseModel):
    """A frozen pydantic model, which can be written as YAML or JSON. The constructor and `parse`
    raise InputError if a field is unknown, missing or has a wrong value."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, populate_by_name=True, allow_inf_nan=False
    )

    def __init__(self, /, **fields: Any) -> None:
        self._fill(fields, type(self).__name__.lower())

    def _fill(self, fields: dict[str, Any], where: str) -> None:
        for name, value in fields.items():  # pydantic would accept True as 1
            if isinstance(value, bool) and _is_number(type(self), name):
                raise InputError(f"{where}: {name}", f"{value} is not a number", "write a number, not true or false")
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise explain_validation(type(self), error, where) from None

    @classmethod
    def parse(cls, content: Any, where: str = "") -> Self:
        """Return a validated value of this class.

        content  a mapping of the fields, such as the content of a file
        where    the file or section that an error names; the class's name by default

        Raises InputError, which names `where` and the field, if `content` is not a mapping, or if a
        field is unknown, missing or has a wrong value.
        """
        where = where or cls.__name__.lower()
        if not isinstance(content, dict):
            raise InputError(
                where,
                f"expected a mapping of fields, found {type(content).__name__}",
                f"give the fields of a {cls.__name__.lower()}: {', '.join(cls.field_names())}",
            )
        for name in content:
            if not isinstance(name, str):
                raise InputError(
                    f"{where}: {name}",
                    f"field names must be strings, and this is of type {type(name).__name__}",
                    f"write it in quotes: '{name}'",
                )
            if not name.strip():
                raise InputError(
                    f"{where}: {name!r}", "is an empty name", f"use one of: {', '.join(cls.field_names())}"
                )
        check_plain({name: value for name, value in content.items() if not _is_sequence(value)}, where)
        return cls._made(content, where)

    @classmethod
    def _made(cls, content: dict[str, Any], where: str) -> Self:
        value = cls.__new__(cls)
        value._fill(content, where)
        return value

    @classmethod
    def field_names(cls) -> list[str]:
        """Return the names of the fields as they are written in files: "from" instead of
        "from_"."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    def content(self) -> dict[str, Any]:
        """Return the fields that are not None, as JSON types."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    def to_yaml(self) -> str:
        return write_yaml(self.content())

    def to_json(self) -> str:
        return json.dumps(self.content())

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with these fields changed. Values of the other fields are shared
        with the copy."""
        kept = {
            name: getattr(self, name)
            for name, field in type(self).model_fields.items()
            if name not in changes and field.alias not in changes
        }
        return type(self)._made({**kept, **changes}, type(self).__name__.lower())

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield (name, value) of the fields that are required or differ from their default, so that
        a value prints as one short line. pydantic calls this for `repr`."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if field.is_required() or value != field.get_default(call_default_factory=True):
                yield field.alias or name, value

    def __str__(self) -> str:
        return repr(self)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML or JSON file and return the mapping in it. Raises InputError if the file does not
    exist or cannot be read, is too large, is not valid YAML, or does not contain a mapping."""
    path = Path(path)
    if path.is_dir():
        raise InputError(str(path), "is a folder, not a YAML file", "name the YAML file itself")
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], 1)
        raise InputError(
            str(path), "no such file", f"did you mean {path.parent / near[0]}?" if near else "check the path"
        ) from None
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise InputError(str(path), f"cannot be read ({said})", "check the path and the file's permissions") from None
    if len(raw) > MOST_BYTES:
        raise InputError(
            str(path),
            f"has more than {MOST_BYTES} bytes, too many for a file of settings",
            "name a file of settings, not of data",
        )
    try:
        content = parse_yaml(raw.decode())
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise InputError(f"{path}:{line}", "is not UTF-8 text", "save the file as UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        location = f"{path}:{mark.line + 1}" if mark else str(path)
        raise InputError(
            location,
            f"not valid YAML ({getattr(error, 'problem', None) or 'unreadable'})",
            "correct the line; values with ': ' or a leading '%' or '@' need quotes",
        ) from None
    if not isinstance(content, dict):
        raise InputError(
            str(path),
            f"expected a mapping of fields, found {type(content).__name__}",
            "write it as 'field: value' lines",
        )
    check_plain(content, str(path))
    return content


def nearest(word: str, known: list[str]) -> str:
    """Return a remedy for an unknown word, for an error message. It is "did you mean ...?" with the
    known words that begin with `word`, or with the most similar known words; if there is none, it
    is "use one of: ..." with all known words."""
    longer = [one for one in known if word and one.startswith(word.lower())]
    if 0 < len(longer) <= 4:
        return "did you mean " + " or ".join(map(repr, longer)) + "?"
    near = difflib.get_close_matches(word.lower(), known, 8, 0.5)
    alike = [one for one in sorted(near) if _likeness(word, one) == max(_likeness(word, other) for other in near)]
    return f"did you mean {' or '.join(map(repr, alike))}?" if alike else "use one of: " + ", ".join(known)


def _likeness(word: str, known: str) -> tuple[bool, float]:
    """Return how alike two words are, to compare: first whether they have the same letters, as after
    two keys were swapped, and then the share of characters that match in order."""
    swapped = sorted(word.lower()) == sorted(known)
    return swapped, difflib.SequenceMatcher(None, word.lower(), known).ratio()


def nearest_field(name: str, known: list[str]) -> str:
    """Return a remedy for an unknown field, for an error message. If another tool calls a field
    `name`, it is tightfit's name of this field; else it is the most similar of the `known`
    fields."""
    return tightfits_word(name) or nearest(name, known)


def explain_validation(cls: type[BaseModel], error: ValidationError, where: str) -> InputError:
    """Return an InputError for the first error that pydantic found. If a field is unknown, the
    result is about this field instead.

    cls    the class whose fields were validated
    where  the file or section that the InputError names
    """
    details = error.errors()
    unknown = [detail for detail in details if detail["type"] == "extra_forbidden"]
    first = (unknown or details)[0]
    path = _path(first)
    field = ".".join(str(part) for part in path)
    location = f"{where}: {field}" if field else where
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, InputError):
        kind, _, rest = inner.asked.partition(": ")
        if path and kind in _names_of_values(Value):  # the error of a value within this one, or of a field
            outer = path[:-1] if rest.partition("=")[0] == str(path[-1]) else path
            return InputError(f"{where}: {'.'.join([*map(str, outer), rest])}", inner.found, inner.fix)
        named = not path or str(path[-1]) in inner.asked
        return inner if named else InputError(f"{location}: {inner.asked}", inner.found, inner.fix)
    branches = [detail for detail in details if _path(detail) == path]  # a union's types
    fixes = dict.fromkeys(_fix(cls, path, detail) for detail in branches)
    return InputError(location, _found(first), ", or ".join(fixes))


def _names_of_values(cls: type[Value]) -> set[str]:
    """Return the names that error messages use for the subclasses of `cls` and for their own
    subclasses: the class names in lower case, such as "loraspec"."""
    below = cls.__subclasses__()
    return {one.__name__.lower() for one in below}.union(*map(_names_of_values, below))


def _is_sequence(value: Any) -> bool:
    """Return whether `value` is a list or tuple. `parse` does not check the elements of these.

    A list from a file was checked when the file was read. A list from Python may be a dataset,
    which may have too many elements to check.
    """
    return isinstance(value, list | tuple)


@cache
def _is_number(cls: type[BaseModel], name: str) -> bool:
    """Return whether the field `name` of a class takes numbers but not booleans, and has no
    validator of its own."""
    field = cls.model_fields.get(name)
    if field is None or any(isinstance(one, BeforeValidator) for one in field.metadata):
        return False
    leaves = _leaves(field.annotation)
    return bool not in leaves and any(leaf in (int, float) or type(leaf) is int for leaf in leaves)


def _path(detail: ErrorDetails) -> list[int | str]:
    """Return the path to the value that has an error: field names and list positions, such as
    ["groups", 0, "match"]. Names that pydantic adds for the types of a union are left out."""
    *outer, last = detail["loc"] or ("",)
    kept = [part for part in outer if not _is_branch(part)]
    own = detail["type"] == "extra_forbidden" or (last != "" and not _is_branch(last))  # any name
    return [*kept, last] if own else kept


def _is_branch(part: Any) -> bool:
    """Return whether a part of pydantic's error location names a type of a union rather than a
    field."""
    kinds = {"int", "str", "bool", "float", "callable"}
    return isinstance(part, str) and (not part.isidentifier() or part[0].isupper() or part in kinds)


def _found(detail: ErrorDetails) -> str:
    if detail["type"] == "extra_forbidden":
        return "unknown field"
    if detail["type"] == "missing":
        return "is required and missing"
    message = re.sub(
        "valid dictionary or instance of .*", "mapping of fields", detail["msg"].removeprefix("Value error, ")
    )
    asked = repr(detail["input"])
    return f"{asked if len(asked) <= 80 else asked[:80] + '...'} is not allowed ({message[0].lower()}{message[1:]})"


def _fix(cls: type[BaseModel], path: list[Any], detail: ErrorDetails) -> str:
    if detail["type"] == "extra_forbidden":
        return nearest_field(str(path[-1]), _fields_at(cls, path[:-1]))
    if detail["type"] == "missing":
        return "give one more" if isinstance(path[-1], int) else f"add '{path[-1]}: ...'"
    context = detail.get("ctx", {})
    if detail["type"] == "too_long":
        return f"give at most {context['max_length']}"
    if "expected" in context:
        return f"use one of: {context['expected']}"
    for name, words in (("gt", "more than"), ("ge", "at least"), ("lt", "less than"), ("le", "at most")):
        if name in context:
            return f"give a value of {words} {context[name]}"
    kinds = {
        "int": "a whole number",
        "float": "a number",
        "finite": "a number",
        "bool": "true or false",
        "string": "text",
        "list": "a list",
        "tuple": "a list",
        "dict": "a mapping",
    }
    if detail["type"].startswith("model"):
        return f"give a mapping with some of the fields {', '.join(_fields_at(cls, path))}"
    kind = next((words for name, words in kinds.items() if detail["type"].startswith(name)), "a valid value")
    return f"give {kind}"


def _fields_at(cls: type[BaseModel], path: list[Any]) -> list[str]:
    """Return the field names of the section at `path` inside `cls`. Example: for the class Job and
    the path ["train"], these are the fields of Train."""
    for part in path:
        field = next((f for n, f in cls.model_fields.items() if part in (n, f.alias)), None)
        leaves = _leaves(field.annotation) if field else []
        inner = [leaf for leaf in leaves if isinstance(leaf, type) and issubclass(leaf, BaseModel)]
        if not inner:
            break
        cls = inner[0]
    return [field.alias or name for name, field in cls.model_fields.items()]


def _leaves(annotation: Any) -> list[Any]:
    arguments = getattr(annotation, "__args__", ())
    return [leaf for argument in arguments for leaf in _leaves(argument)] if arguments else [annotation]
