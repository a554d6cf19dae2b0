"""Pace: how fast a processor is at the moment. One that is shared with others changes its pace within minutes.

A fixed piece of work, the control, is timed beside what is measured; a ratio to it is what a machine that changes can be
compared by.
"""

from __future__ import annotations

import statistics

import torch

from tightfit.measure.timing import timed

ROWS, WIDTH = 1024, 512  # of the control: what a step of a layer does that is four times as wide within
PASSES = 4  # over the wide activations, as its norms and nonlinearities make them


def control_s(device: torch.device) -> float:
    """Seconds of the control: the products and passes of a layer's forward, backward and update in fp32, over more than a
    processor's caches hold. It allocates nothing while it is timed, so that a plan's allocator does not change it."""
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


class Pace:
    """The control before and after each stretch of measurements. A GPU is nobody else's: it is taken to be always as fast.
    watched: False takes a processor to be so, too."""

    def __init__(self, device: torch.device, watched: bool = True) -> None:
        self.device = device
        self.moves = watched and device.type == "cpu"
        self.seen: list[float] = [self._now()]

    def _now(self) -> float:
        return control_s(self.device) if self.moves else 1.0

    def stretch(self) -> float:
        """Seconds of the control, on average, before and after what was measured since the last call."""
        self.seen.append(self._now())
        return (self.seen[-2] + self.seen[-1]) / 2

    @property
    def usual(self) -> float:
        """The median of all: what measurements of any stretch are brought to."""
        return statistics.median(self.seen)
