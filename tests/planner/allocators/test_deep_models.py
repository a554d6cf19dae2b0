"""The allocator's bytes for very many blocks follow from those for a few."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import tightfit
from tightfit.cost.ledger import Ledger
from tightfit.machine import Machine
from tightfit.planner.allocators import deep_models
from tightfit.planner.allocators.cuda import reserved_bytes
from tightfit.planner.allocators.glibc import peak_heap_bytes
from tightfit.planner.estimator import Estimator

SMALL: dict[str, dict[str, Any]] = {
    "qwen2": {
        "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 5000,
    },
    "gemma3_text": {  # two kinds of blocks, in turn
        "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128,
        "vocab_size": 5000, "sliding_window": 16,
    },
}  # fmt: skip
GPU = Machine.named("a100-80gb")


def estimator(name: str, blocks: int, machine: Machine = GPU) -> Estimator:
    model = {"architecture": name, "num_hidden_layers": blocks, **SMALL[name]}
    data = {"synthetic": "tokens", "sequence_length": 512}
    return Estimator(tightfit.Job(model=model, data=data, train=tightfit.Train(batch=8, steps=4)), machine)


def expandable(ledger: Ledger) -> float:
    return reserved_bytes(ledger, expandable=True)


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("qwen2", {}),
        ("qwen2", {"recompute": "full", "micro_batch": 2}),
        ("qwen2", {"recompute": "sqrt", "update_in_backward": True}),
        pytest.param("gemma3_text", {"micro_batch": 4, "recompute": "selective"}, marks=pytest.mark.slow),
    ],
)
def test_a_few_blocks_predict_the_bytes_of_all(
    name: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a model were deep from 64 blocks on."""
    monkeypatch.setattr(deep_models, "SIMULATED_BLOCKS", 64)
    for taken, machine in ((expandable, GPU), (peak_heap_bytes, Machine.detect())):
        ledger = estimator(name, 120, machine).estimate(tightfit.Plan(**fields)).ledger
        seen: list[int] = []

        def played(one: Ledger, taken: Any = taken, seen: list[int] = seen) -> float:
            seen.append(one.blocks)
            return taken(one)

        found, whole = deep_models.extrapolate_layers(ledger, played), taken(ledger)
        assert max(seen) < 100
        assert found == pytest.approx(whole, rel=0.01)  # segments of an allocator are filled now more, now less


def test_a_pipeline_of_deep_stages_is_simulated_with_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_models, "SIMULATED_BLOCKS", 32)
    plan = tightfit.Plan(pp=2, micro_batch=2, split=(47, 49), recompute="full")
    ledger = estimator("qwen2", 96, Machine.named("a100-80gb:2")).estimate(plan).ledger
    seen: list[int] = []

    def played(one: Ledger) -> float:
        seen.append(len({segment.block for segment in one.training if segment.block is not None}))
        return expandable(one)

    # from 24, 32, 40 or 48 blocks it is 1.0, 1.3, -0.2 or 0.9 % off: segments of 20 MiB are filled now more, now less
    assert deep_models.extrapolate_layers(ledger, played) == pytest.approx(expandable(ledger), rel=0.015)
    assert max(seen) <= 34


def test_blocks_that_do_not_repeat_are_all_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_models, "SIMULATED_BLOCKS", 8)
    known = estimator("qwen2", 24).estimate(tightfit.Plan()).ledger
    heads = [index for index, one in enumerate(known.training) if one.block is not None]
    odd = [heads[number] for number in (9, 14, 16)]  # of three blocks a forward that does something else
    segments = tuple(
        one if place not in odd else replace(one, timeline=one.timeline.then(one.timeline))
        for place, one in enumerate(known.training)
    )
    ledger, seen = replace(known, training=segments), []

    def played(one: Ledger) -> float:
        seen.append(one.blocks)
        return 1.0

    deep_models.extrapolate_layers(ledger, played)
    assert seen == [24]
