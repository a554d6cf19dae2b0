"""What a loss keeps in its attributes stays as it is while plans are searched and runs are built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tightfit
from tightfit.models.loss_state import ObjectState, keeping_losses, note_loss
from tightfit.planner.dry_run import dry_run
from tightfit.planner.estimator import Estimator
from tightfit.planner.split_check import loss_depends_on_split


class Annealed:
    """Its second term grows with the number of calls."""

    def __init__(self) -> None:
        self.calls, self.seen, self.table = 0, [], None

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.table = torch.arange(output.shape[1])
        return functional.cross_entropy(output, batch[1]) + min(1.0, self.calls / 10) * output.square().mean()

    def of_pair(self, output: Tensor, batch: Any) -> Tensor:
        return self(output, batch)


class AnnealedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Annealed()
        self.part = nn.Identity()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor, batch: Any) -> Tensor:
        self.calls = self.calls + 1
        self.part.called = True
        return functional.cross_entropy(output, batch[1]) * self.calls


def job(loss: Any) -> tightfit.Job:
    data = [(torch.randn(8), number % 4) for number in range(32)]
    train = tightfit.Train(batch=8, steps=2, learning_rate=1e-2)
    return tightfit.Job(model=lambda: nn.Linear(8, 4), data=data, loss=loss, train=train, allow=[])


def plan_and_build(loss: Any) -> Any:
    asked = job(loss)
    chosen = tightfit.search(asked)[0]
    dry_run(asked, tightfit.Plan())
    tightfit.estimate(asked, {}, "l4")
    return tightfit.build(asked, chosen.plan)


@pytest.mark.slow
@pytest.mark.sweep(8)
@pytest.mark.parametrize("form", ["object", "method", "objective"])
def test_planning_does_not_change_an_object(form: str) -> None:
    loss = Annealed()
    given: Any = {
        "object": loss,
        "method": loss.of_pair,
        "objective": tightfit.Objective(lambda model, batch: loss(model(batch[0]), batch) * len(batch[0]), len),
    }[form]
    run = plan_and_build(given)
    if form == "objective":  # a function, whose closure is not known
        return
    assert (loss.calls, loss.seen, loss.table) == (0, [], None)
    list(tightfit.train(run))
    assert loss.seen == [1, 2]
    assert loss.table is not None
    assert loss.table.tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_planning_does_not_change_a_module() -> None:
    loss = AnnealedModule()
    run = plan_and_build(loss)
    assert float(loss.calls) == 0
    assert not hasattr(loss.part, "called")
    list(tightfit.train(run))
    assert float(loss.calls) == 2


def test_a_batch_is_not_split_for_a_loss_that_counts_its_calls() -> None:
    assert "each call of the loss changes" in loss_depends_on_split(
        Estimator(job(Annealed()), tightfit.Machine.named("l4"))
    )


def test_states_are_restored() -> None:
    class Keeps:
        def __init__(self) -> None:
            self.number, self.list, self.dict, self.set = 1, [1], {"a": 1}, {1}

    one = Keeps()
    kept = one.list
    state = ObjectState(one)
    assert not state.has_changed
    one.number, one.other = 2, 3  # type: ignore[attr-defined]
    one.list += [2]
    one.dict["b"] = 2
    one.set.add(2)
    assert state.has_changed
    state.restore()
    assert vars(one) == {"number": 1, "list": [1], "dict": {"a": 1}, "set": {1}}
    assert one.list is kept
    note_loss(one)
    note_loss(one)
    with pytest.raises(ValueError, match="wrong"), keeping_losses():  # noqa: PT012
        one.number = 5
        raise ValueError("wrong")
    assert one.number == 1
