"""A copy of a model whose forward a method has replaced computes with its own weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tightfit
from tests.contract.cases import make_case
from tightfit.errors import InputError
from tightfit.models.replaced_forward import refuse_copies

PLANS = [
    {"recompute": "full"}, {"recompute": "selective"}, {"recompute": "every-2"}, {"recompute": "sqrt"},
    {"recompute": "attention"}, {"chunked_loss": 8}, {"recompute": "full", "chunked_loss": 8},
]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_copied_model_computes_with_its_own_weights(plan: dict[str, object]) -> None:
    job = make_case("llama").job
    run, plain = tightfit.build(job, tightfit.Plan(**plan)), tightfit.build(job)
    copied, expected = copy.deepcopy(run.model), copy.deepcopy(plain.model)
    with torch.no_grad():
        for model in (copied, expected):
            for weight in model.parameters():
                weight += 0.1
    tokens = torch.arange(12).unsqueeze(0)
    logits = copied(input_ids=tokens).logits
    torch.testing.assert_close(logits, expected(input_ids=tokens).logits, rtol=1e-6, atol=1e-6)
    logits.sum().backward()
    assert all(weight.grad is not None for weight in copied.parameters())
    assert all(weight.grad is None for weight in run.model.parameters())


def test_a_layer_divided_over_devices_is_not_copied() -> None:
    layer = nn.Linear(2, 2)
    refuse_copies(layer)
    with pytest.raises(InputError, match="divides the model's layers"):
        copy.deepcopy(nn.Sequential(layer))
