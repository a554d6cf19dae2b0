"""LARS: momentum SGD with a learning rate for each layer, proportional to |weight| / |gradient|,
for large batches.

Source  You et al. 2017, Large Batch Training of Convolutional Networks, arXiv:1708.03888, algorithm
        1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from tightfit.optim.norms import full_norms
from tightfit.optim.one_by_one import OneByOne


class LARS(OneByOne):
    """The LARS optimizer.

        v <- momentum * v + lr * rate * (g + weight_decay * w)
        w <- w - v

    rate           trust * |w| / (|g| + weight_decay * |w|), for each parameter
    trust          the paper's eta: how far a layer may move in one step with lr = 1, as a share of
                   its norm
    decay_vectors  whether `weight_decay` also applies to parameters with fewer than two dims

    The momentum v includes the learning rate, as in the paper. Parameters with fewer than two dims
    (norms, biases) are updated by plain momentum SGD, with rate = 1 and, unless `decay_vectors`,
    without weight decay. The rate is also 1 if the weight or its gradient is zero. State: 4 bytes
    for each element of an fp32 parameter.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
        decay_vectors: bool = False,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**options, "trust": trust, "decay_vectors": decay_vectors})

    def update_parameter(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        velocity = state["momentum_buffer"].mul_(group["momentum"])
        if weight.dim() >= 2:
            rate = _local_rate(weight, gradient, group["trust"], group["weight_decay"])
            velocity.add_(gradient.add(weight, alpha=group["weight_decay"]).mul_(rate), alpha=group["lr"])
        else:
            decay = group["weight_decay"] if group["decay_vectors"] else 0.0
            velocity.add_(gradient.add(weight, alpha=decay) if decay else gradient, alpha=group["lr"])
        weight.sub_(velocity)


def _local_rate(weight: Tensor, gradient: Tensor, trust: float, weight_decay: float) -> Tensor:
    """Return LARS's rate of a layer as a scalar tensor: trust * |w| / (|g| + weight_decay * |w|),
    where w is the weight and g its gradient. It is 1 if either norm is zero."""
    weight_norm, gradient_norm = full_norms(weight, weight, gradient)
    usable = (weight_norm > 0) & (gradient_norm > 0)
    rate = trust * weight_norm / (gradient_norm + weight_decay * weight_norm)
    return torch.where(usable, rate, torch.ones_like(rate))
