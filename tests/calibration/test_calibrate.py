"""Quick calibration of a machine: its results, and where they are stored."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

import pytest

from tests import tiny
from tests.report.test_run_folder import command
from tightfit.achieved_rates import COMPILED_ARITHMETIC, achieved
from tightfit.calibration import calibrate
from tightfit.calibration.this_machine import measured_machine_of, this_machine
from tightfit.machine import Figure, Machine, calibration_path


def test_quick_calibration_finds_all_rates_and_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load = [99.0]
    monkeypatch.setattr(os, "getloadavg", lambda: (load[0], 0.0, 0.0))
    answer = functools.cache(lambda text: calibrate.quick_measurement(text))
    monkeypatch.setattr(
        calibrate.subprocess,
        "run",
        lambda command, input, **more: subprocess.CompletedProcess(command, 0, answer(input)),
    )
    before = Machine.detect()
    assert calibrate.quick_calibrate(before).matrix_flops_per_s
    assert Machine.detect() == before  # a busy machine's is not kept
    load[0] = 0.0
    assert "guess" in before.speed_caveat
    seen = calibrate.quick_calibrate(before)
    assert "quick calibration" in seen.speed_caveat
    assert Machine.detect() == seen
    assert all(figure.source == "quick" for figure in seen.matrix_flops_per_s.values())
    assert {"product/float32", "product/bfloat16", "elementwise/float32", "update/float32"} <= seen.rates.keys()
    assert all(rate > 0 for table in seen.rates.values() for rate in table.values())
    for kind in COMPILED_ARITHMETIC:  # which nothing was compiled for: as what is nearest
        assert f"{kind}/float32" not in seen.rates
        assert 0 < achieved(seen, kind, "float32", 2**20) < 1e13


def test_a_failed_quick_calibration_leaves_a_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate.sys, "executable", "/bin/false")
    machine = Machine.detect()
    assert calibrate.quick_calibrate(machine) == machine
    assert not calibration_path(machine.name).exists()


@pytest.mark.parametrize(("load", "said"), [(0.0, 1), (99.0, 2)])
def test_a_busy_machine_is_said_to_be_measured_again(
    load: float, said: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(calibrate.sys, "executable", "/bin/false")
    lines: list[str] = []
    this_machine(lines.append)
    assert len(lines) == said
    assert ("later commands will measure it again" in lines[-1]) is (said == 2)


@pytest.mark.parametrize("load", [0.0, 99.0])
def test_the_library_measures_an_unmeasured_machine_once(
    load: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("tightfit.calibration.this_machine._measured", {})
    measurements: list[str] = []

    def measure(command: list[str], input: str, **more: object) -> subprocess.CompletedProcess[str]:
        measurements.append(input)
        figure = {"fp32": Figure(value=1e12, source="quick")}
        answer = Machine.model_validate_json(input).replace(matrix_flops_per_s=figure).to_json()
        return subprocess.CompletedProcess(command, 0, answer)

    monkeypatch.setattr(calibrate.subprocess, "run", measure)
    monkeypatch.setenv("WORLD_SIZE", "2")  # the other process would disturb it
    assert measured_machine_of(None) == Machine.detect()
    monkeypatch.delenv("WORLD_SIZE")
    assert measured_machine_of("l4") == Machine.named("l4")
    assert not measurements
    for _ in range(2):
        assert measured_machine_of(None).matrix_flops_per_s["fp32"].value == 1e12
    assert len(measurements) == 1


@pytest.mark.slow
def test_commands_calibrate_an_unmeasured_machine_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    job = str(tiny.write(tmp_path))
    assert command(monkeypatch, "train", job, "--plan", "reference", "--out", str(tmp_path / "out")) == 0
    said = capsys.readouterr().out
    assert said.startswith("measuring the speed of this machine")
    assert "--calibrate measures it closely" in said
    assert command(monkeypatch, "explain", job, "--plan", "reference") == 0
    said = capsys.readouterr().out
    assert "measuring the speed of this machine (" not in said
    assert "--calibrate measures it closely" in said
    assert command(monkeypatch, "machine") == 0
    assert "quick (square matrices" in " ".join(capsys.readouterr().out.split())
