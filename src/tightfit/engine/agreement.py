"""What all devices of a run must agree on: whether something holds on all of them, the largest of
their numbers, and when to stop."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tightfit.distributed.mesh import AXES
from tightfit.engine.delayed_readings import Reading, begin_reading
from tightfit.runtime.run import Run


def all_ranks_true(run: Run, holds: bool | torch.Tensor) -> bool | torch.Tensor:
    """Return whether `holds` is true on every device. All devices must call this function.

    holds  this device's answer. If it is a scalar bool tensor, the result is one, too, and the host
           does not wait
    """
    if run.mesh is None:
        return holds
    if isinstance(holds, torch.Tensor):
        return run.mesh.all_reduce((~holds).to(run.device, torch.int64), AXES, dist.ReduceOp.MAX) == 0
    return not all_reduce_max(run, int(not holds))


def all_reduce_max(run: Run, number: int) -> int:
    """Return the largest `number` of all devices. All devices must call this function, and the host
    waits for the result."""
    return int(_begin_max(run, number)()["largest"])


def _begin_max(run: Run, number: int) -> Reading:
    """Begin to compute the largest `number` of all devices. Return a callable that waits for the
    result and returns {"largest": result}."""
    if run.mesh is None:
        return begin_reading({"largest": number})
    on_device = torch.full((), number, device=run.device)  # filled on the device: a copy would block
    return begin_reading({"largest": run.mesh.all_reduce(on_device, AXES, dist.ReduceOp.MAX)})


class StopPoll:
    """Computes the largest of the numbers that all devices pass to `largest`. A device passes a
    number above 0 to ask for a stop, so all devices learn of it and stop after the same step.

    On several CUDA devices, `largest` returns the result for the numbers of the previous call (0 at
    first), so that no device has to wait.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._is_late = run.mesh is not None and run.device.type == "cuda"
        self._before = begin_reading({"largest": 0})

    def largest(self, number: int) -> int:
        if not self._is_late:
            return all_reduce_max(self._run, number)
        before, self._before = self._before, _begin_max(self._run, number)
        return int(before()["largest"])
