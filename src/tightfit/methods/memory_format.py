"""Stores images and the results of convolutions with the channels of a pixel side by side
(channels_last), as the fast convolution kernels read them.

Saves   time in convolutional models: on a CPU, in oneDNN's convolutions and in pooling; on CUDA, in
        the convolutions of Tensor Cores. Kernels need not reorder their inputs and outputs.
Costs   nothing in memory. Batch norms are a little slower on a CPU.
When    a convolutional model in 16 bits that is not compiled as a whole. torch.compile chooses this
        format by itself within a compiled region.
Order   before anything wraps a block.
Source  PyTorch, "Channels Last Memory Format", a tutorial; NVIDIA, "Convolutional Layers User's
        Guide", on NHWC.

The input of each nn.Conv2d is converted, which does nothing if it has the format already: the
results of a convolution, a batch norm or an activation keep the format of their input. Weights stay
as they are, so that sharding and checkpoints do not depend on this method.

Example: a tensor of shape (8, 64, 56, 56) has strides (200704, 3136, 56, 1) in the usual format,
and (200704, 1, 3584, 64) in channels_last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tightfit.cost.ledger import cost_in_trace
from tightfit.plan import Plan
from tightfit.runtime.run import Run

cost = cost_in_trace
FIELDS = ("memory_format",)
TRACED_FIELDS = ("memory_format",)
VARIANTS = ({"memory_format": "channels_last"},)


def enabled(plan: Plan) -> bool:
    return plan.memory_format == "channels_last"


def apply(run: Run, plan: Plan) -> Run:
    """Convert the input of every nn.Conv2d of the run's model, and return the run."""
    for module in run.model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(channels_last_input)
    return run


def channels_last_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the positional arguments of a forward, with a 4-dimensional first argument of shape
    (samples, channels, height, width) in the format channels_last."""
    first, *rest = inputs
    if isinstance(first, Tensor) and first.dim() == 4:
        first = first.contiguous(memory_format=torch.channels_last)
    return (first, *rest)
