"""Moves gradients to the store while backward computes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tightfit._torch.distributed import local_shard
from tightfit.optim.gradient_hooks import on_gradient_ready
from tightfit.runtime.offload_store import Store


class OffloadedGradients:
    """Moves each gradient to the store as soon as backward has computed it. The gradients of a
    step's micro-batches are added up in the store.

    weights  parameter -> the tensor that the optimizer updates in its place, and whose `grad` the
             optimizer reads; may be the parameter itself
    store    the store
    """

    def __init__(self, weights: dict[nn.Parameter, nn.Parameter], store: Store) -> None:
        self.weights, self.store = weights, store
        self.gradients = store.gradients
        self.in_store: set[Tensor] = set()
        on_gradient_ready(weights, self._offload)

    @torch.no_grad()
    def _offload(self, parameter: Tensor) -> None:
        """Move the gradient of `parameter`, which backward has just computed, to the store. If
        earlier micro-batches of the step have a gradient there, add to it. This method is a hook
        that backward calls."""
        gradient: Any = parameter.grad
        assert gradient is not None
        if isinstance(gradient, DTensor):
            gradient = local_shard(gradient)
        if parameter not in self.gradients:
            self.gradients[parameter] = self.store.empty(gradient.shape, gradient.dtype)
        stored = self.gradients[parameter]
        if parameter not in self.in_store:
            self.store.send(gradient, stored)
            self.in_store.add(parameter)
        else:
            self.store.add(gradient, stored)
        parameter.grad = None

    def end(self) -> None:
        """Wait until all gradients are in the store, and make each stored gradient the `grad` of
        its weight. Call it after the last backward of a step."""
        self.store.settle()
        for parameter in self.in_store:
            self.weights[parameter].grad = self.gradients[parameter]  # type: ignore[index]
        self.in_store.clear()
