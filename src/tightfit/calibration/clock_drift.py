"""Corrects measurements for clock drift. The speed of a shared CPU changes within minutes, so
measurements that are taken at different times must be scaled to one speed.

A fixed workload, called the control, is timed before and after each measurement. If the machine
becomes 20 % slower, the measurement and the control both take 20 % longer, and the ratio of their
times stays the same.
"""

from __future__ import annotations

import statistics

import torch

from tightfit.calibration.timing import timed

ROWS, WIDTH = 1024, 512  # of the control, an MLP whose hidden layer is four times as wide
PASSES = 4  # elementwise passes over the wide activations, for norms and nonlinearities


def control_s(device: torch.device) -> float:
    """Run the control, a fixed workload, a few times and return the seconds that one run takes. It
    consists of the matrix products and elementwise passes of a small MLP's forward, backward and
    update in fp32.

    Its tensors are larger than a CPU's caches. Nothing is allocated while it is timed, so the
    plan's allocator does not change its time.
    """
    given, out, gradient = (torch.ones(ROWS, WIDTH, device=device) for _ in range(3))
    first, first_gradient = (torch.zeros(WIDTH, 4 * WIDTH, device=device) for _ in range(2))
    second, second_gradient = (torch.zeros(4 * WIDTH, WIDTH, device=device) for _ in range(2))
    wide, active, wide_gradient = (torch.zeros(ROWS, 4 * WIDTH, device=device) for _ in range(3))

    def work() -> None:
        torch.mm(given, first, out=wide)
        for _ in range(PASSES):
            torch.add(wide, active, alpha=0.5, out=active)
        torch.mm(active, second, out=out)
        torch.mm(out, second.t(), out=wide_gradient)
        torch.mm(active.t(), out, out=second_gradient)
        for _ in range(PASSES):
            torch.add(wide_gradient, active, alpha=0.5, out=wide_gradient)
        torch.mm(wide_gradient, first.t(), out=gradient)
        torch.mm(given.t(), wide_gradient, out=first_gradient)
        first.add_(first_gradient, alpha=0.0)
        second.add_(second_gradient, alpha=0.0)

    return timed(work, device, least_s=0.15)


class ClockDrift:
    """Times the control, a fixed workload, before and after each group of measurements on a CPU, so
    that they can be scaled to one speed.

    A GPU is not shared, so its speed is assumed to be constant: the control is not timed, and its
    time counts as 1 second.

    watched  if False, the speed of a CPU is assumed to be constant, too
    """

    def __init__(self, device: torch.device, watched: bool = True) -> None:
        self.device = device
        self.drifts = watched and device.type == "cpu"
        self.control_times_s: list[float] = [self._now()]

    def _now(self) -> float:
        return control_s(self.device) if self.drifts else 1.0

    def control_around_s(self) -> float:
        """Time the control workload again. Return the mean of its seconds now and at the previous
        call, which are its times just after and just before the measurements between the two calls.
        """
        self.control_times_s.append(self._now())
        return (self.control_times_s[-2] + self.control_times_s[-1]) / 2

    @property
    def usual_control_s(self) -> float:
        """The median of all times of the control workload so far, in seconds. It represents the
        machine's usual speed, to which measurements are scaled."""
        return statistics.median(self.control_times_s)
