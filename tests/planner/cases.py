"""Small jobs of every kind of model, to compare the ledger with dry runs and measurements."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import tightfit

ALLOW = ["bf16", "fp16", "bf16-states", "8-bit-states", "4-bit-states", "stochastic-rounding"]
TEXT: dict[str, Any] = {"synthetic": "tokens", "sequence_length": 32}
SPECS: dict[str, dict[str, Any]] = {
    "llama": {
        "architecture": "llama", "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4,
        "intermediate_size": 160, "vocab_size": 320,
    },
    "gpt2": {"architecture": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 320, "n_positions": 32},
    "bert": {
        "architecture": "bert", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 256, "vocab_size": 320, "max_position_embeddings": 64,
    },
    "t5": {
        "architecture": "t5", "d_model": 64, "num_layers": 3, "num_decoder_layers": 4, "num_heads": 4, "d_kv": 16,
        "d_ff": 128, "vocab_size": 320,
    },
    "vit": {
        "architecture": "vit", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 256, "image_size": 32, "patch_size": 8, "num_labels": 10,
    },
}  # fmt: skip


def convolutions() -> nn.Module:
    """Two convolutions with BatchNorm, no repeated block."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def job(name: str, **train: Any) -> tightfit.Job:
    settings = tightfit.Train(**{"batch": 8, "steps": 4, **train})
    if name == "convolutions":
        images = [(torch.zeros(3, 16, 16), number % 10) for number in range(16)]
        return tightfit.Job(model=convolutions, data=images, train=settings, allow=ALLOW)
    data = {"synthetic": "images", "samples": 64} if name == "vit" else {**TEXT, "samples": 64}
    return tightfit.Job(model=SPECS[name], data=data, train=settings, allow=ALLOW)


NAMES = (*SPECS, "convolutions")
