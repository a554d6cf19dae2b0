"""A tiny language-model job, for the tests of everything around the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

import tightfit

LLAMA: dict[str, Any] = {
    "architecture": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
MODEL: dict[str, Any] = {**LLAMA, "attention_dropout": 0.1}


def content(**train: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "data": {"synthetic": "tokens", "sequence_length": 16, "samples": 50, "held_out": 0.1},
        "train": {"batch": 4, "steps": 8, "learning_rate": 1e-2, "trackers": [], **train},
        "allow": ["bf16", "fp16", "bf16-states", "8-bit-states", "4-bit-states", "stochastic-rounding"],
    }


def job(**train: Any) -> tightfit.Job:
    return tightfit.Job.parse(content(**train))


def write(folder: Path, **train: Any) -> Path:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(content(**train)))
    return path
