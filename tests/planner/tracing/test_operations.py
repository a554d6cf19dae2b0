"""Operations on numbers in two memory formats have a kind of their own, because they are slower."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tightfit.cost.recorded_step import Operation
from tightfit.machine import Figure, Machine
from tightfit.planner.operation_kinds import kind_of
from tightfit.planner.time_model import TimeModel
from tightfit.planner.tracing.recorder import record_step

IMAGES, HEADS = (2, 32, 8, 8), (2, 16, 4, 32)
LAST = torch.channels_last


def kinds(compute: Callable[..., Tensor], *tensors: Tensor) -> list[str]:
    """The kinds of the operations in the forward of a model, without those that take no time."""
    return [kind_of(one) for one in forward(compute, *tensors) if kind_of(one) != "nothing"]


def forward(compute: Callable[..., Tensor], *tensors: Tensor) -> list[Operation]:
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(one) for one in tensors]
        segments = record_step(nn.Identity(), lambda batch: compute(*batch), fakes, [], training=False)
    return [one for segment in segments for one in segment.timeline.operations]


@pytest.mark.parametrize(
    ("compute", "tensors", "expected"),
    [
        (torch.add, [torch.ones(IMAGES)] * 2, "elementwise"),
        (torch.add, [torch.ones(IMAGES).to(memory_format=LAST)] * 2, "elementwise"),
        (torch.add, [torch.ones(IMAGES), torch.ones(IMAGES).to(memory_format=LAST)], "elementwise between formats"),
        (torch.mul, [torch.ones(IMAGES).to(memory_format=LAST), torch.ones(1, 32, 1, 1)], "elementwise"),
        (torch.mul, [torch.ones(IMAGES).to(memory_format=LAST), torch.ones(8)], "elementwise"),
        # 12 bytes between neighbours are in the same cache line
        (torch.add, [torch.ones(2, 3, 8, 8), torch.ones(2, 3, 8, 8).to(memory_format=LAST)], "elementwise"),
        (lambda x: x.contiguous(memory_format=LAST), [torch.ones(IMAGES)], "copy between formats"),
        (lambda x: x.permute(0, 2, 3, 1).contiguous(), [torch.ones(IMAGES)], "copy between formats"),
        (lambda x: x.to(torch.bfloat16, memory_format=LAST), [torch.ones(IMAGES)], "copy between formats"),
        (lambda x: x.transpose(1, 2).contiguous(), [torch.ones(HEADS)], "copy"),
        (lambda x: x.transpose(2, 3) * 2, [torch.ones(HEADS)], "elementwise"),
    ],
)
def test_only_other_orders_in_memory_are_between_formats(
    compute: Callable[..., Tensor], tensors: list[Tensor], expected: str
) -> None:
    assert kinds(compute, *tensors) == [expected]


@pytest.mark.parametrize("kind", ["copy", "elementwise"])
def test_operations_between_formats_have_their_own_rate(kind: str) -> None:
    """A machine without this rate has that of the same operation in one format."""
    compute = torch.add if kind == "elementwise" else lambda one, other: other.contiguous()
    (operation,) = forward(compute, torch.ones(IMAGES), torch.ones(IMAGES).to(memory_format=LAST))
    rates = {f"{kind}/float32": {1: 4e9}}
    bytes_accessed = operation.bytes_accessed.at(1)
    for known, rate in ((rates, 4e9), ({**rates, f"{kind} between formats/float32": {1: 1e9}}, 1e9)):
        memory = Figure(value=2**34, source="system")
        machine = Machine(
            name="here",
            device="cpu",
            memory_bytes=memory,
            host_memory_bytes=memory,
            memory_bytes_per_s=Figure(value=1e15, source="measured"),
            matrix_flops_per_s={},
            rates=known,
        )
        assert TimeModel(machine).operation_s(operation, 1) == pytest.approx(bytes_accessed / rate)
