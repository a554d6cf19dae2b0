"""verify passes for plans that train the same job, and only for those."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from tests import tiny
from tests.contract import cases
from tightfit.distributed.mesh import PendingSum
from tightfit.engine import step
from tightfit.engine.build import build
from tightfit.measure import verify
from tightfit.measure.verify import Tolerances, Verification
from tightfit.methods import recompute
from tightfit.models.batches import Batch
from tightfit.runtime.run import Run

DROPPING: dict[str, dict[str, Any]] = {
    "bert": {"architecture": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 64, "vocab_size": 96, "max_position_embeddings": 32},
    "t5": {"architecture": "t5", "d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 96},
    "opt": {"architecture": "opt", "hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "ffn_dim": 64, "vocab_size": 96, "max_position_embeddings": 32,
            "attention_dropout": 0.1},
    "electra": {"architecture": "electra", "embedding_size": 32, "hidden_size": 32, "num_hidden_layers": 2,
                "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 96, "max_position_embeddings": 32},
}  # fmt: skip
"""Small models that drop elements by default, which no other test trains with these plans."""


@pytest.fixture
def job() -> tightfit.Job:
    return tiny.job().replace(model={**tiny.MODEL, "attention_dropout": 0.0})


@pytest.mark.parametrize(
    "plan",
    [
        {"micro_batch": 3, "recompute": "full", "chunked_loss": 8},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true", "rounding": "kahan"},
        {"precision": "fp16-mixed"},
        {"update_in_backward": True, "states": "8-bit"},
        {"attention": "blocked", "materialize": "device"},
    ],
    ids=str,
)
def test_equivalent_plans_pass(job: tightfit.Job, plan: dict[str, Any]) -> None:
    result = tightfit.verify(job, tightfit.Plan(**plan))
    assert result.passed, result
    assert set(result.content()) == {"max_relative_error", "tolerance", "tolerances", "passed"}
    for each in ("max_relative_error", "tolerances"):
        assert set(result.content()[each]) == {"loss", "gradients", "weights"}  # type: ignore[call-overload]


@pytest.mark.sweep(12)
@pytest.mark.parametrize("architecture", ["bert", "t5", "opt", "electra"])
@pytest.mark.parametrize(
    "plan", [{"dropout": "16-bit"}, {"attention": "blocked"}, {"micro_batch": 2}, {"recompute": "full"}], ids=str
)
def test_models_with_dropout_are_compared_without_it(architecture: str, plan: dict[str, Any]) -> None:
    """Layers of torch drop elements in BERT, ELECTRA and T5, and functions in OPT. Each of these
    plans may drop others than the reference does."""
    job = tightfit.Job(
        model=DROPPING[architecture],
        data={"synthetic": "tokens", "sequence_length": 16, "samples": 16},
        train=tightfit.Train(batch=4, steps=4, trackers=()),
    )
    result = tightfit.verify(job, tightfit.Plan(**plan))
    assert result.passed, result


def test_dropout_is_switched_off_in_every_layer() -> None:
    job = tightfit.Job(model=DROPPING["opt"], data={"synthetic": "tokens", "sequence_length": 8, "samples": 8})
    model = build(job, tightfit.Plan()).model
    before = [module.dropout for module in model.modules() if hasattr(module, "dropout")]
    assert before
    assert all(before)
    verify.switch_off_dropout(model)
    assert not any(module.dropout for module in model.modules() if hasattr(module, "dropout"))


def test_fp32_plans_agree_to_rounding(job: tightfit.Job) -> None:
    result = tightfit.verify(job, tightfit.Plan(micro_batch=1, recompute="full", chunked_loss=5, materialize="device"))
    assert max(result.loss, result.gradients) < 1e-5


def test_a_method_that_changes_the_job_fails(job: tightfit.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = recompute.recomputed

    def sabotaged(*arguments: Any) -> Any:
        again = honest(*arguments)
        return lambda *args, **kwargs: again(*args, **kwargs) * 1.5

    monkeypatch.setattr(recompute, "recomputed", sabotaged)
    assert not tightfit.verify(job, tightfit.Plan(recompute="full")).passed


@pytest.mark.sweep(16)
@pytest.mark.parametrize("name", cases.NAMES)
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16-true", "fp16-mixed", "fp16-true"])
def test_every_precision_passes_with_the_default_epsilon(name: str, precision: str) -> None:
    """A learning rate of 1e-2 with a tiny epsilon amplifies rounding most."""
    job = cases.make_case(name, epsilon=1e-8).job
    result = tightfit.verify(job, tightfit.Plan(precision=precision, recompute="full"), steps=6)
    assert result.passed, result


@pytest.mark.parametrize("states", ["bf16", "8-bit", "4-bit"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_narrow_optimizer_states_pass(states: str, precision: str) -> None:
    job = cases.make_case("llama", epsilon=1e-8).job
    result = tightfit.verify(job, tightfit.Plan(states=states, precision=precision), steps=6)
    assert result.passed, result


def by_micro_batches(run: Run, micro_batches: list[Batch], items: Callable[[], int]) -> PendingSum:
    """What many loops do: each micro-batch's mean, and the mean of these. Right only where all count as many items."""
    total = torch.zeros(())
    for batch in micro_batches:
        loss = run.loss_sum(batch) / run.objective.count(batch)
        (loss / len(micro_batches)).backward()
        total += loss.detach() / len(micro_batches)
    return PendingSum(total * items())


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_averaging_uneven_micro_batches_fails(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tightfit.Plan(precision=precision, micro_batch=1)
    job = cases.make_case(name).job
    assert tightfit.verify(job, plan).passed
    monkeypatch.setattr(step, "accumulate", by_micro_batches)
    result = tightfit.verify(job, plan)
    assert not result.passed
    assert result.gradients > result.tolerances.gradients


def test_summing_instead_of_averaging_gradients_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients show it: Adam's weights would not."""
    honest = step.accumulate

    def summed(run: Run, micro_batches: list[Batch], items: Callable[[], int]) -> PendingSum:
        return honest(run, micro_batches, items if run.plan == tightfit.Plan() else lambda: 1)

    monkeypatch.setattr(step, "accumulate", summed)
    assert not tightfit.verify(cases.make_case("llama").job, tightfit.Plan(precision="bf16-mixed")).passed


def test_batch_norm_over_micro_batches_fails() -> None:
    job = cases.make_case("batchnorm").job
    assert not tightfit.verify(job, tightfit.Plan(micro_batch=2)).passed
    assert tightfit.verify(job, tightfit.Plan(recompute="full")).passed


def test_a_loss_scale_that_starts_too_high_settles_first() -> None:
    """The mean of losses in the thousands, times 2^16, overflows in fp16; the skipped step is no difference in mathematics."""

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(8, 1)

    samples = [{"inputs": torch.randn(8), "target": torch.tensor(100.0)} for _ in range(16)]
    job = tightfit.Job(
        model=make_model,
        data=samples,
        loss=lambda output, batch: (output.float().squeeze(1) - batch["target"]).square().mean(),
        train=tightfit.Train(batch=4, steps=3, learning_rate=1e-2),
        allow=["fp16"],
    )
    plan = tightfit.Plan(precision="fp16-true")
    assert next(iter(tightfit.train(tightfit.build(job, plan)))).skipped
    result = tightfit.verify(job, plan)
    assert result.passed, result
    assert not tightfit.verify(job, plan.replace(loss_scale=2.0**16)).passed


@pytest.mark.parametrize("name", ["loss", "gradients", "weights"])
def test_nan_fails(name: str) -> None:
    errors = {"loss": 0.0, "gradients": 0.0, "weights": 0.0}
    tolerances = Tolerances.of(tightfit.Plan(), 0.1)
    assert Verification(**errors, tolerances=tolerances).passed
    assert not Verification(**{**errors, name: math.nan}, tolerances=tolerances).passed


def test_tolerances_depend_on_precision_states_and_comparison() -> None:
    still, moved = (Tolerances.of(tightfit.Plan(), way) for way in (0.0, 1.0))
    assert still.gradients == still.weights == still.loss == 2.0**-12
    assert moved.gradients == still.gradients
    assert moved.weights == pytest.approx(2.0**-12 + 2 * 2.0**-6)
    assert Tolerances.of(tightfit.Plan(precision="bf16-true"), 0.0).gradients == 2.0**-4
    narrow = tightfit.Plan(states="4-bit")
    assert Tolerances.of(narrow, 1.0).weights == Tolerances.of(narrow, 1.0).loss == moved.weights + 0.5
    assert Tolerances.of(narrow, 0.0, loss_change=1.0).loss == 2.0**-12 + 0.5
    assert Tolerances.of(tightfit.Plan(), 0.0, loss_change=1.0) == still
