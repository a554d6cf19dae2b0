"""FLOPs counted from a run's own forward agree with the formulas of the literature."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tests.contract.cases import BERT, LLAMA, VIT, make_case
from tests.sweeps import spread
from tightfit._torch.fake import FakeTensor
from tightfit.machine import Figure, Machine
from tightfit.measure.flops import forward_flops, matrix_utilization, mfu
from tightfit.measure.observer import Observer
from tightfit.planner.estimator import Estimator

BATCH, LENGTH = 8, 16
LAYERS, HIDDEN, INNER, HEADS, GROUPS, VOCABULARY = 4, 32, 128, 4, 2, 160
ATTENTION = 4 * LAYERS * HIDDEN * LENGTH  # for a token: the products with keys and with values, of all pairs


def count(job: tightfit.Job, **plan: Any) -> int | None:
    run = tightfit.build(job, tightfit.Plan(**plan))
    return forward_flops(run, next(run.data.steps(0, None))[0])


def test_llama_counts_every_matrix_and_every_attention_pair() -> None:
    matrices = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN * GROUPS // HEADS + 3 * HIDDEN * INNER)
    matrices += HIDDEN * VOCABULARY
    tokens = BATCH * LENGTH
    assert count(make_case("llama").job) == 2 * matrices * tokens + ATTENTION * tokens


def test_three_forwards_take_6p_plus_12lhs_flops_per_token() -> None:
    """P counts tied embeddings once."""
    job = make_case("llama").job.replace(model={**LLAMA, "tie_word_embeddings": True})
    run = tightfit.build(job)
    parameters = sum(p.numel() for p in run.model.parameters() if p.dim() >= 2)  # but for the norms' vectors
    flops = forward_flops(run, next(run.data.steps(0, None))[0])
    assert flops is not None
    per_token = 3 * flops / (BATCH * LENGTH)
    assert per_token == 6 * parameters + 12 * LAYERS * HIDDEN * LENGTH


def test_vit_counts_its_patches_blocks_and_head() -> None:
    patches, labels = 4, 10
    places = patches + 1
    embedding = 2 * patches * (3 * 8 * 8) * HIDDEN
    blocks = 2 * places * LAYERS * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * INNER) + 4 * LAYERS * HIDDEN * places**2
    assert count(make_case("vit").job) == BATCH * (embedding + blocks + 2 * HIDDEN * labels)


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("name", "plan"),
    spread(
        ["llama", "bert", "vit", "batchnorm"],
        [
            {"precision": "bf16-true"},
            {"precision": "bf16-mixed"},
            {"recompute": "full"},
            {"recompute": "sqrt"},
            {"compile": "block"},
            {"compile": "model"},
        ],
        3,
    ),
)
def test_a_plan_does_not_change_the_count(name: str, plan: dict[str, Any]) -> None:
    job = make_case(name).job
    plain = count(job)
    assert plain
    assert count(job, **plan) == plain


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("plan", [{"chunked_loss": 5}, {"attention": "blocked"}], ids=str)
def test_a_plan_does_not_change_the_count_of_language_models(name: str, plan: dict[str, Any]) -> None:
    job = make_case(name).job
    assert count(job, **plan) == count(job)


def test_a_micro_batch_counts_for_its_samples() -> None:
    job = make_case("vit").job
    whole, half = count(job), count(job, micro_batch=BATCH // 2)
    assert half is not None
    assert whole == 2 * half


@pytest.mark.sweep(8)
@pytest.mark.parametrize("model", [LLAMA, BERT], ids=lambda model: model["architecture"])
def test_padding_counts_like_other_positions(model: dict[str, Any]) -> None:
    tokens = torch.arange(LENGTH)
    samples = [{"input_ids": tokens, "labels": tokens, "attention_mask": (tokens < 12).long()}] * BATCH
    job = tightfit.Job(model=model, data=samples, train=tightfit.Train(batch=BATCH, steps=1))
    unpadded = job.replace(data=[{name: sample[name] for name in ("input_ids", "labels")} for sample in samples])
    assert count(job)
    assert count(job) == count(unpadded)


def test_counting_does_not_change_the_run() -> None:
    job = make_case("vit").job.replace(model={**VIT, "hidden_dropout_prob": 0.1})
    run = tightfit.build(job)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    state = torch.get_rng_state()
    assert forward_flops(run, next(run.data.steps(0, None))[0])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
    assert all(type(parameter) is nn.Parameter for parameter in run.model.parameters())


class Remembering(nn.Module):
    """Has one layer under two names, draws from Python's generator, and notes what its forward computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(self.first), nn.Sequential(self.first)])
        self.outputs: list[Tensor] = []
        self.latest: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            self.outputs.append(x.detach())
        self.latest = x.detach() if random.random() < 2 else None
        return x


