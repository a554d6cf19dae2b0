"""Losses that compare the samples of a batch: a search does not split their batches."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tightfit
from tests import tiny
from tightfit.errors import DoesNotFit, TightfitWarning
from tightfit.machine import Machine
from tightfit.models.equal_draws import EqualDraws
from tightfit.planner import search as search_module
from tightfit.planner import split_check
from tightfit.planner.choose import choose_plan
from tightfit.planner.estimator import Estimator
from tightfit.planner.search import search
from tightfit.planner.split_check import loss_depends_on_split

GPU = Machine.named("l4")
WIDTH, BATCH = 256, 8192


class Tower(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        hidden = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.first, self.layers = nn.Linear(8, WIDTH), nn.Sequential(*hidden, *layers)

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(self.layers(self.first(x)), dim=-1)


class Noisy(Tower):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand_like(x))


class Restless(Tower):
    """Draws numbers that no generator repeats."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + int.from_bytes(os.urandom(4), "little") / 2**36


class Centred(Tower):
    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found - found.mean(0)


class Counting(Tower):
    """Its output grows with the number of forwards, which it has in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return super().forward(x) * self.forwards / 10


class Masked(Tower):
    """Masks some of all inputs, as wav2vec 2.0 does: other ones if there are fewer samples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.from_numpy(np.random.rand(*x.shape) < 0.5))


class Teacher(Tower):
    """Its forward moves the weights of a teacher towards its own."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, WIDTH).requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.first.weight, 0.1)
        return super().forward(x) + 0.1 * self.teacher(x)


class Hooked(Tower):
    """Halves the gradient of a layer, or clips it."""

    def __init__(self, clips: bool) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda gradient: gradient.clamp(-1, 1) if clips else 0.5 * gradient)


def spectral() -> nn.Module:
    made = Tower()
    made.first = nn.utils.parametrizations.spectral_norm(made.first)
    return made


class Pairs:
    def __len__(self) -> int:
        return 2 * BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), torch.randn(WIDTH, generator=generator)


def contrast(output: Tensor, batch: Any) -> Tensor:
    """That of CLIP, without the product of all pairs, whose memory is quadratic in the batch."""
    far = output - functional.normalize(batch[1].roll(1, 0), dim=-1)
    return functional.softplus(2 - far.square().sum(1)).mean()


def zero_with_gradient(loss: Tensor) -> Tensor:
    return loss - loss.detach()


def apart(output: Tensor, batch: Any) -> Tensor:
    return functional.mse_loss(output, batch[1])


def estimator_of(model: Any, loss: Any, machine: Machine = GPU, **job: Any) -> Estimator:
    train = tightfit.Train(batch=BATCH, steps=2)
    return Estimator(tightfit.Job(model=model, data=Pairs(), loss=loss, train=train, allow=[], **job), machine)


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("model", "loss", "depends"),
    [
        (Tower, contrast, True),
        (Tower, tightfit.Objective(lambda model, batch: contrast(model(batch[0]), batch) * len(batch[0]), len), True),
        (Centred, nn.MSELoss(), True),
        (Counting, apart, False),  # what each forward changes is told apart: see changed_state
        (Masked, apart, False),
        (Tower, lambda output, batch: apart(output, batch) + zero_with_gradient(contrast(output, batch)), True),
        (Tower, apart, False),
        (Tower, nn.MSELoss(), False),
        (lambda: Tower(nn.Dropout(0.5)), apart, False),
        (lambda: Tower(nn.BatchNorm1d(WIDTH)), apart, False),  # its users know
        (Noisy, contrast, True),
        (Noisy, apart, False),
        (Restless, contrast, False),  # it cannot be told from its own noise
        (Tower, lambda output, batch: output.missing, False),  # building the run says why it fails
    ],
    ids=[
        "contrast",
        "objective",
        "mean over samples",
        "counts its calls",
        "masks drawn by NumPy",
        "in its gradient alone",
        "own",
        "torch",
        "dropout",
        "BatchNorm",
        "random",
        "random, own",
        "random in another way",
        "fails",
    ],
)
def test_a_loss_that_compares_samples_is_found(model: Any, loss: Any, depends: bool) -> None:
    estimator = estimator_of(model, loss)
    estimator.estimate = lambda plan: estimator_of(Tower, apart).estimate(plan)  # type: ignore[method-assign]
    drawn = torch.get_rng_state()
    assert bool(loss_depends_on_split(estimator)) is depends
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.slow
def test_large_models_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loss_depends_on_split(estimator_of(Tower, contrast))
    monkeypatch.setattr(split_check, "MOST_BYTES", 1)
    assert not loss_depends_on_split(estimator_of(Tower, contrast))


@pytest.mark.slow
def test_a_search_keeps_such_a_batch_whole() -> None:
    pins = {"compile": "none", "recompute": "none"}
    whole = estimator_of(Tower, contrast).estimate(tightfit.Plan())
    runtime = whole.peak.rows["runtime"]
    tight = {"limits": {"memory": int(runtime + 0.6 * (whole.peak_bytes - runtime))}}
    ordinary = estimator_of(Tower, apart, **tight)
    assert search(ordinary.job, GPU, pins, ordinary)[0].plan.micro_batch is not None
    compared = estimator_of(Tower, contrast, **tight)
    with pytest.raises(
        DoesNotFit, match="the training depends on how a batch is split: 8 samples have a loss of"
    ) as refused:
        search(compared.job, GPU, pins, compared)
    assert "plan.micro_batch: " not in str(refused.value)
    (note,) = search(compared.job, GPU, {**pins, "micro_batch": 256}, compared)[0].notes
    assert "This plan splits the batch, so it trains another loss" in note
    enough = estimator_of(Tower, contrast, limits={"memory": int(1.5 * whole.peak_bytes)})
    chosen = search(enough.job, GPU, pins, enough)[0]
    assert (chosen.plan.micro_batch, chosen.notes) == (None, ())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name"),
    [(Teacher, "teacher.weight"), (spectral, "first.parametrizations.weight.0._"), (Counting, "forwards")],
    ids=["teacher", "spectral norm", "counter"],
)
def test_a_search_does_not_repeat_what_a_forward_changes(
    model: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of a first step does not show it: the copy of a teacher equals its model at first."""
    monkeypatch.setattr(search_module, "loss_depends_on_split", lambda estimator: "")
    pins = {"compile": "none", "recompute": "none", "fused_optimizer": True}
    whole = estimator_of(model, apart).estimate(tightfit.Plan(**pins))
    tight = estimator_of(model, apart, limits={"memory": int(whole.peak_bytes - 0.4 * whole.peak.rows["activations"])})
    with pytest.raises(DoesNotFit, match=f"the forward changes {name}.*, which micro-batches do several times a step"):
        search(tight.job, GPU, pins, tight)
    (note,) = search(tight.job, GPU, {**pins, "micro_batch": 256}, tight)[0].notes
    assert "This plan splits the batch" in note
    two = Machine.named("l4:2")
    enough = estimator_of(model, apart, two)
    chosen = search(enough.job, two, {**pins, "dp_replicate": 2, "micro_batch": None}, enough)[0]
    assert not any("the forward changes" in note for note in chosen.notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clips", "note"),
    [
        (False, "the hook of first.weight gets the gradient of each part of a batch, not that of the whole batch"),
        (True, "the training depends on how a batch is split: a hook on the gradient of first.weight is not linear"),
    ],
)
def test_hooks_that_get_parts_of_a_gradient_are_told(clips: bool, note: str) -> None:
    estimator = estimator_of(lambda: Hooked(clips), apart)
    pins = {"compile": "none", "recompute": "none", "micro_batch": 256}
    (told,) = search(estimator.job, GPU, pins, estimator)[0].notes
    assert told.startswith(note)


