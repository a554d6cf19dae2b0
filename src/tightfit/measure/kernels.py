"""Finds out which attention kernel a run uses. For each call of scaled_dot_product_attention, torch
chooses a kernel by the shapes, dtypes and device of its arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tightfit._torch.devices import attention_backend
from tightfit.runtime.run import Run

# number of torch.nn.attention.SDPBackend -> name of the kernel
_KERNELS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}


class AttentionCalls(TorchFunctionMode):
    """A torch function mode: while it is active, it stores the arguments of the first call of
    `scaled_dot_product_attention`. Afterwards, `kernel` says which kernel torch chooses for this
    call.

    The tensors may be fake, because only their shapes, strides and dtypes are used.
    """

    def __init__(self) -> None:
        super().__init__()
        self._first: tuple[list[Tensor | None], dict[str, Any], torch.dtype] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is functional.scaled_dot_product_attention and self._first is None:
            self._remember(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _remember(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, **others: Any,
    ) -> None:  # fmt: skip
        kind = query.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
        options = {"dropout_p": dropout_p, "is_causal": is_causal, **others}
        self._first = [query, key, value, attn_mask], options, dtype

    def kernel(self, run: Run) -> str | None:
        """Return the name of the attention kernel that torch chooses when the stored call runs in
        training on the run's device, such as "flash" or "cpu-flash".

        If the plan uses tightfit's own attention, return "blocked". If the model did not call
        scaled_dot_product_attention, return the name of its own implementation, such as "eager".
        Return None if the kernel is not known.
        """
        if run.plan.attention == "blocked":
            return "blocked"
        if self._first is None:
            found = getattr(getattr(run.model, "config", None), "_attn_implementation", None)
            return None if found == "sdpa" else found
        try:
            chosen = self._chosen(run)
        except RuntimeError:  # out of memory, or unsupported arguments: the training must not fail
            return None
        return f"{run.device.type}-flash" if chosen == "flash" and run.device.type != "cuda" else chosen

    def _chosen(self, run: Run) -> str | None:
        assert self._first is not None
        tensors, options, dtype = self._first
        query, key, value, mask = (
            None if tensor is None else _uninitialized_like(tensor, dtype, run.device) for tensor in tensors
        )
        with torch.enable_grad():
            for one in (query, key, value):
                assert one is not None
                one.requires_grad_()
            return _KERNELS.get(attention_backend(query, key, value, mask, **options))  # type: ignore[arg-type]


def _uninitialized_like(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor with the shape and the order of dimensions in memory of
    `tensor`. If it has four dimensions, its batch size is 1.

    dtype  dtype of the result if `tensor` is floating-point; otherwise the result has the dtype of
           `tensor`
    """
    narrow = dtype if tensor.is_floating_point() else tensor.dtype
    shape = (1, *tensor.shape[1:]) if tensor.dim() == 4 else tuple(tensor.shape)
    order = sorted(range(tensor.dim()), key=lambda dim: tensor.stride(dim), reverse=True)
    return torch.empty_permuted(shape, order, dtype=narrow, device=device)


__all__ = ["AttentionCalls"]
