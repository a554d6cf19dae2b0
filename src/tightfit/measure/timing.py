"""Seconds of a piece of work on a device."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

Pick = Callable[[list[float]], float]  # of the seconds of several runs

WARM_UPS = 3  # calls before a GPU is timed: libraries choose and load their kernels in the first
BATCH_S = 3e-3  # of a GPU's work between two events, so that what the events take is nothing beside it
MOST_CALLS = 100  # between two events: their kernels have to fit the queue that a GPU takes them from
SPIN_HZ = 2e9  # clock that `_sleep` counts in, at most: a slower one waits longer; of AMD's GPUs a clock of its own
AMD_SPIN_HZ = 1e8


def timed(
    work: Callable[[], object],
    device: torch.device,
    least_s: float = 0.2,
    least_runs: int = 3,
    pick: Pick = statistics.median,
) -> float:
    """Seconds of `work` on `device`, once it is warm: the median of its runs, or what else `pick` makes of them. On a GPU
    those of its kernels alone."""
    by = _on_gpu if device.type == "cuda" else timed_by_clock
    return by(work, device, least_s, least_runs, pick)


def timed_by_clock(
    work: Callable[[], object],
    device: torch.device,
    least_s: float = 0.2,
    least_runs: int = 3,
    pick: Pick = statistics.median,
) -> float:
    """As `timed`, with what the host does to start `work`, until all of it is done."""
    work()
    _wait(device)
    times: list[float] = []
    while len(times) < least_runs or sum(times) < least_s:
        began = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - began)
    return pick(times)


def _on_gpu(work: Callable[[], object], device: torch.device, least_s: float, least_runs: int, pick: Pick) -> float:
    """Batches of calls, each batch between two events of the GPU. What the host takes to start a small kernel is longer than
    the kernel: so the GPU is kept waiting until the batch is queued."""
    with torch.cuda.device(device):
        for _ in range(WARM_UPS):
            work()
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        started_s = time.perf_counter() - began
        calls = calls_in_a_batch(_batch_s(work, 1, started_s))
        times: list[float] = []
        while len(times) < least_runs or sum(times) * calls < least_s:
            times.append(_batch_s(work, calls, started_s))
    return pick(times)


def calls_in_a_batch(seconds: float) -> int:
    """How many calls of so many seconds are timed at once."""
    return max(min(math.ceil(BATCH_S / max(seconds, 1e-9)), MOST_CALLS), 1)


def _batch_s(work: Callable[[], object], calls: int, started_s: float) -> float:
    """Seconds of one of `calls` calls on the current GPU. started_s: what the host takes to start one."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(2 * calls * started_s * (AMD_SPIN_HZ if torch.version.hip else SPIN_HZ)))
    first.record()
    for _ in range(calls):
        work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
