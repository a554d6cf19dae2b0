"""Every source of text is read as documents, and damage in it is reported with its place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tightfit.data import text
from tightfit.data.samples import DamagePolicy
from tightfit.data.source_files import stdlib_files
from tightfit.data.text import Columns, Document, open_text
from tightfit.errors import InputError
from tightfit.job import DataSpec


def read(columns: Columns | None = None, skip: bool = False, **spec: Any) -> tuple[list[Document], int]:
    damage = DamagePolicy(skip)
    source = open_text(DataSpec(**spec), columns or Columns("text"))
    return list(source.documents(damage)), damage.count


def texts(**spec: Any) -> list[str]:
    return [document.text for document in read(**spec)[0]]


def test_text_is_read_from_a_file_folder_glob_and_list(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").write_text("no")
    for name, words in (("a.txt", "one"), ("b/c.txt", "two"), ("d.md", "three")):
        (tmp_path / name).write_text(words)
    assert texts(text=str(tmp_path / "a.txt")) == ["one"]
    assert texts(text=str(tmp_path)) == ["one", "two", "three"]
    assert texts(text=str(tmp_path / "**" / "*.txt")) == ["one", "two"]
    assert texts(text=[str(tmp_path / "d.md"), str(tmp_path / "b")]) == ["three", "two"]


def test_large_files_come_in_blocks_that_make_up_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_BLOCK_BYTES", 64)
    whole = "".join(f"línea {number}\r\n\n" for number in range(40)) + "end"
    (tmp_path / "a.txt").write_bytes(whole.encode())
    (tmp_path / "b.txt").write_text("b")
    documents, _ = read(text=str(tmp_path))
    assert "".join(document.text for document in documents[:-1]) == whole
    assert [document.is_last_part for document in documents] == [False] * (len(documents) - 2) + [True, True]
    assert len(documents) > 5


def test_the_standard_library_is_a_text_of_several_megabytes() -> None:
    files = stdlib_files()
    assert 5e6 < sum(file.stat().st_size for file in files) < 30e6
    assert not any({"test", "site-packages"} & set(file.parts) for file in files)
    assert files == sorted(files)


def test_text_that_is_not_utf8_is_reported_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_BLOCK_BYTES", 8)
    (tmp_path / "a.txt").write_bytes(b"one\nand two\nthree\r\xff\nfour\n")
    with pytest.raises(InputError, match=r"a\.txt:3.*UTF-8(.|\n)*skip_damaged"):
        read(text=str(tmp_path / "a.txt"))
    documents, damaged = read(skip=True, text=str(tmp_path / "a.txt"))
    assert "".join(document.text for document in documents) == "one\nand two\nfour\n"
    assert damaged == 1


LINES = [
    '{"text": "a", "label": 1}',
    '{"text": ',
    "[1]",
    '{"words": "a"}',
    '{"text": 3}',
    "",
    '{"text": "\\ud800"}',
    '{"text": ""}',
    '{"text": "b", "label": "x"}',
]


def test_damaged_json_lines_are_located_and_counted_if_skipped(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    for number, found in (
        (1, "JSON"),
        (2, "mapping"),
        (3, "no field 'text'; it has 'words'"),
        (4, "int, not text"),
        (6, "surrogate"),
    ):
        file.write_text("\n".join([LINES[0], LINES[number]]))
        with pytest.raises(InputError, match=r"d\.jsonl:2") as raised:
            read(jsonl=str(file))
        assert found in str(raised.value)
    file.write_text("\n".join(LINES))
    documents, damaged = read(jsonl=str(file), skip=True)
    assert [document.text for document in documents] == ["a", "b"]
    assert damaged == 5


def test_the_text_field_of_rows_is_read(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps({"q": "what", "a": "that", "kind": 2}) + "\n")
    documents, _ = read(Columns("q", "a", "kind"), jsonl=str(file))
    assert documents == [Document(f"{file}:1", "what", "that", 2)]


def test_parquet_files_are_read(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    file = tmp_path / "d.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", None, "b"], "n": [1, 2, 3]}), file)
    with pytest.raises(InputError, match=r"d\.parquet: row 2"):
        read(parquet=str(file))
    documents, damaged = read(skip=True, parquet=str(tmp_path))
    assert [document.text for document in documents] == ["a", "b"]
    assert damaged == 1
    with pytest.raises(InputError, match=r"d\.parquet: has no column 'body'; it has text, n"):
        read(Columns("body"), parquet=str(file))
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"d\.parquet: not readable as parquet"):
        read(parquet=str(file))
    assert read(skip=True, parquet=str(file)) == ([], 1)


def test_parquet_named_as_plain_text_is_refused(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["one"]}), tmp_path / "rows.bin")
    with pytest.raises(InputError, match=r"(?s)this is a parquet file.*\n.*write data: \{parquet: .*rows.bin\}"):
        open_text(DataSpec(text=str(tmp_path / "rows.bin")), Columns("text"))


def test_saved_datasets_are_read(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]})
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "two")
    datasets.DatasetDict({"dev": rows}).save_to_disk(tmp_path / "three")
    assert texts(dataset=str(tmp_path / "one")) == texts(dataset=str(tmp_path / "two")) == ["a", "b"]
    with pytest.raises(InputError, match=r"no split named train(.|\n)*dev"):
        read(dataset=str(tmp_path / "three"))
    with pytest.raises(InputError, match=r"no column 'txt'(.|\n)*did you mean 'text'"):
        read(Columns("txt"), dataset=str(tmp_path / "one"))
    (tmp_path / "one" / "state.json").unlink()
    with pytest.raises(InputError, match=r"not a folder written by datasets.save_to_disk"):
        read(dataset=str(tmp_path / "one"))


def test_missing_sources_are_refused_with_the_available_ones(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no such file(.|\n)*did you mean 'corpus.txt'"):
        read(text=str(tmp_path / "corpsu.txt"))
    with pytest.raises(InputError, match=r"contains no files ending in .jsonl"):
        read(jsonl=str(tmp_path / "empty"))
    with pytest.raises(InputError, match="no such file"):
        read(text=str(tmp_path / "*.csv"))
    with pytest.raises(InputError, match="so it has no 'label'"):
        read(Columns("text", None, "label"), text=str(tmp_path))


def test_json_lines_may_be_compressed_with_gzip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b'{"text": "one"}\nwrong\n\n{"text": "two"}\n'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "b.jsonl.gz").write_bytes(b'{"text": "three"}\n')  # not compressed, in spite of its name
    found, damaged = read(jsonl=str(tmp_path), skip=True)
    assert [document.text for document in found] == ["one", "two", "three"]
    assert (found[1].location, damaged) == (f"{tmp_path / 'a.jsonl.gz'}:4", 1)
    with pytest.raises(InputError, match=r"a\.jsonl\.gz:2: not a line of JSON"):
        read(jsonl=str(tmp_path / "a.jsonl.gz"))
    monkeypatch.setattr("tightfit.data.text.LONG", 20)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a long text"}\n{"text": "two"}\n'))
    with pytest.raises(InputError, match=r"gz:1: has more than 20 bytes, which needs a file that is not compressed"):
        read(jsonl=str(tmp_path / "a.jsonl.gz"))
    assert [document.text for document in read(jsonl=str(tmp_path / "a.jsonl.gz"), skip=True)[0]] == ["two"]


def test_a_damaged_gzip_file_is_reported(tmp_path: Path) -> None:
    whole = gzip.compress("".join(f'{{"text": "{number * 7919}"}}\n' for number in range(500)).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="not readable as gzip after line"):
        read(jsonl=str(tmp_path / "a.jsonl.gz"))
    found, damaged = read(jsonl=str(tmp_path / "a.jsonl.gz"), skip=True)
    assert (0 < len(found) < 500, damaged) == (True, 1)


@pytest.mark.parametrize("content", [b'[{"text": "one"}]', b'\xef\xbb\xbf[\n  {\n "text": "one"}\n]', b"[ {}]"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_one_json_array_is_refused(content: bytes, is_packed: bool, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(gzip.compress(content) if is_packed else content)
    with pytest.raises(
        InputError, match=r"is one JSON array of rows(.|\n)*jq -c '\.\[\]' a\.json > a\.jsonl; or name its folder"
    ):
        read(jsonl=str(tmp_path / "a.json"), skip=True)


def test_compressed_files_that_are_not_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(gzip.compress(b"text"))
    with pytest.raises(InputError, match=r"compressed with gzip(.|\n)*unpack it$"):
        texts(text=str(tmp_path / "a.txt"))
    for begin, name in ((b"\x28\xb5\x2f\xfd", "zstd"), (b"BZh9", "bzip2"), (b"\xfd7zXZ\0", "xz"), (b"PK\3\4", "zip")):
        (tmp_path / "a.jsonl").write_bytes(begin + b"...")
        with pytest.raises(InputError, match=rf"compressed with {name}(.|\n)*gzip instead"):
            read(jsonl=str(tmp_path / "a.jsonl"))
    (tmp_path / "a.jsonl").write_bytes(b"PAR1...")
    with pytest.raises(InputError, match="a parquet file, not JSON lines"):
        read(jsonl=str(tmp_path / "a.jsonl"))
