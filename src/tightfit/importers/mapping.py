"""Defines `Key`, an entry in the table of a tool's keys, and `Draft`, the job and plan that an
import builds from a file.

A table is a tuple of `Key`. Each key names a field of tightfit and a conversion of its value, or
the reason why tightfit has no such field.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["mapped", "default", "left open", "contradiction", "no counterpart", "not needed", "unknown"]


@dataclass(frozen=True)
class Lacks:
    """What a conversion returns for a value that tightfit has no counterpart for.

    reason   why there is no counterpart
    is_lost  whether the training differs without it; if false, no counterpart is needed
    """

    reason: str
    is_lost: bool = True


@dataclass(frozen=True)
class Key:
    """A key of another tool.

    name     the key with its sections, joined by dots; * stands for any characters
    field    tightfit's field, such as train.learning_rate; empty if tightfit has no such field
    convert  converts the key's value to the field's value or to Lacks; raises ValueError for a
             value that the tool would not accept either
    part     the name of the value in `Draft.parts`, if several keys determine the field together
             (micro-batch and accumulation determine train.batch)
    reason   why tightfit has no such field, or a remark about the conversion
    is_lost  for a key without a field: whether the training differs without it; if false, no
             counterpart is needed
    takes_auto  whether `convert` accepts the word auto; if false, auto leaves the field open
    """

    name: str
    field: str = ""
    convert: Callable[[Any], Any] | None = None
    part: str = ""
    reason: str = ""
    is_lost: bool = True
    takes_auto: bool = False

    def matches(self, name: str) -> bool:
        return fnmatch.fnmatchcase(name, self.name) if "*" in self.name else name == self.name


def lacks(reason: str, *names: str) -> tuple[Key, ...]:
    """Return keys without a counterpart, which the training needs: it is not the same without
    them."""
    return tuple(Key(name, reason=reason) for name in names)


def needless(reason: str, *names: str) -> tuple[Key, ...]:
    """Return keys that need no counterpart: the training is the same without them."""
    return tuple(Key(name, reason=reason, is_lost=False) for name in names)


def under(section: str, keys: tuple[Key, ...]) -> tuple[Key, ...]:
    """Return the same keys, as they are named inside a section of another tool's file."""
    return tuple(replace(key, name=f"{section}.{key.name}") for key in keys)


@dataclass
class Row:
    """How one key of the file was translated.

    field, result  tightfit's field and its value, if the key sets a field
    note           the reason for the outcome, or a remark
    """

    key: str
    value: Any
    outcome: Outcome
    field: str = ""
    result: Any = None
    note: str = ""


