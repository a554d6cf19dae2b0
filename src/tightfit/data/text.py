"""Sources of text: plain files, JSON lines, parquet files and saved datasets, read as a stream of
documents.

`data/language.py` opens a source; `data/tokens.py` and `data/tokenizer.py` read its documents. Each
document has its file and line, for error messages. No reader holds a full file in memory.
"""

from __future__ import annotations

import glob
import io
import itertools
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from tightfit.data.cache import stamps
from tightfit.data.datasets_library import DatasetRows, dataset_rows
from tightfit.data.long_records import LONG, LongRecord, incomplete
from tightfit.data.remote import local_files, local_path
from tightfit.data.samples import DamagePolicy
from tightfit.errors import InputError
from tightfit.job import DataSpec, expand_path, is_url
from tightfit.values import nearest

PYTHON_STDLIB = "python-stdlib"
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_BLOCK_BYTES = 1 << 20
_PARQUET_ROWS = 256  # rows of a parquet file that are decoded at once


@dataclass(frozen=True)
class Document:
    """A text with its target or label.

    location      its file and line or row, for messages
    target        the target text, if the document is a pair of texts, else None
    label         the class label, or None
    is_last_part  False if the next Document continues the same text: a large file is read in
                  several parts
    """

    location: str
    text: str
    target: str | None = None
    label: int | str | None = None
    is_last_part: bool = True


@dataclass(frozen=True)
class Columns:
    """The names of the fields that are read from a row: the text, the target text of a pair, the
    class label."""

    text: str
    target: str | None = None
    label: str | None = None

    def names(self) -> list[str]:
        """The names of all fields that are read, the text first."""
        return [name for name in (self.text, self.target, self.label) if name is not None]


@dataclass(frozen=True)
class TextSource:
    """A source of documents.

    name        the source's name in messages
    identity    JSON-like content that changes when the files or fields change: the key of the cache
    size_bytes  the size of all files
    documents   yields the documents from the first one; reports damage to the given DamagePolicy
    """

    name: str
    identity: Any
    size_bytes: int
    documents: Callable[[DamagePolicy], Iterator[Document]]


def open_text(spec: DataSpec, columns: Columns) -> TextSource:
    """Return the source that `spec` names (text, jsonl, parquet or dataset). Raises InputError if
    its files do not exist."""
    if spec.text is not None:
        if columns.target or columns.label:
            raise InputError(
                f"data: text={spec.text}",
                f"plain text has no fields, so it has no {columns.names()[-1]!r}",
                "use data.jsonl, data.parquet or data.dataset, whose rows have fields",
            )
        files = stdlib_files() if spec.text == PYTHON_STDLIB else find_files("text", spec.text)
        for file in files:
            _refuse_parquet(file)
        return _source(str(spec), files, columns, lambda damage: _read_text(files, damage))
    if spec.jsonl is not None:
        files = find_files("jsonl", spec.jsonl, (".jsonl", ".json", ".ndjson"))
        return _source(str(spec), files, columns, lambda damage: _read_jsonl(files, columns, damage))
    if spec.parquet is not None:
        files = find_files("parquet", spec.parquet, (".parquet",))
        return _source(str(spec), files, columns, lambda damage: _read_parquet(files, columns, damage))
    rows = dataset_rows(spec)
    identity = [rows.identity, columns.names()]
    return TextSource(str(spec), identity, rows.size_bytes, lambda damage: _read_dataset(rows, columns, damage))


def first_document(source: TextSource, skip_damaged: bool) -> Document:
    """Return the source's first undamaged document. Raises InputError if it has none."""
    damage = DamagePolicy(skip_damaged)
    for document in source.documents(damage):
        return document
    left_out = f": all {damage.count} samples are damaged" if damage.count else ""
    raise InputError(
        f"data: {source.name}", f"contains no text{left_out}", "name files that contain text, or another data.field"
    )


def _source(
    name: str, files: list[Path], columns: Columns, read: Callable[[DamagePolicy], Iterator[Document]]
) -> TextSource:
    seen = stamps(files)
    return TextSource(name, [seen, columns.names()], sum(size for _, size, _ in seen), read)


def stdlib_files() -> list[Path]:
    """Return the source files of the running Python's standard library, without its tests: about
    12 MB of text that every machine has."""
    files: list[Path] = []
    for place, inside, names in os.walk(sysconfig.get_paths()["stdlib"]):
        inside[:] = [name for name in inside if name not in _LEFT_OUT]  # os.walk visits only these
        files += [Path(place, name) for name in names if name.endswith(".py")]
    return sorted(files)


def find_files(field: str, given: str | list[str], endings: tuple[str, ...] = ()) -> list[Path]:
    """Return the files that `given` names. It is a file, a folder, a glob or a list of these. Of a
    URL such as s3://bucket/folder, local copies of its files are returned.

    field    the data field that has this value, for messages
    endings  from a folder, only files with one of these endings are taken; () takes all

    Raises InputError if there are no such files.
    """
    if isinstance(given, list):
        return [file for one in given for file in find_files(field, one, endings)]
    if is_url(given) and not given.startswith("file://"):
        return local_files(field, given, endings)
    path = expand_path(local_path(given) if is_url(given) else given)
    if path.is_file():
        return [path]
    if path.is_dir():
        files = _files_below(path, endings)
        if not files:
            kinds = f" ending in {' or '.join(endings)}" if endings else ""
            raise InputError(
                f"data: {field}={given}", f"this folder contains no files{kinds}", "name a file, or another folder"
            )
        return files
    files = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
    if not files:
        raise InputError(f"data: {field}={given}", "no such file or folder", _nearest_path_fix(path))
    return files


