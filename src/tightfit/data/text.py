"""Reads text as a stream of documents, from plain files, JSON lines, parquet files and saved
datasets.

`data/language.py` opens a source; `data/tokens.py` and `data/tokenizer.py` read its documents. Each
document has its file and line, for error messages. No reader holds a full file in memory.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from tightfit.data.cache import stamps
from tightfit.data.datasets_library import DatasetRows, DatasetStream, dataset_rows, dataset_stream, file_stream
from tightfit.data.long_records import LONG, LongRecord, incomplete
from tightfit.data.samples import DamagePolicy
from tightfit.data.source_files import (
    JSON_ENDINGS,
    PARQUET_ENDINGS,
    PYTHON_STDLIB,
    as_list,
    find_files,
    is_remote,
    readable_files,
    stdlib_files,
)
from tightfit.errors import InputError
from tightfit.job import DataSpec
from tightfit.optional_packages import import_optional
from tightfit.values import nearest

_BLOCK_BYTES = 1 << 20
_PARQUET_ROWS = 256  # rows of a parquet file that are decoded at once
_HEAD_BYTES = 4096
_GZIP = b"\x1f\x8b"
_COMPRESSED = {
    _GZIP: "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
}  # by the first bytes of a file
_BROKEN_GZIP = (EOFError, OSError, zlib.error)
_ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")  # the begin of a list of rows
_NO_LABEL = "not a label (a whole number or a name)"


@dataclass(frozen=True)
class Document:
    """One text, with its target text or its class label if it has one; or a part of a long text.

    location      the file and line, or row, of the text, for messages
    text          the text
    target        the target text, if the data consists of pairs of texts, else None
    label         the class label: a number or the name of the class; None if there is none
    is_last_part  False if the next Document continues this text: a long text is read in several
                  parts
    """

    location: str
    text: str
    target: str | None = None
    label: int | str | None = None
    is_last_part: bool = True


class RowFormat(Protocol):
    """Interface of a format of rows. It says which fields a row of JSON lines, parquet or a saved
    dataset must have, and reads documents from such rows.

    identity   JSON-like content that changes if the same rows would give other documents: a part of
               the key of the cache
    names      {name: setting}: the name of each field that a row must have, and the setting of the
               job that gives this name, such as {"text": "data.field"}
    optional   the names of fields that are read from a row if it has them
    long_text  the name of the field whose text may be too long for the memory; None if there is
               none
    documents  yields the documents of one row; calls damage.report if the row is damaged. `location`
               is the row's file and number, for messages
    """

    @property
    def identity(self) -> Any: ...

    @property
    def names(self) -> dict[str, str]: ...

    @property
    def optional(self) -> tuple[str, ...]: ...

    @property
    def long_text(self) -> str | None: ...

    def documents(self, location: str, row: Any, damage: DamagePolicy) -> Iterator[Document]: ...


@dataclass(frozen=True)
class Columns:
    """A RowFormat for rows with one text each, which may have a target text or a class label.

    text    the name of the field with the text
    target  the name of the field with the target text; None if the data has no target texts
    label   the name of the field with the class label; None if labels are not read
    """

    text: str
    target: str | None = None
    label: str | None = None

    @property
    def identity(self) -> list[str]:
        return list(self.names)

    @property
    def names(self) -> dict[str, str]:
        settings = {"data.field": self.text, "data.target_field": self.target, "data.label_field": self.label}
        return {name: setting for setting, name in settings.items() if name is not None}

    @property
    def optional(self) -> tuple[str, ...]:
        return ()

    @property
    def long_text(self) -> str:
        return self.text

    def documents(self, location: str, row: Any, damage: DamagePolicy) -> Iterator[Document]:
        """Yield the document of one row. Yield nothing if its text is empty, or if the row is
        damaged, which is reported to `damage`.

        location: the row's file and number, for messages
        """
        found = row_damage(row, self) or self._wrong_type(row)
        if found:
            damage.report(location, found)
        elif row[self.text] and (self.target is None or row[self.target]):
            target, label = (name and row[name] for name in (self.target, self.label))
            yield Document(location, row[self.text], target, label)

    def _wrong_type(self, row: dict[str, Any]) -> str | None:
        for name in self.names:
            kinds, expected = (int | str, _NO_LABEL) if name == self.label else (str, "not text")
            if not isinstance(row[name], kinds):
                return f"field {name!r} holds {type(row[name]).__name__}, {expected}"
            if isinstance(row[name], str) and not is_unicode(row[name]):
                return f"field {name!r} holds half a surrogate pair, which is no character"
        return None


@dataclass(frozen=True)
class TextSource:
    """Text data that has been opened, whose documents can be read any number of times.

    name        the source's name in messages
    identity    JSON-like content that changes when the files or the fields to read change: the key
                of the cache. None for a stream, whose content is not known before it is read
    size_bytes  the size of all files together; 0 for a stream
    columns     says which fields of each row are read
    documents   yields all documents, from the first one at each call; reports damaged rows to the
                DamagePolicy that it is given
    class_names  the names of the classes, if the labels are numbers and the source names them
    """

    name: str
    identity: Any
    size_bytes: int
    columns: RowFormat
    documents: Callable[[DamagePolicy], Iterator[Document]]
    class_names: tuple[str, ...] = ()


def open_text(spec: DataSpec, columns: RowFormat) -> TextSource:
    """Return the source of the text that `spec` names by its field text, jsonl, parquet or dataset.

    With `spec.streaming`, nothing is copied into the cache: files at URLs and data sets are read
    while the documents are.

    columns: says which fields of each row are read. Raises InputError if there are no such files,
    or if `columns` needs several fields of plain text, which has no fields.
    """
    if spec.streaming and (stream := _open_stream(spec)) is not None:
        return TextSource(str(spec), None, 0, columns, lambda damage: _read_dataset(stream, columns, damage))
    if spec.text is not None:
        if len(columns.names) > 1:
            raise InputError(
                f"data: text={spec.text}",
                f"plain text has no fields, so it has no {list(columns.names)[-1]!r}",
                "use data.jsonl, data.parquet or data.dataset, whose rows have fields",
            )
        files = stdlib_files() if spec.text == PYTHON_STDLIB else find_files("text", spec.text)
        for file in files:
            _refuse_kind("text", file)
        return _source(str(spec), files, columns, lambda damage: _read_text(files, damage))
    if spec.jsonl is not None:
        files = find_files("jsonl", spec.jsonl, JSON_ENDINGS)
        for file in files:
            _refuse_kind("jsonl", file)
        return _source(str(spec), files, columns, lambda damage: _read_jsonl(files, columns, damage))
    if spec.parquet is not None:
        files = find_files("parquet", spec.parquet, PARQUET_ENDINGS)
        return _source(str(spec), files, columns, lambda damage: _read_parquet(files, columns, damage))
    rows = dataset_rows(spec)
    identity = [rows.identity, columns.identity]
    names = rows.class_names(columns.label) if isinstance(columns, Columns) and columns.label is not None else ()
    return TextSource(
        str(spec), identity, rows.size_bytes, columns, lambda damage: _read_dataset(rows, columns, damage), names
    )


def _open_stream(spec: DataSpec) -> DatasetRows | DatasetStream | None:
    """Return a stream of the data set or of the files at URLs that `spec` names; None for local
    files, whose readers hold little memory."""
    if spec.dataset is not None:
        return dataset_stream(spec)
    if spec.text is not None:
        if any(map(is_remote, as_list(spec.text))):
            raise InputError(
                f"data: text={spec.text}",
                "plain text at a URL cannot be streamed, because each file would be held in memory",
                "use data.jsonl or data.parquet, or leave out data.streaming, which copies the files into the cache",
            )
        return None
    name, given, endings = (
        ("jsonl", spec.jsonl, JSON_ENDINGS) if spec.jsonl else ("parquet", spec.parquet, PARQUET_ENDINGS)
    )
    if not any(map(is_remote, as_list(given))):
        return None
    files = [file for one in as_list(given) for file in readable_files(name, one, endings)]
    return file_stream(f"data: {name}={given}", "json" if name == "jsonl" else name, files)


def first_document(source: TextSource, skip_damaged: bool) -> Document:
    """Return the first document of a source that is not damaged.

    Raises InputError if there is none, or if a damaged one comes first and `skip_damaged` is False.
    The message recommends skipping damaged samples only if some sample is not damaged.
    """
    damage = DamagePolicy(skip_damaged)
    try:
        for document in source.documents(damage):
            return document
    except InputError as error:
        skipping = DamagePolicy(skip=True)
        if next(source.documents(skipping), None) is not None or skipping.first is None:
            raise
        raise InputError(error.asked, error.found, _damage_fix(source, error.found)) from None
    if damage.first is not None:
        location, found = damage.first
        raise InputError(
            f"data: {source.name}",
            f"contains no text: all {damage.count} samples are damaged; {location} {found}",
            _damage_fix(source, found),
        )
    raise InputError(f"data: {source.name}", "contains no text", "name files that contain text, or another data.field")


def _damage_fix(source: TextSource, damage: str) -> str:
    """Return the remedy that an error message gives for a source whose samples are all damaged: to
    name another field if `damage` says that a field is missing, else to correct the samples.

    damage: what is wrong with the first sample
    """
    for name in source.columns.names:
        if f"no field {name!r}" in damage or f"no column {name!r}" in damage:
            return _field_fix(source.columns, name)
    if _NO_LABEL in damage:
        return (
            "number the classes from 0, or write their names. Regression and several labels for a sample are no tasks of "
            "tightfit: give the job a loss, such as loss: {python: 'torch.nn:MSELoss'}, and a dataset with such labels (data.python)"
        )
    return "correct the samples, or name other files"


def _source(
    name: str, files: list[Path], columns: RowFormat, read: Callable[[DamagePolicy], Iterator[Document]]
) -> TextSource:
    file_stamps = stamps(files)
    return TextSource(name, [file_stamps, columns.identity], sum(size for _, size, _ in file_stamps), columns, read)


def _read_text(files: list[Path], damage: DamagePolicy) -> Iterator[Document]:
    """Yield each file as one document. A file larger than 1 MiB is yielded in several parts, each a
    Document, which are split at the ends of lines. Lines that are not UTF-8 are reported to
    `damage` and left out."""
    for file in files:
        held: Document | None = None
        for line, block in _blocks(file):
            text = _decode(file, line, block, damage)
            if text and held:
                yield Document(held.location, held.text, is_last_part=False)
            held = Document(f"{file}:{line}", text) if text else held
        if held:
            yield held


def _blocks(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the bytes of a file in blocks of about 1 MiB, each as (number of the block's first
    line, from 1; bytes). A block holds complete lines, or a part of one line that is longer than a
    block."""
    line, rest = 1, b""
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK_BYTES):
            rest += block
            cut = rest.rfind(b"\n") + 1 or (len(rest) - incomplete(rest[-4:]) if len(rest) > _BLOCK_BYTES else 0)
            if cut:
                yield line, rest[:cut]
                line += rest.count(b"\n", 0, cut)
                rest = rest[cut:]
    if rest:
        yield line, rest


