"""Stores images and the results of convolutions with the channels of a pixel side by side
(channels_last), as the fast convolution kernels read them.

Saves   time in convolutional models: on a CPU, in oneDNN's convolutions and in pooling; on CUDA, in
        the convolutions of Tensor Cores. Kernels need not reorder their inputs and outputs. A 1 x 1
        convolution of a small image is one matrix product, which is faster on a CPU.
Costs   nothing in memory. Batch norms are a little slower on a CPU.
When    a convolutional model in 16 bits that is not compiled as a whole. torch.compile chooses this
        format by itself within a compiled region.
Changes which elements a dropout drops on a CPU: its random numbers follow the order in memory.
Order   before anything wraps a block.
Source  PyTorch, "Channels Last Memory Format", a tutorial; NVIDIA, "Convolutional Layers User's
        Guide", on NHWC.

The input of each nn.Conv2d is converted, which does nothing if it has the format already: the
results of a convolution, a batch norm or an activation keep the format of their input. Weights stay
as they are, so that sharding and checkpoints do not depend on this method.

A 1 x 1 convolution multiplies each pixel's channels by one matrix. In channels_last, the pixels are
the rows of a matrix, so that a matrix product computes the same. It is used for images of at most 64
pixels, outside of compiled regions. For larger images, both are about equally fast.

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
MAX_PIXELS = 64  # of an image, for 1 x 1 convolutions as matrix products


def enabled(plan: Plan) -> bool:
    return plan.memory_format == "channels_last"


def apply(run: Run, plan: Plan) -> Run:
    """Convert the input of every nn.Conv2d of the run's model, and return the run."""
    use_channels_last(run.model)
    return run


def use_channels_last(model: nn.Module) -> None:
    """Convert the input of every nn.Conv2d of `model`, and replace the class of those with 1 x 1
    kernels by `PointwiseConv2d`."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(channels_last_input)
            if type(module) is nn.Conv2d and _multiplies_pixels(module):
                module.__class__ = PointwiseConv2d


def _multiplies_pixels(module: nn.Conv2d) -> bool:
    """Return whether the convolution multiplies the channels of each pixel by one matrix."""
    return (module.kernel_size, module.stride, module.groups) == ((1, 1), (1, 1), 1) and module.padding in (
        (0, 0),
        "valid",
        "same",
    )


class PointwiseConv2d(nn.Conv2d):
    """A convolution with 1 x 1 kernels and stride 1. It is computed as a matrix product if its input is
    a small image in channels_last."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution of `input`, of shape (samples, channels, height, width), with
        `weight`, of shape (output channels, channels, 1, 1)."""
        small = input.dim() == 4 and input.shape[2] * input.shape[3] <= MAX_PIXELS
        in_format = small and input.is_contiguous(memory_format=torch.channels_last)
        if not in_format or torch.compiler.is_compiling():
            return super()._conv_forward(input, weight, bias)
        pixels = nn.functional.linear(input.permute(0, 2, 3, 1), weight.flatten(1), bias)
        return pixels.permute(0, 3, 1, 2)


def channels_last_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the positional arguments of a forward, with a 4-dimensional first argument of shape
    (samples, channels, height, width) in the format channels_last."""
    first, *rest = inputs
    if isinstance(first, Tensor) and first.dim() == 4:
        first = first.contiguous(memory_format=torch.channels_last)
    return (first, *rest)
