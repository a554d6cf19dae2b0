"""The ladder falls at each rung, and fake tensors take what real ones take."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import memory_ladder  # type: ignore[import-not-found]

TINY = {
    "preset": "vit-b-16",
    "image_size": 64,
    "num_hidden_layers": 4,
    "hidden_size": 96,
    "intermediate_size": 384,
    "num_attention_heads": 3,
}


def test_fake_rungs_are_the_real_ones_and_each_is_lower() -> None:
    real = memory_ladder.climb(memory_ladder.RUNGS, TINY, 64, fake=False)
    fake = memory_ladder.climb(memory_ladder.RUNGS, TINY, 64, fake=True)
    for one, other in zip(real, fake, strict=True):
        assert one["peak_bytes"] == pytest.approx(other["peak_bytes"], rel=0.01), one["name"]
        assert sum(one["rows"].values()) == one["peak_bytes"]
    peaks = [row["peak_bytes"] for row in fake]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)
