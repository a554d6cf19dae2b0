"""Times a function on a CPU or a GPU, in seconds."""

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
# cycles per second that `spin` counts, at most: on a GPU with a slower clock it waits longer. AMD's
# GPUs count a clock of 100 MHz
SPIN_HZ = 2e9
AMD_SPIN_HZ = 1e8


def timed(
    work: Callable[[], object],
    device: torch.device,
    least_s: float = 0.2,
    least_runs: int = 3,
    pick: Pick = statistics.median,
) -> float:
    """Return the seconds that one call of `work` takes on `device`, after warm-up. On a GPU, only
    the time of its kernels counts, not the time that the host takes to launch them.

    least_s     repeat `work` for at least this many seconds
    least_runs  repeat `work` at least this many times
    pick        computes the result from the seconds of all runs; the default is the median
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
    """Like `timed`, but on a GPU the host's time counts, too: a run lasts from the call of `work`
    until the device has finished all of its operations."""
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
    """Return the seconds of GPU time that one call of `work` takes. The arguments are the same as
    those of `timed`.

    Batches of calls are timed, each between two CUDA events. Launching a small kernel takes longer
    than running it. So the GPU first spins until the whole batch is queued, and then runs the
    kernels without gaps.
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
    """Return how many calls are timed as one batch if one call takes `seconds`: so many that the
    batch takes about BATCH_S seconds, at least 1 and at most MOST_CALLS."""
    return max(min(math.ceil(BATCH_S / max(seconds, 1e-9)), MOST_CALLS), 1)


def _batch_s(work: Callable[[], object], calls: int, started_s: float) -> float:
    """Return the mean GPU seconds of one call of `work`, measured over `calls` calls on the current
    GPU.

    started_s  seconds that the host takes to launch one call
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
