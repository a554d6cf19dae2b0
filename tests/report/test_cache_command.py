"""`tightfit cache` lists what is stored and removes what is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tightfit.cache_folder import cache_folder
from tightfit.cli import app
from tightfit.errors import InputError
from tightfit.report.cache import CONTENTS, contents


@pytest.fixture(autouse=True)
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache with one file of 100 bytes in each part."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in CONTENTS:
        folder = cache_folder() / name / "below"
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(bytes(100))


def test_each_part_is_listed_with_its_size() -> None:
    shown = CliRunner().invoke(app, ["cache"])
    assert shown.exit_code == 0, shown.output
    assert str(cache_folder()) in shown.output
    assert all(name in shown.output for name in CONTENTS)
    found = json.loads(CliRunner().invoke(app, ["cache", "--json"]).output)
    assert {name: (part["bytes"], part["files"]) for name, part in found["parts"].items()} == dict.fromkeys(
        CONTENTS, (100, 1)
    )


@pytest.mark.parametrize("named", [*CONTENTS, "all"])
def test_only_the_named_part_is_removed(named: str) -> None:
    assert CliRunner().invoke(app, ["cache", "--clear", named]).exit_code == 0
    left = {name for name, part in contents().items() if part["files"]}
    assert left == (set() if named == "all" else set(CONTENTS) - {named})


def test_an_unknown_part_is_refused_and_nothing_removed() -> None:
    refused = CliRunner().invoke(app, ["cache", "--clear", "tokens"])
    assert isinstance(refused.exception, InputError)
    assert "use one of: machines, profiles, data, all" in str(refused.exception)
    assert all(part["files"] for part in contents().values())


def test_version_names_the_packages_that_matter() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert shown.exit_code == 0
    assert shown.output.startswith("tightfit 0.")
    assert ", torch 2." in shown.output
