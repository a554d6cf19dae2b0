"""Each rung of the memory ladder is lower than the one before, and fake tensors take what real ones
take."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import memory_ladder

TINY = {
    "preset": "vit-b-16",
    "image_size": 64,
    "num_hidden_layers": 4,
    "hidden_size": 96,
    "intermediate_size": 384,
    "num_attention_heads": 3,
}
RECORD = Path(__file__).parent.parent.parent / "records" / "memory_ladder.json"


def falls(rows: list[dict[str, Any]]) -> bool:
    peaks = [row["peak_bytes"] for row in rows]
    return all(higher > lower for higher, lower in pairwise(peaks))


@pytest.mark.slow
def test_fake_and_real_rungs_agree_and_each_is_lower(capsys: pytest.CaptureFixture[str]) -> None:
    real, fake = memory_ladder.climb(TINY, fake=False), memory_ladder.climb(TINY, fake=True)
    for one, other in zip(real, fake, strict=True):
        assert one["peak_bytes"] == pytest.approx(other["peak_bytes"], rel=0.01), one["name"]
        assert sum(one["rows"].values()) == one["peak_bytes"]
    assert falls(real)
    assert falls(fake)
    memory_ladder.show(fake)
    memory_ladder.show_both(real, fake)
    shown = capsys.readouterr().out
    assert all(shown.count(rung.name) == 2 for rung in memory_ladder.RUNGS)


def test_the_record_contains_these_rungs() -> None:
    record = json.loads(RECORD.read_text())
    rows = record["rungs"]
    assert [row["name"] for row in rows] == [rung.name for rung in memory_ladder.RUNGS]
    assert falls(rows)
    assert record["times_less"] == memory_ladder.times_less(rows) > 13
    for row in rows:
        published = row["published_bytes"]
        assert published is None or 0.7 < row["peak_bytes"] / published < 1  # an allocator reserves more than is alive
