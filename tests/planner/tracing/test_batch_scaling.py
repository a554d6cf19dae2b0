"""The estimate of batched updates, as CUDA devices compute them, agrees with a dry run."""

from __future__ import annotations

from typing import Any

import pytest

import tightfit
from tests.planner import cases
from tests.sweeps import part
from tightfit.machine import Machine
from tightfit.optim import in_batches
from tightfit.planner.dry_run import dry_run
from tightfit.planner.estimator import Estimator

GPU = Machine.named("a100-80gb")
PLANS: list[dict[str, Any]] = [
    {"precision": "bf16-true", "rounding": "kahan"},
    {"precision": "bf16-true", "rounding": "stochastic", "states": "bf16"},
    {"precision": "bf16-true", "rounding": "kahan", "states": "8-bit", "fused_optimizer": True},
    {"precision": "bf16-mixed", "states": "8-bit"},
    {"precision": "fp16-true"},
    {"precision": "bf16-true", "states": "4-bit"},
]
SEVERAL: list[dict[str, Any]] = [
    {"states": "bf16", "zero": 1, "dp_shard": 2},
    {"precision": "bf16-true", "rounding": "kahan", "zero": 2, "dp_shard": 2},
    {"precision": "bf16-true", "rounding": "kahan", "zero": 3, "dp_shard": 2},
    {"offload": ["states"]},
    {"offload": ["states"], "precision": "bf16-true", "rounding": "kahan"},
    {"precision": "fp16-mixed"},
]


ELEMENTS = (2**24, 2**14, 1)  # all parameters in one batch, some, each alone
UPDATES = [
    (fields, optimizer, elements)
    for optimizer in ("adamw", "sgd", "lion")
    for fields in PLANS
    for elements in ELEMENTS
    if optimizer == "adamw" or ("fused_optimizer" not in fields and elements == 2**14)
]


@pytest.mark.sweep(12)
@pytest.mark.parametrize("update", part(UPDATES, 6))
def test_bytes_of_a_step_match_the_dry_run(
    update: tuple[dict[str, Any], str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, optimizer, elements = update
    monkeypatch.setattr(in_batches, "ELEMENTS", elements)
    job = cases.job("llama", optimizer=optimizer, batch=1)
    plan = tightfit.Plan(**fields)
    foreseen = Estimator(job, GPU).estimate(plan).ledger
    found = dry_run(job, plan, "cuda")
    rows = max(
        (rows for phase, _, rows in foreseen.instants() if phase == "optimizer"), key=lambda rows: sum(rows.values())
    )
    assert found.phase == "optimizer"
    total = sum(rows.values()) - foreseen.fixed["runtime"]
    assert total == pytest.approx(found.total, rel=0.03)


@pytest.mark.slow
def test_batched_updates_need_far_fewer_launches() -> None:
    job = cases.job("llama")
    plan = tightfit.Plan(precision="bf16-true", rounding="kahan", states="8-bit")
    one_by_one = Estimator(job.replace(train=job.train.replace(optimizer="lamb")), GPU).estimate(plan)
    together = Estimator(job, GPU).estimate(plan)

    def launches(one: Any) -> float:
        return sum(count for phase, _, _, count in one.time.rows if phase == "optimizer")

    assert launches(together) < launches(one_by_one) / 3


@pytest.mark.sweep(12)
@pytest.mark.parametrize("fields", part(SEVERAL, 2))
def test_bytes_of_sharded_or_offloaded_steps_match_dry_runs(fields: dict[str, Any]) -> None:
    job = cases.job("llama", batch=2).replace(allow=[*cases.ALLOW, "offload"])
    plan = tightfit.Plan(**fields)
    ledger = Estimator(job, Machine.named("a100-80gb:2" if plan.devices > 1 else "a100-80gb")).estimate(plan).ledger
    found = dry_run(job, plan, "cuda")
    assert ledger.peak().total - ledger.fixed["runtime"] == pytest.approx(found.total, rel=0.06)