def _refuse_kind(field: str, file: Path) -> None:
    """Raise InputError if the first bytes of a file show that it is a parquet file, compressed, or
    one JSON array of rows. JSON lines may be compressed with gzip.

    field  the field of the job's data that names the file: text or jsonl
    """
    asked = f"data: {field}={file}"
    with file.open("rb") as opened:
        begin = opened.read(_HEAD_BYTES)
    if begin.startswith(b"PAR1"):
        expected = "plain text" if field == "text" else "JSON lines"
        raise InputError(asked, f"this is a parquet file, not {expected}", f"write data: {{parquet: {file}}}")
    packed = next((name for mark, name in _COMPRESSED.items() if begin.startswith(mark)), None)
    if packed is not None and (field == "text" or packed != "gzip"):
        reads = "it" if field == "text" else "it, or compress it with gzip instead"
        raise InputError(asked, f"is compressed with {packed}", f"unpack {reads}")
    if field == "jsonl" and _ARRAY.match(_head(file) if packed else begin):
        raise InputError(
            asked,
            "is one JSON array of rows, and JSON lines have one row in each line",
            f"write it so: jq -c '.[]' {file.name} > {file.stem}.jsonl; or name its folder with data.dataset",
        )


def _head(file: Path) -> bytes:
    """Return the first bytes of a file that is compressed with gzip, unpacked; empty if it is damaged."""
    try:
        with gzip.open(file) as opened:
            return opened.read(_HEAD_BYTES)
    except _BROKEN_GZIP:
        return b""


