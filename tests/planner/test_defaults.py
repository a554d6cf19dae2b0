"""Whether a machine can compile is known before anything is compiled, and the reason is given."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

import tightfit
from tests import tiny
from tests.planner import cases
from tightfit.capabilities import can_compile, missing_for_compile
from tightfit.machine import Figure, Machine
from tightfit.planner.defaults import complete
from tightfit.planner.estimate import workspace_bytes
from tightfit.planner.estimator import Estimator

TABLE = Machine.named("l4")
HERE = TABLE.replace(memory_bytes=Figure(value=2**34, source="system"))


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A host with no compiler but those in the list, and no headers but those in a folder."""
    there: list[str] = []
    monkeypatch.setattr(shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return there


def test_triton_needs_a_c_compiler_and_python_s_headers(
    bare: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert missing_for_compile(HERE) == (
        "a compiler (gcc, clang, cc) and Python's headers (python3-dev, or python3-devel)"
    )
    (tmp_path / "Python.h").touch()
    assert missing_for_compile(HERE) == "a compiler (gcc, clang, cc)"
    monkeypatch.setenv("CC", "icx -O2")
    bare.append("icx")
    assert can_compile(HERE)


def test_headers_that_the_compiler_finds_suffice(
    bare: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CPATH", raising=False)
    bare.append("gcc")
    assert missing_for_compile(HERE) == "Python's headers (python3-dev, or python3-devel)"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "Python.h").touch()
    monkeypatch.setenv("CPATH", str(tmp_path / "elsewhere"))
    assert can_compile(HERE)
    bare[:] = ["g++"]
    assert can_compile(HERE.replace(device="cpu"))


def test_a_cpu_needs_a_cpp_compiler(bare: list[str], tmp_path: Path) -> None:
    (tmp_path / "Python.h").touch()
    here = Machine.detect().replace(device="cpu")
    bare.append("gcc")
    assert not can_compile(here)
    bare.append("g++")
    assert can_compile(here)


def test_a_machine_of_the_table_can_compile(bare: list[str]) -> None:
    assert can_compile(TABLE)
    assert not can_compile(HERE)


def test_the_reason_for_not_compiling_is_given(bare: list[str]) -> None:
    long = tiny.job(steps=1000)
    plan, reasons = complete(long, HERE, {})
    assert plan.compile == "none"
    assert reasons["compile"].startswith("torch.compile needs a compiler")
    assert "compile" not in complete(tiny.job(steps=10), HERE, {})[1]
    for machine, said in ((HERE, True), (TABLE, False)):
        advice = Estimator(cases.job("bert", steps=1000), machine).estimate(tightfit.Plan()).advice
        assert any(line.startswith("compile is none: torch.compile needs") for line in advice) is said


@pytest.mark.parametrize(
    ("architecture", "mebibytes"),
    [("sm_80", 17.25), ("sm_90", 65), ("sm_100", 17.25), ("gfx90a", 140), ("gfx942", 332)],
)
def test_workspaces_depend_on_the_architecture(architecture: str, mebibytes: float) -> None:
    assert workspace_bytes(architecture) == mebibytes * 2**20


def test_workspaces_are_part_of_the_predicted_gpu_memory() -> None:
    for name, known in (("a100-80gb", 17.25), ("h100-sxm", 65)):
        estimate = Estimator(cases.job("bert"), Machine.named(name)).estimate(tightfit.Plan())
        assert estimate.workspace_bytes == known * 2**20
        assert estimate.peak.rows["runtime"] == 500 * 2**20 + known * 2**20
    assert (
        Estimator(cases.job("bert"), Machine.detect().replace(device="cpu")).estimate(tightfit.Plan()).workspace_bytes
        == 0
    )
