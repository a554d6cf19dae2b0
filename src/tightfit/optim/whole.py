"""WholeParameters: an optimizer that looks at rows and columns of a matrix, over parameters that devices divide."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_FACTORS = ("row_var", "col_var")  # of Adafactor: for rows and columns, whatever shape a part happens to have


def lies_as(name: str, value: Any, shape: torch.Size) -> bool:
    """Whether a state has one number for each of its parameter's; what has no dims is a counter."""
    return name not in _FACTORS and isinstance(value, Tensor) and value.dim() > 0 and value.shape == shape


class WholeParameters(Optimizer):
    """Wraps a fresh optimizer and updates one parameter at a time, brought together for the time of its update.

    whole  (weight, tensor that lies as the weight does) -> the whole tensor, on every device
    part   (weight, whole tensor) -> this device's part

    States of a parameter's shape are kept in parts, others (factors, counters) whole on every device. Every device
    makes the same update; beyond what is kept, memory is needed for one whole parameter, its gradient and its states.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        whole: Callable[[Tensor, Tensor], Tensor],
        part: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        self._inner, self._whole, self._part = optimizer, whole, part

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. All devices take part. `closure` computes the loss anew."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        inner, kept = self._inner, self.state[parameter]
        weight = self._whole(parameter, parameter.detach())
        weight = weight.clone() if weight.data_ptr() == parameter.data_ptr() else weight
        weight.grad = self._whole(parameter, parameter.grad)  # type: ignore[arg-type]
        states = {
            name: self._whole(parameter, value) if lies_as(name, value, parameter.shape) else value
            for name, value in kept.items()
        }
        inner.param_groups, inner.state = [{**group, "params": [weight]}], defaultdict(dict)
        if states:
            inner.state[weight] = states
        inner.step()
        states = inner.state[weight]
        inner.param_groups, inner.state = [], defaultdict(dict)
        for name, value in states.items():
            kept[name] = self._part(parameter, value).clone() if lies_as(name, value, weight.shape) else value
        parameter.copy_(self._part(parameter, weight))
