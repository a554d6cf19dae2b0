"""Synthetic samples follow a rule that a model can learn, and depend on the seed alone."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.conftest import MODELS, make_job
from tightfit.data import open_samples
from tightfit.errors import InputError


def at(samples: Any, indices: list[int]) -> dict[str, torch.Tensor]:
    return samples.batch(np.array(indices), np.zeros(len(indices), dtype=np.int64))


def tokens(model: Any = "causal-lm", seed: int = 0, **spec: Any) -> Any:
    return open_samples(make_job(model, {"synthetic": "tokens", "sequence_length": 32, "samples": 50, **spec}, seed))


def test_nine_tenths_of_tokens_follow_a_rule() -> None:
    ids = at(tokens(), list(range(50)))["input_ids"]
    assert ids.shape == (50, 32)
    assert ids.min() >= 0
    assert ids.max() < 300
    steps = (ids[:, 1:] - ids[:, :-1]) % 300
    common = steps.mode(1).values
    assert ((common >= 1) & (common <= 8)).all()
    assert float((steps == common[:, None]).float().mean()) == pytest.approx(0.81, abs=0.05)
    assert len(common.unique()) > 4


def test_samples_are_a_function_of_the_seed() -> None:
    first = at(tokens(), [3, 8])["input_ids"]
    assert torch.equal(at(tokens(), [8])["input_ids"][0], first[1])
    assert not torch.equal(at(tokens(seed=1), [8])["input_ids"][0], first[1])


def test_each_task_gets_its_inputs() -> None:
    masked = at(tokens("masked-lm"), [0, 1])
    assert (masked["input_ids"] == 299).any()
    assert (masked["labels"] != -100).any()
    pairs = at(tokens("seq2seq-lm", target_length=8), [0, 1])
    assert torch.equal(pairs["labels"], pairs["input_ids"][:, :8])
    assert at(tokens("text"), list(range(50)))["labels"].unique().tolist() == [0, 1, 2]


def test_images_of_one_class_are_similar() -> None:
    samples: Any = open_samples(make_job("images", {"synthetic": "images", "samples": 200}))
    batch = at(samples, list(range(200)))
    assert batch["pixel_values"].shape == (200, 1, 8, 8)
    assert -1 <= batch["pixel_values"].min() < -0.9
    assert 0.9 < batch["pixel_values"].max() <= 1
    assert batch["labels"].unique().tolist() == list(range(10))
    flat = batch["pixel_values"].flatten(1)
    away = torch.cdist(flat, flat)
    same = batch["labels"][:, None] == batch["labels"]
    assert away[same].mean() < 0.8 * away[~same].mean()
    assert not torch.equal(flat[same[0]][0], flat[same[0]][1])
    assert torch.equal(at(pickle.loads(pickle.dumps(samples)), [7])["pixel_values"][0], batch["pixel_values"][7])


def test_facts_missing_from_the_model_are_required() -> None:
    def make_model() -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def loss(output: Any, batch: Any) -> Any:
        return output.sum()

    data = {"synthetic": "tokens", "samples": 4, "sequence_length": 8}
    with pytest.raises(InputError, match="vocabulary_size"):
        open_samples(make_job(make_model, data, loss=loss))
    with pytest.raises(InputError, match="model's task is not known"):
        open_samples(make_job(make_model, data))
    samples = open_samples(make_job(make_model, data | {"vocabulary_size": 9}, loss=loss))
    assert at(samples, [0, 1, 2])["input_ids"].max() < 9
    shown: Any = open_samples(make_job(make_model, {"synthetic": "images", "samples": 4, "image_size": 16}))
    assert shown[0]["pixel_values"].shape == (3, 16, 16)
    with pytest.raises(InputError, match=r"use data\.images"):
        open_samples(make_job(MODELS["images"], data))
    with pytest.raises(InputError, match="positions"):
        tokens(sequence_length=65)
    with pytest.raises(InputError, match="has 301 tokens, but the model's vocabulary has 300"):
        tokens(vocabulary_size=301)


def test_a_model_of_any_length_takes_long_samples() -> None:
    """XLNet's config says -1 positions."""
    model = {"architecture": "xlnet", "vocab_size": 300, "d_model": 8, "n_head": 2, "n_layer": 1, "d_inner": 8}
    samples = open_samples(make_job(model, {"synthetic": "tokens", "sequence_length": 3000, "samples": 2}))
    assert at(samples, [0])["input_ids"].shape == (1, 3000)
