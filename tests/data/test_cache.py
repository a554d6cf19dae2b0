"""Cached folders are made once, survive interruption, and are made again when they were changed."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tightfit.data.cache import cached_folder, stamps
from tightfit.errors import InputError


def write(folder: Path) -> None:
    (folder / "a").write_text("made")


def test_a_folder_is_made_once_per_identity() -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        write(folder)

    first = cached_folder("kind", {"a": 1}, make)
    assert cached_folder("kind", {"a": 1}, make) == first
    assert (first / "a").read_text() == "made"
    assert cached_folder("kind", {"a": 2}, make) != first
    assert cached_folder("other", {"a": 1}, make) != first
    assert len(made) == 3


def test_a_modified_folder_is_made_again() -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        write(folder)

    first = cached_folder("kind", 7, make)
    manifest = first.with_suffix(".json")
    for change in (
        lambda: (first / "a").write_text("mad"),
        lambda: (first / "a").write_text("edam"),
        lambda: (first / "a").unlink(),
        lambda: (first / "b").write_text("more"),
        lambda: manifest.write_text("{"),
        lambda: manifest.unlink(),
    ):
        change()
        assert (cached_folder("kind", 7, make) / "a").read_text() == "made"
        assert [path.name for path in first.iterdir()] == ["a"]
    assert len(made) == 7
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700


def test_folders_of_interrupted_and_killed_runs_are_removed(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        write(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder("kind", 1, fail)
    folder = tmp_path / "cache" / "tightfit" / "data"
    assert [path.suffix for path in folder.iterdir()] == [".lock"]
    partial = next(folder.iterdir()).with_suffix(".partial")
    partial.mkdir()
    (partial / "left").write_text("by a killed run")
    assert [path.name for path in cached_folder("kind", 1, write).iterdir()] == ["a"]
    assert not partial.exists()


def test_concurrent_callers_wait_and_read_the_first_result() -> None:
    """The test uses threads: the lock belongs to the opened file, so it works between threads as
    between processes."""
    made: list[Path] = []

    def make_slowly(folder: Path) -> None:
        made.append(folder)
        for number in range(200):
            with (folder / "a").open("a") as file:
                file.write(f"{number}\n")

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: (cached_folder("shared", 0, make_slowly) / "a").read_text(), range(4)))
    assert set(found) == {"".join(f"{number}\n" for number in range(200))}
    assert len(made) == 1


def test_an_unwritable_folder_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match="XDG_CACHE_HOME"):
        cached_folder("kind", 1, write)


def test_a_changed_file_has_another_stamp(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("1")
    before = stamps([file])
    assert stamps([file]) == before
    file.write_text("12")
    assert stamps([file]) != before
