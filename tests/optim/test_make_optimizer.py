"""Optimizers made from a job's settings: parameter groups, kernels, step lengths, refusals."""

import io
from typing import get_args

import pytest
import torch
from torch import nn

from tightfit.errors import InputError
from tightfit.job import Train
from tightfit.job_sections.train import OptimizerName
from tightfit.optim import make_optimizer

NAMES = get_args(OptimizerName)


def make_model(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 11))
    if tied:
        model[4].weight = model[0].weight
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(seed))
    model(tokens).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_each_parameter_is_in_one_group_and_matrices_decay(name: str, tied: bool) -> None:
    """Only trainable parameters are in a group, and only matrices decay."""
    model = make_model(tied)
    model[1].bias.requires_grad_(False)
    optimizer = make_optimizer(model, Train(optimizer=name, weight_decay=0.1, learning_rate=0.2))
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert len(owned) == len(trainable)
    assert {id(parameter) for parameter in owned} == trainable
    for group in optimizer.param_groups:
        assert group["lr"] == 0.2
        assert {group["weight_decay"]} == {0.1 if parameter.dim() >= 2 else 0.0 for parameter in group["params"]}


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_lowers_the_loss_and_resumes_exactly(name: str) -> None:
    train = Train(optimizer=name, learning_rate=1.0 if name == "lars" else 0.01, weight_decay=0.01)
    whole, tokens = make_model(), torch.arange(11)
    before = whole(tokens).square().mean()
    optimizer = make_optimizer(whole, train)
    for seed in range(3):
        step(whole, optimizer, seed)
    file = io.BytesIO()
    torch.save({"model": whole.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for seed in range(3, 6):
        step(whole, optimizer, seed)
    assert whole(tokens).square().mean() < before

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = make_model()
    resumed.load_state_dict(saved["model"])
    optimizer = make_optimizer(resumed, train)
    optimizer.load_state_dict(saved["optimizer"])
    for seed in range(3, 6):
        step(resumed, optimizer, seed)
    for expected, found in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_fused_kernel_agrees_with_the_default_one(name: str, dtype: torch.dtype) -> None:
    models = [make_model().to(dtype) for _ in range(2)]
    optimizers = [
        make_optimizer(model, Train(optimizer=name, learning_rate=0.01, weight_decay=0.1), fused=fused)
        for model, fused in zip(models, (False, True), strict=True)
    ]
    assert [optimizer.param_groups[0]["fused"] for optimizer in optimizers] == [None, True]
    for seed in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer, seed)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    for default, fused in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(default, fused, rtol=tolerance, atol=tolerance)


def test_the_first_gradient_may_come_in_a_later_step() -> None:
    """A layer may be skipped in the first steps; torch's fused SGD kernel would fail."""
    models = [make_model() for _ in range(2)]
    train = Train(optimizer="sgd", learning_rate=0.01)
    optimizers = [make_optimizer(model, train, fused=fused) for model, fused in zip(models, (False, True), strict=True)]
    for turn in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.ones_like(parameter) if turn or number else None
            optimizer.step()
    for default, fused in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(default, fused)


def test_the_plan_s_kernel_is_used_after_a_resume() -> None:
    model = make_model()
    default = make_optimizer(model, Train())
    step(model, default, 0)
    fused = make_optimizer(model, Train(), fused=True)
    fused.load_state_dict(default.state_dict())
    assert {group["fused"] for group in fused.param_groups} == {True}
    step(model, fused, 1)
    default.load_state_dict(fused.state_dict())
    assert {group["fused"] for group in default.param_groups} == {None}
    step(model, default, 2)


def test_a_muon_step_is_as_long_as_an_adamw_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 2))
    optimizer = make_optimizer(model, Train(optimizer="muon", learning_rate=0.1))
    before = model[0].weight.detach().clone()
    model[0].weight.grad = torch.randn(32, 8)
    optimizer.step()
    moved = (model[0].weight - before).square().mean().sqrt() / 0.1
    assert 0.14 < moved < 0.26  # AdamW's is about 0.2


def test_parameters_that_cannot_be_optimized_are_refused() -> None:
    with pytest.raises(InputError, match="fused_optimizer: false with lamb"):
        make_optimizer(make_model(), Train(optimizer="lamb"), fused=True)
    with pytest.raises(InputError, match="no hidden matrix"):
        make_optimizer(nn.Linear(3, 3), Train(optimizer="muon"))
    with pytest.raises(InputError, match="no trainable parameter"):
        make_optimizer(nn.Linear(3, 3).requires_grad_(False), Train())
    sparse = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    with pytest.raises(InputError, match=r"\(0\): is an Embedding with sparse gradients(.|\n)*sparse=False"):
        make_optimizer(sparse, Train())
    sparse[0].weight.requires_grad_(False)
    make_optimizer(sparse, Train())


@pytest.mark.parametrize(
    ("name", "fields", "moved"),
    [("lars", {"trust": 0.01, "momentum": 0.0}, 0.01 * 0.5), ("lamb", {"norm_clamp": (0.0, 0.25)}, 0.5 * 0.25)],
)
def test_the_job_sets_the_layerwise_step_length(name: str, fields: dict[str, object], moved: float) -> None:
    model = nn.Linear(4, 4, bias=False)
    nn.init.constant_(model.weight, 0.125)  # of norm 0.5
    before = model.weight.detach().clone()
    optimizer = make_optimizer(model, Train(optimizer=name, learning_rate=0.5, **fields))
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    rate = 0.5 if name == "lars" else 1.0
    torch.testing.assert_close((model.weight - before).norm(), torch.tensor(rate * moved))


def test_a_norm_clamp_in_the_wrong_order_is_refused() -> None:
    with pytest.raises(InputError, match="smaller one first"):
        Train(optimizer="lamb", norm_clamp=(2.0, 1.0))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("field", "value"),
    [("momentum", 0.3), ("betas", (0.3, 0.4)), ("epsilon", 0.3), ("trust", 0.3), ("norm_clamp", (0.01, 0.02))],
)
def test_a_setting_without_effect_is_named(name: str, field: str, value: object) -> None:
    """The job names a field as without effect exactly if two steps with it end at the same weights."""
    ends = []
    for fields in ({}, {field: value}):
        model, train = make_model(), Train(optimizer=name, **fields)
        optimizer = make_optimizer(model, train)
        step(model, optimizer, 1)
        step(model, optimizer, 2)
        ends.append(torch.nn.utils.parameters_to_vector(model.parameters()))
    assert bool(train.without_effect) == torch.equal(*ends)
    if train.without_effect:
        assert [line.split("=")[0] for line in train.without_effect] == [f"train.{field}"]


def test_settings_of_another_schedule_are_named() -> None:
    def named(**fields: object) -> list[str]:
        return [line.split("=")[0].removeprefix("train.") for line in Train(steps=9, **fields).without_effect]

    assert named() == []
    assert named(final_learning_rate=0.1) == ["final_learning_rate"]
    assert named(final_learning_rate=0.1, schedule="cosine") == []
    assert named(decay=0.1, schedule="cosine") == ["decay"]
    assert named(decay=0.1, schedule="warmup-stable-decay", final_learning_rate=0.1) == []
    assert named(base_batch=8) == ["base_batch"]
    assert named(base_batch=8, scale_learning_rate="sqrt") == []
    assert named(momentum=0.1, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)) == ["momentum"]
