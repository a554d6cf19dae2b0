"""Data sets that the datasets library saves, builds from files, or downloads from the hub."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests import tiny
from tightfit.data.datasets_library import DatasetRows
from tightfit.data.samples import DamagePolicy
from tightfit.data.text import Columns, open_text
from tightfit.errors import InputError
from tightfit.job import DataSpec, Job


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that datasets.load_dataset reads, with two splits."""
    found = tmp_path / "owner" / "name"
    (found / "data").mkdir(parents=True)
    for split, texts in (("train", ["one", "two"]), ("validation", ["three"])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (found / "data" / f"{split}.jsonl").write_text(lines)
    return found


def texts(field: str = "text", **spec: Any) -> list[str]:
    source = open_text(DataSpec(**spec), Columns(field))
    return [document.text for document in source.documents(DamagePolicy(False))]


def test_a_folder_of_files_is_read_by_split(folder: Path) -> None:
    assert texts(dataset=str(folder)) == ["one", "two"]
    assert texts(dataset=str(folder), split="validation") == ["three"]
    assert texts(dataset=str(folder), split="train[1:]") == ["two"]
    with pytest.raises(InputError, match=r"has the splits train, validation, but no split named test"):
        texts(dataset=str(folder), split="test")


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of a data set that is in the cache of the Hub, and no network."""
    from huggingface_hub import constants

    commit = "0" * 40
    cached = tmp_path / "hub" / "datasets--org--cached"
    shutil.copytree(folder, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return "org/cached"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_of_the_hub_is_read_offline(hub: str, streaming: bool) -> None:
    assert texts(dataset=hub, streaming=streaming) == ["one", "two"]
    assert texts(dataset=hub, split="validation", streaming=streaming) == ["three"]
    with pytest.raises(InputError, match=r"has the splits train, validation, but no split named test"):
        texts(dataset=hub, split="test", streaming=streaming)
    with pytest.raises(InputError, match=r"has no column 'body'; it has text|has no field 'body'; it has 'text'"):
        texts("body", dataset=hub, streaming=streaming)


def test_an_unknown_data_set_is_refused(hub: str) -> None:
    with pytest.raises(InputError, match=r"ConnectionError(.|\n)*hf download --repo-type dataset org/other") as raised:
        texts(dataset="org/other")
    assert str(raised.value).count("\n") == 1


def test_subsets_are_named(tmp_path: Path) -> None:
    configs = [{"config_name": name, "data_files": f"{name}.jsonl"} for name in ("en", "fr")]
    (tmp_path / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    for name in ("en", "fr"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    assert texts(dataset=str(tmp_path), subset="fr") == ["fr"]
    with pytest.raises(InputError, match=r"has the subsets en, fr(.|\n)*data.subset: en"):
        texts(dataset=str(tmp_path))
    with pytest.raises(InputError, match=r"has no subset 'french'; it has en, fr"):
        texts(dataset=str(tmp_path), subset="french")


def test_a_failing_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach\n the hub " + "x" * 1000)

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(InputError, match=r"ConnectionError: Couldn't reach the hub x+\)(.|\n)*network") as raised:
        texts(dataset="owner/name")
    assert len(str(raised.value)) < 500


def test_names_of_the_hub_are_not_made_paths(folder: Path, tmp_path: Path) -> None:
    """A folder of this name beside the job file comes first."""
    for name, expected in (("owner/name", str(folder)), ("owner/other", "owner/other")):
        (tmp_path / "job.json").write_text(json.dumps({**tiny.content(), "data": {"dataset": name}}))
        assert Job.load(tmp_path / "job.json").data.dataset == expected


def test_the_identity_differs_by_split_and_content(folder: Path) -> None:
    def identity(**spec: Any) -> Any:
        return open_text(DataSpec(dataset=str(folder), **spec), Columns("text")).identity

    before = identity()
    assert identity(split="train") != identity(split="train[1:]") != identity(split="validation")
    assert identity() == before
    (folder / "data" / "train.jsonl").write_text('{"text": "new"}\n{"text": "more"}\n')
    assert identity() != before
    assert texts(dataset=str(folder)) == ["new", "more"]


def test_rows_are_opened_again_in_a_worker(folder: Path) -> None:
    rows = DatasetRows(str(folder), split="validation")
    assert rows.rows[0] == {"text": "three"}
    sent = pickle.dumps(rows)
    assert b"three" not in sent
    assert pickle.loads(sent).rows[0] == {"text": "three"}


def test_wrong_names_are_refused(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(InputError, match=r"no such folder(.|\n)*org/name"):
        texts(dataset=str(tmp_path / "missing"))
    with pytest.raises(InputError, match=r"has no splits(.|\n)*leave out data.split"):
        texts(dataset=str(tmp_path / "saved"), split="train")
    with pytest.raises(InputError, match=r"has no subsets(.|\n)*leave out data.subset"):
        texts(dataset=str(tmp_path / "saved"), subset="en")
    with pytest.raises(InputError, match=r"data.split(.|\n)*without data.dataset"):
        DataSpec(jsonl="a", split="train")