@dataclass
class Draft:
    """A job and a plan while an import builds them from another tool's keys.

    fields          values of tightfit's fields, by names such as plan.zero
    parts           values that determine a field only together, such as micro_batch and
                    accumulation; `combine.py` reads them
    defaulted       parts and fields that have the tool's default, because the file does not have
                    them
    rows            the translation of each key
    contradictions  one sentence for each contradiction in the file
    to_do           one sentence for each thing that the user must add or decide
    """

    fields: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)
    defaulted: set[str] = field(default_factory=set)
    rows: list[Row] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)
    to_do: list[str] = field(default_factory=list)
    _givers: dict[str, str] = field(default_factory=dict, repr=False)  # by field or part: the key that gave it
    _dropped: set[str] = field(default_factory=set, repr=False)
    _contested: set[str] = field(default_factory=set, repr=False)  # fields and parts that two keys disagree about

    def give(self, row: Row, key: Key, value: Any, is_default: bool = False) -> None:
        """Store a key's converted value as a field or a part. If two keys give different values,
        add a contradiction and leave the field out.

        is_default  whether the value is the tool's default, not the file's
        """
        place, name = (self.parts, key.part) if key.part else (self.fields, key.field)
        giver = self._givers.setdefault(name, row.key)
        if name in self._contested or (name in place and place[name] != value):
            self.contradict(f"{giver} and {row.key} disagree about {key.field}")
            self._contested.add(name)
            place.pop(name, None)
            self.drop(key.field)
            return
        place[name] = value
        if is_default:
            self.defaulted.add(name)

    def contradict(self, sentence: str) -> None:
        if sentence not in self.contradictions:
            self.contradictions.append(sentence)

    def drop(self, name: str) -> None:
        """Leave field `name` out because of a contradiction, even if a later step sets it."""
        self._dropped.add(name)
        for row in self.rows:
            if row.field == name:
                row.outcome = "contradiction"
                row.note = row.note or "see the contradictions"

    def imply(self, part: str, value: Any, source: str) -> None:
        """Set a part that follows from another part, unless the part is set already.

        source  the other part; its key is named in messages about `part`
        """
        if part not in self.parts:
            self.parts[part] = value
            self._givers[part] = self.giver(source)

    def is_dropped(self, name: str) -> bool:
        """Whether field `name` is left out because of a contradiction."""
        return name in self._dropped

    def remove_dropped(self) -> None:
        """Remove the fields that `drop` named. Call this after all fields are set."""
        for name in self._dropped:
            self.fields.pop(name, None)

    def remark(self, part: str, note: str) -> None:
        """Add a note to the row of the key that set a part or field."""
        for row in self.rows:
            if row.key == self._givers.get(part) and note not in row.note:
                row.note = f"{row.note}; {note}" if row.note else note

    def settle(self, part: str, outcome: Outcome, note: str) -> None:
        """Change the outcome of the key that set a part or field."""
        for row in self.rows:
            if row.key == self._givers.get(part):
                row.outcome, row.note, row.field = outcome, note, ""

    def point(self, part: str, field: str) -> None:
        """Change the field in the row of the key that set a part."""
        for row in self.rows:
            if row.key == self._givers.get(part) and row.field:
                row.field = field

    def giver(self, part: str) -> str:
        """Return the name of the key that set a part or field; `part` itself if no key set it."""
        return self._givers.get(part, part)


def _as_it_is(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    return content


def _nothing(draft: Draft) -> None:
    pass


@dataclass(frozen=True)
class Importer:
    """A tool whose configuration can be imported.

    name      the tool's name after --from
    title     the tool's name in messages
    marks     keys by which a file of this tool is recognized; * stands for any characters
    keys      the table of the tool's keys
    sections  sections that may contain these keys, such as trainer; the longest name first
    defaults  the tool's defaults for keys that change the mathematics, by key
    auto      what the value auto means in the tool's files
    prepare   (content, folder of the file) -> content, with the files read that the content names
    combine   sets the fields that depend on several keys in a way of this tool only; called before
              `combine` of `combine.py`
    """

    name: str
    title: str
    marks: tuple[str, ...]
    keys: tuple[Key, ...]
    sections: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    auto: str = "auto lets the tool decide; tightfit's search decides instead"
    prepare: Callable[[dict[str, Any], Path], dict[str, Any]] = _as_it_is
    combine: Callable[[Draft], None] = _nothing

    def find(self, name: str) -> Key | None:
        """Return the key of the table with this name, else the first key whose pattern matches;
        None if there is none."""
        bare = self.without_section(name)
        exact = next((key for key in self.keys if key.name in (name, bare)), None)
        return exact or next((key for key in self.keys if key.matches(name) or key.matches(bare)), None)

    def without_section(self, name: str) -> str:
        """Return a key's name without its section, if this is one of `sections`."""
        section = next((one for one in self.sections if name.startswith(f"{one}.")), None)
        return name if section is None else name.removeprefix(f"{section}.")

    def flatten(self, content: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
        """Yield (name with its sections, value) of every key of a file. A mapping that the table
        names as one key is not divided further."""
        for name, value in content.items():
            path = f"{section}{name}"
            bare = self.without_section(path)
            is_leaf = any(key.name in (path, bare) for key in self.keys) and not any(
                key.name.startswith((f"{path}.", f"{bare}.")) for key in self.keys
            )
            if isinstance(value, dict) and value and not is_leaf:
                yield from self.flatten(value, f"{path}.")
            else:
                yield path, value
