"""States of a user's optimizer that are lists and dicts of tensors, as SOAP's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tests.pool import together
from tightfit.errors import InputError
from tightfit.optim.nested_states import flatten_state, is_nested, rebuild_state

HERE = "tests.optim.test_nested_states:"


class Nested(torch.optim.Optimizer):
    """Averages gradients in a list, and counts in a dict with a tuple."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["means"] = [torch.zeros(len(parameter)), torch.zeros_like(parameter)]
                    state["more"] = {"count": 0, "none": None, "both": (torch.ones(()), 2.5)}
                rows, whole = state["means"]
                rows.lerp_(parameter.grad.flatten(1).mean(1) if parameter.dim() > 1 else parameter.grad, 0.5)
                whole.lerp_(parameter.grad, 0.5)
                state["more"]["count"] += 1
                factor = state["more"]["count"] * state["more"]["both"][0].mul_(1.1)
                parameter.sub_((whole + rows.view(-1, *[1] * (parameter.dim() - 1))) * factor, alpha=group["lr"])


def job(optimizer: Any = Nested) -> tightfit.Job:
    data = [(torch.randn(5, generator=torch.Generator().manual_seed(number)), number % 3) for number in range(32)]
    train = tightfit.Train(batch=4, steps=6, optimizer=lambda parameters: optimizer(parameters), trackers=())
    return tightfit.Job(model=lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), data=data, train=train)


def test_a_resumed_run_has_the_nested_states(tmp_path: Path) -> None:
    run = tightfit.build(job())
    losses = []
    for step in tightfit.train(run):
        losses.append(step.loss)
        if step.step == 2:
            tightfit.save(run, tmp_path, 3)
    again = tightfit.build(job())
    start = tightfit.resume(again, tmp_path)
    assert start == 3
    state = next(iter(again.optimizer.state.values()))
    assert isinstance(state["means"], list)
    assert state["more"]["both"][1] == 2.5
    assert state["more"]["none"] is None
    assert state["more"]["count"] == 3
    assert [step.loss for step in tightfit.train(again, start)] == losses[3:]


def test_a_description_survives_json() -> None:
    value = [torch.ones(2), {"a": (torch.zeros(1), 3, None)}, []]
    description, tensors = flatten_state(value)
    again = rebuild_state(json.loads(json.dumps(description)), {str(at): one for at, one in enumerate(tensors)})
    assert torch.equal(again[0], torch.ones(2))
    assert isinstance(again[1]["a"], tuple)
    assert again[1]["a"][1:] == (3, None)
    assert again[2] == []


def test_quantized_states_and_tensors_are_not_nested() -> None:
    packed: dict[str, Tensor] = {"codes": torch.ones(1), "scale": torch.ones(1)}
    assert not any(map(is_nested, (packed, torch.ones(1), 3)))
    assert all(map(is_nested, ([], (torch.ones(1),), {"a": 1})))


class Elementwise(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                (mean,) = self.state[parameter].setdefault("means", [torch.zeros_like(parameter)])
                parameter.sub_(mean.lerp_(parameter.grad, 0.5), alpha=group["lr"])


def sharded(elementwise: bool) -> list[float] | str:
    try:
        run = tightfit.build(job(Elementwise if elementwise else Nested), tightfit.Plan(zero=1, dp_shard=2))
    except InputError as error:
        return str(error)
    return [step.loss for step in tightfit.train(run)]


def test_sharded_nested_states_are_refused_or_whole() -> None:
    assert "keeps its state 'means' in a list or dict" in together(2, HERE + "sharded", True)[0]
    expected = [step.loss for step in tightfit.train(tightfit.build(job()))]
    assert together(2, HERE + "sharded", False)[0] == pytest.approx(expected, rel=1e-5)
