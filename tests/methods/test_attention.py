"""The operations of blocked attention behave as they are declared to the compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, SwinConfig, SwinForImageClassification

from tightfit.methods import attention


@pytest.mark.parametrize("batch", [1, 2])
def test_gradient_strides_match_the_fake_kernel(batch: int) -> None:
    """The call is transformers': heads next to the width, viewed as (batch, heads, length, width)."""
    query, key, value, gradient = (torch.randn(batch, 80, 2, 4).transpose(1, 2) for _ in range(4))
    output, kept = attention.blocked_attention(query, key, value, None, True)
    torch.library.opcheck(attention.blocked_attention, (query, key, value, None, True), test_utils="test_faketensor")
    torch.library.opcheck(
        attention.blocked_attention_backward,
        (gradient, query, key, value, output, kept, True),
        test_utils="test_faketensor",
    )


SWIN: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 2,
    "window_size": 4,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "num_labels": 3,
    "drop_path_rate": 0.0,
}


def test_a_learned_bias_gets_the_fused_kernel_s_gradient() -> None:
    """Swin's tables of relative positions, which are added to the scores, in shifted windows beside a mask."""
    torch.manual_seed(3)
    model = SwinForImageClassification(SwinConfig(**SWIN))
    images = torch.randn(2, 3, 16, 16)
    found = []
    attention.register()
    for kernel in ("sdpa", attention.NAME):
        model.set_attn_implementation(kernel)
        model.zero_grad(set_to_none=True)
        model(images).logits.square().sum().backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert any("relative_position_bias_table" in name for name in found[0])
    for name, gradient in found[0].items():
        assert torch.allclose(found[1][name], gradient, rtol=1e-4, atol=1e-6), name


def test_a_query_that_sees_no_key_is_as_in_the_fused_kernel() -> None:
    """Causal samples padded on the left: the first queries see no key, and the label of the first
    token is predicted from such a query."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    ids, mask = torch.randint(32, (3, 12)), torch.ones(3, 12, dtype=torch.long)
    for row in range(3):
        mask[row, : 2 * row] = 0
    found: list[list[torch.Tensor]] = []
    attention.register()
    for kernel in ("sdpa", attention.NAME):
        model.set_attn_implementation(kernel)
        model.zero_grad(set_to_none=True)
        logits = model(input_ids=ids, attention_mask=mask).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        found.append([logits.detach(), *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_factor_of_dropout_is_rounded_as_by_torch(dtype: torch.dtype) -> None:
    for dropout in (number / 997 for number in range(0, 997, 7)):
        kept = 1 - attention.rounded(dropout)
        expected = torch.tensor(1 / kept, dtype=torch.float64).to(dtype).item()
        assert attention.kept_factor(dropout, dtype) == expected
    assert attention.kept_factor(1.0, dtype) == 0.0
