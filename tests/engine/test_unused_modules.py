"""Parameters that only some devices use: experts without tokens, and layers that a batch skips."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tightfit
from tests import conditional
from tests.contract import cases
from tests.pool import together

HERE = "tests.engine.test_unused_modules:"
PLANS: list[dict[str, Any]] = [
    {"zero": 3, "dp_shard": 2},
    {"zero": 3, "dp_shard": 2, "micro_batch": 1},
    {"zero": 3, "dp_shard": 4, "micro_batch": 2},
    {"zero": 3, "dp_shard": 2, "recompute": "full", "micro_batch": 2},
    {"zero": 3, "dp_shard": 2, "dp_replicate": 2, "micro_batch": 1},
    {"zero": 3, "dp_shard": 2, "offload": ("states", "gradients", "parameters"), "offload_to": "disk"},
    {"zero": 2, "dp_shard": 2, "recompute": "full", "micro_batch": 2},
    {"dp_replicate": 2, "recompute": "full", "micro_batch": 2},
]
LAYERS: list[dict[str, Any]] = [
    {"zero": 3, "dp_shard": 2},
    {"zero": 3, "dp_shard": 2, "recompute": "full", "micro_batch": 2},
    {"zero": 3, "dp_shard": 2, "dp_replicate": 2, "micro_batch": 1},
]


def named(fields: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in fields.items())


MIXTRAL: dict[str, Any] = {
    "architecture": "mixtral",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
}


def mixtral(fields: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Four tokens of a micro-batch choose among eight experts."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 64, (4,), generator=generator) for _ in range(16)]
    settings = {"batch": 4, "steps": 3, "learning_rate": 1e-2, "weight_decay": 0.1, "epsilon": cases.EPSILON}
    job = tightfit.Job(
        model=MIXTRAL,
        data=[{"input_ids": row, "labels": row.clone()} for row in rows],
        train=tightfit.Train(**settings),
    )
    run = tightfit.build(job, tightfit.Plan(**fields))
    return [step.loss for step in tightfit.train(run)], cases.state_of(run)


@pytest.mark.parametrize("fields", [PLANS[1], {"zero": 2, "dp_shard": 2, "micro_batch": 1}], ids=named)
def test_experts_without_tokens_on_some_devices_train_the_same(fields: dict[str, Any]) -> None:
    losses, weights = mixtral({})
    for found, others in together(2, HERE + "mixtral", fields):
        assert found == pytest.approx(losses, rel=2e-6)
        assert cases.distance(others, weights) <= 1e-6


REFUSED = {
    conditional.Chosen: "blocks.3",
    conditional.OtherOrder: "blocks.0",
    conditional.Repeats: "blocks.0",
    conditional.LastOfAll: "blocks.3",
    conditional.OutOfUse: "blocks.",
    conditional.DroppedByChance: "blocks.",
}


def refused(fields: dict[str, Any], model: Any, first: int | None = None) -> tuple[str, int, float]:
    """What a run is refused with, after how many steps, and by how much its weights have changed since the last one's end.

    first   in how many backward passes the ranks agree before each collective; None: in all
    """
    run = tightfit.build(conditional.job(model, clip=0.05), tightfit.Plan(**fields))
    run.reduction.collective_order.first = first
    kept = [weight.detach().clone() for weight in run.optimizer_weights.values()]
    steps = 0
    try:
        for _ in tightfit.train(run):
            kept = [weight.detach().clone() for weight in run.optimizer_weights.values()]
            steps += 1
    except tightfit.InputError as error:
        changed = sum(
            float((weight - before).abs().sum())
            for weight, before in zip(run.optimizer_weights.values(), kept, strict=True)
        )
        return str(error), steps, changed
    return "", steps, 0.0


@pytest.mark.sweep(16)
@pytest.mark.parametrize("fields", LAYERS, ids=named)
@pytest.mark.parametrize("model", REFUSED)
def test_layers_called_on_some_devices_only_are_refused_on_all(fields: dict[str, Any], model: Any) -> None:
    """The refusal comes in the same step, before the update. No device waits forever or trains with
    another layer's weights."""
    first, *others = together(tightfit.Plan(**fields).devices, HERE + "refused", fields, model)
    assert all(other == first for other in others)
    said, _, changed = first
    assert said.startswith("plan: zero=3: each layer's parameters are gathered from all ranks")
    assert f"first differ at {REFUSED[model] if fields is LAYERS[0] else 'blocks.'}" in said
    assert "use zero: 2" in said
    assert changed == 0


@pytest.mark.parametrize("fields", LAYERS[:2], ids=named)
def test_checksums_detect_another_order_of_layers(fields: dict[str, Any]) -> None:
    """The layers are of equal size, so only the checksum shows that a rank gathered another layer's
    weights."""
    first, *others = together(2, HERE + "refused", fields, conditional.OtherOrder, 0)
    assert all(other == first for other in others)
    said, _, changed = first
    assert "in this step (ranks 0, 1: the step ends, after different layers" in said
    assert changed == 0


def models(fields: dict[str, Any]) -> list[Any]:
    """The plans that can train it: layers that only some devices call stay whole in all but ZeRO's
    third stage."""
    if "zero" in fields and "recompute" in fields:
        return [conditional.Conditional, conditional.SameForAll, *[conditional.Chosen] * (fields["zero"] == 2)]
    return [conditional.Conditional]


def trained(fields: dict[str, Any], optimizers: tuple[str, ...]) -> list[Any]:
    return [
        conditional.trained(fields, model, optimizer=optimizer, clip=0.05)
        for model in models(fields)
        for optimizer in optimizers
    ]


@pytest.mark.sweep(12)
@pytest.mark.parametrize("fields", PLANS, ids=named)
def test_devices_that_use_other_modules_train_the_same_model(fields: dict[str, Any]) -> None:
    optimizers = ("adamw", "lamb", "adafactor") if fields is PLANS[1] else ("adamw",)
    wanted = [
        conditional.plain(conditional.job(model, optimizer=optimizer, clip=0.05))
        for model in models(fields)
        for optimizer in optimizers
    ]
    for found in together(tightfit.Plan(**fields).devices, HERE + "trained", fields, optimizers):
        for (losses, weights), (expected_losses, expected, had) in zip(found, wanted, strict=True):
            assert losses == pytest.approx(expected_losses, rel=2e-6)
            assert cases.distance(weights, expected) <= 1e-6
            for name, there in had.items():
                if not any(there):
                    assert torch.equal(weights[name], expected[name]), name
