"""Splits of a batch: as many as it takes, the last one short, BatchNorm corrected; the advice on widths."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tightfit
from tightfit.methods.microbatch import advice, correct_batch_norm
from tightfit.models.objective import sample_count

from .. import tiny


@pytest.mark.parametrize(
    ("micro_batch", "pieces"), [(None, [8]), (8, [8]), (4, [4, 4]), (3, [3, 3, 2]), (1, [1] * 8), (7, [7, 1])]
)
def test_the_batch_in_pieces(micro_batch: int | None, pieces: list[int]) -> None:
    run = tightfit.build(tiny.job(batch=8), tightfit.Plan(micro_batch=micro_batch))
    micro_batches = next(iter(run.data.steps(0, None)))
    assert [sample_count(batch) for batch in micro_batches] == pieces


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_running_statistics_forget_as_fast_as_with_one_batch(pieces: int) -> None:
    """A step of `pieces` pieces of the same batch moves them as far as one step of the whole."""
    whole, split = nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4))
    correct_batch_norm(split, pieces)
    batch = torch.randn(16, 4) + 3
    for _ in range(3):
        whole(batch)
        for _ in range(pieces):
            split(batch)
    torch.testing.assert_close(split[0].running_mean, whole.running_mean)
    torch.testing.assert_close(split[0].running_var, whole.running_var)


def test_a_cumulative_average_needs_no_correction() -> None:
    norm = nn.BatchNorm1d(4, momentum=None)
    correct_batch_norm(norm, 4)
    assert norm.momentum is None


def test_build_corrects_by_the_number_of_pieces() -> None:
    job = tightfit.Job(
        model=lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        data=[(torch.randn(4), index % 2) for index in range(10)],
        train=tightfit.Train(batch=10, steps=1),
    )
    momenta = {
        size: tightfit.build(job, tightfit.Plan(micro_batch=size)).model[1].momentum for size in (None, 10, 5, 4)
    }
    assert momenta[None] == 0.1
    assert momenta[10] == pytest.approx(0.1)
    assert 1 - (1 - momenta[5]) ** 2 == pytest.approx(0.1)
    assert 1 - (1 - momenta[4]) ** 3 == pytest.approx(0.1)


def test_advice_names_widths_that_waste_tiles() -> None:
    assert advice(8, [64, 128, 4096], "cuda") == []
    assert advice(3, [16, 32], "cpu") == []
    odd, loose, micro_batch = advice(6, [50257, 72, 50257], "cuda")
    assert "50257" in odd
    assert "50264" in odd
    assert "72" in loose
    assert "128" in loose
    assert "micro_batch 6" in micro_batch
    assert "8" in micro_batch
    assert len(advice(3, [24], "cpu")) == 1
