"""The GPU tests cover every method for one device, whatever machine collects them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tightfit
from benchmarks.gpu_sizes import GPU
from tests import conftest
from tests.contract.test_contract import ON_GPU_ONLY, SINGLES, is_compiled, named, on_several
from tightfit.methods import METHODS

ROOT = Path(__file__).parent.parent
LEAST = 150


@pytest.fixture(scope="module")
def collected(request: pytest.FixtureRequest) -> list[str]:
    """The ids of what `scripts/test --gpu` runs. If this run has not collected all tests, a process of
    its own does."""
    (marks,) = re.findall(r"--gpu\) .*?marks=\"(.*?)\"", (ROOT / "scripts" / "test").read_text())
    assert marks == "gpu and not slow"
    if [Path(path).resolve() for path in request.config.args] == [ROOT / "tests"]:
        return request.config.stash[conftest.GPU_TESTS]
    command = [sys.executable, "-m", "pytest", "-m", marks, "--collect-only", "-q", "-o", "addopts=--strict-markers"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_the_suite_for_a_gpu_is_large(collected: list[str]) -> None:
    assert len(collected) >= LEAST


def test_every_one_device_variant_is_tested_on_a_gpu(collected: list[str]) -> None:
    """Each variant is tested on every model, or compiled on one, with the settings that only a GPU
    has."""
    alone = [items for items in SINGLES if not on_several(items)]
    for items in [*alone, *ON_GPU_ONLY]:
        found = [one for one in collected if f"[{named(items)}-" in one and one.endswith("-cuda]")]
        assert len(found) >= (1 if is_compiled(items) else 4), named(items)


def test_every_method_of_one_device_has_a_variant(collected: list[str]) -> None:
    there = {method for items in SINGLES if not on_several(items) for method, _ in items}
    several = {method for items in SINGLES if on_several(items) for method, _ in items} - there
    assert there | several == {method.__name__.rpartition(".")[2] for method in METHODS if method.VARIANTS}
    assert {"precision", "recompute", "loss", "optimizer_states", "compile", "attention", "allocator"} <= there
    assert {"loader", "offload", "materialize", "microbatch"} <= there


@pytest.mark.parametrize(
    "file", ["engine/checkpoint/test_checkpoint", "measure/test_predicted", "methods/test_offload"]
)
def test_checkpoints_memory_and_offloading_are_tested_on_a_gpu(file: str, collected: list[str]) -> None:
    assert sum(one.startswith(f"tests/{file}.py") for one in collected) >= 10


def test_the_gpu_benchmark_runs_the_whole_gpu_suite(collected: list[str]) -> None:
    """The benchmark names the test files: others may need packages that are not installed."""
    (_, marks, *paths) = GPU["tests"]["arguments"]
    assert marks == "gpu and not slow"
    files = {one.partition("::")[0] for one in collected}
    assert all(any(file == path or file.startswith(f"{path}/") for path in paths) for file in files), files


@pytest.mark.parametrize(("marks", "device"), [([1, 1], "cuda"), ([0, 0], "cuda"), ([0, 1], "cpu"), ([0, 1], "cuda")])
def test_cpu_and_gpu_tests_refuse_to_run_together_on_a_gpu(
    marks: list[int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = tightfit.Machine.detect().replace(device=device)
    monkeypatch.setattr(tightfit.Machine, "detect", lambda: machine)
    items = [
        SimpleNamespace(get_closest_marker=lambda name, mark=mark: pytest.mark.gpu if mark else None) for mark in marks
    ]
    session: Any = SimpleNamespace(items=items)
    if device == "cpu" or len(set(marks)) == 1:
        conftest.pytest_collection_finish(session)
        return
    with pytest.raises(pytest.UsageError, match="run apart"):
        conftest.pytest_collection_finish(session)


def test_the_cpu_suite_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for marks, hidden in (("gpu and not slow", None), ("gpu", None), ("not gpu", ""), ("not slow and not gpu", "")):
        config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=marks))
        conftest.pytest_configure(config)
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == hidden
