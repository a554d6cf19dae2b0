"""Samples are held out only for evaluations that use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tightfit
from tests import tiny
from tightfit.errors import InputError

ROWS = {"synthetic": "tokens", "sequence_length": 16, "samples": 200}


def job_of(data: dict[str, Any], **fields: Any) -> tightfit.Job:
    content = tiny.content(epochs=1, steps=None)
    return tightfit.Job.parse({**content, "data": data, **fields})


@pytest.mark.parametrize(
    ("data", "fields", "share"),
    [
        (ROWS, {}, 0.0),
        (ROWS, {"evaluate": {"every": 5}}, 0.01),
        ({**ROWS, "held_out": 0.2}, {}, 0.2),
        ({**ROWS, "held_out": 0.0}, {}, 0.0),
        (ROWS, {"evaluate": {"every": 5, "data": {"jsonl": "a.jsonl"}}}, 0.0),
    ],
)
def test_the_share_follows_from_the_evaluations(
    data: Any, fields: dict[str, Any], share: float, tmp_path: Path
) -> None:
    assert job_of(data, **fields).held_out == share


def test_a_job_without_evaluations_trains_all_samples() -> None:
    assert tightfit.build(job_of(ROWS)).data.samples == 200
    assert tightfit.build(job_of(ROWS, evaluate={"every": 5})).data.samples == 198


def test_an_evaluation_without_samples_says_what_to_set() -> None:
    with pytest.raises(InputError, match=r"data\.held_out: 0\.01"):
        tightfit.evaluate(tightfit.build(job_of(ROWS)))
