"""Models whose forward reads the values of tensors are checked like others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tightfit
from tightfit.errors import InputError, TightfitWarning
from tightfit.machine import Machine
from tightfit.models import fake_forward
from tightfit.models.block_state import changed_after_forward
from tightfit.models.fake_forward import uses_of_parameters
from tightfit.planner.estimator import Estimator
from tightfit.planner.search import _with_wide_weights

WIDTH = 8


def asserts(x: Tensor) -> None:
    assert not x.isnan().any().item()


def logs(x: Tensor) -> None:
    float(x.abs().mean().item())


def masks(x: Tensor) -> None:
    x[x > 0].sum()


def lists(x: Tensor) -> None:
    x.mean((1,)).tolist()


def finds_nonzero(x: Tensor) -> None:
    x.new_ones(len(x)).index_select(0, (x.sum(1) > 0).nonzero()[:, 0])


def finds_unique(x: Tensor) -> None:
    values, places = torch.unique((x > 0).long(), return_inverse=True)
    values[places].sum()


def repeats(x: Tensor) -> None:
    x.repeat_interleave(torch.ones(len(x), dtype=torch.int64), 0).sum()


def leaves_torch(x: Tensor) -> None:
    np.asarray(x.detach())


READS = [asserts, logs, masks, lists, finds_nonzero, finds_unique, repeats, leaves_torch]


class Block(nn.Module):
    """Scales by an attribute that the model sets between two passes."""

    def __init__(self, read: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.linear, self.scale, self.read = nn.Linear(WIDTH, WIDTH), 1.0, read

    def forward(self, x: Tensor) -> Tensor:
        self.read(x)
        return x + torch.tanh(self.linear(x)) * self.scale


class Two(nn.Module):
    """Runs its blocks twice, and averages a copy of its weights, as a teacher."""

    def __init__(self, read: Callable[[Tensor], None], scales: bool = True, averages: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(read) for _ in range(3))
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scales, self.averages = scales, averages

    def forward(self, x: Tensor) -> Tensor:
        for scale in (1.0, 2.0):
            for block in self.blocks:
                block.scale = scale if self.scales else 1.0
                x = block(x)
        if self.averages:
            with torch.no_grad():
                for mine, its in zip(self.teacher.parameters(), self.blocks[0].linear.parameters(), strict=True):
                    mine.lerp_(its, 0.1)
        return x - self.teacher(x)


def total(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def batch() -> Any:
    return torch.randn(6, WIDTH), torch.arange(6) % 3


@pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)
def test_a_read_of_values_hides_no_changed_attribute(read: Any) -> None:
    found = changed_after_forward(lambda: Two(read), total, batch(), None)
    assert "computes something else when it runs again" in found.changed
    assert found.unchecked == ""
    same = changed_after_forward(lambda: Two(read, scales=False), total, batch(), None)
    assert (same.changed, same.unchecked) == ("", "")


@pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)
def test_a_read_of_values_hides_no_changed_weight(read: Any) -> None:
    found = uses_of_parameters(lambda: Two(read), total, batch())
    assert set(found.in_place) == set(found.floating) == {"teacher.weight", "teacher.bias"}
    assert found.unchecked == ""
    assert uses_of_parameters(lambda: Two(read, averages=False), total, batch()).changed == ()


class ActNorm(nn.Module):
    """Sets its scale by its first batch, as a buffer says."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, 3)
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
                self.is_set.fill_(True)
        return self.head(x * self.scale)


def test_both_values_of_a_condition_are_tried() -> None:
    assert "scale" in uses_of_parameters(ActNorm, total, batch()).from_batch


class Memory(Block):
    """Updates a tensor that is no buffer, in place."""

    def __init__(self, read: Callable[[Tensor], None], overwrites: bool = False) -> None:
        super().__init__(read)
        self.memory, self.overwrites = torch.zeros(WIDTH), overwrites

    def forward(self, x: Tensor) -> Tensor:
        if self.overwrites:
            self.memory.copy_(x.detach().mean(0))
        else:
            self.memory.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x) + self.memory


