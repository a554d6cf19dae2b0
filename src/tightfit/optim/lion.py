"""Lion: an update by the sign of an interpolated momentum. It has one state; Adam has two.

Source  Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675, algorithm
        2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class Lion(Optimizer):
    """w <- w - lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * w), then m <- beta2 * m +
    (1 - beta2) * g.

    Every weight moves by lr. The paper therefore uses a learning rate 3 to 10 times smaller than
    AdamW's and a weight decay larger by the same factor. State: 4 bytes for each fp32 parameter.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. closure: computes the loss again and returns
        it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum = state["exp_avg"]
                direction = momentum.lerp(parameter.grad, 1 - beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 1 - beta2)
        return loss
