"""Settings of CUDA's allocator, a kernel that keeps a GPU busy, and torch's choice of an attention
kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def set_allocator_settings(settings: str) -> None:
    """Change settings of CUDA's caching allocator in this process.

    settings  such as "expandable_segments:True", in the format of the environment variable
              PYTORCH_ALLOC_CONF
    """
    torch._C._accelerator_setAllocatorSettings(settings)


def spin(cycles: int) -> None:
    """Launch a kernel that keeps the current GPU stream busy for `cycles` clock cycles."""
    torch.cuda._sleep(cycles)


def attention_backend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> int:
    """Return which backend scaled_dot_product_attention uses for these arguments, as the number of
    the backend in `torch.nn.attention.SDPBackend`.

    options  further keyword arguments of scaled_dot_product_attention, such as is_causal
    """
    return torch._fused_sdp_choice(query, key, value, mask, **options)


__all__ = ["attention_backend", "set_allocator_settings", "spin"]
