"""A small copy of every part of the GPU benchmark runs, and the README table comes from its record."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tightfit
from benchmarks import gpu, gpu_parts
from benchmarks.gpu_parts import KEPT_OF_FAILURES, finite, llama_spec, summary_of, variants
from benchmarks.gpu_sizes import CPU, GPU, LIMIT_S, ORDER
from tightfit.methods import materialize
from tightfit.models.configs import model_config

PROGRAM = str(Path(gpu.__file__))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    out = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, PROGRAM, "--cpu", "--budget", "3600", "--out", str(out)]
    command += ["--record", str(out / "records" / "gpu.json")]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=out), out


@pytest.fixture(scope="module")
def record(ran: tuple[subprocess.CompletedProcess[str], Path]) -> dict[str, Any]:
    done, out = ran
    assert done.returncode == gpu.DONE, done.stdout[-5000:] + done.stderr[-2000:]
    return json.loads((out / "gpu.json").read_text())


@pytest.mark.slow
def test_every_part_completes_and_leaves_at_most_8_files(
    record: dict[str, Any], ran: tuple[subprocess.CompletedProcess[str], Path]
) -> None:
    done, out = ran
    assert list(record["parts"]) == list(ORDER)
    assert {part["status"] for part in record["parts"].values()} == {"done"}
    assert {path.name for path in out.iterdir()} == {"gpu.json", "tests.txt", "log.txt", "records"}
    assert json.loads((out / "records" / "gpu.json").read_text()) == record
    assert all(name in done.stdout for name in ORDER)


@pytest.mark.slow
def test_what_each_part_records(record: dict[str, Any]) -> None:
    found = {name: part["result"] for name, part in record["parts"].items()}
    assert found["machine"]["machine"]["device"] == "cpu"
    assert (found["tests"]["passed"], found["tests"]["failed"]) == (2, 0)
    methods = found["methods"]
    assert methods["agrees"] >= 10
    assert methods["differs"] == methods["failed"] == 0
    assert {row["net"] for row in methods["rows"]} == {"llama", "bert", "vit", "batchnorm"}
    assert found["calibration"]["machine"]["matrix_flops_per_s"]
    llama = found["llama"]
    assert [one["model"] for one in llama["too_large"]] == [CPU["llama"]["family"][0][0]]
    assert len(llama["step_s"]) == 2  # of five: three warm up, and their memory is tracked
    assert 0.9 < llama["predicted_over_measured"]["allocated"] < 1.1
    assert len(found["ladder"]["rungs"]) == CPU["ladder"]["rungs"]
    for rung in found["ladder"]["rungs"]:
        assert 0.9 < rung["predicted_over_measured"]["allocated"] < 1.1
        assert rung["published_bytes"] > 1e10
    rivals = found["rivals"]["models"]["gpt2"]
    assert {"plain", "tightfit"} <= set(rivals["tokens_per_s"])
    assert all(len(rates) == CPU["rivals"]["rounds"] for rates in rivals["rounds"].values())
    assert rivals["tightfit_over"]["plain"] > 0
    assert set(rivals["missing"]) <= {"trainer"}  # which needs accelerate
    for way in CPU["largest"]["trained"]:
        row = found["largest"]["ways"][way]
        assert row["parameters"] < 1e6
        assert row["next_lacks"]["memory"][0] > row["next_lacks"]["memory"][1]
        assert row["trained"]["loss"]
    assert "trained" not in found["largest"]["ways"]["AdamW, offload"]
    for table in found["kernels"]["tables"].values():
        assert 0 < sum(row["share"] for row in table) <= 1.0001
        assert len(table) <= 15
    assert len(found["kernels"]["tables"]) == 2


@pytest.mark.slow
def test_the_readme_table_is_generated_from_the_record(record: dict[str, Any]) -> None:
    lines = gpu.readme(record).splitlines()
    assert len(lines) > 8
    assert {line.count("|") for line in lines} == {4}
    assert any("tightfit is" in line for line in lines)
    assert any("published 26.84 GB" in line for line in lines)


def test_both_size_tables_have_every_part_and_the_same_keys() -> None:
    assert set(CPU) == set(GPU) == set(LIMIT_S) == set(ORDER)
    for name in ORDER:
        optional = {"rungs"}  # fewer of them on a processor
        assert set(CPU[name]) - optional == set(GPU[name]) - optional, name


def test_every_gpu_model_is_valid_and_sizes_increase() -> None:
    rivals = [one["model"] for one in GPU["rivals"]["models"].values()]
    for spec in [
        *(spec for _, spec in GPU["llama"]["family"]),
        *rivals,
        GPU["ladder"]["model"],
        *GPU["methods"]["specs"].values(),
    ]:
        model_config(tightfit.ModelSpec.parse(spec))
    widths = GPU["largest"]["widths"]
    counts = []
    for width, depth, heads, inner in widths:
        config = model_config(tightfit.ModelSpec.parse(llama_spec(width, depth, heads, inner, GPU["largest"])))
        assert width % heads == heads % config.num_key_value_heads == (width // heads) % 8 == 0
        counts.append(depth * width * (2 * width + 2 * width * 8 // heads + 3 * inner))
    assert counts == sorted(counts)


def test_gpu_variants_include_all_cpu_variants() -> None:
    here, there = variants("cpu"), variants("cuda")
    assert there[: len(here)] == here
    assert {"offload": ("states", "gradients", "parameters")} in there[len(here) :]


def test_parts_are_chosen_by_number_and_name() -> None:
    assert gpu.chosen("") == list(ORDER)
    assert gpu.chosen("6, llama") == ["llama", "ladder"]
    with pytest.raises(SystemExit, match="no part 12"):
        gpu.chosen("12")


def test_parts_are_skipped_with_a_reason_when_time_is_spent(tmp_path: Path) -> None:
    command = [sys.executable, PROGRAM, "--cpu", "--budget", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == gpu.OUT_OF_TIME, done.stderr
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert {(part["status"], part["said"]) for part in parts.values()} == {("left out", "the budget is spent")}


def test_running_some_parts_keeps_the_others_in_the_record(tmp_path: Path) -> None:
    """Parts that were skipped for lack of time are kept too, unless the record is of another
    device."""
    path = tmp_path / "gpu.json"
    earlier = {"kernels": {"status": "done"}, "llama": {"status": "done"}, "machine": {"status": "done"}}
    command = [sys.executable, PROGRAM, "--cpu", "--budget", "1", "--only", "llama,6", "--out", str(tmp_path)]
    for device, expected in (
        ("cpu", {"machine": "done", "llama": "done", "ladder": "left out", "kernels": "done"}),
        ("cuda", {"llama": "left out", "ladder": "left out"}),
    ):
        path.write_text(json.dumps({"device": device, "parts": earlier}))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == gpu.OUT_OF_TIME, done.stderr
        parts = json.loads(path.read_text())["parts"]
        assert {name: part["status"] for name, part in parts.items()} == expected
        assert list(parts) == list(expected)


def test_a_part_that_times_out_keeps_its_results_so_far(tmp_path: Path) -> None:
    (tmp_path / "llama.json").write_text(json.dumps({"status": "under way", "result": {"model": "x"}}))
    log = tmp_path / "llama.log"
    log.write_text("building\n")
    found = gpu.result_of("llama", log, tmp_path, 7.0)
    assert found["result"] == {"model": "x"}
    assert (found["status"], found["said"]) == ("timed out or died", "building\n")
    assert gpu.result_of("ladder", log, tmp_path, 7.0)["status"] == "failed"
    assert gpu.status_of({"llama": found}) == gpu.FAILED


def test_wheels_replace_missing_and_older_packages(tmp_path: Path) -> None:
    def wheel(name: str, version: str) -> None:
        with zipfile.ZipFile(tmp_path / f"{name}-{version}-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}/__init__.py", "")
            archive.writestr(f"{name}-{version}.data/purelib/{name}_more.py", "")

    wheel("not_here_at_all", "1.0")
    wheel("pytest", "0.1")
    wheel("torch", "99.0")
    target = tmp_path / "target"
    target.mkdir()
    assert gpu.unpack(tmp_path, target) == ["not_here_at_all 1.0"]
    assert sorted(path.name for path in target.iterdir()) == ["not_here_at_all", "not_here_at_all_more.py"]
    assert gpu.is_newer("2.10", "2.9")
    assert not gpu.is_newer("2.9", "2.9.0+cu128")


def test_only_parts_that_time_nothing_run_at_the_same_time() -> None:
    assert gpu.together(["machine", "tests", "methods", "calibration"]) == [
        [["machine"]],
        [["tests"], ["methods"]],
        [["calibration"]],
    ]
    assert gpu.together(["methods", "llama"]) == [[["methods"]], [["llama"]]]
    assert gpu.together(["machine", "llama"]) == [[["machine"]], [["llama"]]]


def test_the_summary_keeps_test_failures() -> None:
    text = (
        "tests/a.py::test_one[x y] PASSED [ 50%]\ntests/a.py::test_two FAILED [100%]\n\n"
        "=================================== FAILURES ===================================\n"
        "___ test_two ___\nE   assert 1 == 2\n"
        "============================= slowest 15 durations =============================\n1.0s call a\n"
        "=========================== short test summary info ============================\nFAILED tests/a.py::test_two\n"
        "1 failed, 1 passed in 3.2s\n"
    )
    found = summary_of(text)
    assert (found["passed"], found["failed"], found["names"]) == (1, 1, ["tests/a.py::test_two"])
    workers = text.replace("tests/a.py::test_one[x y] PASSED [ 50%]", "[gw0] [ 50%] PASSED tests/a.py::test_one[x y] ")
    workers = workers.replace("tests/a.py::test_two FAILED [100%]", "[gw1] [100%] FAILED tests/a.py::test_two@several ")
    assert summary_of(workers) == found
    assert "assert 1 == 2" in found["failures"]
    assert "slowest" not in found["failures"]
    assert found["slowest"] == ["1.0s call a"]
    assert len(summary_of(text.replace("assert 1", "x" * 10**6))["failures"]) == KEPT_OF_FAILURES


def test_kernels_of_a_gpu_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations that launch kernels and ranges that span them are not counted; kernels of one name
    are summed."""
    gpu_device, host = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU

    def event(name: str, kind: Any, spent: float, marks: bool = False) -> Any:
        return SimpleNamespace(
            key=name,
            device_type=kind,
            self_device_time_total=spent,
            self_cpu_time_total=99.0,
            count=4,
            is_user_annotation=marks,
        )

    events = [
        event("gemm", gpu_device, 60.0),
        event("aten::mm", host, 60.0),
        event("Optimizer.step", gpu_device, 100.0, marks=True),
        event("add", gpu_device, 30.0),
        event("add", gpu_device, 10.0),
    ]
    asked_for: list[Any] = []

    @contextmanager
    def profile(activities: list[Any], acc_events: bool) -> Iterator[Any]:
        asked_for.extend(activities)
        yield SimpleNamespace(key_averages=lambda: events)

    waited: list[int] = []
    monkeypatch.setattr(gpu_parts, "profile", profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(1))
    table = gpu_parts.kernels_of(lambda: None, 2, "cuda")
    assert [(row["name"], row["us_per_step"], row["calls_per_step"], row["share"]) for row in table] == [
        ("gemm", 30.0, 2.0, 0.6),
        ("add", 20.0, 4.0, 0.4),
    ]
    assert torch.profiler.ProfilerActivity.CUDA in asked_for
    assert waited


