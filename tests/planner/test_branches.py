"""A prediction says which line of the user's own model depends on values, which it cannot know."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tightfit.errors import Untraceable
from tightfit.models import dataflow


class Settling(nn.Module):
    """Repeats its layer until the result hardly changes: a prediction runs the loop once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        before, after = x, torch.tanh(self.layer(x))
        while (after - before).abs().max() > 1e-2:
            before, after = after, torch.tanh(self.layer(after))
        return after


class Counting(Settling):
    """Ends only when a value becomes False, which it never does in a prediction."""

    def forward(self, x: Tensor) -> Tensor:
        while True:
            x = torch.tanh(self.layer(x))
            if not (x.sum() > 1e9):
                return x
            if x.mean() > 0:
                continue


class Straight(Settling):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.tensor(0.5).item()


def notes(model: type[nn.Module]) -> tuple[str, ...]:
    data = [(torch.randn(8), torch.randn(8)) for _ in range(8)]
    job = tightfit.Job(model=model, data=data, loss=nn.MSELoss(), train=tightfit.Train(batch=4, steps=2))
    return tightfit.estimate(job, {}).notes


def test_a_branch_on_values_is_named() -> None:
    (note,) = notes(Settling)
    assert note.startswith("test_branches.py, line 23 (while (after - before).abs().max() > 1e-2:)")
    assert notes(Straight) == ()


def test_a_loop_that_never_ends_in_a_prediction_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataflow, "MOST_READS", 20)
    with pytest.raises(Untraceable, match=r"repeats test_branches.py, line \d+ .* until the value of a tensor changes"):
        notes(Counting)
