"""Which attention kernel a run uses: torch chooses one for each call, by shapes, dtypes and
device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tightfit._torch.devices import attention_backend
from tightfit.runtime.run import Run

# by the number of torch.nn.attention.SDPBackend; the CPU has a fused kernel of its own
_KERNELS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}


class AttentionCalls(TorchFunctionMode):
    """While this mode is active, it stores the arguments of the first call of
    `scaled_dot_product_attention`.

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
        """Return the name of the kernel that torch chooses for the first call, in training, on the
        run's device, such as "flash" or "cpu-flash".

        If the model did not call torch's attention, return the name of its own implementation, such
        as "eager". None if the kernel is not known.
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
            None if one is None else _uninitialized_like(one, dtype, run.device) for one in tensors
        )
        with torch.enable_grad():
            for one in (query, key, value):
                assert one is not None
                one.requires_grad_()
            return _KERNELS.get(attention_backend(query, key, value, mask, **options))  # type: ignore[arg-type]


def _uninitialized_like(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor with the shape and memory layout of `tensor`, but a batch size of
    1."""
    narrow = dtype if tensor.is_floating_point() else tensor.dtype
    shape = (1, *tensor.shape[1:]) if tensor.dim() == 4 else tuple(tensor.shape)
    order = sorted(range(tensor.dim()), key=lambda dim: tensor.stride(dim), reverse=True)
    return torch.empty_permuted(shape, order, dtype=narrow, device=device)


__all__ = ["AttentionCalls"]
