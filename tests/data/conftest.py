from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tightfit.job import Job

MODELS: dict[str, dict[str, Any]] = {
    "causal-lm": {"architecture": "gpt2", "vocab_size": 300, "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 64},
    "masked-lm": {"architecture": "bert", "vocab_size": 300, "max_position_embeddings": 64},
    "seq2seq-lm": {"architecture": "t5", "vocab_size": 300},
    "text": {"architecture": "bert", "task": "classification", "vocab_size": 300, "num_labels": 3},
    "images": {"architecture": "vit", "image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10},
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_job(model: Any, data: Any, seed: int = 0, **job: Any) -> Job:
    """A job of one of MODELS, or of a model's section given whole."""
    section = MODELS[model] if isinstance(model, str) else model
    return Job(model=section, data=data, train={"batch": 1, "steps": 2, "seed": seed}, **job)