def test_out_of_memory_is_distinguished_from_other_errors() -> None:
    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
    ):
        assert gpu_parts.is_out_of_memory(error)
    assert not gpu_parts.is_out_of_memory(RuntimeError("shapes do not match"))


def test_a_smaller_model_is_trained_after_out_of_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each attempt of a size runs, then the next size. Every attempt is recorded, and other errors
    are raised."""
    family = [("large", {"preset": "llama-3-8b"}), ("small", {"preset": "llama-3.2-1b"})]
    sizes = {"family": family, "length": 16, "batch": 1, "planned_steps": 10, "attempts": [{}, {"micro_batch": 1}]}
    setup = gpu_parts.Setup("cpu", sizes, 1000.0, tmp_path)
    saved: list[dict[str, Any]] = []

    def searched(job: Any, pins: Any, machine: Any, sizes: Any, one: dict[str, Any]) -> dict[str, Any]:
        if one["model"] == "large":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"tokens_per_s": 7.0}

    monkeypatch.setattr(gpu_parts, "searched", searched)
    gpu_parts.llama(setup, lambda content: saved.append(content))
    assert saved[-1]["model"] == "small"
    assert saved[-1]["tokens_per_s"] == 7.0
    assert [one["model"] for one in saved[-1]["attempts"]] == ["large", "large", "small"]
    assert [one["model"] for one in saved[-1]["too_large"]] == ["large"]
    monkeypatch.setattr(gpu_parts, "searched", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gpu_parts.llama(setup, lambda content: None)


def test_weights_are_drawn_on_the_device() -> None:
    """To draw those of the largest models on the host would take minutes."""
    drawn_on: list[str] = []

    def model() -> torch.nn.Module:
        layer = torch.nn.Linear(4, 4)
        drawn_on.append(layer.weight.device.type)
        return layer

    with gpu_parts.weights_drawn_on("meta"):
        materialize.create_on_device(model, torch.device("meta"), torch.bfloat16)
    materialize.create_on_device(model, torch.device("cpu"), torch.bfloat16)
    assert drawn_on == ["meta", "cpu"]


def test_json_contains_no_infinity_or_nan() -> None:
    assert finite({"a": [float("inf"), 1.0], "b": (float("nan"),)}) == {"a": [None, 1.0], "b": [None]}
