"""Times a function on a CPU or a GPU."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

from tightfit._torch.devices import spin

Pick = Callable[[list[float]], float]  # seconds of several runs -> one figure, such as their median

WARM_UPS = 3  # calls before a GPU is timed: in the first, libraries select and load their kernels
BATCH_S = 3e-3  # seconds of GPU work between two events, so that the events' own time is negligible
MOST_CALLS = 100  # calls between two events: their kernels must fit into the GPU's launch queue
# The most clock cycles per second that `spin` may count; with a slower clock it spins for longer
# than needed. On AMD's GPUs it counts another clock.
SPIN_HZ = 2e9
AMD_SPIN_HZ = 1e8


def timed(
    work: Callable[[], object],
    device: torch.device,
    least_s: float = 0.2,
    least_runs: int = 3,
    pick: Pick = statistics.median,
) -> float:
    """Return the seconds of one call of `work` on `device`, after warm-up. On a GPU, only the time
    of its kernels counts.

    least_s     `work` is timed for at least so many seconds
    least_runs  and at least so many times
    pick        combines the seconds of the runs to one figure, by default their median
    """
    by = _on_gpu if device.type == "cuda" else timed_by_clock
    return by(work, device, least_s, least_runs, pick)


def timed_by_clock(
    work: Callable[[], object],
    device: torch.device,
    least_s: float = 0.2,
    least_runs: int = 3,
    pick: Pick = statistics.median,
) -> float:
    """Like `timed`, but by the host's clock: from the call of `work` until the device has finished
    all of its kernels."""
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
    """Time batches of calls, each batch between two CUDA events.

    Launching a small kernel takes longer than the kernel itself. So the GPU first runs a kernel
    that spins until the host has queued the whole batch.
    """
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
    """Return the number of calls in a batch that takes about BATCH_S, at most MOST_CALLS.

    seconds: seconds of one call.
    """
    return max(min(math.ceil(BATCH_S / max(seconds, 1e-9)), MOST_CALLS), 1)


def _batch_s(work: Callable[[], object], calls: int, started_s: float) -> float:
    """Time one batch of `calls` calls on the current GPU and return the mean seconds of a call.

    started_s: seconds that the host takes to launch one call.
    """
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    spin(int(2 * calls * started_s * (AMD_SPIN_HZ if torch.version.hip else SPIN_HZ)))
    first.record()
    for _ in range(calls):
        work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
