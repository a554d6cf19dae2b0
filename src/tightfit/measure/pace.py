"""Pace: how fast a processor is at the moment. One that is shared with others works a third faster or slower within minutes.

A fixed piece of work, the control, is timed beside what is measured; a ratio to it is what a machine that changes can be
compared by.
"""

from __future__ import annotations

import statistics

import torch

from tightfit.measure.timing import timed

SIZE, PRODUCTS, COPIED = 512, 8, 2**26  # of the control: square products in fp32, and bytes that are copied


def control_s(device: torch.device) -> float:
    """Seconds of the control, about 0.1 s of them looked at."""
    left, right = (torch.randn(SIZE, SIZE, device=device) for _ in range(2))
    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    product, target = torch.empty_like(left), torch.empty_like(source)

    def work() -> None:
        for _ in range(PRODUCTS):
            torch.mm(left, right, out=product)
        target.copy_(source)

    return timed(work, device, least_s=0.1)


class Pace:
    """The control before and after each stretch of measurements. A GPU is nobody else's: it is taken to be always as fast."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seen: list[float] = [self._now()]

    def _now(self) -> float:
        return control_s(self.device) if self.device.type == "cpu" else 1.0

    def stretch(self) -> float:
        """Seconds of the control, on average, before and after what was measured since the last call."""
        self.seen.append(self._now())
        return (self.seen[-2] + self.seen[-1]) / 2

    @property
    def usual(self) -> float:
        """The median of all: what measurements of any stretch are brought to."""
        return statistics.median(self.seen)
