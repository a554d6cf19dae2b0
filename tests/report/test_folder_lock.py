"""Two runs do not write to one folder at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.report.test_run_folder import run_train
from tightfit.errors import InputError
from tightfit.report import folder_lock
from tightfit.report.folder_lock import folder_held


def test_a_folder_is_held_by_one_run(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "first"
    with folder_held(out):
        with (
            pytest.raises(InputError, match=rf"another run is writing to it \(process {os.getpid()}\)"),
            folder_held(out),
        ):
            pass
        with folder_held(tmp_path / "other"):
            pass
    with folder_held(out):
        pass


def test_a_killed_run_holds_nothing(tmp_path: Path) -> None:
    held = "from pathlib import Path; from tightfit.report.folder_lock import folder_held; import os, sys\n"
    held += "with folder_held(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", held, str(tmp_path)], check=False).returncode == -9
    with folder_held(tmp_path):
        pass


def test_a_system_without_locks_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "fcntl", None)
    with folder_held(tmp_path), folder_held(tmp_path):
        pass


def test_training_beside_another_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, out = tiny.write(tmp_path), tmp_path / "out"
    with folder_held(out):
        assert run_train(monkeypatch, job, out, "--plan", "reference") == 2
    assert "another run is writing to it" in capsys.readouterr().err
    assert not (out / "metrics.jsonl").exists()
    assert run_train(monkeypatch, job, out, "--plan", "reference") == 0
