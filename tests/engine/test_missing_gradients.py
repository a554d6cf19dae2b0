"""A parameter without a gradient is skipped: no weight decay, no momentum, no state, no count of
its steps.

Plain PyTorch does the same with zero_grad(set_to_none=True). The gradient of the whole batch
decides: if a single device or micro-batch computes one, the parameter is updated.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import tightfit
from tests import conditional
from tests.contract import cases
from tests.pool import together

OPTIMIZERS = ("adamw", "adafactor", "sgd", "lamb", "lars", "lion", "muon")
DIVIDED: list[dict[str, Any]] = [
    {"dp_replicate": 2},
    {"dp_replicate": 2, "micro_batch": 1},
    {"zero": 1, "dp_shard": 2},
    {"zero": 1, "dp_shard": 2, "micro_batch": 1},
    {"zero": 2, "dp_shard": 2, "micro_batch": 1},
    {"zero": 1, "dp_shard": 2, "dp_replicate": 2, "micro_batch": 1},
    {"zero": 2, "dp_shard": 2, "dp_replicate": 2, "micro_batch": 1},
    {"zero": 2, "dp_shard": 4},
    {"zero": 3, "dp_shard": 2, "gradient_sync": "step", "micro_batch": 1},
    {"parameter_server": "sync", "dp_replicate": 2},
]
POWERSGD = {"dp_replicate": 2, "compressed_gradients": "powersgd", "powersgd_rank": 1, "micro_batch": 1}
ALONE: list[dict[str, Any]] = [
    {},
    {"micro_batch": 1},
    {"update_in_backward": True},
    {"offload": ("states",), "offload_to": "disk"},
    {"offload": ("states", "gradients", "parameters"), "offload_to": "disk", "micro_batch": 1},
]
HERE = "tests.engine.test_missing_gradients:"


def named(fields: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in fields.items()) or "one device"


@cache
def plain(optimizer: str, clip: float | None = None) -> tuple[list[float], dict[str, Tensor], dict[str, list[bool]]]:
    return conditional.plain(conditional.job(optimizer=optimizer, clip=clip))


def each(fields: dict[str, Any], optimizers: tuple[str, ...], clip: float | None = None) -> list[Any]:
    return [conditional.trained(fields, optimizer=optimizer, clip=clip) for optimizer in optimizers]


def hold(fields: dict[str, Any], optimizers: tuple[str, ...], clip: float | None = None) -> None:
    devices = tightfit.Plan(**fields).devices
    found = together(devices, HERE + "each", fields, optimizers, clip) if devices > 1 else [each(fields, optimizers)]
    for one in found:
        for optimizer, (losses, weights) in zip(optimizers, one, strict=True):
            wanted, expected, had = plain(optimizer, clip)
            for name, there in had.items():
                if not any(there):
                    assert torch.equal(weights[name], expected[name]), (optimizer, name)
            near = 3e-3 if optimizer == "muon" else 1e-6  # which multiplies in bf16
            assert cases.distance(weights, expected) <= near, optimizer
            assert len(losses) == len(wanted)


def test_the_model_covers_every_kind_of_missing_gradient() -> None:
    had = plain("adamw")[2].values()
    assert any(not any(there) for there in had)
    assert any(all(there) for there in had)
    assert any(not there[0] and any(there) for there in had)  # comes late
    assert any(any(a and not b for a, b in pairwise(there)) for there in had)  # goes again


@pytest.mark.sweep(12)
@pytest.mark.parametrize("fields", DIVIDED, ids=named)
def test_several_devices_skip_parameters_without_gradient(fields: dict[str, Any]) -> None:
    every = fields in (DIVIDED[3], DIVIDED[4])
    hold(fields, OPTIMIZERS if every else ("adamw", "lars"))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("fields", [DIVIDED[2], DIVIDED[6], DIVIDED[8], DIVIDED[9]], ids=named)
def test_several_devices_skip_missing_gradients_when_clipping(fields: dict[str, Any]) -> None:
    hold(fields, ("adamw", "sgd"), clip=0.05)


def left_alone(fields: dict[str, Any]) -> tuple[bool, list[str]]:
    """Whether parameters that nothing uses are as they were, and which have states after so many steps."""
    run = tightfit.build(conditional.job(), tightfit.Plan(**fields))
    before = cases.state_of(run)
    for _ in tightfit.train(run):
        pass
    after = cases.state_of(run)
    names = {
        id(run.optimizer_weights.get(parameter, parameter)): name for name, parameter in run.model.named_parameters()
    }
    states = [names[id(weight)] for weight, state in run.optimizer.state.items() if state]
    return all(torch.equal(after[name], before[name]) for name in before if "unused" in name), states


@pytest.mark.parametrize("fields", [{"zero": 1, "dp_shard": 2}, {"zero": 3, "dp_shard": 2}, POWERSGD], ids=named)
@pytest.mark.parametrize("states", ["bf16", "4-bit"])
def test_narrow_states_and_compression_skip_missing_gradients(fields: dict[str, Any], states: str) -> None:
    used = {name for name, there in plain("adamw")[2].items() if any(there)}
    for unchanged, updated in together(2, HERE + "left_alone", {**fields, "states": states}):
        assert unchanged
        assert set(updated) == used


@pytest.mark.parametrize("fields", ALONE, ids=named)
def test_one_device_skips_parameters_without_gradient(fields: dict[str, Any]) -> None:
    offloads = "offload" in fields
    hold(fields, tuple(name for name in OPTIMIZERS if not (offloads and name == "muon")))
