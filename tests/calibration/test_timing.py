"""Timing of an operation: on a GPU the time of its kernels, without the host's launch time."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from tightfit.calibration import timing

GPU = torch.device("cuda", 0)


class Device:
    """A GPU and its host: kernels wait in a queue, and each takes as long on the device as the host takes to start it not."""

    def __init__(self, kernel_s: float, start_s: float) -> None:
        self.kernel_s, self.start_s = kernel_s, start_s
        self.host = self.device = 0.0
        self.calls = 0
        self.recorded: list[int] = []

    def queue(self, seconds: float) -> float:
        """Something is queued now, and ends then."""
        self.device = max(self.device, self.host) + seconds
        return self.device

    def work(self) -> None:
        self.calls += 1
        self.host += self.start_s
        self.queue(self.kernel_s)

    def wait(self, *_: object) -> None:
        self.host = max(self.host, self.device)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A kernel of 4 microseconds, which the host takes 20 to start."""
    seen = Device(4e-6, 20e-6)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = seen.queue(0.0)
            seen.recorded.append(seen.calls)

        def synchronize(self) -> None:
            seen.wait()

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: seen.queue(cycles / timing.SPIN_HZ))
    monkeypatch.setattr(torch.cuda, "synchronize", seen.wait)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(timing.time, "perf_counter", lambda: seen.host)
    return seen


def test_a_small_kernel_is_timed_without_its_launch(gpu: Device) -> None:
    assert timing.timed(gpu.work, GPU, least_s=0.01) == pytest.approx(4e-6)
    assert timing.timed_by_clock(gpu.work, GPU, least_s=0.01) == pytest.approx(24e-6)


def test_small_calls_are_timed_together_and_long_ones_singly(gpu: Device) -> None:
    timing.timed(gpu.work, GPU, least_s=0.0, least_runs=2)
    first, last = gpu.recorded[-2:]
    assert last - first == timing.MOST_CALLS
    gpu.kernel_s = 0.1
    assert timing.timed(gpu.work, GPU, least_s=0.0, least_runs=2) == pytest.approx(0.1)
    first, last = gpu.recorded[-2:]
    assert last - first == 1


@pytest.mark.parametrize(("seconds", "calls"), [(1.0, 1), (1e-3, 3), (1e-4, 30), (1e-6, 100), (0.0, 100)])
def test_the_number_of_calls_in_a_batch_depends_on_their_time(seconds: float, calls: int) -> None:
    assert timing.calls_in_a_batch(seconds) == calls


def test_a_cpu_is_timed_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(100))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(seconds)))
    assert timing.timed(lambda: None, torch.device("cpu"), least_s=3.0) == 1.0
