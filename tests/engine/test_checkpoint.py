"""A resumed run is the undisturbed run: the same losses and weights, bit for bit, on one device in fp32."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import tightfit
from tightfit.engine.checkpoint import checkpoints
from tightfit.errors import InputError

from .. import tiny

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("adamw", {}, {}),
    ("sgd", {"optimizer": "sgd"}, {"micro_batch": 3}),
    ("lamb", {"optimizer": "lamb"}, {}),
    ("lars", {"optimizer": "lars"}, {}),
    ("lion", {"optimizer": "lion"}, {}),
    ("muon", {"optimizer": "muon"}, {}),
    ("adafactor", {"optimizer": "adafactor"}, {}),
    ("cosine with warm-up", {"schedule": "cosine", "warmup": 2}, {"chunked_loss": 7}),
    ("8-bit states", {}, {"states": "8-bit"}),
    ("kahan", {}, {"precision": "bf16-true", "rounding": "kahan"}),
    ("stochastic", {}, {"precision": "bf16-true", "rounding": "stochastic"}),
    ("loss scale", {}, {"precision": "fp16-mixed", "loss_scale": "dynamic"}),
    ("fused", {}, {"fused_optimizer": True, "update_in_backward": True}),
    ("recompute", {}, {"recompute": "full"}),
]


@pytest.mark.parametrize(("train", "plan"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_resumed_run_is_the_undisturbed_run(train: dict[str, Any], plan: dict[str, Any], tmp_path: Path) -> None:
    job, fitted = tiny.job(**train), tightfit.Plan(**plan)
    whole = tightfit.build(job, fitted)
    expected = [step.loss for step in tightfit.train(whole)]
    first = tightfit.build(job, fitted)
    before = [step.loss for step in itertools.islice(tightfit.train(first), 5)]
    tightfit.save(first, tmp_path, 5)
    torch.manual_seed(99)  # what a new process would have
    second = tightfit.build(job, fitted)
    start = tightfit.resume(second, tmp_path)
    after = [step.loss for step in tightfit.train(second, start)]
    assert start == 5
    assert before + after == expected
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name


def test_resumes_in_the_middle_of_an_epoch_with_a_short_last_step(tmp_path: Path) -> None:
    job = tiny.job(steps=None, epochs=2)  # 45 samples an epoch in batches of 4
    whole = tightfit.build(job)
    steps = list(tightfit.train(whole))
    assert [step.samples for step in steps[-2:]] == [4, 2]
    first = tightfit.build(job)
    list(itertools.islice(tightfit.train(first), 13))
    tightfit.save(first, tmp_path, 13)
    second = tightfit.build(job)
    after = [step.loss for step in tightfit.train(second, tightfit.resume(second, tmp_path))]
    assert after == [step.loss for step in steps[13:]]


def test_old_checkpoints_go_and_partial_ones_do_not_count(tmp_path: Path) -> None:
    run = tightfit.build(tiny.job(keep_checkpoints=2))
    for step in (1, 2, 3):
        tightfit.save(run, tmp_path, step)
    (tmp_path / ".step-00000009.partial").mkdir()
    (tmp_path / "step-00000008").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    assert tightfit.resume(run, tmp_path) == 3


@pytest.mark.parametrize(
    ("change", "field"),
    [({"learning_rate": 1e-3}, "train.learning_rate"), ({"batch": 8}, "train.batch"), ({"seed": 4}, "train.seed")],
)
def test_another_job_is_refused(change: dict[str, Any], field: str, tmp_path: Path) -> None:
    tightfit.save(tightfit.build(tiny.job()), tmp_path, 1)
    with pytest.raises(InputError, match=field):
        tightfit.resume(tightfit.build(tiny.job(**change)), tmp_path)


def test_a_longer_training_goes_on(tmp_path: Path) -> None:
    run = tightfit.build(tiny.job())
    list(tightfit.train(run))
    tightfit.save(run, tmp_path, 8)
    longer = tightfit.build(tiny.job(steps=10))
    assert len(list(tightfit.train(longer, tightfit.resume(longer, tmp_path)))) == 2


def test_another_plan_goes_on_with_the_same_job(tmp_path: Path) -> None:
    job = tiny.job()
    expected = [step.loss for step in tightfit.train(tightfit.build(job))]
    first = tightfit.build(job)
    list(itertools.islice(tightfit.train(first), 5))
    tightfit.save(first, tmp_path, 5)
    plan = tightfit.Plan(
        micro_batch=2, update_in_backward=False, fused_optimizer=True, materialize="device", chunked_loss=9
    )
    second = tightfit.build(job.replace(model={**tiny.MODEL}), plan)
    after = [step.loss for step in tightfit.train(second, tightfit.resume(second, tmp_path))]
    assert after == pytest.approx(expected[5:], rel=1e-2)  # attention's dropout falls on other numbers


def test_transformers_loads_a_checkpoint(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = tightfit.build(tiny.job())
    path = tightfit.save(run, tmp_path, 1)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
