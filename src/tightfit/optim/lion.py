"""Lion: an update by the sign of an interpolated momentum. It has one state for each parameter;
Adam has two.

Source  Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675, algorithm
        2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from tightfit.optim.one_by_one import OneByOne


class Lion(OneByOne):
    """The Lion optimizer.

        w <- w - lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * w)
        m <- beta2 * m + (1 - beta2) * g

    Apart from weight decay, every weight moves by lr in each step. The paper therefore uses a
    learning rate 3 to 10 times smaller than AdamW's and a weight decay larger by the same factor.
    State: 4 bytes for each element of an fp32 parameter.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update_parameter(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["exp_avg"] = torch.zeros_like(weight)
        beta1, beta2 = group["betas"]
        momentum = state["exp_avg"]
        direction = momentum.lerp(gradient, 1 - beta1).sign_()
        weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
        momentum.lerp_(gradient, 1 - beta2)
