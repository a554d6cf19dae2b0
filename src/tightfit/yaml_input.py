"""Reads YAML as plain data only (mappings, lists, text, numbers, true, false and null), and refuses
files that are too large or nested too deep.

YAML 1.1 reads 1:30 as 90 (base 60), 010 as 8, 2024-01-01 as a date and 1e-4 as text. This module
follows YAML 1.2: it reads 1:30 and 2024-01-01 as text, 010 as 10 and 1e-4 as a number. The
functions raise InputError, or yaml.YAMLError with the line number if the YAML itself is wrong.
"""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar

import yaml

from tightfit.errors import InputError

MOST_BYTES = 2**19  # size limit of a file of settings
MOST_NODES = 50_000  # limit of values in a file; an alias counts as all values of its anchor
MOST_DEPTH = 32
MOST_BITS = 63

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+|0b[01]+)$")
_FLOAT = re.compile(
    r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$"
    r"|\.(?:nan|NaN|NAN)$"
)
_DECIMAL = re.compile(r"[-+]?0[0-9_]+$")  # leading zeros: a text; number fields read it as decimal


def parse_yaml(text: str) -> Any:
    """Parse a YAML text and return its content as plain data. Raises yaml.YAMLError, with the place
    of the error, if the text is wrong, too large or nested too deep."""
    if len(text) > MOST_BYTES:
        raise yaml.YAMLError(f"{len(text)} characters are more than the {MOST_BYTES} that a file of settings may have")
    return yaml.load(text, _Loader)


def write_yaml(content: Any) -> str:
    """Return YAML text that both YAML 1.1 parsers and `parse_yaml` read back as `content`."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def check_plain(content: Any, where: str) -> None:
    """Raise InputError if `content`, or a value inside its mappings and lists, is one that no field
    can take: an integer beyond 64 bits, an infinite number or NaN, a text with zero bytes or
    unpaired surrogates, an empty field name, or content that is nested too deep.

    where  the file or section that the error names, besides the field
    """
    _check(content, where, (), MOST_DEPTH)


def _check(content: Any, where: str, path: tuple[str, ...], depth: int) -> None:
    def refuse(found: str, fix: str) -> None:
        raise InputError(f"{where}: {'.'.join(path)}" if path else where, found, fix)

    if isinstance(content, str):
        if "\0" in content or any("\ud800" <= letter <= "\udfff" for letter in content):
            refuse("contains a zero byte or half a surrogate pair, which no name or path has", "remove that character")
    elif isinstance(content, int):
        if content.bit_length() > MOST_BITS:
            refuse("is a number beyond 64 bits", f"write one of at most {2**MOST_BITS - 1}")
    elif isinstance(content, float):
        if not math.isfinite(content):
            refuse(f"is {content}", "write a finite number")
    elif isinstance(content, dict | list | tuple):
        if depth == 0:
            refuse(f"is nested more than {MOST_DEPTH} deep", f"use at most {MOST_DEPTH} levels")
        inner = content.items() if isinstance(content, dict) else ((str(n), one) for n, one in enumerate(content))
        for name, value in inner:
            if isinstance(content, dict):
                _check(name, where, (*path, "a key"), depth - 1)
                if isinstance(name, str) and not name.strip():
                    refuse(f"has an empty name ({name!r}) among its fields", "name this field, or remove it")
            _check(value, where, (*path, str(name)), depth - 1)


class _Loader(yaml.SafeLoader):
    """A YAML loader for plain types only. It raises yaml.YAMLError for a field that is written
    twice, where PyYAML would silently keep the last value, and for YAML that is too large or nested
    too deep."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {  # type: ignore[misc]
        first: [(tag, pattern) for tag, pattern in known if tag[len(_TAG) :] in ("bool", "null", "merge")]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {  # noqa: RUF012
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag[len(_TAG) :] in ("bool", "null", "str", "seq", "map", "int", "float")
    }

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._nodes = 0
        self._sizes: dict[int, int] = {}  # by id of each complete node: its number of values

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark, is_alias = self.peek_event().start_mark, self.check_event(yaml.AliasEvent)

        def refuse(problem: str) -> None:
            raise yaml.composer.ComposerError(None, None, problem, mark)

        if self._depth == MOST_DEPTH:
            refuse(f"nested more than {MOST_DEPTH} deep")
        before = self._nodes
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and id(node) not in self._sizes:
            refuse("an alias of a value that contains the alias")
        self._nodes += self._sizes[id(node)] if is_alias else 1
        if self._nodes > MOST_NODES:
            refuse(f"more than {MOST_NODES} values")
        self._sizes.setdefault(id(node), self._nodes - before)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:  # a tag that does not fit its value
            raise yaml.constructor.ConstructorError(
                None, None, f"{str(getattr(node, 'value', ''))[:40]!r} is no {node.tag[len(_TAG) :]}", node.start_mark
            ) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != f"{_TAG}merge":
                if key.value in keys:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value!r} is written twice", key.start_mark
                    )
                keys.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node).replace("_", ""), 0)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        text = self.construct_scalar(node).replace("_", "").lower()
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes a text if a YAML 1.1 or 1.2 parser would otherwise read the text as
    a number, date or boolean."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: list(known) for first, known in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }


_Loader.add_constructor(f"{_TAG}int", _Loader.construct_yaml_int)
_Loader.add_constructor(f"{_TAG}float", _Loader.construct_yaml_float)
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(f"{_TAG}int", _INT, list("-+0123456789"))
    _kind.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+.0123456789"))
_Dumper.add_implicit_resolver(f"{_TAG}int", _DECIMAL, list("-+0"))

__all__ = ["MOST_BYTES", "check_plain", "parse_yaml", "write_yaml"]
