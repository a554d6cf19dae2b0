"""What the tables of other tools' keys are made of, and the draft that they fill.

A table is a tuple of `Key`. Each key has a field of tightfit's and a conversion, or the reason why
it has none.
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
    """What a conversion returns for a value that has no counterpart, with the reason.

    is_lost  whether the training loses something by that; else the value needs no counterpart
    """

    reason: str
    is_lost: bool = True


@dataclass(frozen=True)
class Key:
    """A key of another tool.

    name     with its sections, joined by dots; * stands for any characters
    field    tightfit's field, such as train.learning_rate; empty if there is none
    convert  from the key's value to the field's or to Lacks; raises ValueError for a wrong value
    part     if several keys give the field together: this key's name in `Draft.parts`
    reason   why there is no field; or what a reader should know about the conversion
    is_lost  without a field: whether the training loses something; else it needs no counterpart
    takes_auto  whether `convert` reads the word auto; else it leaves the field open
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
    """Keys without a counterpart: the training loses what they say."""
    return tuple(Key(name, reason=reason) for name in names)


def needless(reason: str, *names: str) -> tuple[Key, ...]:
    """Keys that need no counterpart: the training is the same without them."""
    return tuple(Key(name, reason=reason, is_lost=False) for name in names)


def under(section: str, keys: tuple[Key, ...]) -> tuple[Key, ...]:
    """The same keys, as a section of another file names them."""
    return tuple(replace(key, name=f"{section}.{key.name}") for key in keys)


@dataclass
class Row:
    """What became of one key of the file.

    field, result  tightfit's field and its value, if the key was mapped
    note           the reason, or a remark
    """

    key: str
    value: Any
    outcome: Outcome
    field: str = ""
    result: Any = None
    note: str = ""


@dataclass
class Draft:
    """A job and a plan while they are made from another tool's keys.

    fields          tightfit's fields by name, such as plan.zero
    parts           what several keys say together, by the names that `combine.py` reads
    defaulted       parts that the file leaves out and that have the tool's default
    rows            one for each key
    contradictions  what cannot both be true, a sentence each
    to_do           what the user must add or decide, a sentence each
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
        """Store a key's converted value as a field or a part. Two keys that disagree are a
        contradiction, and the field is left out."""
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
        """Leave a field out because of a contradiction, also if it is set later."""
        self._dropped.add(name)
        for row in self.rows:
            if row.field == name:
                row.outcome = "contradiction"
                row.note = row.note or "see the contradictions"

    def imply(self, part: str, value: Any, source: str) -> None:
        """Set a part that the key of the part `source` implies, unless the file gives it itself."""
        if part not in self.parts:
            self.parts[part] = value
            self._givers[part] = self.giver(source)

    def is_dropped(self, name: str) -> bool:
        """Whether a contradiction leaves this field out."""
        return name in self._dropped

    def remove_dropped(self) -> None:
        """Take the dropped fields out, at the end."""
        for name in self._dropped:
            self.fields.pop(name, None)

    def remark(self, part: str, note: str) -> None:
        """Add a note to the rows of the keys that gave a part or field."""
        for row in self.rows:
            if row.key == self._givers.get(part) and note not in row.note:
                row.note = f"{row.note}; {note}" if row.note else note

    def settle(self, part: str, outcome: Outcome, note: str) -> None:
        """Change what became of the key that gave a part or field."""
        for row in self.rows:
            if row.key == self._givers.get(part):
                row.outcome, row.note, row.field = outcome, note, ""

    def point(self, part: str, field: str) -> None:
        """Let the row of the key that gave a part lead to another field."""
        for row in self.rows:
            if row.key == self._givers.get(part) and row.field:
                row.field = field

    def giver(self, part: str) -> str:
        """The key that gave a part or field."""
        return self._givers.get(part, part)


def _as_it_is(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    return content


def _nothing(draft: Draft) -> None:
    pass


@dataclass(frozen=True)
class Importer:
    """A tool whose configuration can be imported.

    name      the word after --from
    title     the tool's name, for people
    marks     keys that tell its files from other tools' files; * stands for any characters
    keys      the table
    sections  sections in which the table's keys may also stand, such as trainer; the longest first
    defaults  what the tool does where a key is left out, for keys that change the mathematics
    auto      what the word auto means in its files
    prepare   (content, the file's folder) -> content: reads what the file refers to
    combine   joins what is this tool's own, before `combine.py` joins the rest
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
        """The key of the table that has this name; an exact name comes before a pattern."""
        bare = self.without_section(name)
        exact = next((key for key in self.keys if key.name in (name, bare)), None)
        return exact or next((key for key in self.keys if key.matches(name) or key.matches(bare)), None)

    def without_section(self, name: str) -> str:
        """A key's name without the section that it may stand in."""
        section = next((one for one in self.sections if name.startswith(f"{one}.")), None)
        return name if section is None else name.removeprefix(f"{section}.")

    def flatten(self, content: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
        """(name with its sections, value) of every key of a file, down to what the table names."""
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
