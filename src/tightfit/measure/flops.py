"""Model FLOPs of a step, counted from the model's own operations, and the share of the machine's rate they reach."""

from __future__ import annotations

import torch
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from tightfit.machine import Machine
from tightfit.methods.run import Run
from tightfit.models.objective import Batch, map_tensors


def forward_flops(run: Run, batch: Batch) -> int | None:
    """FLOPs of one forward of `batch` (multiply and add count as two), on meta tensors; None for a model that refuses them.

    Attention takes the path that computes all pairs, so for a language model three times this is 6 P + 12 L h s a token.
    """
    meta = map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), batch)
    state = {name: torch.empty_like(t, device="meta") for name, t in [*run.model.named_parameters(), *run.model.named_buffers()]}

    class Total(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = run.model

        def forward(self, inputs: Batch) -> torch.Tensor:
            return run.objective.total(self.model, inputs)

    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter, torch.compiler.set_stance("force_eager"):
            functional_call(Total(), {f"model.{name}": value for name, value in state.items()}, (meta,))
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    return counter.get_total_flops()


def mfu(flops_per_step: float | None, step_s: float | None, machine: Machine, precision: str) -> float | None:
    """Model FLOP/s over the machine's measured matrix rate for the plan's type; None where either is unknown."""
    rate = machine.rate(precision)
    if not flops_per_step or not step_s or not rate:
        return None
    return flops_per_step / step_s / rate
