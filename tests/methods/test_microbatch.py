"""Splits of a batch: any number of micro-batches, a short last one, BatchNorm corrected; advice on
widths."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import tightfit
from tests import tiny
from tightfit.errors import TightfitWarning
from tightfit.machine import Machine
from tightfit.methods.microbatch import correct_running_norms
from tightfit.models.batches import sample_count
from tightfit.planner.estimator import Estimator


@pytest.mark.parametrize(
    ("micro_batch", "pieces"), [(None, [8]), (8, [8]), (4, [4, 4]), (3, [3, 3, 2]), (1, [1] * 8), (7, [7, 1])]
)
def test_the_batch_is_split_into_micro_batches(micro_batch: int | None, pieces: list[int]) -> None:
    run = tightfit.build(tiny.job(batch=8), tightfit.Plan(micro_batch=micro_batch))
    micro_batches = next(iter(run.data.steps(0, None)))
    assert [sample_count(batch) for batch in micro_batches] == pieces


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_running_statistics_decay_as_with_one_batch(pieces: int) -> None:
    """A step of `pieces` equal micro-batches moves them as far as one step of the whole batch."""
    whole, split = nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4))
    correct_running_norms(split, pieces)
    batch = torch.randn(16, 4) + 3
    for _ in range(3):
        whole(batch)
        for _ in range(pieces):
            split(batch)
    torch.testing.assert_close(split[0].running_mean, whole.running_mean)
    torch.testing.assert_close(split[0].running_var, whole.running_var)


def test_a_cumulative_average_needs_no_correction() -> None:
    norm = nn.BatchNorm1d(4, momentum=None)
    correct_running_norms(norm, 4)
    assert norm.momentum is None


def test_momentum_is_corrected_by_the_number_of_micro_batches() -> None:
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


def test_instance_norms_keep_the_statistics_of_whole_batches() -> None:
    job = tightfit.Job(
        model=lambda: nn.Sequential(nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten(), nn.Linear(24, 2)),
        data=[(torch.randn(4, 6) + 3, index % 2) for index in range(8)],
        train=tightfit.Train(batch=8, steps=4),
    )
    means = []
    for size in (None, 4, 1):
        run = tightfit.build(job, tightfit.Plan(micro_batch=size))
        list(tightfit.train(run))
        means.append(run.model[0].running_mean)  # type: ignore[index]
    torch.testing.assert_close(means[1], means[0], rtol=0.05, atol=0)
    torch.testing.assert_close(means[2], means[0], rtol=0.05, atol=0)


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("device", "widths", "micro_batch", "said"),
    [
        ("a100-80gb", (64, 128, 512), 8, []),
        ("a100-80gb", (64, 100, 512), 8, ["layer width 100: 128 would fill tiles of 64"]),
        ("a100-80gb", (72, 128, 514), 8, ["layer width 72: 128", "layer width 514: 576"]),
        ("a100-80gb", (64, 128, 512), 6, ["micro_batch 6: a multiple of 8, such as 8"]),
        ("host", (16, 32, 48), 6, []),
        ("host", (16, 24, 50), 6, ["layer width 24: 32", "layer width 50: 64"]),
    ],
)
def test_advice_names_sizes_that_waste_tiles(
    device: str, widths: tuple[int, ...], micro_batch: int, said: list[str]
) -> None:
    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(*sizes) for sizes in pairwise(widths)))

    data = [(torch.zeros(widths[0]), 1)] * 24
    job = tightfit.Job(model=model, data=data, train=tightfit.Train(batch=24, steps=1))
    machine = Machine.detect() if device == "host" else Machine.named(device)
    advice = Estimator(job, machine).estimate(tightfit.Plan(micro_batch=micro_batch)).advice
    assert len(advice) == len(said)
    assert all(line.startswith(start) for line, start in zip(advice, said, strict=True))


def test_advice_takes_no_number_of_tokens_for_a_width() -> None:
    """The loss in chunks computes the head's weight gradient in forward, whose inner size is the tokens."""
    llama = {"architecture": "llama", "vocab_size": 320, "hidden_size": 16, "intermediate_size": 32}
    job = tightfit.Job(
        model=llama | {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2},
        data={"synthetic": "tokens", "sequence_length": 8},
        train={"batch": 4, "steps": 1},
    )
    estimate = Estimator(job, Machine.detect()).estimate(tightfit.Plan(chunked_loss=28))
    assert estimate.advice == []


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "micro_batch", "said"), [(True, 8, 1), (True, None, 0), (False, 8, 0)])
def test_advice_says_that_batch_norm_is_split(norm: bool, micro_batch: int | None, said: int) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128) if norm else nn.LayerNorm(128), nn.Linear(128, 64))

    job = tightfit.Job(model=model, data=[(torch.zeros(64), 1)] * 24, train=tightfit.Train(batch=24, steps=1))
    advice = Estimator(job, Machine.named("a100-80gb")).estimate(tightfit.Plan(micro_batch=micro_batch)).advice
    assert [line.startswith("micro_batch 8: BatchNorm normalises each micro-batch") for line in advice] == [True] * said


def routed(architecture: str, capacity: int = 4) -> tightfit.Job:
    sizes = {"vocab_size": 48, "d_model": 16, "num_experts": 2, "decoder_start_token_id": 2}
    stacks = {"layers": 2, "ffn_dim": 16, "sparse_step": 2, "attention_heads": 2, "layerdrop": 0.0}
    without = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "moe_token_dropout"), 0.0)
    layers = {
        "nllb-moe": {f"{one}_{name}": value for one in ("encoder", "decoder") for name, value in stacks.items()}
        | without,
        "switch_transformers": {"d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 2},
    }
    rows = [torch.randint(4, 48, (6,), generator=torch.Generator().manual_seed(n)) for n in range(8)]
    return tightfit.Job(
        model={"architecture": architecture, "expert_capacity": capacity, **sizes, **layers[architecture]},
        data=[{"input_ids": row, "labels": row.clone()} for row in rows],
        train=tightfit.Train(batch=4, steps=1),
    )


@pytest.mark.parametrize(("capacity", "is_limit"), [(4, True), (24, False)])
def test_splitting_a_batch_warns_if_experts_drop_tokens(capacity: int, is_limit: bool) -> None:
    """NLLB-MoE counts the tokens of a whole forward. Warnings are errors here."""
    job = routed("nllb-moe", capacity)
    with pytest.warns(TightfitWarning, match="micro-batch, here 2 of 4"):
        divided = tightfit.build(job, tightfit.Plan(micro_batch=2))
    whole = tightfit.build(job, tightfit.Plan(recompute="full"))
    found, expected = [next(iter(tightfit.train(run))).loss for run in (divided, whole)]
    assert (found != pytest.approx(expected, rel=2e-6)) == is_limit


def test_experts_that_count_per_sequence_give_no_warning() -> None:
    tightfit.build(routed("switch_transformers"), tightfit.Plan(micro_batch=2))
