"""The base class of the optimizers in this package that update one parameter after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Closure = Callable[[], float]


def loss_of(closure: Closure | None) -> float | None:
    """Call the closure of a step, which computes the loss again, and return the loss. Return None
    if `closure` is None."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class OneByOne(Optimizer):
    """An optimizer that updates one parameter after another. Subclasses implement
    `update_parameter(weight, gradient, group)`, which updates one weight in place; `group` is its
    parameter group with the options, such as `lr`."""

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        closure  computes the loss again and returns it, as in torch

        Returns the closure's loss, or None without a closure.
        """
        loss = loss_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update_parameter(parameter, parameter.grad, group)
        return loss

    def update_parameter(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError
