"""Files at URLs are copied once, and read like local files."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests import tiny
from tightfit.data.samples import DamagePolicy
from tightfit.data.text import Columns, open_text
from tightfit.errors import InputError
from tightfit.job import DataSpec, Job
from tightfit.runtime.run_length import length_of


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


def write(system: Any, path: str, *texts: str) -> None:
    system.pipe(path, "".join(json.dumps({"text": text}) + "\n" for text in texts).encode())


def texts(**spec: Any) -> list[str]:
    source = open_text(DataSpec(**spec), Columns("text"))
    return [document.text for document in source.documents(DamagePolicy(False))]


def test_a_url_is_a_file_folder_glob_or_list(memory: Any) -> None:
    write(memory, "/data/a.jsonl", "one")
    write(memory, "/data/inner/a.jsonl", "two")
    write(memory, "/data/.hidden/c.jsonl", "no")
    memory.pipe("/data/readme.md", b"no")
    assert texts(jsonl="memory://data/a.jsonl") == ["one"]
    assert texts(jsonl="memory://data") == ["one", "two"]
    assert texts(jsonl="memory://data/*.jsonl") == ["one"]
    assert texts(jsonl=["memory://data/inner", "memory://data/a.jsonl"]) == ["two", "one"]


def test_parquet_is_read_from_a_url(memory: Any) -> None:
    import pyarrow
    from pyarrow import parquet

    with memory.open("/tables/a.parquet", "wb") as file:
        parquet.write_table(pyarrow.table({"text": ["x", "y"]}), file)
    assert texts(parquet="memory://tables/a.parquet") == ["x", "y"]


def test_files_are_copied_again_only_after_a_change(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    get_file = type(memory).get_file
    monkeypatch.setattr(
        type(memory), "get_file", lambda self, *names: (copied.append(names[0]), get_file(self, *names))
    )
    write(memory, "/data/a.jsonl", "one")
    assert texts(jsonl="memory://data/a.jsonl") == texts(jsonl="memory://data/a.jsonl") == ["one"]
    assert len(copied) == 1
    write(memory, "/data/a.jsonl", "two")
    assert texts(jsonl="memory://data/a.jsonl") == ["two"]
    assert len(copied) == 2


def test_a_file_url_is_a_local_path(tmp_path: Path) -> None:
    (tmp_path / "with space.jsonl").write_text('{"text": "here"}\n')
    assert texts(jsonl=f"file://{tmp_path}/with%20space.jsonl") == ["here"]
    assert texts(jsonl=f"file://{tmp_path}") == ["here"]


def test_urls_of_a_job_file_stay_urls(tmp_path: Path) -> None:
    content = {**tiny.content(), "data": {"jsonl": ["s3://bucket/a.jsonl", "b.jsonl"]}}
    (tmp_path / "job.json").write_text(json.dumps(content))
    assert Job.load(tmp_path / "job.json").data.jsonl == ["s3://bucket/a.jsonl", str(tmp_path / "b.jsonl")]


def test_explain_copies_no_files(memory: Any, tmp_path: Path) -> None:
    write(memory, "/data/a.jsonl", *["a text of some length"] * 50)
    data = {"jsonl": "memory://data/a.jsonl", "sequence_length": 16}
    assert "assumed" in length_of(Job(model=tiny.LLAMA, data=data, train={"epochs": 1})).basis
    assert not list((tmp_path / "cache").rglob("remote-*"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def without(name: str, *rest: Any, **others: Any) -> Any:
        if name.split(".")[0] == "s3fs":
            raise ImportError("no s3fs", name="s3fs")
        return load(name, *rest, **others)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"needs the package s3fs(.|\n)*pip install s3fs"):
        texts(jsonl="s3://bucket/a.jsonl")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("memory://nothing.jsonl", "no files|cannot be read"),
        ("memory://nothing/*.jsonl", "no files"),
        ("nonsense://a", "cannot read this URL"),
    ],
)
def test_a_wrong_url_is_refused(url: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as raised:
        texts(jsonl=url)
    assert url in str(raised.value)


def test_a_failing_back_end_is_one_sentence(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write(memory, "/data/a.jsonl", "one")

    def fail(*_: Any) -> None:
        raise PermissionError("Access\nDenied")

    monkeypatch.setattr(type(memory), "get_file", fail)
    with pytest.raises(InputError, match=r"cannot be read \(PermissionError: Access Denied\)"):
        texts(jsonl="memory://data/a.jsonl")


def test_a_mistyped_url_names_its_neighbour(memory: Any) -> None:
    write(memory, "/data/train.jsonl", "one")
    for streaming in (False, True):
        with pytest.raises(InputError, match=r"did you mean 'train.jsonl'\?"):
            texts(jsonl="memory://data/trian.jsonl", streaming=streaming)
    with pytest.raises(InputError, match=r"no files ending in .parquet at this URL(.|\n)*check the URL"):
        texts(parquet="memory://data")
