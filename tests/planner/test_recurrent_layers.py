"""The memory of nn.LSTM, nn.GRU and nn.RNN is predicted as it is measured, and on a GPU they are cuDNN's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tightfit
from tightfit.engine.build import build
from tightfit.engine.step import take_step
from tightfit.errors import Untraceable
from tightfit.measure.memory import sample_step
from tightfit.planner.dry_run import dry_run
from tightfit.planner.tracing import recurrent_layers

GPU = tightfit.Machine.named("a100-80gb")
WIDTH, HIDDEN, LENGTH, BATCH = 32, 48, 20, 8


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH)
        self.layers = kind(WIDTH, HIDDEN, batch_first=True, **options)
        self.head = nn.Linear(HIDDEN * (1 + self.layers.bidirectional), 100)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens))[0])


class Packed(Tagger):
    def forward(self, tokens: Tensor) -> Tensor:
        lengths = (tokens > 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(self.embedding(tokens), lengths, True, False)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.layers(packed)[0], True, total_length=LENGTH)[0])


def job(model: Any) -> tightfit.Job:
    tokens = torch.randint(1, 100, (32, LENGTH), generator=torch.Generator().manual_seed(0))
    data = [(row, row) for row in tokens]

    def loss(logits: Tensor, batch: list[Tensor]) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    return tightfit.Job(model=model, data=data, loss=loss, allow=["bf16"], train=tightfit.Train(batch=BATCH, steps=4))


KINDS: dict[str, Any] = {
    "lstm": lambda: Tagger(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.1),
    "gru": lambda: Tagger(nn.GRU, num_layers=2),
    "tanh": lambda: Tagger(nn.RNN),
}


@pytest.mark.sweep(12)
@pytest.mark.parametrize("fields", [{}, {"precision": "bf16-mixed", "micro_batch": 4}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layers_take_the_predicted_memory(kind: str, fields: dict[str, Any]) -> None:
    asked, plan = job(KINDS[kind]), tightfit.Plan(**fields)
    run = build(asked, plan)
    steps = run.data.steps(0, None)
    take_step(run, next(steps), 0)
    _, measured = sample_step(run, next(steps), 1)
    predicted = tightfit.estimate(asked, plan)
    estimated = predicted.peak.total - predicted.peak.rows["runtime"] - predicted.peak.rows["allocator"]
    assert estimated == pytest.approx(measured.total, rel=0.01)
    assert dry_run(asked, plan).total == pytest.approx(measured.total, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "hidden"), [(32, 48), (96, 512), (300, 100)])
def test_workspace_of_many_samples_follows_from_few(
    width: int, hidden: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = recurrent_layers._workspace_bytes(50, 40, width, hidden, dtype, True)
    monkeypatch.setattr(recurrent_layers, "EXACT", 0)
    assert recurrent_layers._workspace_bytes(50, 40, width, hidden, dtype, True) == pytest.approx(exact, rel=0.01)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_runs_the_kernel_of_cudnn(kind: str) -> None:
    found = tightfit.estimate(job(KINDS[kind]), {"precision": "bf16-mixed"}, GPU)
    names = [one.name for segment in found.ledger.training for one in segment.timeline.operations]
    assert names.count("aten._cudnn_rnn") == names.count("aten._cudnn_rnn_backward") == 1
    layers = KINDS[kind]().layers
    flops = 6 * BATCH * LENGTH * sum(weight.numel() for weight in layers.parameters() if weight.dim() == 2)
    counted = sum(
        one.flops.at(BATCH) * one.count.at(BATCH)
        for segment in found.ledger.training
        for one in segment.timeline.operations
        if "cudnn" in one.name
    )
    assert counted == pytest.approx(flops, rel=1e-6)
    assert "cuDNN" in found.notes[0]


@pytest.mark.slow
def test_more_layers_keep_more_for_backward_on_a_gpu() -> None:
    def activations(layers: int) -> float:
        found = tightfit.estimate(job(lambda: Tagger(nn.LSTM, num_layers=layers)), {}, GPU)
        return max(sum(there.values()) for phase, _, there in found.ledger.instants() if phase == "forward") - sum(
            one.bytes for one in found.ledger.parameters
        )

    per_layer = 4 * BATCH * LENGTH * HIDDEN * 6  # gates, cell and output, in fp32
    added = activations(3) - activations(2)
    weights = 4 * sum(weight.numel() for weight in nn.LSTM(HIDDEN, HIDDEN).parameters())
    assert added == pytest.approx(per_layer + 2 * weights, rel=0.05)  # and two optimizer states of its weights


def test_sequences_packed_by_their_lengths_are_refused() -> None:
    with pytest.raises(Untraceable, match="tightfit train"):
        tightfit.estimate(job(lambda: Packed(nn.LSTM)))
