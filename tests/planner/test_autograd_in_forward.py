"""A model whose forward needs autograd, such as one of forces, is predicted and trained."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tightfit.errors import Untraceable
from tightfit.machine import Machine
from tightfit.planner.choose import choose_plan
from tightfit.planner.dry_run import dry_run
from tightfit.planner.estimate import Estimate
from tightfit.planner.estimator import Estimator
from tightfit.planner.variants import estimate_candidates

WIDTH = 64


class Force(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        place = x.detach().requires_grad_(True)
        energy = torch.tanh(self.layer(place)).square().sum()
        return x + torch.autograd.grad(energy, place, create_graph=True)[0]


class Forces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Force() for _ in range(3)), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_estimator() -> Estimator:
    data = [(torch.zeros(WIDTH), number % 3) for number in range(8)]
    job = tightfit.Job(model=Forces, data=data, train=tightfit.Train(batch=8192, steps=4))
    found = Estimator(job, Machine.named("a100-80gb"))
    found.runtime_bytes = 0
    return found


def test_a_model_of_forces_is_predicted() -> None:
    estimator, plan = make_estimator(), tightfit.Plan()
    one: Estimate = estimator.estimate(plan)
    assert one.peak.total == pytest.approx(dry_run(estimator.job, plan, "cuda").total, rel=0.01)
    assert one.ledger.model_flops() > 0
    assert one.phases["evaluation"] > 0


def test_recompute_is_left_out_for_a_model_of_forces() -> None:
    estimator = make_estimator()
    whole = estimator.estimate(tightfit.Plan()).peak_bytes
    with pytest.raises(Untraceable, match="needs autograd in its forward") as refused:
        estimator.estimate(tightfit.Plan(recompute="full"))
    assert refused.value.fix == "use recompute: none, or train without a prediction"
    estimator = Estimator(estimator.job, estimator.machine, estimator.profiler)
    estimator.limit_bytes = 0.7 * whole
    estimator.runtime_bytes = 0
    found = estimate_candidates(estimator, tightfit.Plan(), {"micro_batch": None})
    assert {one.plan.recompute for one in found} <= {"none", "attention"}
    ((option, why),) = estimator.untraceable.items()
    assert option.startswith("recompute: ")
    assert "full" in option
    assert "does not require grad" in why


@pytest.mark.slow
def test_train_and_explain_show_a_prediction_of_forces() -> None:
    job = make_estimator().job
    choice = choose_plan(job, Machine.named("a100-80gb"), {})
    predicted, plan = choice.predicted, choice.plan
    assert predicted is not None
    assert predicted["memory"]["peak"] > 0
    assert predicted["mfu"] > 0
    assert plan.recompute == "none"
    assert tightfit.explain(job, machine=Machine.named("a100-80gb"))