def _decode(file: Path, first: int, block: bytes, damage: DamagePolicy) -> str:
    """Return the text of a block of lines. Lines that are not UTF-8 are reported to `damage` and
    left out.

    first: the number of the block's first line in the file
    """
    try:
        return block.decode()
    except UnicodeDecodeError:
        return "".join(_valid_lines(file, first, block, damage))


def _valid_lines(file: Path, first: int, block: bytes, damage: DamagePolicy) -> Iterator[str]:
    for number, line in enumerate(io.BytesIO(block), first):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            damage.report(f"{file}:{number}", f"not UTF-8 text ({error.reason} at byte {error.start} of the line)")


def _read_jsonl(files: list[Path], columns: RowFormat, damage: DamagePolicy) -> Iterator[Document]:
    for file in files:
        with file.open("rb") as raw:
            is_packed = raw.read(len(_GZIP)) == _GZIP
        if is_packed:
            yield from _read_packed(file, columns, damage)
            continue
        with file.open("rb") as lines:
            start = 0
            for number in itertools.count(1):
                line = lines.readline(LONG)
                if not line:
                    break
                if len(line) == LONG and not line.endswith(b"\n"):
                    stop = _line_end(lines)
                    yield from _read_long(f"{file}:{number}", LongRecord(file, start, stop), columns, damage)
                elif line.strip():
                    yield from _read_line(f"{file}:{number}", line, columns, damage)
                start = lines.tell()


