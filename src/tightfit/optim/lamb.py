"""LAMB: Adam with each layer's step scaled to the norm of the layer's weights, for large batches.

Source  You et al. 2020, Large Batch Optimization for Deep Learning, arXiv:1904.00962, algorithm 2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from tightfit.optim.norms import full_norms
from tightfit.optim.one_by_one import OneByOne


class LAMB(OneByOne):
    """The LAMB optimizer.

        u = m / (sqrt(v) + eps) + weight_decay * w
        w <- w - lr * phi(|w|) / |u| * u

    m and v are Adam's bias-corrected moments. phi(|w|) / |u| is the trust ratio.

    clamp          (low, high) of phi(z) = min(max(z, low), high). The paper gives this form but no
                   bounds, and its authors' code does not clamp
    decay_vectors  whether `weight_decay` also applies to parameters with fewer than two dims

    Parameters with fewer than two dims (norms, biases) take Adam's step without the trust ratio
    and, unless `decay_vectors`, without weight decay, as in the authors' code. The ratio is 1 if
    the weight or its update is zero, so that weights that start at zero can move. State: 8 bytes
    for each element of an fp32 parameter.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clamp: tuple[float, float] = (0.0, math.inf),
        decay_vectors: bool = False,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "clamp": clamp, "decay_vectors": decay_vectors})

    def update_parameter(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight))
        state["step"] += 1
        beta1, beta2 = group["betas"]
        first = state["exp_avg"].lerp_(gradient, 1 - beta1)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (second / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        update = torch.div(first, root, out=root).div_(1 - beta1 ** state["step"])
        if weight.dim() >= 2 or group["decay_vectors"]:
            update.add_(weight, alpha=group["weight_decay"])
        if weight.dim() >= 2:
            update.mul_(_trust_ratio(weight, update, group["clamp"]))
        weight.add_(update, alpha=-group["lr"])


def _trust_ratio(weight: Tensor, update: Tensor, clamp: tuple[float, float]) -> Tensor:
    """Return LAMB's trust ratio as a scalar tensor: the norm of `weight`, clamped to the range
    `clamp`, divided by the norm of `update`. It is 1 if either of these is zero. The host does not
    wait for the value."""
    weight_norm, update_norm = full_norms(weight, weight, update)
    weight_norm = weight_norm.clamp(*clamp)
    usable = (weight_norm > 0) & (update_norm > 0)
    return torch.where(usable, weight_norm / update_norm, torch.ones_like(weight_norm))
