"""Which states of an optimizer count updates, rather than belong to the elements of a parameter."""

from __future__ import annotations

from torch import Tensor

_NAMES = ("step", "mu_product", "eta", "mu")  # of torch's optimizers


def is_counter(name: str, value: Tensor, parameter_dims: int) -> bool:
    """Return whether a state is a counter, a tensor without dimensions. The states of a parameter without
    dimensions have none either, so for it the name decides.

    name            the state's name, such as step
    parameter_dims  the number of the parameter's dimensions
    """
    return value.dim() == 0 and (parameter_dims > 0 or name in _NAMES)
