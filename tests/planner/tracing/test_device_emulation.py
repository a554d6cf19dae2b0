"""On fake tensors of a processor, torch's choices by device are those of the target."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import tightfit
from tests.planner import cases
from tightfit.machine import Machine
from tightfit.planner.dry_run import dry_run
from tightfit.planner.estimate import estimated_ledger
from tightfit.planner.tracing.device_emulation import emulate_device
from tightfit.planner.tracing.profiler import Profiler


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(str(func).rsplit(".", 1)[0])
        return func(*args, **(kwargs or {}))


def normalised(device: str) -> torch.dtype:
    with emulate_device(device), FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        narrow = functional.linear(torch.empty(4, 8), torch.empty(8, 8))
        assert narrow.dtype is torch.bfloat16
        return functional.layer_norm(narrow, (8,)).dtype


def test_the_compiler_returns_to_the_cpu_after_emulation() -> None:
    project = torch.nn.Linear(8, 8)

    def attend(input: torch.Tensor) -> torch.Tensor:
        query = project(input).view(1, 2, 4, 8)
        return functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum()

    for device in ("cuda", "cpu"):
        torch.compiler.reset()
        with emulate_device(device):
            torch.compile(attend, backend="aot_eager")(torch.randn(8, 8)).backward()
    torch.compiler.reset()


def test_autocast_keeps_the_target_s_fp32_operations() -> None:
    assert normalised("cpu") is torch.bfloat16
    assert normalised("cuda") is torch.float32
    assert normalised("cpu") is torch.bfloat16  # and nothing of it is left


def attention(device: str) -> list[str]:
    with emulate_device(device), FakeTensorMode(), Names() as names:
        query = torch.empty(1, 2, 16, 8, requires_grad=True)
        functional.scaled_dot_product_attention(query, query, query, dropout_p=0.1).sum().backward()
    return names.seen


def test_attention_with_dropout_is_fused_on_a_cuda_device() -> None:
    assert any("flash_attention" in name for name in attention("cuda"))
    assert not any("flash_attention" in name for name in attention("cpu"))


@pytest.mark.slow
def test_estimate_for_a_cuda_device_agrees_with_its_dry_run() -> None:
    machine = Machine.named("a100-40gb")
    for name in ("gpt2", "bert", "vit"):
        for fields in (
            {},
            {"precision": "bf16-mixed", "micro_batch": 2},
            {"precision": "bf16-mixed", "fused_optimizer": True},
        ):
            plan = tightfit.Plan(**fields)
            estimated = estimated_ledger(Profiler(cases.job(name), "cuda"), plan, machine).peak().total
            seen = dry_run(cases.job(name), plan, "cuda").total
            assert abs(estimated / seen - 1) < 0.02, (name, fields)


def test_foreach_kernels_hold_a_copy_of_each_parameter() -> None:
    machine, job = Machine.named("a100-40gb"), cases.job("llama")
    together, fused = (
        estimated_ledger(Profiler(job, "cuda"), tightfit.Plan(fused_optimizer=kind), machine) for kind in (False, True)
    )
    assert together.peaks()["optimizer"] - fused.peaks()["optimizer"] >= 0.95 * together.gradient_bytes()
