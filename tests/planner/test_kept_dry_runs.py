"""The results of dry runs are kept on disk, and a copy of the process makes the next one ahead."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tightfit
from tests.planner import cases
from tightfit.errors import InputError
from tightfit.machine import Machine
from tightfit.planner import certainty
from tightfit.planner import dry_run as dry_runs
from tightfit.planner.dry_run import dry_run, dry_run_bytes
from tightfit.planner.estimator import Estimator
from tightfit.planner.tracing.shared_work import shared_work

JOB = cases.job("llama")
PLAN = tightfit.Plan(precision="bf16-mixed", micro_batch=2)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, own_cache: None) -> list[tightfit.Plan]:
    """The plans of the dry runs that were made, and not read."""
    plans: list[tightfit.Plan] = []

    def noted(job: tightfit.Job, plan: tightfit.Plan, *arguments: Any) -> Any:
        plans.append(plan)
        return dry_run(job, plan, *arguments)

    monkeypatch.setattr(dry_runs, "dry_run", noted)
    return plans


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", ["llama", "vit", "t5"])
def test_the_same_dry_run_is_made_once(name: str, made: list[tightfit.Plan]) -> None:
    job = cases.job(name)
    found = dry_run_bytes(job, PLAN, "cuda")
    assert found == dry_run(job, PLAN, "cuda").total
    assert dry_run_bytes(job, PLAN, "cuda") == found
    assert made == [PLAN]


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("changed", "plan", "device"),
    [
        ({}, PLAN.replace(micro_batch=4), "cuda"),
        ({}, PLAN, "cpu"),
        ({"train": JOB.train.replace(optimizer="sgd")}, PLAN, "cuda"),
        ({"model": {**JOB.model.content(), "num_hidden_layers": 3}}, PLAN, "cuda"),
        ({"data": {"synthetic": "tokens", "sequence_length": 48, "samples": 64}}, PLAN, "cuda"),
    ],
    ids=["plan", "device", "optimizer", "model", "length"],
)
def test_another_dry_run_is_made_anew(
    made: list[tightfit.Plan], changed: dict[str, Any], plan: tightfit.Plan, device: str
) -> None:
    job = JOB.replace(**changed)
    before = dry_run_bytes(JOB, PLAN, "cuda")
    after = dry_run_bytes(job, plan, device)
    assert made == [PLAN, plan]
    assert after == dry_run(job, plan, device).total != before


@pytest.mark.slow
def test_other_data_of_the_same_shape_are_dry_run_anew(made: list[tightfit.Plan], tmp_path: Path) -> None:
    """Layers in 8 bits pad text that is not packed, whatever length the first samples have."""
    (tmp_path / "text.txt").write_text("word " * 4000)
    text = {"text": str(tmp_path / "text.txt"), "sequence_length": 32}
    plan = PLAN.replace(float8="tensorwise")
    jobs = [JOB.replace(allow=["bf16", "float8"], data={**text, **more}) for more in ({}, {"packing": "padded"}, {})]
    found = [dry_run_bytes(job, plan, "cuda") for job in jobs]
    assert made == [plan, plan]
    assert found[0] == found[2]


OWN = tightfit.Job(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)),
    data=[(torch.ones(8), 1)] * 64,
    train=tightfit.Train(batch=8, steps=4),
)


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    "job",
    [
        OWN,
        JOB.replace(train=JOB.train.replace(optimizer=torch.optim.AdamW)),
        JOB.replace(train=JOB.train.replace(schedule=lambda step: 1.0)),
    ],
    ids=["model", "optimizer", "schedule"],
)
def test_a_job_with_own_code_is_always_dry_run(job: tightfit.Job, made: list[tightfit.Plan]) -> None:
    assert dry_run_bytes(job, PLAN, "cuda") == dry_run_bytes(job, PLAN, "cuda")
    assert made == [PLAN, PLAN]


def test_a_refusal_is_not_kept(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise InputError("plan: x", "this model is too odd", "another")

    with monkeypatch.context() as patch:
        patch.setattr(dry_runs, "dry_run", refuse)
        with pytest.raises(InputError, match="too odd"):
            dry_run_bytes(JOB, PLAN, "cuda")
    assert dry_run_bytes(JOB, PLAN, "cuda") == dry_run(JOB, PLAN, "cuda").total


@pytest.mark.slow
@pytest.mark.sweep(8)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux copies processes")
@pytest.mark.parametrize("unsure", [False, True])
def test_a_copy_makes_the_next_dry_run(
    made: list[tightfit.Plan], unsure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the second fastest plan, or of the fastest that surely fits if the fastest does not."""
    estimator = Estimator(JOB, Machine.named("a100-80gb"))
    plans = [PLAN, PLAN.replace(micro_batch=4), PLAN.replace(micro_batch=1)]
    fitting = [estimator.estimate(plan) for plan in plans]
    monkeypatch.setattr(certainty, "WORTH_OF_CERTAINTY", 100.0)
    monkeypatch.setattr(type(fitting[0]), "fits_surely", property(lambda one: one.plan == plans[2] or not unsure))
    with shared_work() as estimator.profiler.shared_work:
        work = estimator.profiler.shared_work
        work.start_copies(1, [])
        certainty._dry_run_ahead(estimator, fitting, any_micro_batch=False)
        end = time.monotonic() + 60
        while not list(work.folder.glob("*.done")):
            assert time.monotonic() < end
            time.sleep(0.01)
    assert made == []  # in this process
    for plan in plans[1:]:
        dry_run_bytes(JOB, plan, "cuda")
    assert made == [plans[1] if unsure else plans[2]]
