"""Weights' gradients of linear layers, left for later: what zero-bubble pipelines fill their waiting with.

Source  Qi et al. 2023, arXiv:2401.10241: a backward needs the gradients of its inputs at once, those of its weights whenever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

LINEAR = torch.nn.functional.linear


class Deferred(TorchFunctionMode):
    """Within, the backward of each linear layer makes its input's gradient, and keeps what its weight's needs.

    `attach` enters it in a model's linear layers, also where their forward runs again in backward.
    `group` names the backward that is under way; `run` makes the weights' gradients that it left. They arrive as those of a
    backward do, hooks included: of a weight that was used several times once, as their sum.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[int, list[tuple[nn.Parameter, Callable[[], Tensor]]]] = {}
        self._now: int | None = None

    def attach(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
                module.forward = partial(self._within, module.forward)  # type: ignore[method-assign]

    def _within(self, forward: Callable[..., Any], *args: Any) -> Any:
        with self:
            return forward(*args)

    @contextmanager
    def group(self, number: int) -> Iterator[None]:
        self._now = number
        try:
            yield
        finally:
            self._now = None

    def run(self, number: int) -> None:
        left = self.left.pop(number, [])[::-1]
        uses = Counter(weight for weight, _ in left)
        sums: dict[nn.Parameter, Tensor] = {}
        while left:
            weight, make = left.pop()
            gradient = make()
            del make  # what it needed is free
            if weight in sums:
                gradient = sums.pop(weight).add_(gradient)
            uses[weight] -= 1
            if uses[weight]:
                sums[weight] = gradient
            else:
                torch.autograd.backward([get_gradient_edge(weight)], [gradient])

    def defer(self, weight: nn.Parameter, make: Callable[[], Tensor]) -> None:
        """make  makes this use's part of the weight's gradient."""
        assert self._now is not None
        self.left.setdefault(self._now, []).append((weight, make))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled() and not kwargs:
            if func is LINEAR and _is_leaf(args[1]):
                bias = args[2] if len(args) > 2 else None
                return _narrowed(args[0], args[1], bias, self, transposed=False)
            if func is torch.addmm and _is_leaf(args[2]):  # transformers' Conv1D: (bias, input, weight)
                return _narrowed(args[1], args[2], args[0], self, transposed=True)
        return func(*args, **kwargs)


def _is_leaf(weight: Any) -> bool:
    return isinstance(weight, nn.Parameter) and weight.requires_grad


def _narrowed(input: Tensor, weight: Tensor, bias: Tensor | None, store: Deferred, transposed: bool) -> Tensor:
    """The product, in the type of autocast where that is on."""
    dtype = input.dtype
    if torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
    product = _Product.apply(input.to(dtype), weight, dtype, store, transposed)
    return product if bias is None else product + bias.to(dtype)


class _Product(torch.autograd.Function):
    """input (..., in) @ weight: (out, in), or (in, out) where `transposed` -> (..., out), both in `dtype`."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, dtype: torch.dtype, store: Deferred, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(input)
        ctx.weight = weight  # itself: what a recomputation saves of it is a copy that accumulates nothing
        ctx.dtype, ctx.store, ctx.transposed = dtype, store, transposed
        with torch.autocast(input.device.type, enabled=False):
            return input @ (weight.to(dtype) if transposed else weight.to(dtype).t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, (gradient,) = ctx.weight, gradients
        input = ctx.saved_tensors[0].detach()  # or what waits would keep the graph that it is from
        transposed = ctx.transposed

        def make() -> Tensor:
            rows, columns = input.reshape(-1, input.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
            product = rows.t() @ columns if transposed else columns.t() @ rows
            return product.to(weight.dtype)

        ctx.store.defer(weight, make)
        narrow = weight.to(ctx.dtype)
        return gradient @ (narrow.t() if transposed else narrow), None, None, None, None
