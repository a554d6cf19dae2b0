"""Operations that are timed by name: the bytes of each case are those that a trace counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tightfit.calibration import operation_rates, single_operations
from tightfit.calibration.single_operations import OPERATIONS, single_cases
from tightfit.cost.recorded_step import BatchLinear, Operation
from tightfit.machine import Figure, Machine
from tightfit.planner.operation_kinds import KIND, kind_of
from tightfit.planner.time_model import TimeModel
from tightfit.planner.tracing.recorder import record_step

CPU = torch.device("cpu")
OTHERS = [
    kind
    for kind in operation_rates._KINDS
    if any(word in kind for word in ("average pooling", "interpolation", "index", "element", "between"))
    and kind not in ("indexed sum", "elementwise")
]


def recorded(work: object) -> list[Operation]:
    def loss(batch: object) -> torch.Tensor:
        work()  # type: ignore[operator]
        return torch.zeros(())

    segments = record_step(nn.Identity(), loss, [], [], training=False)
    return [one for segment in segments for one in segment.timeline.operations]


def test_each_operation_is_called_and_its_bytes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_operations, "SIZES", (2**12,))
    for name in OPERATIONS:
        (case,) = single_cases(name, torch.float32, CPU)
        _, expected, work = case
        case[2]()
        assert expected in [one.bytes_accessed.at(1) for one in recorded(work) if one.name == f"aten.{name}"], name


def test_an_operation_without_bf16_or_on_a_gpu_has_no_case() -> None:
    assert list(single_cases("avg_pool3d", torch.bfloat16, CPU)) == []
    assert list(single_cases("mish", torch.float32, torch.device("cuda"))) == []


@pytest.mark.parametrize("kind", OTHERS)
def test_the_bytes_of_a_kind_are_those_of_a_trace(kind: str) -> None:
    with FakeTensorMode():
        _, expected, work = next(iter(operation_rates._KINDS[kind](torch.float32, CPU)))
        found = [one.bytes_accessed.at(1) for one in recorded(work) if kind_of(one) == kind]
    assert found == [pytest.approx(expected)]


def test_a_rate_by_name_counts_before_that_of_the_kind() -> None:
    memory = Figure(value=2**34, source="system")
    machine = Machine(
        name="here",
        device="cpu",
        memory_bytes=memory,
        host_memory_bytes=memory,
        memory_bytes_per_s=Figure(value=1e15, source="measured"),
        matrix_flops_per_s={},
        rates={"elementwise/float32": {1: 8e9}, "elementwise/bfloat16": {1: 8e9}, "aten.mish/float32": {1: 2e9}},
    )
    for name, dtype, rate in (("mish", "float32", 2e9), ("mish", "bfloat16", 8e9), ("relu", "float32", 8e9)):
        operation = Operation(f"aten.{name}", dtype, BatchLinear(), BatchLinear(4e6))
        assert kind_of(operation) == "elementwise"
        assert TimeModel(machine).operation_s(operation, 1) == pytest.approx(4e6 / rate)
    assert "aten.mish" not in KIND


def test_a_quick_case_is_one_small_one() -> None:
    for name in ("mish", "where", "avg_pool3d_backward"):
        ((size, expected, work),) = single_operations.quick_cases(f"aten.{name}", torch.float32, CPU)
        assert size == single_operations.QUICK_SIZE
        assert expected in [one.bytes_accessed.at(1) for one in recorded(work) if one.name == f"aten.{name}"]
    assert list(single_operations.quick_cases("aten.avg_pool3d", torch.bfloat16, CPU)) == []
