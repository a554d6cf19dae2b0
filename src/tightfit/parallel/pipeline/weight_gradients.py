"""Split the backward of linear layers into two parts, so that weight gradients can be computed
later.

Zero-bubble pipelines use this to fill their idle time. The preceding stage waits for the gradient
of a layer's input, but the gradient of a layer's weight is needed only before the update.

Example: for input (4, 128, 512) and weight (2048, 512), backward receives the output's gradient (4,
128, 2048). It computes the input's gradient at once, (4, 128, 2048) @ (2048, 512), and stores the
input and the output's gradient. Later, `run` views them as (4 x 128, 512) and (4 x 128, 2048) and
computes the weight's gradient, (2048, 4 x 128) @ (4 x 128, 512).

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

from tightfit._torch.tensors import has_gradient_hooks

LINEAR = torch.nn.functional.linear


class DeferredWeightGradients(TorchFunctionMode):
    """A mode that defers the weight gradients of linear layers. The backward of a linear layer that
    ran in this mode computes only the gradient of its input, and stores the tensors that the
    weight's gradient needs.

    To use it, call `attach` once: the model's linear layers then run in this mode, also when they
    are recomputed in backward. Run each backward inside `group`, which sets the number of the
    micro-batch. Later, `run` computes the weight gradients of a micro-batch.

    `run` accumulates gradients as a normal backward does, hooks included. A weight that was used
    several times gets one gradient, the sum of the gradients of its uses.

    Only calls of `linear` and of `addmm` (transformers' Conv1D) on a trainable nn.Parameter without
    hooks of the user's own are deferred. The gradients of all other operations and of all biases are computed at once.

    left  number of a micro-batch -> for each use of a weight, (weight, a function that computes the
          gradient)
    """

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[int, list[tuple[nn.Parameter, Callable[[], Tensor]]]] = {}
        self._group: int | None = None
        self._hooked: set[nn.Parameter] = set()

    def attach(self, model: nn.Module) -> None:
        """Make the linear layers (nn.Linear and Conv1D) of `model` defer their weight gradients:
        from now on, their forwards run in this mode. A weight that has a gradient hook already, which
        is the user's, is not deferred: autograd would call the hook without a gradient.
        """
        self._hooked = {weight for weight in model.parameters() if has_gradient_hooks(weight)}
        for module in model.modules():
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
                module.forward = partial(self._forward_in_mode, module.forward)  # type: ignore[method-assign]

    def _forward_in_mode(self, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        with self:
            return forward(*args, **named)

    @contextmanager
    def group(self, number: int) -> Iterator[None]:
        """Inside this context, a backward stores its deferred weight gradients under micro-batch
        `number`.
        """
        self._group = number
        try:
            yield
        finally:
            self._group = None

    def run(self, number: int) -> None:
        """Compute the weight gradients that are stored under micro-batch `number`, in the order in
        which they were stored, and accumulate them in the weights' `.grad`.

        After a gradient is accumulated, the gradient and the tensors that it needed are freed.
        """
        deferred = self.left.pop(number, [])[::-1]
        uses = Counter(weight for weight, _ in deferred)
        sums: dict[nn.Parameter, Tensor] = {}
        while deferred:
            weight, make = deferred.pop()
            gradient = make()
            del make  # frees the tensors that the gradient needed
            if weight in sums:
                gradient = sums.pop(weight).add_(gradient)
            uses[weight] -= 1
            if uses[weight]:
                sums[weight] = gradient
            else:
                torch.autograd.backward([get_gradient_edge(weight)], [gradient])

    def defer(self, weight: nn.Parameter, make: Callable[[], Tensor]) -> None:
        """Store the weight gradient of one use of `weight` under the micro-batch that `group` has
        set.

        make  a function that computes the gradient of this use
        """
        assert self._group is not None
        self.left.setdefault(self._group, []).append((weight, make))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled() and not kwargs:
            if func is LINEAR and self._is_deferred(args[1]):
                bias = args[2] if len(args) > 2 else None
                return _deferred_linear(args[0], args[1], bias, self, transposed=False)
            if func is torch.addmm and self._is_deferred(args[2]):  # transformers' Conv1D: (bias, input, weight)
                return _deferred_linear(args[1], args[2], args[0], self, transposed=True)
        return func(*args, **kwargs)

    def _is_deferred(self, weight: Any) -> bool:
        return isinstance(weight, nn.Parameter) and weight.requires_grad and weight not in self._hooked


def _deferred_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, store: DeferredWeightGradients, transposed: bool
) -> Tensor:
    """Return the output of a linear layer whose weight gradient is deferred. The output has
    autocast's dtype if autocast is enabled, else the input's dtype.

    store       the object that stores the weight gradient
    transposed  whether `weight` has shape (in, out), as in Conv1D, instead of (out, in)
    """
    dtype = input.dtype
    if torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
    product = _DeferredMatmul.apply(input.to(dtype), weight, dtype, store, transposed)
    return product if bias is None else product + bias.to(dtype)


class _DeferredMatmul(torch.autograd.Function):
    """Forward: multiply the input, (..., in), by the weight; the output has shape (..., out).
    Backward: compute the gradient of the input only, and defer that of the weight.

    weight  shape (out, in), or (in, out) if `transposed`
    dtype   the dtype of the product
    store   the object that stores the weight gradient
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, dtype: torch.dtype, store: DeferredWeightGradients, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(input)
        # not with save_for_backward: under recomputation it gives a copy, whose gradient is lost
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
