"""The training loop and the evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from tests import tiny
from tightfit.engine.clipping import clip
from tightfit.engine.loop import total_steps
from tightfit.errors import InputError


def test_steps_report_loss_norm_and_counts() -> None:
    run = tightfit.build(tiny.job(clip=0.5, schedule="linear"))
    steps = list(tightfit.train(run))
    assert [step.step for step in steps] == list(range(total_steps(run))) == list(range(8))
    assert all(step.samples == 4 and step.processed == 64 and step.items == 60 for step in steps)
    assert all(step.gradient_norm and step.gradient_norm > 0 and step.seconds > 0 for step in steps)
    assert steps[0].learning_rate == pytest.approx(1e-2)
    assert steps[-1].learning_rate == pytest.approx(1e-2 / 8)


def test_labels_outside_the_classes_are_refused_by_name() -> None:
    job = tightfit.Job(model=lambda: torch.nn.Linear(3, 5), data=[(torch.zeros(3), 7)] * 4)
    run = tightfit.build(job)
    with pytest.raises(InputError, match=r"labels outside of the model's 5 classes \(Target 7(.|\n)*from 0 to 4"):
        next(iter(tightfit.train(run)))

    def generated(batch: object) -> torch.Tensor:
        raise RuntimeError("kernel, some/cache/of.cpp:68, index out of bounds: 0 <= tmp21 < 5L")

    compiled = replace(run, plan=tightfit.Plan(compile="model"), loss_sum=generated)
    with pytest.raises(InputError, match=r"not one of the model's classes(.|\n)*plan\.compile=none"):
        next(iter(tightfit.train(compiled)))


class Pair(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(input), input


@pytest.mark.parametrize(
    ("model", "label", "said"),
    [
        (lambda: torch.nn.Linear(3, 5), [0, 1], r"shape \(4, 5\) for labels of shape \(4, 2\)"),
        (
            lambda: torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0)),
            0,
            r"shape \(4,\) for labels of shape \(4,\)",
        ),
        (lambda: Pair(3, 5), 0, "returns tuple, which has no logits"),
    ],
    ids=["a label for each position", "no classes", "a tuple"],
)
def test_an_output_that_matches_no_label_is_refused(
    model: Callable[[], torch.nn.Module], label: object, said: str
) -> None:
    data = [(torch.zeros(3), torch.tensor(label))] * 4
    run = tightfit.build(tightfit.Job(model=model, data=data, train=tightfit.Train(batch=4, steps=1)))
    with pytest.raises(InputError, match=said + r"(.|\n)*job its own loss"):
        next(iter(tightfit.train(run)))


class Alone:
    """A mesh of one device."""

    def size(self, axis: str) -> int:
        return 1

    def all_reduce(self, value: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        return value


def test_complex_gradients_are_clipped_the_same_on_a_mesh() -> None:
    def model() -> torch.nn.Module:
        return torch.nn.ParameterDict({"wave": torch.randn(4, 4, dtype=torch.complex64), "bias": torch.randn(4)})

    run = tightfit.build(tightfit.Job(model=model, data=[(torch.zeros(3), 0)] * 4, train=tightfit.Train(steps=1)))
    clipped = []
    for mesh in (None, Alone()):
        for parameter in run.model.parameters():
            parameter.grad = 3 * parameter.detach()
        norm = clip(replace(run, mesh=mesh), 1.0)  # type: ignore[arg-type]
        clipped.append((norm, *(parameter.grad for parameter in run.model.parameters())))
    torch.testing.assert_close(clipped[0], clipped[1])


def test_learning_rate_scales_with_the_batch() -> None:
    for rule, factor in (("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)):
        run = tightfit.build(tiny.job(scale_learning_rate=rule, base_batch=1))
        assert run.learning_rate(0) == pytest.approx(1e-2 * factor)


def test_evaluation_does_not_change_the_training() -> None:
    job = tiny.job()
    plain = [step.loss for step in tightfit.train(tightfit.build(job))]
    run, evaluated = tightfit.build(job), []
    losses = []
    for step in tightfit.train(run):
        losses.append(step.loss)
        evaluated.append(tightfit.evaluate(run))
    assert losses == plain
    assert all(math.isfinite(value) for value in evaluated)
    assert evaluated[-1] == tightfit.evaluate(run)
    assert run.model.training


def test_fp16_skips_a_step_that_overflows() -> None:
    run = tightfit.build(tiny.job(), tightfit.Plan(precision="fp16-mixed", loss_scale=1e30))
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    steps = list(tightfit.train(run))
    assert all(step.skipped for step in steps)
    assert run.loss_scale is not None
    assert run.loss_scale.skipped == 8
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))


def test_a_dynamic_loss_scale_settles() -> None:
    run = tightfit.build(tiny.job(), tightfit.Plan(precision="fp16-mixed"))
    assert run.loss_scale is not None
    run.loss_scale.value = 2.0**40
    skipped = [step.skipped for step in tightfit.train(run)]
    assert skipped[0]
    assert run.loss_scale.value == 2.0 ** (40 - sum(skipped))


def half_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


def half_frozen_job() -> tightfit.Job:
    samples = [(torch.randn(8), number % 3) for number in range(16)]
    return tightfit.Job(model=half_frozen, data=samples, train={"batch": 4, "steps": 3, "trackers": []})


@pytest.mark.parametrize("plan", [{}, {"micro_batch": 2, "precision": "bf16-mixed", "materialize": "device"}], ids=str)
def test_a_parameter_unfrozen_in_the_loop_is_refused(plan: dict[str, Any]) -> None:
    run = tightfit.build(half_frozen_job(), plan)
    done = []

    def unfreeze_after_each_step() -> None:
        for step in tightfit.train(run):
            done.append(step.step)
            run.model.get_submodule("0").requires_grad_(True)

    with pytest.raises(InputError, match=r"0\.weight\.requires_grad: was set to True after the run") as raised:
        unfreeze_after_each_step()
    assert done == [0]
    assert "build the run again" in raised.value.fix


def test_a_parameter_frozen_in_the_loop_stays_allowed() -> None:
    run = tightfit.build(half_frozen_job())
    head, weights = run.model.get_parameter("2.weight"), []
    for _ in tightfit.train(run):
        head.requires_grad_(False)
        weights.append(head.detach().clone())
    assert len(weights) == 3
    assert torch.equal(weights[0], weights[2])


def test_a_saved_step_counts_the_steps_that_are_done(tmp_path: Path) -> None:
    """As the docstring of `save` says: the number of a step plus 1."""
    job = half_frozen_job()
    whole = [step.loss for step in tightfit.train(tightfit.build(job))]
    run, losses = tightfit.build(job), []
    for step in tightfit.train(run):
        losses.append(step.loss)
        if step.step == 1:
            tightfit.save(run, tmp_path, step.step + 1)
            break
    again = tightfit.build(job)
    losses += [step.loss for step in tightfit.train(again, tightfit.resume(again, tmp_path))]
    assert losses == whole


@pytest.mark.parametrize("name", ["train", "save", "resume", "evaluate", "evaluate_metrics"])
def test_a_job_in_place_of_a_run_is_refused(name: str, tmp_path: Path) -> None:
    more = {"save": (tmp_path, 1), "resume": (tmp_path,)}.get(name, ())
    with pytest.raises(InputError, match=f"{name}: run: is of type Job, and must be a Run"):
        list(getattr(tightfit, name)(half_frozen_job(), *more))  # `train` is a generator
