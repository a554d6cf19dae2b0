"""Parameters without dimensions, such as a temperature: their optimizer states have none either, as counters do."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tests.pool import together

HERE = "tests.engine.checkpoint.test_scalar_parameters:"


class Tempered(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.temperature = nn.Linear(8, 4), nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.temperature


def job(shape: tuple[int, ...], **train: Any) -> tightfit.Job:
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, generator=generator), number % 4) for number in range(32)]
    settings = tightfit.Train(**{"batch": 8, "steps": 6, "learning_rate": 0.05, **train})
    return tightfit.Job(
        model=lambda: Tempered(shape), data=data, train=settings, allow=["bf16", "8-bit-states", "bf16-states"]
    )


def saved(folder: str, shape: tuple[int, ...], fields: dict[str, Any], **train: Any) -> list[float]:
    """The losses of a whole training, which is saved after three steps."""
    run, losses = tightfit.build(job(shape, **train), fields), []
    for step in tightfit.train(run):
        losses.append(step.loss)
        if step.step == 2:
            tightfit.save(run, folder, 3)
    return losses


def resumed(folder: str, shape: tuple[int, ...], fields: dict[str, Any], **train: Any) -> list[float]:
    run = tightfit.build(job(shape, **train), fields)
    return [step.loss for step in itertools.islice(tightfit.train(run, tightfit.resume(run, folder)), 3)]


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "bf16-true", "rounding": "kahan"},
        {"precision": "bf16-true", "master_weights": True},
        {"states": "8-bit"},
        {"states": "bf16"},
    ],
    ids=str,
)
def test_states_of_16_bit_scalars_are_widened(fields: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for shape in ((), (1,)):
        folder = str(tmp_path / str(len(shape)))
        saved(folder, shape, {"precision": "bf16-true"})
        found.append(resumed(folder, shape, fields))
    assert found[0] == pytest.approx(found[1], rel=1e-2)
    assert found[0][0] == found[1][0]


@pytest.mark.parametrize(
    ("optimizer", "zero"), [("adamw", 1), *(pytest.param("lamb", zero, marks=pytest.mark.slow) for zero in (1, 2))]
)
def test_sharded_states_of_scalars_are_resumed(optimizer: str, zero: int, tmp_path: Path) -> None:
    sharded = {"dp_shard": 2, "zero": zero}
    expected = together(2, HERE + "saved", str(tmp_path / "two"), (), sharded, optimizer=optimizer)[0]
    assert resumed(str(tmp_path / "two"), (), {}, optimizer=optimizer) == pytest.approx(expected[3:], rel=1e-4)
    saved(str(tmp_path / "one"), (), {}, optimizer=optimizer)
    for folder in ("one", "two"):
        found = together(2, HERE + "resumed", str(tmp_path / folder), (), sharded, optimizer=optimizer)
        assert found[0] == found[1] == pytest.approx(expected[3:], rel=1e-4)
