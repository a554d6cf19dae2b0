"""The dtype of a parameter's gradient, which may be wider than that of the parameter: fp32 gradients
of 16-bit weights (`master_weights`).

torch casts each gradient that backward computes to the parameter's `grad_dtype` and then adds it to
`.grad`, so micro-batches add up in that dtype.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's `.grad`: that of the parameter, unless `widen_gradients` has
    changed it."""
    return parameter.grad_dtype or parameter.dtype


def widen_gradients(parameters: Iterable[Tensor], wide: bool = True) -> None:
    """Make backward accumulate the gradients of 16-bit parameters in fp32. Other parameters, and
    frozen ones, are unchanged.

    wide  False: gradients have the dtype of their parameter again, as torch's default is
    """
    for parameter in parameters:
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.grad_dtype = torch.float32 if wide else parameter.dtype


def copy_gradient_dtype(copy: Tensor, parameter: Tensor) -> None:
    """Give `copy`, a tensor that takes the place of `parameter` or of a part of it, the gradient
    dtype of `parameter`."""
    if parameter.requires_grad:
        copy.grad_dtype = gradient_dtype(parameter)


def empty_gradient(parameter: Tensor) -> Tensor:
    """Return an uninitialized tensor with the shape, the device and the dtype of a parameter's
    gradient."""
    return torch.empty_like(parameter, dtype=gradient_dtype(parameter), requires_grad=False)


__all__ = [
    "copy_gradient_dtype",
    "empty_gradient",
    "gradient_dtype",
    "widen_gradients",
]