def test_training_goes_on_with_the_model_after_a_count() -> None:
    samples = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), i % 4) for i in range(4)]

    def losses(observed: bool) -> list[float]:
        job = tightfit.Job(
            model=Remembering, data=samples, train=tightfit.Train(optimizer="sgd", learning_rate=0.1, batch=4, steps=6)
        )
        run = tightfit.build(job)
        observer = Observer(run, 0)
        steps = list(tightfit.train(run, take=observer.take) if observed else tightfit.train(run))
        if observed:
            assert observer.flops_per_step
        model = run.model
        assert isinstance(model, Remembering)
        tensors = [*model.parameters(), *model.outputs, model.latest]
        assert not any(isinstance(one, FakeTensor) for one in tensors)
        assert len(model.outputs) == 2 * 6
        return [step.loss for step in steps]

    assert losses(observed=True) == losses(observed=False)


class Refusing(nn.Module):
    """A model whose operations depend on the values it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (2.0 if x.sum().item() > 0 else 1.0)


@pytest.mark.parametrize("frozen", [False, True])
def test_frozen_weights_take_no_products_for_their_gradients(frozen: bool) -> None:
    """Two layers have as many weights each: with one frozen, forward and backward are 2.5 forwards."""

    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        made[0].requires_grad_(not frozen)
        return made

    data = [(torch.randn(64), number) for number in range(8)]
    job = tightfit.Job(model=model, data=data, train=tightfit.Train(optimizer="sgd", batch=8, steps=3))
    forward = 2 * 8 * 2 * 64 * 64
    assert (
        Estimator(job, Machine.detect()).estimate(tightfit.Plan()).ledger.model_flops()
        == (2.5 if frozen else 3) * forward
    )
    run = tightfit.build(job)
    observer = Observer(run, 0)
    list(tightfit.train(run, take=observer.take))
    assert observer.flops_per_step == (2.5 if frozen else 3) * forward


def test_a_model_that_reads_values_has_no_count() -> None:
    samples = [(torch.ones(4), 1)] * BATCH
    job = tightfit.Job(model=Refusing, data=samples, train=tightfit.Train(batch=BATCH, steps=1))
    assert count(job) is None


def test_mfu_uses_the_published_peak_not_the_achieved_rate() -> None:
    memory = Figure(value=1, source="system")
    rates = {kind: Figure(value=200.0, source="measured") for kind in ("bf16", "fp32")}
    peaks = {"bf16": Figure(value=400.0, source="published")}
    machine = Machine(
        name="here",
        device="cpu",
        memory_bytes=memory,
        host_memory_bytes=memory,
        matrix_flops_per_s=rates,
        matrix_peak_flops_per_s=peaks,
    )
    assert (mfu(300.0, 3.0, machine, "bf16-mixed"), matrix_utilization(300.0, 3.0, machine, "bf16-mixed")) == (
        0.25,
        0.5,
    )
    assert (mfu(300.0, 3.0, machine, "fp32"), matrix_utilization(300.0, 3.0, machine, "fp32")) == (None, 0.5)
    for share in (mfu, matrix_utilization):
        assert share(300.0, 3.0, machine, "fp16-mixed") is None
        assert share(None, 3.0, machine, "bf16-true") is None
        assert share(300.0, None, machine, "bf16-true") is None
