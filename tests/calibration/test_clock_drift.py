"""A machine whose speed changes during calibration gets the rates of one whose speed does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tightfit.calibration import calibrate as calibration
from tightfit.calibration import clock_drift
from tightfit.machine import Machine

PROCESSOR = torch.device("cpu")


class Changing:
    """A machine of which each stretch of measurements runs at another speed: what is timed, and the control with it."""

    def __init__(self, speeds: list[float]) -> None:
        self.speeds, self.speed = iter(speeds), 1.0

    def control_s(self, device: torch.device) -> float:
        return 0.1 / self.speed

    def next(self) -> float:
        self.speed = next(self.speeds, 1.0)
        return self.speed


def test_drift_is_measured_against_the_median_of_the_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.1, 0.3, 0.2])
    monkeypatch.setattr(clock_drift, "control_s", lambda device: next(seconds))
    seen = clock_drift.ClockDrift(PROCESSOR)
    assert seen.control_around_s() == pytest.approx(0.2)
    assert seen.control_around_s() == pytest.approx(0.25)
    assert seen.usual_control_s == pytest.approx(0.2)


def test_the_control_repeats_its_work_and_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    works: list[Callable[[], object]] = []
    monkeypatch.setattr(clock_drift, "timed", lambda work, device, **named: works.append(work) or 0.1)
    assert clock_drift.control_s(PROCESSOR) == 0.1
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        works[0]()
    assert max((event.self_cpu_memory_usage for event in profile.events()), default=0) < 2**16


def test_rates_of_a_slow_moment_are_corrected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is twice as slow while fp32 products are measured, and twice as fast while links
    are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = Changing([0.5, 1.0, 1.0, 1.0, 1.0, 2.0])

    class Steady(clock_drift.ClockDrift):  # a stretch's controls are at its speed
        def control_around_s(self) -> float:
            self.control_times_s.append(machine.control_s(self.device))
            return self.control_times_s[-1]

    monkeypatch.setattr(clock_drift, "control_s", machine.control_s)
    monkeypatch.setattr(calibration, "ClockDrift", Steady)
    monkeypatch.setattr(calibration, "_matrix_rates", lambda kind, device, sizes: {512: 1e9 * machine.next()})
    monkeypatch.setattr(
        calibration,
        "measure_rates",
        lambda device, seen, say: {"product/float32": {64: machine.next() * seen.control_around_s()}},
    )
    monkeypatch.setattr(calibration, "_memory_bandwidth", lambda device: 1e10 * machine.next())
    monkeypatch.setattr(calibration, "_launch_s", lambda device: 1e-6 / machine.speed)
    monkeypatch.setattr(
        calibration,
        "_all_reduces_s",
        lambda: dict.fromkeys((calibration.LARGE, calibration.SMALL), 1.0 / machine.next()),
    )
    found = calibration.calibrate(Machine.detect())
    assert found.matrix_flops_per_s["fp32"].value == pytest.approx(1e9)
    assert found.matrix_flops_per_s_by_size["bf16"][512] == pytest.approx(1e9)
    assert found.rates["product/float32"][64] == pytest.approx(1.0)
    assert found.memory_bytes_per_s is not None
    assert found.memory_bytes_per_s.value == pytest.approx(1e10)
    assert found.launch_s is not None
    assert found.launch_s.value == pytest.approx(1e-6)
    assert found.process_bytes_per_s is not None
    assert found.process_bytes_per_s.value == pytest.approx(calibration.LARGE)
    assert found.control_s is not None
    assert found.control_s.value == pytest.approx(0.1)
    assert Machine.detect() == found  # it was kept