def _files_below(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    inside = (file for file in folder.rglob("*") if file.is_file())
    shown = (file for file in inside if not any(part.startswith(".") for part in file.relative_to(folder).parts))
    return sorted(file for file in shown if not endings or file.suffix.lower() in endings)


def _nearest_path_fix(path: Path) -> str:
    """Return the remedy for a path that does not exist, such as the nearest name in its folder."""
    if glob.has_magic(str(path)) or not path.parent.is_dir():
        return "check the path; relative paths start at the job file's folder"
    names = sorted(other.name for other in path.parent.iterdir())
    return nearest(path.name, names[:20]) if names else f"put data into {path.parent}, which is empty"


def _read_text(files: list[Path], damage: DamagePolicy) -> Iterator[Document]:
    """Yield each file as one document, but a file larger than _BLOCK_BYTES in several parts, which
    are split at line ends."""
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
    """Yield (number of the first line, bytes) for each block of about 1 MiB of a file. A block
    holds complete lines, or a part of one line that is longer than a block."""
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


def _refuse_parquet(file: Path) -> None:
    """Raise InputError if a file given as plain text starts with the magic bytes of parquet."""
    with file.open("rb") as opened:
        if opened.read(4) == b"PAR1":
            raise InputError(
                f"data: text={file}", "this is a parquet file, not plain text", f"write data: {{parquet: {file}}}"
            )


def _decode(file: Path, first: int, block: bytes, damage: DamagePolicy) -> str:
    """Decode a block. Lines that are not UTF-8 are reported as damage and left out. first: the
    number of the block's first line."""
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


def _read_jsonl(files: list[Path], columns: Columns, damage: DamagePolicy) -> Iterator[Document]:
    for file in files:
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


def _read_line(place: str, line: bytes, columns: Columns, damage: DamagePolicy) -> Iterator[Document]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        damage.report(place, f"not a line of JSON ({_json_error(error)})")
    else:
        yield from _documents(place, row, columns, damage)


def _json_error(error: Exception) -> str:
    return "nested too deep" if isinstance(error, RecursionError) else str(error)


def _line_end(lines: BinaryIO) -> int:
    """Read to the end of the present line. Returns the offset in the file at which the line ends,
    before the newline."""
    while part := lines.readline(_BLOCK_BYTES):
        if part.endswith(b"\n"):
            return lines.tell() - 1
    return lines.tell()


def _read_long(place: str, record: LongRecord, columns: Columns, damage: DamagePolicy) -> Iterator[Document]:
    """Yield the document of a line that is too long to be read at once, with its text in several
    parts."""
    try:
        row = record.fields(columns.text)
    except (ValueError, RecursionError) as error:
        damage.report(place, f"not a line of JSON ({_json_error(error)})")
        return
    for document in _documents(place, row, columns, damage):
        before = None
        for part in record.text(columns.text):
            if before is not None:
                yield Document(place, before, is_last_part=False)
            before = part
        yield replace(document, text=before or "")


def _read_parquet(files: list[Path], columns: Columns, damage: DamagePolicy) -> Iterator[Document]:
    """Yield the rows of parquet files as documents, one by one.

    Texts are read in their dictionary encoding. Otherwise a small file in which many rows repeat a
    text would need much memory when it is decoded.
    """
    import pyarrow
    from pyarrow import parquet

    for file in files:
        number = 0
        try:
            schema = parquet.read_schema(file)
            missing = next((name for name in columns.names() if name not in schema.names), None)
            if missing is not None:
                damage.report(str(file), f"has no column {missing!r}; it has {', '.join(schema.names)}")
                continue
            known = columns.names()
            texts = [name for name in known if schema.field(name).type in (pyarrow.string(), pyarrow.large_string())]
            with parquet.ParquetFile(file, read_dictionary=texts) as table:
                for batch in table.iter_batches(_PARQUET_ROWS, columns=known):
                    for index in range(batch.num_rows):
                        number += 1
                        row = {name: batch.column(name)[index].as_py() for name in known}
                        yield from _documents(f"{file}: row {number}", row, columns, damage)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            damage.report(str(file), f"not readable as parquet after row {number} ({error})")


def _read_dataset(source: DatasetRows, columns: Columns, damage: DamagePolicy) -> Iterator[Document]:
    rows = source.rows
    missing = [name for name in columns.names() if name not in rows.column_names]
    if missing:
        raise InputError(source.asked, f"has no column {missing[0]!r}", nearest(missing[0], rows.column_names))
    for number, row in enumerate(rows.select_columns(columns.names()), 1):
        yield from _documents(f"{source.name}: row {number}", row, columns, damage)


def _documents(place: str, row: Any, columns: Columns, damage: DamagePolicy) -> Iterator[Document]:
    """Yield the document of one row, or nothing if the row is damaged or its text is empty."""
    found = _row_damage(row, columns)
    if found:
        damage.report(place, found)
    elif row[columns.text] and (columns.target is None or row[columns.target]):
        target, label = (name and row[name] for name in (columns.target, columns.label))
        yield Document(place, row[columns.text], target, label)


def _row_damage(row: Any, columns: Columns) -> str | None:
    """Return what is wrong with a row, as a message, or None if the row is not damaged."""
    if not isinstance(row, dict):
        return f"expected a mapping of fields, found {type(row).__name__}"
    for name in columns.names():
        if name not in row:
            return f"has no field {name!r}; it has {', '.join(map(repr, row)) or 'none'}"
        kinds, expected = (int | str, "a label") if name == columns.label else (str, "text")
        if not isinstance(row[name], kinds):
            return f"field {name!r} holds {type(row[name]).__name__}, not {expected}"
        if isinstance(row[name], str) and not _is_unicode(row[name]):
            return f"field {name!r} holds half a surrogate pair, which is no character"
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
