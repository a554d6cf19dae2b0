"""Which errors mean that memory ran out."""

from __future__ import annotations

import errno

import pytest

from tightfit.report.out_of_memory import is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("could not create a primitive"),
    ],
    ids=["python", "system", "torch", "oneDNN"],
)
def test_out_of_memory_errors_are_recognised(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("could not create a primitive descriptor for the convolution forward propagation primitive"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ],
    ids=["disk", "oneDNN has no kernel", "shapes"],
)
def test_other_errors_are_not_out_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)