def test_each_sample_gets_the_same_random_numbers() -> None:
    def draw(samples: int) -> list[Tensor]:
        probabilities = torch.full((samples, 5), 0.4)
        return [
            torch.rand(samples, 5),
            torch.randn(samples, 3, 4),
            torch.randn_like(probabilities),
            torch.empty(samples, 5).uniform_(-2, 2),
            torch.empty(samples, 5).normal_(3, 0.1),
            torch.normal(probabilities, 0.1),
            torch.randint(3, 9, (samples, 5)),
            torch.randint(7, (samples,)),
            torch.randint_like(probabilities, 2, 4),
            torch.bernoulli(probabilities),
            torch.empty(samples, 5).bernoulli_(0.5),
            torch.bernoulli(probabilities, 0.7),
            nn.functional.dropout(probabilities, 0.5),
            torch.empty(samples, 4, dtype=torch.int64).random_(5, 8),
        ]

    with EqualDraws():
        two, four, places = draw(2), draw(4), torch.randperm(6)
    assert places.tolist() == list(range(6))
    for small, large in zip(two, four, strict=True):
        assert torch.equal(torch.cat([small, small]), large)
    uniform, normal, integers, chances = four[0], four[1], four[6], four[9]
    assert 0 < uniform.min() < uniform.max() < 1
    assert len(set(uniform[0].tolist())) == 5
    assert abs(float(normal.mean())) < 0.3
    assert 0.6 < float(normal.std()) < 1.4
    assert set(integers.unique().tolist()) <= set(range(3, 9))
    assert integers.unique().numel() > 2
    assert 0 < chances.mean() < 1
    assert -2 < four[3].min() < 0 < four[3].max() < 2
    assert four[4].mean() == pytest.approx(3, abs=0.1)
    assert set(four[13].unique().tolist()) <= {5, 6, 7}


