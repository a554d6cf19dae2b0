"""Operations on fake tensors that torch does not support, and the errors of those that fail."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import grouped_mm

import tightfit
from tightfit.errors import Untraceable
from tightfit.machine import Machine
from tightfit.models.expert_routing import RoutedExperts
from tightfit.models.fake_kernels import grouped_mm_flops, grouped_mm_sizes
from tightfit.planner.estimator import Estimator
from tightfit.planner.tracing.fake_tensors import FakeValues

ROWS, DEPTH, COLUMNS, GROUPS = 32, 16, 32, 2  # bf16 takes multiples of 8 in each group


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What torch logs of operations on tensors without values."""
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler, logger = Handler(), logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


def product(left: Tensor, right: Tensor, offsets: Tensor | None) -> list[torch.Size]:
    """Shapes of a product of groups and of its gradients."""
    left, right = left.detach().requires_grad_(), right.detach().requires_grad_()
    result = grouped_mm(left, right, offs=offsets)
    result.square().sum().backward()
    return [one.shape for one in (result, left.grad, right.grad) if one is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((ROWS, DEPTH), (GROUPS, DEPTH, COLUMNS)),
        ((ROWS, DEPTH), (DEPTH, COLUMNS)),
        ((GROUPS, ROWS, DEPTH), (DEPTH, COLUMNS)),
        ((GROUPS, ROWS, DEPTH), (GROUPS, DEPTH, COLUMNS)),
    ],
    ids=str,
)
def test_grouped_products_have_their_real_shapes(left: Any, right: Any, dtype: torch.dtype) -> None:
    cut = {2: DEPTH if len(right) == 2 else ROWS, 3: COLUMNS}[len(left)]
    offsets = None if len(left) == len(right) == 3 else torch.tensor([cut // 2, cut], dtype=torch.int32)
    real = product(torch.randn(left, dtype=dtype), torch.randn(right, dtype=dtype), offsets)
    with FakeTensorMode(allow_non_fake_inputs=True), RoutedExperts():
        assert product(torch.randn(left, dtype=dtype), torch.randn(right, dtype=dtype), offsets) == real


def test_grouped_products_count_their_flops() -> None:
    """Each row goes through one expert."""
    assert grouped_mm_flops((ROWS, DEPTH), (GROUPS, DEPTH, COLUMNS), (GROUPS,)) == 2 * ROWS * DEPTH * COLUMNS
    assert grouped_mm_flops((DEPTH, ROWS), (ROWS, COLUMNS), (GROUPS,)) == 2 * ROWS * DEPTH * COLUMNS
    assert grouped_mm_sizes((ROWS, DEPTH), (GROUPS, DEPTH, COLUMNS), GROUPS) == (GROUPS, ROWS / GROUPS, COLUMNS, DEPTH)


MINIMAX: dict[str, Any] = {
    "architecture": "minimax",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "block_size": 4,
}


def test_experts_in_fp32_are_predicted(logged: list[str]) -> None:
    rows = [torch.randint(0, 64, (8,)) for _ in range(8)]
    data = [{"input_ids": row, "labels": row.clone()} for row in rows]
    job = tightfit.Job(model=MINIMAX, data=data, train=tightfit.Train(batch=4, steps=1))
    ledger = Estimator(job, Machine.named("a100-80gb")).estimate(tightfit.Plan()).ledger
    forward = [
        operation.flops.at(4) * count
        for phase, _, operation, count in ledger.operations()
        if phase == "forward" and operation.name == "aten._grouped_mm"
    ]
    assert sum(forward) == 2 * (4 * 8) * 2 * (2 * 16 * 24 + 24 * 16) * 2  # layers, tokens, experts of each
    assert not logged


class Fails(nn.Module):
    """Calls an operation that torch has in types of 8 bits only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        one = torch.ones((), dtype=torch.float32)
        return torch._scaled_mm(x, self.weight, one, one)


def test_failures_on_fake_tensors_raise_and_log_nothing(logged: list[str]) -> None:
    data: list[Any] = [(torch.ones(16), 0) for _ in range(8)]
    job = tightfit.Job(model=Fails, data=data, train=tightfit.Train(batch=4, steps=1))
    with pytest.raises(Untraceable, match="fails on fake tensors"):
        Estimator(job, Machine.named("a100-80gb")).estimate(tightfit.Plan())
    assert not logged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [[True, True, True], [True, False, False]])
def test_group_norm_gradients_have_their_real_dtypes(dtype: torch.dtype, wanted: list[bool]) -> None:
    """Under autocast on a CPU, the input is bf16 and the weights are fp32."""

    def gradients() -> list[torch.dtype | None]:
        given, weight = torch.ones((2, 4, 3), dtype=dtype), torch.ones(4)
        _, mean, rstd = torch.ops.aten.native_group_norm(given, weight, weight, 2, 4, 3, 2, 1e-5)
        backward = torch.ops.aten.native_group_norm_backward
        found = backward(given, given, mean.float(), rstd.float(), weight, 2, 4, 3, 2, wanted)
        return [one if one is None else one.dtype for one in found]

    with FakeTensorMode(), FakeValues():
        fake = gradients()
    assert [one for one, is_wanted in zip(fake, wanted, strict=True) if is_wanted] == [
        one for one, is_wanted in zip(gradients(), wanted, strict=True) if is_wanted
    ]
    assert fake[0] is dtype
