"""UnshardingOptimizer: run an optimizer that needs full matrices (Adafactor, Muon) on sharded
parameters.

`methods/optimizer_states.py` wraps the job's optimizer in an UnshardingOptimizer if it needs full
matrices and the parameters are sharded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tightfit.optim.counters import is_counter
from tightfit.optim.gradient_dtype import copy_gradient_dtype
from tightfit.optim.one_by_one import OneByOne

# Adafactor's row and column factors are never sharded, even if a shard happens to have their shape.
_FACTORS = ("row_var", "col_var")


def has_parameter_shape(name: str, value: Any, shape: torch.Size) -> bool:
    """Return whether the state `value` has the shape of its parameter, so that it is sharded like
    the parameter. Return False for Adafactor's factors and for counters, which are tensors without
    dimensions, as the states of a parameter without dimensions are.

    name   the state's name, such as momentum_buffer
    shape  the parameter's shape
    """
    if not isinstance(value, Tensor) or name in _FACTORS or value.shape != shape:
        return False
    return not is_counter(name, value, len(shape))


class UnshardingOptimizer(OneByOne):
    """Wraps a new optimizer and updates one parameter at a time, unsharded during its update.

    unshard  a function (weight, shard) -> full tensor. It all-gathers `shard`, which is sharded in
             the same way as `weight`, on every device
    shard    a function (weight, full tensor) -> this device's shard of the tensor

    States with the shape of their parameter are sharded; others (factors, counters) are replicated.
    A step is a collective operation: every device computes the same update. An update needs memory
    for one full parameter, its gradient and its states, in addition to what stays between updates.

    Example: a (4096, 4096) fp32 matrix on 8 devices. Each device stores 8 MiB of it. During its
    update with Muon, the weight, its gradient and its momentum are gathered: 3 x 64 MiB on each
    device.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        unshard: Callable[[Tensor, Tensor], Tensor],
        shard: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        self._inner, self._unshard, self._shard = optimizer, unshard, shard

    def update_parameter(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        inner, saved = self._inner, self.state[parameter]
        weight = self._unshard(parameter, parameter.detach())
        weight = weight.clone() if weight.data_ptr() == parameter.data_ptr() else weight
        copy_gradient_dtype(weight, parameter)
        weight.grad = self._unshard(parameter, gradient)
        states = {
            name: self._unshard(parameter, value) if has_parameter_shape(name, value, parameter.shape) else value
            for name, value in saved.items()
        }
        inner.param_groups, inner.state = [{**group, "params": [weight]}], defaultdict(dict)
        if states:
            inner.state[weight] = states
        inner.step()
        states = inner.state[weight]
        inner.param_groups, inner.state = [], defaultdict(dict)
        for name, value in states.items():
            saved[name] = (
                self._shard(parameter, value).clone() if has_parameter_shape(name, value, weight.shape) else value
            )
        parameter.copy_(self._shard(parameter, weight))
