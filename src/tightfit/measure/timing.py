"""Seconds of a piece of work on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

Pick = Callable[[list[float]], float]  # of the seconds of several runs


def timed(
    work: Callable[[], object],
    device: torch.device,
    least_s: float = 0.2,
    least_runs: int = 3,
    pick: Pick = statistics.median,
) -> float:
    """Seconds of `work`, after one run to warm up: the median of its runs, or what else `pick` makes of them."""
    work()
    _wait(device)
    times: list[float] = []
    while len(times) < least_runs or sum(times) < least_s:
        began = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - began)
    return pick(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
