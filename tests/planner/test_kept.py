"""Profiles on disk: the same trace is not made twice, another one is, and a broken file is no trouble."""

from __future__ import annotations

from pathlib import Path

import pytest

import tightfit
from tests.planner import cases
from tightfit.ledger import Ledger
from tightfit.planner.profile import Profiler, profile


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tightfit" / "profiles"


def traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that are traced from now on."""
    seen: list[int] = []
    trace = Profiler._trace

    def counted(self: Profiler, plan: tightfit.Plan, samples: int, training: bool) -> object:
        seen.append(samples)
        return trace(self, plan, samples, training)

    monkeypatch.setattr(Profiler, "_trace", counted)
    return seen


def peak(ledger: Ledger) -> tuple[float, dict[str, float]]:
    return ledger.peak().total, ledger.peak().rows


def test_a_profile_is_made_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = traces(monkeypatch)
    first = profile(cases.job("llama"))
    assert len(seen) == 1
    assert peak(profile(cases.job("llama"))) == peak(first)
    assert len(seen) == 1
    profile(cases.job("llama", batch=4))
    profile(cases.job("llama"), tightfit.Plan(precision="bf16-mixed"))
    profile(cases.job("llama"), device="cuda")
    assert len(seen) == 4
    assert len(list(folder.glob("*.pickle"))) == 4


def test_a_broken_file_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = profile(cases.job("gpt2"))
    (path,) = folder.glob("*.pickle")
    for content in (b"", b"nonsense", path.read_bytes()[:100]):
        path.write_bytes(content)
        assert peak(profile(cases.job("gpt2"))) == peak(first)


def test_the_users_own_code_is_traced_each_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = traces(monkeypatch)
    for _ in range(2):
        profile(cases.job("convolutions"))
    assert len(seen) == 2
    assert not folder.exists()


def test_a_disk_that_cannot_be_written_costs_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert profile(cases.job("llama")).peak().total > 0
