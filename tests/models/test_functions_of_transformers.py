"""A model of transformers that a function of the user's own returns trains with the loss that transformers computes for it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import tightfit
from tightfit.errors import TightfitWarning

STEPS, RATE = 4, 0.1
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("OPTForCausalLM", {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32, "num_hidden_layers": 2, "dropout": 0.0}),
    ("GPTNeoXForCausalLM", {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}),
    ("ElectraForMaskedLM", {"hidden_size": 16, "embedding_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}),
    ("BartForCausalLM", {"d_model": 16, "decoder_layers": 1, "decoder_ffn_dim": 32}),
    ("XLNetLMHeadModel", {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32}),
    ("BertForTokenClassification", {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_labels": 40}),
    ("BartForConditionalGeneration", {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32}),
]  # fmt: skip


def create(name: str, sizes: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    off = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "dropout"), 0.0)
    names = {"num_attention_heads", "encoder_attention_heads", "decoder_attention_heads"}
    config = kind.config_class(vocab_size=40, **dict.fromkeys(names, 2), **{**off, **sizes})
    return kind(config)


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 40, (4 * STEPS, 12), generator=generator)
    labels = ids.clone()
    labels[:, :3] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("name", "sizes"), KINDS, ids=[name for name, _ in KINDS])
def test_a_function_s_model_trains_with_transformers_loss(name: str, sizes: dict[str, Any]) -> None:
    train = tightfit.Train(optimizer="sgd", momentum=0.0, batch=4, steps=STEPS, learning_rate=RATE, trackers=())
    job = tightfit.Job(model=lambda: create(name, sizes), data=rows(), train=train, allow=[])
    unshifted = name in ("BartForCausalLM", "XLNetLMHeadModel")
    with pytest.warns(TightfitWarning, match="labels are not shifted") if unshifted else nullcontext():
        run = tightfit.build(job, tightfit.Plan(micro_batch=2))
    order = list(run.data.steps(0, 4 * STEPS))
    losses = [step.loss for step in tightfit.train(run)]
    model, expected = create(name, sizes).train(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for parts in order:
        batch = {key: torch.cat([part[key] for part in parts]) for key in ("input_ids", "labels")}
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)
