"""Which plans change the numerics, and which of them a job's `allow` admits."""

from __future__ import annotations

from typing import Any, get_args

import pytest

import tightfit
from tests import tiny
from tightfit.errors import InputError
from tightfit.job import Permission
from tightfit.plan import PRECISIONS
from tightfit.rules import check, needed_permissions


@pytest.mark.parametrize(
    ("plan", "needed"),
    [
        ({}, []),
        ({"micro_batch": 1, "recompute": "full", "chunked_loss": 8, "compile": "model"}, []),
        ({"update_in_backward": True, "fused_optimizer": True, "allocator": "tuned"}, []),
        ({"precision": "tf32"}, ["tf32"]),
        ({"precision": "bf16-mixed"}, ["bf16"]),
        ({"precision": "bf16-true", "rounding": "kahan"}, ["bf16"]),
        ({"precision": "bf16-true", "rounding": "nearest"}, ["bf16"]),
        ({"precision": "bf16-true", "rounding": "stochastic"}, ["bf16", "stochastic-rounding"]),
        ({"precision": "fp16-true"}, ["fp16"]),
        ({"states": "4-bit", "precision": "fp16-mixed"}, ["4-bit-states", "fp16"]),
    ],
    ids=str,
)
def test_needed_permissions_of_a_plan_are_listed(plan: dict[str, Any], needed: list[str]) -> None:
    assert needed_permissions(tightfit.Plan(**plan)) == set(needed)


def test_every_precision_but_fp32_needs_the_job_s_permission() -> None:
    for precision in PRECISIONS:
        needed = needed_permissions(tightfit.Plan(precision=precision))
        assert needed <= set(get_args(Permission))
        assert bool(needed) == (precision != "fp32")


@pytest.mark.parametrize("allow", [None, ["bf16"], ["fp16"], ["tf32"]])
def test_a_16_bit_type_allows_tf32(allow: list[str] | None) -> None:
    check(tightfit.Plan(precision="tf32"), tiny.job().replace(allow=allow), "cuda")


@pytest.mark.parametrize("allow", [[], ["8-bit-states"], ["another-optimizer"]])
def test_other_permissions_do_not_allow_tf32(allow: list[str]) -> None:
    with pytest.raises(InputError, match="tf32"):
        check(tightfit.Plan(precision="tf32"), tiny.job().replace(allow=allow), "cuda")


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_tf32_allows_no_16_bit_type(precision: str) -> None:
    with pytest.raises(InputError, match="does not allow"):
        check(tightfit.Plan(precision=precision), tiny.job().replace(allow=["tf32"]), "cuda")


@pytest.mark.parametrize(
    ("allow", "advice"), [(None, r"allow: \[8-bit-states, bf16\]"), ([], r"allow: \[8-bit-states\]")]
)
def test_the_remedy_only_adds_to_the_job_s_permissions(allow: list[str] | None, advice: str) -> None:
    with pytest.raises(InputError, match=advice):
        check(tightfit.Plan(states="8-bit"), tiny.job().replace(allow=allow), "cpu")


def test_fused_sgd_is_refused_where_it_does_not_update() -> None:
    """On a processor torch's fused SGD does not change bf16 weights: the training would silently
    stand still."""
    job = tightfit.Job(
        model=lambda: None, data=[0], train=tightfit.Train(optimizer="sgd", batch=1, steps=1), allow=["bf16"]
    )
    plan = tightfit.Plan(precision="bf16-true", fused_optimizer=True)
    with pytest.raises(tightfit.InputError, match="fused SGD"):
        check(plan, job, "cpu")
    check(plan, job, "cuda")
    check(plan.replace(rounding="kahan"), job, "cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("compressed", ["bf16", "powersgd"])
@pytest.mark.parametrize("offload", [("gradients",), ("gradients", "parameters")])
def test_compressed_gradients_are_on_the_device_that_sends_them(device: str, compressed: Any, offload: Any) -> None:
    """NCCL accepts no host tensors, and replicas send all of their gradients, so they offload none."""
    job = tiny.job().replace(allow=["compressed-gradients", "offload"])
    plan = tightfit.Plan(dp_replicate=2, compressed_gradients=compressed, offload=offload, offload_to="disk")
    with pytest.raises(InputError, match="use zero: 3 with both parameters and gradients in offload, or neither"):
        check(plan, job, device)
    check(plan.replace(offload=("states",)), job, device)


def test_a_wrong_value_is_named_once() -> None:
    with pytest.raises(InputError) as refused:
        tightfit.Plan.parse({"recompute": "ful"}, "plan")
    assert refused.value.asked == "plan: recompute=ful"
