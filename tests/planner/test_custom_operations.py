"""The predicted time of operations that torch has no formula for: a user's own, and those of transformers' experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import flop_registry, register_flop_formula

import tightfit
from tightfit.planner.operation_kinds import BATCHED, PRODUCT

MACHINE = tightfit.Machine.named("l4")
WIDTH = 512
OTHER_EXPERTS = [("bf16-mixed", "none"), ("fp32", "none"), ("fp32", "block")]


@torch.library.custom_op("tests::squared_product", mutates_args=())
def squared_product(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).square()


@squared_product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = context.saved_tensors
    inner = 2 * (x @ weight) * gradient
    return inner @ weight.T, x.T @ inner


squared_product.register_autograd(_backward, setup_context=_keep)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return squared_product(x, self.weight)


def loss(output: Tensor, batch: Any) -> Tensor:
    return functional.mse_loss(output, batch[1])


def predicted() -> tightfit.Estimate:
    data = [(torch.zeros(WIDTH), torch.zeros(WIDTH)) for _ in range(64)]
    job = tightfit.Job(model=Net, data=data, loss=loss, train=tightfit.Train(batch=64, steps=1))
    return tightfit.estimate(job, {}, MACHINE)


def seconds(found: tightfit.Estimate, phase: str, kind: str) -> float:
    return sum(row[2] for row in found.time.rows if row[:2] == (phase, kind))


def test_an_operation_without_a_formula_is_named() -> None:
    found = predicted()
    (note,) = found.content()["notes"]
    assert note.startswith("the arithmetic of tests::squared_product is unknown")
    assert note in found.advice
    assert seconds(found, "forward", PRODUCT) == 0.0


def test_a_formula_of_the_user_counts() -> None:
    @register_flop_formula(torch.ops.tests.squared_product)
    def flops(x: Any, weight: Any, *, out_shape: Any = None) -> int:
        return int(2 * x[0] * x[1] * weight[1])

    try:
        found = predicted()
    finally:
        del flop_registry[torch.ops.tests.squared_product]
    assert found.content()["notes"] == []
    assert seconds(found, "forward", PRODUCT) > 0.0


@pytest.mark.parametrize(
    ("precision", "compile"),
    [("bf16-mixed", "block"), *(pytest.param(*one, marks=pytest.mark.slow) for one in OTHER_EXPERTS)],
)
def test_compiled_experts_compute_as_much_as_others(precision: str, compile: str) -> None:
    """Compiled, transformers multiplies experts whose weights are fp32 by an operation of its own."""
    model = {
        "architecture": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_local_experts": 4,
        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 256,
    }  # fmt: skip
    job = tightfit.Job(
        model=model,
        data={"synthetic": "tokens", "sequence_length": 64},
        train=tightfit.Train(batch=4, steps=1),
    )
    found = tightfit.estimate(job, {"precision": precision, "compile": compile}, MACHINE)
    flops = sum(
        operation.flops.at(4) * operation.count.at(4)
        for segment in found.ledger.training
        for operation in segment.timeline.operations
        if "grouped_mm" in operation.name
    )
    tokens, layers, chosen = 4 * 64, 2, 2
    assert flops == 3 * 2 * tokens * layers * chosen * 3 * 64 * 128
    assert (
        seconds(tightfit.estimate(job, {"precision": precision, "compile": compile}, MACHINE), "forward", BATCHED) > 0
    )
