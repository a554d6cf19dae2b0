"""A prediction says which line of the user's own model depends on values, which it cannot know."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tightfit.errors import Untraceable
from tightfit.models import value_reads
from tightfit.models.value_reads import passing_value


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


class Measuring(Settling):
    """Ends when a number is small, which it is the second time that it is read."""

    def forward(self, x: Tensor) -> Tensor:
        while x.abs().mean().item() > 1e-2:
            x = torch.tanh(self.layer(x))
        return x


class Straight(Settling):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.tensor(0.5).item()


def notes(model: type[nn.Module]) -> tuple[str, ...]:
    data = [(torch.randn(8), torch.randn(8)) for _ in range(8)]
    job = tightfit.Job(model=model, data=data, loss=nn.MSELoss(), train=tightfit.Train(batch=4, steps=2))
    return tightfit.estimate(job, {}).notes


def test_a_branch_on_values_is_named() -> None:
    (note,) = notes(Settling)
    assert note.startswith("test_branches.py, line 26 (while (after - before).abs().max() > 1e-2:)")
    assert notes(Straight) == ()
    (note,) = notes(Measuring)
    assert "(while x.abs().mean().item() > 1e-2:)" in note


def test_a_loop_that_never_ends_in_a_prediction_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_reads, "MOST_READS", 20)
    with pytest.raises(Untraceable, match=r"repeats test_branches.py, line \d+ .* until the value of a tensor changes"):
        notes(Counting)


class Checked(Straight):
    """Refuses wrong data in several ways."""

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 100 or (x.numel() and x.isnan().any()):
            raise ValueError("wrong data")
        if not x.isfinite().all():
            raise ValueError("infinite data")
        assert not (x > 1e9).any()
        assert (x < 1e9).all()
        return super().forward(x)


def test_checks_of_the_data_pass_in_a_prediction() -> None:
    assert notes(Checked) == ()


def test_the_value_that_passes_a_check_is_found(tmp_path: Path) -> None:
    code = """
if a(): raise ValueError
if not a():
    b()
    raise ValueError
elif (a() or
      b()):
    raise ValueError
if a() and not b(): raise ValueError
if a(): b()
assert not not a()
assert not a()
"""
    (tmp_path / "model.py").write_text(code)
    found = [passing_value((str(tmp_path / "model.py"), number)) for number in range(2, 13)]
    assert found == [False, True, None, None, False, False, None, None, None, True, False]
    (tmp_path / "other.py").write_text("%matplotlib inline\n")
    assert passing_value((str(tmp_path / "other.py"), 1)) is None
    assert passing_value(None) is None
