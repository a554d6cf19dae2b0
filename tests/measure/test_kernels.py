"""The record says which attention kernel a run uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import tightfit
from tests import tiny
from tests.measure.test_observer import machine, observed
from tightfit.measure.kernels import AttentionCalls
from tightfit.report.explain import slow_attention


@pytest.mark.parametrize(
    ("plan", "dropout", "own", "kernel"),
    [
        ({}, 0.0, None, "cpu-flash"),
        ({"precision": "bf16-mixed"}, 0.0, None, "cpu-flash"),
        ({}, 0.1, None, "math"),
        ({"attention": "blocked"}, 0.0, None, "blocked"),
        ({}, 0.0, "eager", "eager"),
    ],
    ids=str,
)
def test_the_attention_kernel_of_a_run_is_recorded(
    plan: dict[str, Any], dropout: float, own: str | None, kernel: str
) -> None:
    content = tiny.content(steps=3)
    job = tightfit.Job.parse({**content, "model": {**tiny.MODEL, "attention_dropout": dropout}})
    run = tightfit.build(job, tightfit.Plan(**plan))
    if own is not None:
        run.model.set_attn_implementation(own)  # type: ignore[operator]
    assert observed(run).record(machine()).attention == kernel


def test_a_model_without_attention_has_no_kernel() -> None:
    with AttentionCalls() as calls:
        torch.ones(2).sum()
    run = tightfit.build(tiny.job(steps=3))
    assert calls.kernel(run) is None


def test_torch_s_choice_for_the_first_call_is_reported() -> None:
    """The inputs have autocast's type and need gradients: without gradients torch may choose
    another kernel."""
    run = tightfit.build(tiny.job(steps=3))
    query = torch.randn(2, 8, 4, 16).transpose(1, 2)
    with AttentionCalls() as calls, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    assert calls.kernel(run) == "cpu-flash"
    tensors, options, dtype = calls._first
    assert (dtype, options["is_causal"], tensors[0].shape) == (torch.bfloat16, True, (2, 4, 8, 16))


def test_the_math_kernel_on_cuda_gives_a_warning() -> None:
    run = tightfit.build(tiny.job(steps=3))
    record = observed(run).record(machine())
    assert slow_attention(record) == ""
    on_cpu = record.replace(attention="math")
    assert slow_attention(on_cpu) == ""
    assert "no fused kernel" in slow_attention(on_cpu.replace(machine=record.machine.replace(device="cuda")))
