"""scripts/setup and scripts/test: which environment they make and use, with a Python that only notes what it is asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORKERS = os.sysconf("SC_NPROCESSORS_ONLN") + 1
PYTHON = """#!/usr/bin/env bash
echo "$@" >> "$(dirname "$0")/asked"
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree with two environments that have no packages yet."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in (".venv", ".venv-torch2.11"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").write_text(PYTHON)
        (tmp_path / name / "bin" / "python").chmod(0o755)
    return tmp_path


def run_tests(tree: Path, *arguments: str) -> None:
    subprocess.run(["bash", "scripts/test", *arguments], cwd=tree, check=True, capture_output=True)


def asked(tree: Path, environment: str) -> list[str]:
    """What the Python of an environment was asked, one command a line."""
    file = tree / environment / "bin" / "asked"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize(
    ("options", "environment", "torch"),
    [((), ".venv", "torch>=2.11,<2.14"), (("--torch", "2.11"), ".venv-torch2.11", "torch==2.11.*")],
)
def test_the_environment_of_a_pytorch(tree: Path, options: tuple[str, ...], environment: str, torch: str) -> None:
    run_tests(tree, *options, "--slow", "tests/parallel")
    *installs, compile_all, tests = asked(tree, environment)
    assert [line.split(" --disable-pip-version-check ")[1] for line in installs] == [torch, f"{torch} -e .[dev]"]
    assert compile_all == "-m compileall -q src tests"
    assert tests == f"-m pytest -n {WORKERS} -m not gpu tests/parallel"
    run_tests(tree, *options, "tests/parallel")
    assert asked(tree, environment)[4:] == [
        compile_all,
        f"-m pytest -n {WORKERS} tests/parallel",
    ]  # nothing is installed again
    others = {".venv", ".venv-torch2.11"} - {environment}
    assert not any(asked(tree, other) for other in others)


def test_a_pytorch_without_a_version_is_refused(tree: Path) -> None:
    for script in ("test", "setup"):
        said = subprocess.run(["bash", f"scripts/{script}", "--torch"], cwd=tree, capture_output=True, text=True)
        assert said.returncode != 0
        assert "--torch 2.11" in said.stderr
