"""A checkpoint is on the disk before it gets its name and older ones are deleted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import tightfit
from tests import tiny


def test_files_are_on_the_disk_before_older_checkpoints_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tightfit.build(tiny.job(), tightfit.Plan())
    tightfit.save(run, tmp_path, 1)
    synced: set[str] = set()
    fsync, replace = os.fsync, os.replace

    def noted(file: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    def named(source: Any, target: Any) -> None:
        assert {str(Path(source)), *map(str, Path(source).iterdir())} <= synced
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", named)
    saved = tightfit.save(run, tmp_path, 2)
    assert str(tmp_path) in synced
    assert any(saved.iterdir())