def _read_packed(file: Path, columns: RowFormat, damage: DamagePolicy) -> Iterator[Document]:
    """Yield the documents in JSON lines that are compressed with gzip. Damaged lines and files are
    reported to `damage`, and so are lines that are too long for the memory."""
    number = 0
    with gzip.open(file) as lines:
        while True:
            try:
                line = lines.readline(LONG)
                is_long = len(line) == LONG and not line.endswith(b"\n")
                while is_long and lines.readline(_BLOCK_BYTES)[-1:] not in (b"\n", b""):
                    pass
            except _BROKEN_GZIP as error:
                damage.report(str(file), f"not readable as gzip after line {number} ({error})")
                return
            if not line:
                return
            number += 1
            if is_long:
                damage.report(
                    f"{file}:{number}", f"has more than {LONG} bytes, which needs a file that is not compressed"
                )
            elif line.strip():
                yield from _read_line(f"{file}:{number}", line, columns, damage)


def _read_line(location: str, line: bytes, columns: RowFormat, damage: DamagePolicy) -> Iterator[Document]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        damage.report(location, f"not a line of JSON ({_json_error(error)})")
    else:
        yield from columns.documents(location, row, damage)


def _json_error(error: Exception) -> str:
    return "nested too deep" if isinstance(error, RecursionError) else str(error)