class Remembering(nn.Module):
    def __init__(self, overwrites: bool, read: Callable[[Tensor], None] = asserts) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Memory(read, overwrites) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("read", [asserts, leaves_torch], ids=lambda read: read.__name__)
def test_blocks_that_update_a_tensor_of_theirs_are_found(read: Any) -> None:
    found = changed_after_forward(lambda: Remembering(False, read), total, batch(), None)
    assert "updates a tensor that is neither made in its call nor one of its buffers" in found.changed
    assert changed_after_forward(lambda: Remembering(True, read), total, batch(), None).changed == ""


def job(model: Any, **fields: Any) -> tightfit.Job:
    data = [(torch.randn(WIDTH), number % 3) for number in range(8)]
    return tightfit.Job(model=model, data=data, train=tightfit.Train(batch=4, steps=2), **fields)


def test_a_large_model_that_cannot_be_checked_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_forward, "MOST_REAL_BYTES", 0)
    with pytest.warns(TightfitWarning, match=r"could not check whether blocks compute the same(.|\n)*reference plan"):
        tightfit.build(job(lambda: Two(leaves_torch, scales=False)), tightfit.Plan(recompute="full"))
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tightfit.build(job(lambda: Two(leaves_torch, scales=False)), tightfit.Plan(recompute="full"))
    with pytest.raises(InputError, match="computes something else"):
        tightfit.build(job(lambda: Two(leaves_torch)), tightfit.Plan(recompute="full"))


def test_an_error_about_the_loss_is_raised_by_a_check_as_it_is() -> None:
    with pytest.raises(InputError, match="not a scalar tensor"):
        tightfit.build(job(lambda: Two(asserts), loss=lambda output, batch: output), tightfit.Plan(recompute="full"))


def test_weights_that_a_forward_averages_stay_in_fp32() -> None:
    asked, narrow = job(lambda: Two(asserts, scales=False)), tightfit.Plan(precision="bf16-true", rounding="kahan")
    with pytest.warns(TightfitWarning, match="changes teacher.* stores in 16 bits"):
        tightfit.build(asked, narrow)
    estimator = Estimator(asked, Machine.named("l4"))
    found = [estimator.estimate(narrow)]
    assert _with_wide_weights(estimator, {"precision": "bf16-true"}, found) is found
    first, *_ = _with_wide_weights(estimator, {}, found)
    assert first.plan.precision == "bf16-mixed"
    assert "So this plan has 32-bit weights" in first.notes[-1]
    plain = Estimator(job(lambda: Two(asserts, scales=False, averages=False)), Machine.named("l4"))
    assert _with_wide_weights(plain, {}, found) is found


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.calls = nn.Linear(WIDTH, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(x) / self.calls


def test_micro_batches_of_a_model_that_counts_are_warned_of() -> None:
    with pytest.warns(TightfitWarning, match="changes calls, and with plan.micro_batch=2"):
        tightfit.build(job(Counting), tightfit.Plan(micro_batch=2))


class Stored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)
        self.kept = [self.head.weight.data]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + x @ self.kept[0].t()


def test_the_data_of_a_parameter_in_a_list_is_found() -> None:
    assert uses_of_parameters(Stored, total, batch()).aliases == (
        "the forward reads head.weight from kept, which is no parameter",
    )


class Guarded(Two):
    """Cannot be created with the second guess of a value."""

    def __init__(self) -> None:
        super().__init__(logs)
        if not bool((torch.ones(2) > 0).all()):
            self.missing  # noqa: B018


def test_a_model_that_one_guess_cannot_create_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_forward, "MOST_REAL_BYTES", 0)
    found = changed_after_forward(Guarded, total, batch(), None)
    assert "computes something else when it runs again" in found.changed
    assert found.unchecked == ""