@pytest.mark.slow
def test_dividing_such_a_batch_over_devices_is_said() -> None:
    two = Machine.named("l4:2")
    estimator = estimator_of(Tower, contrast, two)
    chosen = search(estimator.job, two, {"compile": "none", "recompute": "none"}, estimator)[0]
    assert chosen.plan.devices == 2
    assert "This plan splits the batch" in chosen.notes[0]
    assert chosen.notes[0] in chosen.advice


def test_training_prints_why_a_batch_stays_whole_or_is_split() -> None:
    estimator = estimator_of(Tower, contrast)
    pins = {"compile": "none", "recompute": "none", "micro_batch": 256}
    choice = choose_plan(estimator.job, GPU, pins)
    assert choice.plan.micro_batch == 256
    assert choice.predicted is not None
    assert "the training depends on how a batch is split" in choice.predicted["notes"][0]
    assert "micro_batch" not in choice.reasons


def mean_over_tokens(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


@pytest.mark.parametrize(("packing", "depends"), [("padded", True), ("packed", False)])
def test_a_mean_over_the_tokens_of_padded_text_is_found(tmp_path: Path, packing: str, depends: bool) -> None:
    """Padded samples have unequal numbers of labels, although a prediction reads no text."""
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "one two three"}\n' * 16)
    job = tightfit.Job(
        model=tiny.LLAMA,
        data={"jsonl": str(file), "packing": packing, "sequence_length": 16},
        loss=mean_over_tokens,
        train=tightfit.Train(batch=8, steps=1),
    )
    estimator = Estimator(job, Machine.detect())
    assert bool(loss_depends_on_split(estimator)) == depends


class Tabled(Tower):
    """Computes a table in its first forward, and keeps it in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(0), persistent=False)
        self.register_buffer("other", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.table.numel() < WIDTH:
            self.table = torch.arange(WIDTH) / WIDTH
        return super().forward(x) + self.table + self.other


@pytest.mark.parametrize(
    ("model", "changed"), [(Tabled, ()), (Teacher, ("teacher.weight",)), (Counting, ("forwards",)), (Tower, ())]
)
def test_what_each_forward_changes_is_found(model: Any, changed: tuple[str, ...]) -> None:
    assert split_check.model_uses(estimator_of(model, apart)).changed == changed


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def weighted(output: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(output, batch[1], torch.arange(1.0, 5.0))


def classes_in_order(loss: Any) -> tightfit.Job:
    samples = [(torch.randn(8), number // 16) for number in range(64)]
    return tightfit.Job(model=Classes, data=samples, loss=loss, train=tightfit.Train(batch=32, steps=2))


def test_samples_sorted_by_class_do_not_hide_weights_of_classes() -> None:
    estimator = Estimator(classes_in_order(weighted), Machine.detect())
    assert "8 samples have a loss of" in loss_depends_on_split(estimator)


@pytest.mark.parametrize("fields", [{"micro_batch": 8}, {"micro_batch": 32}, {}])
def test_building_a_plan_that_splits_such_a_batch_warns(fields: dict[str, Any]) -> None:
    splits = fields.get("micro_batch", 32) < 32
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tightfit.build(classes_in_order(weighted), tightfit.Plan(**fields))
        tightfit.build(classes_in_order(None), tightfit.Plan(**fields))
    told = [str(one.message) for one in caught if issubclass(one.category, TightfitWarning)]
    assert len(told) == splits
    assert all("This plan splits the batch, so it trains another loss" in text for text in told)


class Pooled(nn.Module):
    """Averages over all positions, those of the padding, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 8), nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens).mean(1))


@pytest.mark.filterwarnings("ignore:samples differ in the length of tokens")
@pytest.mark.parametrize("ragged", [False, True])
def test_a_model_that_reads_the_padding_of_its_batch_is_found(ragged: bool) -> None:
    lengths = [3 + number if ragged else 5 for number in range(32)]
    samples = [{"tokens": torch.arange(1, 1 + length), "labels": length % 4} for length in lengths]
    job = tightfit.Job(model=Pooled, data=samples, train=tightfit.Train(batch=16, steps=2))
    assert bool(loss_depends_on_split(Estimator(job, Machine.detect()))) is ragged
