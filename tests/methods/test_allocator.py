"""The settings that a plan gives the allocator; the user's environment takes precedence."""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch

import tightfit
from tests import tiny
from tightfit.methods import allocator


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What mallopt is called with, in place of calling it: it cannot be undone."""
    calls: list[tuple[int, int]] = []

    class Library:
        def __init__(self, name: str) -> None:
            assert name == "libc.so.6"

        def mallopt(self, name: int, value: int) -> int:
            calls.append((name, value))
            return 1

    monkeypatch.setattr(ctypes, "CDLL", Library)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    return calls


def build(plan: tightfit.Plan) -> None:
    tightfit.build(tiny.job(), plan, tightfit.Machine.detect().replace(device="cpu"))


def test_default_sets_nothing(asked: list[tuple[int, int]]) -> None:
    build(tightfit.Plan())
    assert asked == []


def test_tuned_keeps_memory_and_maps_no_single_blocks(asked: list[tuple[int, int]]) -> None:
    build(tightfit.Plan(allocator="tuned"))
    assert dict(asked) == {
        allocator.M_MMAP_MAX: 0,
        allocator.M_TRIM_THRESHOLD: 2**31 - 1,
        allocator.M_TOP_PAD: 2**26,
    }


def test_the_user_s_environment_takes_precedence(asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.top_pad=0")
    build(tightfit.Plan(allocator="tuned"))
    assert asked == []


def test_nothing_is_set_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not allocator.keep_freed_memory()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not allocator.keep_freed_memory()


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_glibc_knows_the_tunables() -> None:
    """The test runs in a process of its own: elsewhere a new tensor reuses freed memory and causes
    no page faults."""
    script = (
        "import resource, torch\n"
        "from tightfit.methods.allocator import keep_freed_memory\n"
        "torch.empty(0)\n"
        "assert {tuned} and keep_freed_memory() or not {tuned}\n"
        "make = lambda: torch.empty(2**26, dtype=torch.uint8).fill_(1)\n"
        "for _ in range(3): make()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(4): make()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    # a system that is short of memory takes pages back, so one of several processes is enough
    assert any(_run(script.format(tuned=True)) < 100 for _ in range(10))
    default = min(_run(script.format(tuned=False)) for _ in range(2))
    assert default >= 4 * 2**26 / 2**21  # at least a fault for each huge page of each tensor


def _run(script: str) -> int:
    import os
    import subprocess

    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.gpu
def test_cuda_uses_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    tightfit.build(tiny.job(), tightfit.Plan(allocator="tuned"))
    assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
