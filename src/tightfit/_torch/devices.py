"""CUDA's allocator and spin kernel, and torch's choice of an attention kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def set_allocator_settings(settings: str) -> None:
    """Change the settings of CUDA's caching allocator, as PYTORCH_ALLOC_CONF sets them."""
    torch.cuda.memory._set_allocator_settings(settings)


def spin(cycles: int) -> None:
    """Keep the current GPU stream busy for a number of clock cycles."""
    torch.cuda._sleep(cycles)


def attention_backend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> int:
    """The number of the SDPBackend that scaled_dot_product_attention uses for these arguments."""
    return torch._fused_sdp_choice(query, key, value, mask, **options)


__all__ = ["attention_backend", "set_allocator_settings", "spin"]