def _line_end(lines: BinaryIO) -> int:
    """Read the rest of a line, from the file's position on. Returns the offset in the file at which
    the line ends, before the newline."""
    while part := lines.readline(_BLOCK_BYTES):
        if part.endswith(b"\n"):
            return lines.tell() - 1
    return lines.tell()


def _read_long(location: str, record: LongRecord, columns: RowFormat, damage: DamagePolicy) -> Iterator[Document]:
    """Yield the document of a line of JSON that is too long for the memory. Its text comes in
    several parts, each a Document. A damaged line is reported to `damage`.

    location: the line's file and number, for messages
    """
    try:
        row = record.fields(columns.long_text)
    except (ValueError, RecursionError) as error:
        damage.report(location, f"not a line of JSON ({_json_error(error)})")
        return
    for document in columns.documents(location, row, damage):
        if columns.long_text is None:
            yield document
            continue
        before = None
        for part in record.text(columns.long_text):
            if before is not None:
                yield Document(location, before, is_last_part=False)
            before = part
        yield replace(document, text=before or "")


def _read_parquet(files: list[Path], columns: RowFormat, damage: DamagePolicy) -> Iterator[Document]:
    """Yield the documents in the rows of parquet files. Damaged rows and files are reported to
    `damage`.

    Texts are read in their dictionary encoding. Otherwise a small file in which many rows repeat a
    text would need much memory when it is decoded.
    """
    pyarrow = import_optional("pyarrow", "data: parquet")
    parquet = import_optional("pyarrow.parquet", "data: parquet")
    for file in files:
        number = 0
        try:
            schema = parquet.read_schema(file)
            missing = next((name for name in columns.names if name not in schema.names), None)
            if missing is not None:
                damage.report(str(file), f"has no column {missing!r}; it has {', '.join(schema.names)}")
                continue
            known = _present(columns, schema.names)
            texts = [name for name in known if schema.field(name).type in (pyarrow.string(), pyarrow.large_string())]
            with parquet.ParquetFile(file, read_dictionary=texts) as table:
                for batch in table.iter_batches(_PARQUET_ROWS, columns=known):
                    for index in range(batch.num_rows):
                        number += 1
                        row = {name: batch.column(name)[index].as_py() for name in known}
                        yield from columns.documents(f"{file}: row {number}", row, damage)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            damage.report(str(file), f"not readable as parquet after row {number} ({error})")


def _read_dataset(source: DatasetRows | DatasetStream, columns: RowFormat, damage: DamagePolicy) -> Iterator[Document]:
    rows = source.rows
    known = rows.column_names  # None for a stream that does not say
    if known is not None:
        missing = next((name for name in columns.names if name not in known), None)
        if missing is not None:
            raise InputError(
                source.asked,
                f"has no column {missing!r}; it has {', '.join(known)}",
                f"{_field_fix(columns, missing)} ({nearest(missing, known)})",
            )
        rows = rows.select_columns(_present(columns, known))
    for number, row in enumerate(source.read(rows), 1):
        yield from columns.documents(f"{source.name}: row {number}", row, damage)


def _present(columns: RowFormat, known: list[str]) -> list[str]:
    """Return the names of the columns to read from a table that has the columns `known`: the ones
    that `columns` needs, and its optional ones that the table has."""
    return [*columns.names, *(name for name in columns.optional if name in known and name not in columns.names)]


def _field_fix(columns: RowFormat, missing: str) -> str:
    return f"name an existing field with {columns.names[missing]}"


def row_damage(row: Any, columns: RowFormat) -> str | None:
    """Return a message that says what is wrong with a row: it is not a dict, or lacks a field that
    `columns` needs. Return None if the row has all of these fields."""
    if not isinstance(row, dict):
        return f"expected a mapping of fields, found {type(row).__name__}"
    missing = next((name for name in columns.names if name not in row), None)
    return None if missing is None else f"has no field {missing!r}; it has {', '.join(map(repr, row)) or 'none'}"


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8. It cannot if it contains half a surrogate
    pair, which JSON can write but which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
