"""Draws the masks of dropout from 16 random bits per element, on CPUs. PyTorch's CPU kernel draws a
random number of its own for each element.

Saves   time on a CPU, where drawing the masks can take a tenth to a quarter of a step.
Costs   nothing. The dropped share is rounded to a multiple of 1 / 65,536, and the kept elements are
        scaled to match, so the mean of the result is exact. Other elements are dropped than by
        torch's kernel with the same seed.
When    a model with dropout, on a CPU. CUDA's dropout is a single fused kernel already.
Order   before anything wraps the model's modules.
Source  Srivastava et al. 2014 (dropout), https://jmlr.org/papers/v15/srivastava14a.html

It replaces the model's nn.Dropout layers. Dropout of attention probabilities is drawn in the same
way with attention: blocked, and by torch with attention: sdpa.

Example: with a share of 0.1, an element is dropped if its 16 random bits are one of 6,554 of the
65,536 values, which is a share of 0.100006. The others are multiplied by 65536 / 58982 = 1.1111.
"""

from __future__ import annotations

from torch import Tensor, nn

from tightfit.cost.ledger import cost_in_trace
from tightfit.plan import Plan
from tightfit.runtime.dropout_noise import dropout_noise
from tightfit.runtime.run import Run

cost = cost_in_trace
FIELDS = ("dropout",)
TRACED_FIELDS = ("dropout",)
VARIANTS = ({"dropout": "16-bit"},)


def enabled(plan: Plan) -> bool:
    return plan.dropout == "16-bit"


def apply(run: Run, plan: Plan) -> Run:
    """Replace the forward of each nn.Dropout of the run's model, and return the run."""
    for module in run.model.modules():
        if type(module) is nn.Dropout:
            module.__class__ = PackedDropout
    return run


class PackedDropout(nn.Dropout):
    """nn.Dropout with masks from `dropout_noise`, for tensors of any shape and of a floating-point
    type."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        noise = dropout_noise(input.new_empty(0), list(input.shape), self.p)
        return input.mul_(noise) if self.inplace else input * noise
