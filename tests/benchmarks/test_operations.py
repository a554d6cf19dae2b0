"""The benchmark of single operations predicts each of them from its own recorded step."""

from __future__ import annotations

import pytest
import torch

from benchmarks import operations
from tightfit.machine import Machine


def test_each_operation_is_predicted() -> None:
    machine = Machine.named("l4")
    for name, (shape, call) in operations.CASES.items():
        assert operations.predicted_s(machine, call, shape, torch.float32) > 0, name


def test_the_operations_of_a_case_run() -> None:
    shape, call = operations.CASES["avg_pool, channels_last"]
    assert operations.measured_s(call, (1, 2, 4, 4), torch.float32) > 0
    assert shape == operations.IMAGES
    with pytest.raises(NotImplementedError):
        operations.measured_s(operations.CASES["avg_pool3d"][1], (1, 1, 2, 2, 2), torch.bfloat16)
