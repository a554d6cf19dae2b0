"""Profiles on disk: each trace is made once, and a broken file does no harm."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import os
import pickle
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tightfit
from tests.planner import cases
from tests.sweeps import part
from tightfit.cost.ledger import Ledger
from tightfit.machine import Machine
from tightfit.planner.estimator import apply_costs
from tightfit.planner.time_model import TimeModel
from tightfit.planner.tracing.cache import VERSION, read
from tightfit.planner.tracing.profiler import Profiler, profile

UNPICKLES = ("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tightfit" / "profiles"


def traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that are traced from now on."""
    seen: list[int] = []
    trace = Profiler._trace

    def counted(self: Profiler, plan: tightfit.Plan, samples: int, *phase: bool) -> object:
        seen.append(samples)
        return trace(self, plan, samples, *phase)

    monkeypatch.setattr(Profiler, "_trace", counted)
    return seen


def peak(ledger: Ledger) -> tuple[float, dict[str, float]]:
    return ledger.peak().total, ledger.peak().rows


@pytest.mark.slow
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
    assert len(list(folder.glob("*.json"))) == 4


class Runs:
    """What runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("poisoned"),)


def broken(path: Path) -> list[bytes]:
    """What may stand where a profile was."""
    first, text, _ = path.read_bytes().split(b"\n")
    header, content = json.loads(first), json.loads(text)

    def signed(content: Any, **changes: Any) -> bytes:
        body = json.dumps(content, separators=(",", ":"))
        checksum = hashlib.sha256(f"{VERSION}\n{path.stem}\n{body}".encode()).hexdigest()
        return json.dumps({**header, "sha256": checksum, **changes}).encode() + b"\n" + body.encode() + b"\n"

    assert signed(content) == path.read_bytes()
    buffer = content["buffers"][0]
    return [
        b"",
        b"nonsense",
        b"\xff\xfe",
        b"[" * 100_000,
        pickle.dumps(Runs()),
        path.read_bytes()[:100],
        path.read_bytes()[:-100],
        path.read_bytes().replace(b"forward", b"backwar", 1),
        signed(content, version=VERSION + 1),
        signed(content, trace="of another"),
        signed([]),
        signed({}),
        signed({**content, "buffers": []}),
        signed({**content, "segments": []}),
        signed({**content, "buffers": [[[math.nan, 0.0], *buffer[1:]], *content["buffers"][1:]]}),
        signed({**content, "buffers": [[buffer[0], "no row", *buffer[2:]], *content["buffers"][1:]]}),
        signed({**content, "blocks": -1}),
        signed({**content, "blocks": "2"}),
    ]


def test_a_broken_profile_is_made_again_and_executes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    first = profile(cases.job("gpt2"))
    (path,) = folder.glob("*.json")
    whole = path.read_bytes()
    for content in broken(path):
        path.write_bytes(content)
        with pytest.raises((ValueError, TypeError, KeyError, IndexError, RecursionError)):
            read(path)
    seen = traces(monkeypatch)
    for content in (pickle.dumps(Runs()), whole[:-100]):
        path.write_bytes(content)
        assert peak(profile(cases.job("gpt2"))) == peak(first)
        assert path.read_bytes() == whole
    assert len(seen) == 2
    assert not Path("poisoned").exists()


def test_a_profile_of_another_trace_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = profile(cases.job("gpt2"))
    (path,) = folder.glob("*.json")
    profile(cases.job("llama"))
    (other,) = set(folder.glob("*.json")) - {path}
    path.write_bytes(other.read_bytes())
    seen = traces(monkeypatch)
    assert peak(profile(cases.job("gpt2"))) == peak(first)
    assert len(seen) == 1


@pytest.mark.parametrize("plan", part([{"recompute": "selective", "micro_batch": 2}, {}, {"recompute": "full"}], 3))
def test_a_profile_from_disk_gives_the_same_estimate(folder: Path, plan: dict[str, Any]) -> None:
    """Buffers that segments share are shared in the profile that is read, too."""
    first, second = (profile(cases.job("llama"), tightfit.Plan()) for _ in range(2))
    machine = Machine.named("a100-80gb")
    one, two = (apply_costs(ledger, tightfit.Plan(**plan), machine) for ledger in (first, second))
    assert first.training is not second.training
    assert peak(one) == peak(two)
    took, again = (replace(TimeModel(machine).step_time(ledger), input_s=0.0) for ledger in (one, two))
    assert took == again  # but for preparing samples, which is measured


@pytest.mark.parametrize("device", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_profile_from_disk_knows_the_operands_of_gradients(folder: Path, device: int) -> None:
    """Each of two devices computes its part of a tied weight's gradient, and gradients of linear
    layers are deferred."""
    plan, machine = tightfit.Plan(pp=2, micro_batch=2, schedule="zero-bubble"), Machine.named("a100-80gb:2")
    ledgers = [replace(profile(cases.job("gpt2")), pipeline_rank=device) for _ in range(2)]
    assert ledgers[0].training is not ledgers[1].training
    one, two = (apply_costs(ledger, plan, machine).peak() for ledger in ledgers)
    assert one == two


def test_only_the_user_can_open_the_folder(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    profile(cases.job("llama"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_a_folder_of_another_user_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile(cases.job("llama"))
    seen = traces(monkeypatch)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    profile(cases.job("llama"))
    assert len(seen) == 1


def test_nothing_in_the_package_unpickles_files() -> None:
    """Checkpoints are read with weights_only and arrays without pickles. Messages between processes
    are no files."""
    root = Path(tightfit.__file__).parent
    found = []
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if name.rpartition(".")[2] in ("load", "loads", "Unpickler") and name.partition(".")[0] in UNPICKLES:
                found.append(f"{path.name}: {ast.unparse(node)}")
            if name == "torch.load" and keywords.get("weights_only") != "True":
                found.append(f"{path.name}: {ast.unparse(node)}")
            if keywords.get("allow_pickle", "False") != "False":
                found.append(f"{path.name}: {ast.unparse(node)}")
    assert found == []


def test_the_users_own_code_is_traced_each_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = traces(monkeypatch)
    for _ in range(2):
        profile(cases.job("convolutions"))
    assert len(seen) == 2
    assert not folder.exists()


def test_an_unwritable_disk_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert profile(cases.job("llama")).peak().total > 0
