"""The memory of models with the CTC loss is predicted as it is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

import tightfit
from tightfit.engine.build import build
from tightfit.engine.step import take_step
from tightfit.measure.memory import sample_step
from tightfit.planner.dry_run import dry_run

STEPS, LABELS, CLASSES, BATCH = 60, 40, 16, 8
GENERATOR = torch.Generator().manual_seed(0)


class Recogniser(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, CLASSES))


def padded(logits: Tensor, targets: Tensor) -> Tensor:
    lengths = torch.full((len(targets),), STEPS), torch.full((len(targets),), LABELS)
    return functional.ctc_loss(logits.log_softmax(-1).transpose(0, 1), targets, *lengths)


def joined(logits: Tensor, targets: Tensor) -> Tensor:
    """Picks the labels that count, as transformers does, and refuses wrong ones."""
    if targets.max() >= CLASSES:
        raise ValueError("unknown label")
    counts = targets >= 0
    lengths = torch.full((len(targets),), STEPS), counts.sum(-1)
    return functional.ctc_loss(logits.log_softmax(-1).transpose(0, 1), targets.masked_select(counts), *lengths)


def listed(logits: Tensor, targets: Tensor) -> Tensor:
    """With the mean of the losses, torch fails for lists on fake tensors."""
    lengths = (STEPS,) * len(targets), (LABELS,) * len(targets)
    return functional.ctc_loss(logits.log_softmax(-1).transpose(0, 1), targets, *lengths, reduction="sum")


def own(loss: Callable[[Tensor, Tensor], Tensor]) -> tightfit.Job:
    data = [
        (torch.randn(STEPS, 8, generator=GENERATOR), torch.randint(1, CLASSES, (LABELS,), generator=GENERATOR))
        for _ in range(16)
    ]
    return tightfit.Job(
        model=Recogniser,
        data=data,
        loss=lambda logits, batch: loss(logits, batch[1]),
        allow=["bf16"],
        train=tightfit.Train(batch=BATCH, steps=4),
    )


def speech() -> tightfit.Job:
    sizes: dict[str, Any] = {
        "vocab_size": 32, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
        "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0, "layerdrop": 0.0,
        "ctc_loss_reduction": "sum",
    }  # fmt: skip
    data = [
        {
            "input_values": torch.randn(1600, generator=GENERATOR),
            "labels": torch.randint(1, 30, (20,), generator=GENERATOR),
        }
        for _ in range(16)
    ]
    loss = tightfit.Objective(lambda model, batch: model(**batch).loss, lambda batch: len(batch["labels"]))
    return tightfit.Job(
        model=lambda: Wav2Vec2ForCTC(Wav2Vec2Config(**sizes)),
        data=data,
        loss=loss,
        allow=["bf16"],
        train=tightfit.Train(batch=BATCH, steps=4),
    )


JOBS = {"padded": lambda: own(padded), "joined": lambda: own(joined), "listed": lambda: own(listed), "wav2vec2": speech}


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", JOBS)
def test_a_ctc_loss_takes_the_predicted_memory(name: str) -> None:
    asked = JOBS[name]()
    plan = tightfit.Plan(micro_batch=4) if name == "joined" else tightfit.Plan()
    run = build(asked, plan)
    steps = run.data.steps(0, None)
    take_step(run, next(steps), 0)
    _, measured = sample_step(run, next(steps), 1)
    predicted = tightfit.estimate(asked, plan)
    estimated = predicted.peak.total - predicted.peak.rows["runtime"] - predicted.peak.rows["allocator"]
    assert estimated == pytest.approx(measured.total, rel=0.02)
    assert dry_run(asked, plan).total == pytest.approx(measured.total, rel=0.02)
    assert predicted.notes == ()


def test_a_ctc_loss_is_planned_on_a_gpu() -> None:
    assert tightfit.search(own(padded), "a100-80gb")[0].fits
