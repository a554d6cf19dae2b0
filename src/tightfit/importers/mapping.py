"""Defines `Key`, an entry in the table of a tool's keys, and `Draft`, the job and plan that an
import builds from a file.

A tool's table is a tuple of `Key`. Each `Key` has the name of a tightfit field and a function that
converts the value, or the reason why tightfit has no such field.
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
    """What a conversion returns if the key's value sets no field of tightfit. The import then
    reports the key as "no counterpart" or "not needed", with the reason.

    reason      why no field is set
    is_lost     True ("no counterpart") if the training differs without the value; False ("not
                needed") if it is the same
    is_refused  True if the file must not be imported, because the value asks for another objective
    """

    reason: str
    is_lost: bool = True
    is_refused: bool = False


@dataclass(frozen=True)
class Key:
    """One entry of the table of another tool's keys: a key (or a pattern of keys), and the tightfit
    field that it sets.

    name        the key with its sections, joined by dots, such as fp16.enabled; * matches any
                characters
    field       tightfit's field, such as train.learning_rate; empty if tightfit has no such field
    convert     a function that converts the key's value to the field's value. It returns `Lacks` if
                the value sets no field, and raises ValueError for a value that the tool itself
                would not accept
    part        if several keys determine the field together: the name under which `Draft.parts`
                stores this key's value. For example, the micro-batch and the accumulation steps
                determine train.batch
    reason      why tightfit has no such field, or a remark about the conversion
    is_lost     for a key without a field: True if the training differs without it, False if it is
                the same, so that no counterpart is needed
    takes_auto  True if `convert` accepts the word "auto"; False if "auto" leaves the field open
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
    """Return one `Key` for each of `names`, keys that tightfit has no counterpart for although the
    training differs without them.

    reason  why there is no counterpart
    """
    return tuple(Key(name, reason=reason) for name in names)


def needless(reason: str, *names: str) -> tuple[Key, ...]:
    """Return one `Key` for each of `names`, keys that need no counterpart, because the training is
    the same without them.

    reason  why no counterpart is needed
    """
    return tuple(Key(name, reason=reason, is_lost=False) for name in names)


def objective(reason: str, *names: str) -> tuple[Key, ...]:
    """Return one `Key` for each of `names`, keys that ask for an objective that tightfit does not
    train. A file in which one of them is not off is refused.

    reason  what tightfit does not have
    """

    def convert(value: Any) -> Lacks:
        is_off = value is False or value in ("", "none", "no") or value == []
        return Lacks("it is off", is_lost=False) if is_off else Lacks(reason, is_refused=True)

    return tuple(Key(name, convert=convert, reason=f"refused: {reason}") for name in names)


def under(section: str, keys: tuple[Key, ...]) -> tuple[Key, ...]:
    """Return copies of `keys` whose names begin with a section: under("fsdp", keys) changes the
    name version to fsdp.version."""
    return tuple(replace(key, name=f"{section}.{key.name}") for key in keys)


@dataclass
class Row:
    """The translation of one key of the imported file, a row of the table that the command prints.

    key, value     the key with its sections, and its value in the file
    outcome        how the translation ended, such as "mapped" or "no counterpart"
    field, result  the tightfit field that the key sets, and the field's value; empty and None if it
                   sets none
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
    """The unfinished job and plan of an import, which the tool's keys fill in one after another.

    fields          values of tightfit's fields, by names such as plan.zero
    parts           values that determine a field only together with others, such as micro_batch and
                    accumulation; `combine.py` computes the fields from them
    defaulted       names of the parts and fields that have the tool's default, because the file
                    does not have their key
    rows            the translation of each key
    contradictions  one sentence for each contradiction in the file
    to_do           one sentence for each thing that the user must add or decide
    files           files that are written beside the job, such as a chat template: name -> text
    lost            fields of tightfit for which the file has a value without a counterpart
    """

    fields: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)
    defaulted: set[str] = field(default_factory=set)
    rows: list[Row] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)
    to_do: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    _givers: dict[str, str] = field(default_factory=dict, repr=False)  # by field or part: the key that gave it
    _dropped: set[str] = field(default_factory=set, repr=False)
    _contested: set[str] = field(default_factory=set, repr=False)  # fields and parts that two keys disagree about

    def give(self, row: Row, key: Key, value: Any, is_default: bool = False) -> None:
        """Store a key's converted value as the part `key.part` or, if the key has no part, as the
        field `key.field`. If an earlier key gave another value, add a contradiction and leave the
        field out.

        row         the key's row, which has its name in the file
        value       the converted value
        is_default  True if the value is the tool's default; False if the file has it
        """
        target, name = (self.parts, key.part) if key.part else (self.fields, key.field)
        giver = self._givers.setdefault(name, row.key)
        if name in self._contested or (name in target and target[name] != value):
            self.contradict(f"{giver} and {row.key} disagree about {key.field}")
            self._contested.add(name)
            target.pop(name, None)
            self.drop(key.field)
            return
        target[name] = value
        if is_default:
            self.defaulted.add(name)

    def assume(self, key: str, value: Any, field: str, result: Any, note: str = "") -> None:
        """Set a field that follows from the tool's default for a key that the file does not have.

        `Importer.defaults` does the same for keys whose default always counts. This method is for
        keys whose default counts only with another key, such as the rank of adapters.

        key     the tool's key
        value   its default in the tool
        field   the tightfit field that the default sets
        result  the field's value
        note    a remark about the conversion
        """
        self.rows = [row for row in self.rows if row.key != key]  # the key may be empty in the file
        self.rows.append(Row(key, value, "default", field, note=note))
        self.fields[field] = result
        self._givers[field] = key

    def contradict(self, sentence: str) -> None:
        if sentence not in self.contradictions:
            self.contradictions.append(sentence)

    def drop(self, name: str) -> None:
        """Leave field `name` out of the import because of a contradiction, even if a later step
        sets it."""
        self._dropped.add(name)
        for row in self.rows:
            if row.field == name:
                row.outcome = "contradiction"
                row.note = row.note or "see the contradictions"

    def imply(self, part: str, value: Any, source: str) -> None:
        """Set the part `part` to a value that follows from another part, `source`. If `part` is
        already set, it keeps its value.

        Messages about `part` then name the key whose value was stored as `source`.
        """
        if part not in self.parts:
            self.parts[part] = value
            self._givers[part] = self.giver(source)

    def is_dropped(self, name: str) -> bool:
        """Return whether field `name` is left out because of a contradiction."""
        return name in self._dropped

    def remove_dropped(self) -> None:
        """Remove the fields that were left out by `drop`. Call this after all fields are set."""
        for name in self._dropped:
            self.fields.pop(name, None)

    def remark(self, part: str, note: str) -> None:
        """Add a note to one row: that of the key whose value was stored as the part or field
        `part`."""
        for row in self.rows:
            if row.key == self._givers.get(part) and note not in row.note:
                row.note = f"{row.note}; {note}" if row.note else note

    def settle(self, part: str, outcome: Outcome, note: str) -> None:
        """Change the outcome and the note of one row: that of the key whose value was stored as the
        part or field `part`. The row then names no field.

        Example: the number of epochs becomes "not needed" if the file also gives the number of
        steps.
        """
        for row in self.rows:
            if row.key == self._givers.get(part):
                row.outcome, row.note, row.field = outcome, note, ""

    def point(self, part: str, field: str) -> None:
        """Change the field that one row names to `field`. The row is that of the key whose value
        was stored as the part `part`. A row that names no field stays unchanged.

        Example: a number of devices sets plan.dp_shard if the model is sharded, and
        plan.dp_replicate otherwise.
        """
        for row in self.rows:
            if row.key == self._givers.get(part) and row.field:
                row.field = field

    def value(self, key: str) -> Any:
        """Return the value of a key in the file. Returns None if the file does not have the key."""
        return next((row.value for row in self.rows if row.key == key and row.outcome != "default"), None)

    def giver(self, part: str) -> str:
        """Return the name of the file's key whose value was stored as the part or field `part`.
        Returns `part` itself if there is no such key."""
        return self._givers.get(part, part)


def _as_it_is(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    return content


def _nothing(draft: Draft) -> None:
    pass


@dataclass(frozen=True)
class Importer:
    """A tool whose configuration can be imported: its table of keys, and how its files are
    recognized.

    name      the tool's name after --from
    title     the tool's name in messages
    marks     keys by which a file of this tool is recognized; * matches any characters
    keys      the table of the tool's keys
    sections  sections of the file that may contain these keys, such as trainer; the longest name
              first
    defaults  the tool's defaults, by key, for the keys that change the mathematics
    auto      what the value auto means in the tool's files
    prepare   a function (content, folder of the file) -> content, which reads the other files that
              the content names
    combine   a function that sets the fields that depend on several keys of this tool only; called
              before `combine` of `combine.py`
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
        """Return the entry of the table for the key `name`: the entry with this exact name, else
        the first entry whose pattern matches it. Returns None if there is neither."""
        bare = self.without_section(name)
        exact = next((key for key in self.keys if key.name in (name, bare)), None)
        return exact or next((key for key in self.keys if key.matches(name) or key.matches(bare)), None)

    def without_section(self, name: str) -> str:
        """Return a key's name without its section if the section is one of `sections`:
        trainer.max_steps becomes max_steps."""
        section = next((one for one in self.sections if name.startswith(f"{one}.")), None)
        return name if section is None else name.removeprefix(f"{section}.")

    def flatten(self, content: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
        """Yield (name, value) for every key of a file. The names of nested keys are joined by dots:
        {fp16: {enabled: true}} yields ("fp16.enabled", True).

        A mapping is yielded whole if the table has an entry for it and none for the keys inside.

        section  a prefix for all names, such as "fp16."
        """
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
