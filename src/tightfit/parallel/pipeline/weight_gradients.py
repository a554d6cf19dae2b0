"""Splits the backward of linear layers, so that weight gradients can be computed later.

Zero-bubble pipelines use it to fill their idle time: a backward needs the gradients of its inputs
at once, but those of its weights at any time before the update.

Example: for input (4, 128, 512) and weight (2048, 512), backward receives the output's gradient
(4, 128, 2048). It computes the input's gradient at once, (4, 128, 2048) @ (2048, 512). It stores
the input and the output's gradient as 512 rows each; `run` computes (2048, 512 rows) @
(512 rows, 512) later, which is the weight's gradient.

Source  Qi et al. 2023, arXiv:2401.10241 (zero-bubble pipelines).
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


class DeferredWeightGradients(TorchFunctionMode):
    """Within this mode, a linear layer's backward computes only the gradient of its input.

    What the weight's gradient needs is stored until `run`.

    `attach` activates the mode in a model's linear layers, also where their forward runs again in
    backward. `group` names the backward that is being run; `run` computes the weight gradients that
    it left. They reach the weights as those of a normal backward do, hooks included. A weight that
    was used several times gets one gradient, the sum.

    Only calls of `linear` and of `addmm` (transformers' Conv1D) on a trainable nn.Parameter are
    split. Other operations, and all biases, have their gradients computed at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[int, list[tuple[nn.Parameter, Callable[[], Tensor]]]] = {}
        self._group: int | None = None

    def attach(self, model: nn.Module) -> None:
        """Wrap the forward of each nn.Linear and Conv1D of `model`, so that it runs in this mode."""
        for module in model.modules():
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
                module.forward = partial(self._forward_in_mode, module.forward)  # type: ignore[method-assign]

    def _forward_in_mode(self, forward: Callable[..., Any], *args: Any) -> Any:
        with self:
            return forward(*args)

    @contextmanager
    def group(self, number: int) -> Iterator[None]:
        """Within the context, weight gradients are stored under `number` (a micro-batch)."""
        self._group = number
        try:
            yield
        finally:
            self._group = None

    def run(self, number: int) -> None:
        """Compute the weight gradients stored under `number`, in the order of their deferral.

        Each of them is freed, with the tensors it needed, once it has been accumulated.
        """
        deferred = self.left.pop(number, [])[::-1]
        uses = Counter(weight for weight, _ in deferred)
        sums: dict[nn.Parameter, Tensor] = {}
        while deferred:
            weight, make = deferred.pop()
            gradient = make()
            del make  # frees the tensors that it needed
            if weight in sums:
                gradient = sums.pop(weight).add_(gradient)
            uses[weight] -= 1
            if uses[weight]:
                sums[weight] = gradient
            else:
                torch.autograd.backward([get_gradient_edge(weight)], [gradient])

    def defer(self, weight: nn.Parameter, make: Callable[[], Tensor]) -> None:
        """Store one use of `weight`. make: computes this use's term of the weight's gradient."""
        assert self._group is not None
        self.left.setdefault(self._group, []).append((weight, make))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled() and not kwargs:
            if func is LINEAR and _is_trainable(args[1]):
                bias = args[2] if len(args) > 2 else None
                return _deferred_linear(args[0], args[1], bias, self, transposed=False)
            if func is torch.addmm and _is_trainable(args[2]):  # transformers' Conv1D: (bias, input, weight)
                return _deferred_linear(args[1], args[2], args[0], self, transposed=True)
        return func(*args, **kwargs)


def _is_trainable(weight: Any) -> bool:
    return isinstance(weight, nn.Parameter) and weight.requires_grad


def _deferred_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, store: DeferredWeightGradients, transposed: bool
) -> Tensor:
    """The linear layer's output, in autocast's dtype where autocast is enabled."""
    dtype = input.dtype
    if torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
    product = _DeferredMatmul.apply(input.to(dtype), weight, dtype, store, transposed)
    return product if bias is None else product + bias.to(dtype)


class _DeferredMatmul(torch.autograd.Function):
    """input (..., in) @ weight -> (..., out), both in `dtype`; its weight gradient is deferred.

    weight is (out, in), or (in, out) where `transposed`.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, dtype: torch.dtype, store: DeferredWeightGradients, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(input)
        # the weight itself: under recomputation, saved tensors are copies that accumulate nothing
        ctx.weight = weight
        ctx.dtype, ctx.store, ctx.transposed = dtype, store, transposed
        with torch.autocast(input.device.type, enabled=False):
            return input @ (weight.to(dtype) if transposed else weight.to(dtype).t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, (gradient,) = ctx.weight, gradients
        input = ctx.saved_tensors[0].detach()  # else the closure would keep the graph alive
        transposed = ctx.transposed

        def make() -> Tensor:
            rows, columns = input.reshape(-1, input.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
            product = rows.t() @ columns if transposed else columns.t() @ rows
            return product.to(weight.dtype)

        ctx.store.defer(weight, make)
        cast = weight.to(ctx.dtype)
        return gradient @ (cast.t() if transposed else cast), None, None, None, None
