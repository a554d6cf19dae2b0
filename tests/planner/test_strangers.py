"""Models that nothing was tuned for are estimated correctly without an edit, or refused with a true
reason."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import tightfit
from tests.planner.strangers import STRANGERS
from tests.sweeps import spread
from tightfit.engine.build import build
from tightfit.engine.step import take_step
from tightfit.errors import InputError
from tightfit.measure.memory import sample_step
from tightfit.planner.dry_run import dry_run
from tightfit.planner.estimator import estimate


def job(name: str) -> tightfit.Job:
    model, samples, loss = STRANGERS[name]
    train = tightfit.Train(batch=8, steps=4, learning_rate=1e-3)
    return tightfit.Job(model=model, data=samples(), loss=loss, allow=["bf16"], train=train)


@pytest.mark.filterwarnings("ignore:the training depends on how a batch is split")
@pytest.mark.sweep(16)
@pytest.mark.parametrize(
    ("name", "fields"),
    spread(
        list(STRANGERS),
        [{}, {"precision": "bf16-mixed"}, {"micro_batch": 2}, {"precision": "bf16-mixed", "micro_batch": 2}],
        3,
    ),
)
def test_an_unknown_model_s_estimate_agrees_with_its_run(name: str, fields: dict[str, Any]) -> None:
    plan = tightfit.Plan(**fields)
    run = build(job(name), plan)
    steps = run.data.steps(0, None)
    take_step(run, next(steps), 0)
    _, measured = sample_step(run, next(steps), 1)
    predicted = estimate(job(name), plan)
    estimated = predicted.peak.total - predicted.peak.rows["runtime"] - predicted.peak.rows["allocator"]
    assert estimated == pytest.approx(measured.total, rel=0.05)
    assert dry_run(job(name), plan).total == pytest.approx(measured.total, rel=0.05)
    assert predicted.time.step_s > 0


def test_a_scalar_weight_is_cast_like_the_others() -> None:
    plan = tightfit.Plan(precision="bf16-true", rounding="kahan")
    of = {one.name: one for one in estimate(job("drops-paths"), plan).ledger.parameters}
    assert of["temperature"].bytes == 2


def test_a_parameter_without_elements_is_estimated() -> None:
    class Empty(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(5, 3)
            self.none = torch.nn.Parameter(torch.zeros(0, 3))

    data = [(torch.randn(5), torch.randn(3)) for _ in range(16)]
    asked = tightfit.Job(model=Empty, data=data, loss=torch.nn.MSELoss(), train=tightfit.Train(batch=8, steps=1))
    for machine in (None, "a100-80gb"):
        assert estimate(asked, {}, machine).peak.total > 0


@pytest.mark.slow
def test_blocks_that_run_at_random_are_predicted_or_refused() -> None:
    class Sometimes(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if self.training and random.random() < 0.3 else super().forward(x)

    class Deep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(Sometimes(5, 5) for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    data, said = [(torch.randn(5), torch.randn(5)) for _ in range(16)], list[str]()
    for seed in range(4):
        train = tightfit.Train(batch=8, steps=1, seed=seed)
        asked = tightfit.Job(model=Deep, data=data, loss=torch.nn.MSELoss(), train=train)
        try:
            estimate(asked, {"recompute": "full"}, "a100-80gb")
        except InputError as error:
            said.append(str(error))
    assert len(said) < 4
    assert all("in some forwards only" in one for one in said)


def test_a_failing_model_s_error_says_how_and_where() -> None:
    class Broken(torch.nn.Module):
        def forward(self, *values: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
            return {}["nothing"]  # type: ignore[no-any-return]

    broken = job("unet").replace(model=Broken)
    with pytest.raises(InputError, match=r"fails on fake tensors: KeyError: 'nothing' \(test_strangers.py, line \d+\)"):
        estimate(broken, tightfit.Plan())


def test_an_operation_that_fails_is_named_by_the_model_s_line() -> None:
    class Narrow(torch.nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs @ torch.ones(3, 2)

    broken = tightfit.Job(model=Narrow, data=[(torch.randn(5), 1)] * 8, train=tightfit.Train(batch=4, steps=1))
    with pytest.raises(InputError, match=r"but got \[4, 5\] X \[3, 2\]\. \(test_strangers.py, line \d+\)"):
        estimate(broken, tightfit.Plan())
