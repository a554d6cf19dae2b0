"""The blocked attention's operations do what they tell the compiler that they do."""

from __future__ import annotations

import pytest
import torch

from tightfit.methods import attention


@pytest.mark.parametrize("batch", [1, 2])
def test_gradients_are_laid_out_as_the_compiler_is_told(batch: int) -> None:
    """As transformers calls it: heads beside the width, seen as (batch, heads, length, width)."""
    query, key, value, gradient = (torch.randn(batch, 80, 2, 4).transpose(1, 2) for _ in range(4))
    output, kept = attention.blocked_attention(query, key, value, None, True)
    torch.library.opcheck(attention.blocked_attention, (query, key, value, None, True), test_utils="test_faketensor")
    torch.library.opcheck(
        attention.blocked_attention_backward,
        (gradient, query, key, value, output, kept, True),
        test_utils="test_faketensor",
    )
