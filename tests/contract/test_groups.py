"""Parameter groups train as the same param groups of a plain PyTorch optimizer, with every method
that updates weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tightfit
from tests.contract import cases
from tests.sweeps import part
from tightfit.engine.checkpoint.resume import resume
from tightfit.engine.checkpoint.save import save
from tightfit.errors import InputError
from tightfit.plan import Plan

# the embedding and one block have learning rates of their own; biases and norms of it decay
GROUPS = [
    {"match": "model.embed_tokens.*", "learning_rate": 2e-3, "weight_decay": 0.0},
    {"match": "model.layers.2.*", "learning_rate": 4e-2},
    {"match": "*.layers.3.*norm*", "weight_decay": 0.5},
]
TRAIN: dict[str, Any] = {"groups": GROUPS, "schedule": "linear", "final_learning_rate": 0.25}
ONE: list[dict[str, Any]] = [
    {},
    {"micro_batch": 3},
    {"fused_optimizer": True},
    {"update_in_backward": True},
    {"offload": ["states"], "offload_to": "disk"},
    {"offload": ["states", "gradients", "parameters"], "offload_to": "disk"},
]
SEVERAL: list[dict[str, Any]] = [
    {"dp_replicate": 2},
    {"zero": 1, "dp_shard": 2},
    {"zero": 2, "dp_shard": 2, "micro_batch": 2},
    {"zero": 3, "dp_shard": 2},
    {"tp": 2},
    {"pp": 2, "micro_batch": 2},
    {"dp_replicate": 2, "parameter_server": "sync"},
]


def plain(case: cases.Case) -> tuple[list[float], dict[str, Tensor]]:
    """The job by nothing but PyTorch: the groups are written out by name."""
    settings = case.job.train
    run = tightfit.build(case.job)  # for its initial weights and its samples
    model, batches = run.model, run.data.steps(0, None)

    def group(chosen: Any, **options: float) -> dict[str, Any]:
        return {"params": [p for name, p in model.named_parameters() if chosen(name)], **options}

    first = "model.embed_tokens.", "model.layers.2."
    third = "model.layers.3.input_layernorm.weight", "model.layers.3.post_attention_layernorm.weight"
    rate, decay = settings.learning_rate, settings.weight_decay
    groups = [
        group(lambda name: name.startswith(first[0]), lr=2e-3, weight_decay=0.0),
        group(lambda name: name.startswith(first[1]) and "norm" not in name, lr=4e-2, weight_decay=decay),
        group(lambda name: name.startswith(first[1]) and "norm" in name, lr=4e-2, weight_decay=0.0),
        group(lambda name: name in third, lr=rate, weight_decay=0.5),
    ]
    known = {id(p) for one in groups for p in one["params"]}
    rest = {id(p) for p in model.parameters()} - known
    norms = {id(p) for name, p in model.named_parameters() if "norm" in name}
    groups += [
        {"params": [p for p in model.parameters() if id(p) in rest - norms], "lr": rate, "weight_decay": decay},
        {"params": [p for p in model.parameters() if id(p) in rest & norms], "lr": rate, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.epsilon)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.25 + 0.75 * (1 - step / cases.STEPS))
    losses = []
    for _, (batch,) in zip(range(cases.STEPS), batches, strict=False):
        total, count = case.plain_loss(model, batch)
        (total / count).backward()
        losses.append(total.item() / count)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses, cases.state(model)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("fields", part([*ONE, *SEVERAL], 3))
def test_groups_match_plain_pytorch(fields: dict[str, Any]) -> None:
    case = cases.make_case("llama", **TRAIN)
    expected_losses, expected = plain(case)
    losses, weights = cases.training(case, Plan(**fields))
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert cases.distance(weights, expected) <= 1e-6
    without, _ = cases.training(cases.make_case("llama"), Plan())
    assert losses != pytest.approx(without, rel=1e-5)


OPTIMIZERS = ("adafactor", "sgd", "lamb", "lars", "lion", "muon")
SHARDED = [{"zero": 2, "dp_shard": 2}, {"zero": 3, "dp_shard": 2}, {"tp": 2}, {"pp": 2}]


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("optimizer", "fields"),
    [
        pytest.param(name, fields, marks=[] if (name, fields) in USUAL else [pytest.mark.slow], id=f"{name}-{fields}")
        for USUAL in [[("muon", SHARDED[0]), ("lamb", SHARDED[2])]]
        for name in OPTIMIZERS
        for fields in SHARDED
    ],
)
def test_every_sharded_optimizer_follows_groups(optimizer: str, fields: dict[str, Any]) -> None:
    rates = {"lars": 1.0, "lion": 1e-3}
    train = {**TRAIN, "optimizer": optimizer, "learning_rate": rates.get(optimizer, 1e-2)}
    case = cases.make_case("llama", **train)
    expected_losses, expected = cases.training(case, Plan())
    losses, weights = cases.training(case, Plan(**fields))
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    near = 3e-3 if optimizer == "muon" else 2e-6  # Muon multiplies in bf16
    assert cases.distance(weights, expected) <= near


@pytest.mark.slow
def test_a_pattern_of_another_stage_is_no_error() -> None:
    """Only the first stage of a pipeline has the embedding; the pattern is looked up in the whole model."""
    case = cases.make_case("llama", groups=[{"match": "*.embed_tokens.*", "learning_rate": 1e-3}])
    cases.training(case, Plan(pp=2))
    wrong = cases.make_case("llama", groups=[{"match": "*.embeddings.*", "learning_rate": 1e-3}])
    for refused in (lambda: tightfit.build(wrong.job, Plan()), lambda: tightfit.estimate(wrong.job, Plan())):
        with pytest.raises(InputError, match=r"matches no parameter(.|\n)*model\.embed_tokens\.weight"):
            refused()


def test_a_changed_learning_rate_outlives_a_resume(tmp_path: Any) -> None:
    """`lr` of a group is set between steps, in a loop of one's own; plain PyTorch multiplies its schedule."""
    case = cases.make_case("llama", **TRAIN)
    job = case.job.replace(train=case.job.train.replace(steps=6))

    def change(run: tightfit.Run) -> None:
        for group in run.optimizer.param_groups:
            if group["match"] is None:
                group["lr"] *= 0.5

    run = tightfit.build(job)
    for step in tightfit.train(run):
        if step.step == 1:
            change(run)
    whole = tightfit.build(job)
    for step in tightfit.train(whole):
        if step.step == 1:
            change(whole)
        if step.step == 3:
            save(whole, tmp_path, 4)
            break
    again = tightfit.build(job)
    rates = [step.learning_rate for step in tightfit.train(again, resume(again, tmp_path))]
    assert rates == pytest.approx([0.5 * again.learning_rate(step) for step in (4, 5)])
    for one, other in zip(run.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_explain_names_the_groups() -> None:
    from tightfit.machine import Machine

    case = cases.make_case("llama", **TRAIN)
    text = tightfit.explain(case.job, Plan(), Machine.named("l4"))
    assert "groups   model.embed_tokens.*: 1 parameter of 5.12k elements, learning rate 0.002, weight decay 0" in text
