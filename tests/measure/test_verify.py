"""verify passes for plans that train the same job, and only for them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import tightfit
from tightfit.methods import recompute

from .. import tiny


@pytest.fixture
def job() -> tightfit.Job:
    return tiny.job().replace(model={**tiny.MODEL, "attention_dropout": 0.0})


@pytest.mark.parametrize(
    "plan",
    [
        {"micro_batch": 3, "recompute": "full", "chunked_loss": 8},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true", "rounding": "kahan"},
        {"precision": "fp16-mixed"},
        {"update_in_backward": True, "states": "8-bit"},
        {"attention": "blocked", "materialize": "device"},
    ],
    ids=str,
)
def test_passes(job: tightfit.Job, plan: dict[str, Any]) -> None:
    result = tightfit.verify(job, tightfit.Plan(**plan))
    assert result.passed, result
    assert set(result.content()) == {"max_relative_error", "tolerance", "passed"}
    assert set(result.content()["max_relative_error"]) == {"loss", "gradients", "weights"}  # type: ignore[call-overload]


def test_fp32_plans_agree_to_rounding(job: tightfit.Job) -> None:
    result = tightfit.verify(job, tightfit.Plan(micro_batch=1, recompute="full", chunked_loss=5, materialize="device"))
    assert max(result.loss, result.gradients) < 1e-5


def test_fails_where_a_method_changes_the_job(job: tightfit.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = recompute.recomputed

    def sabotaged(forward: Any, modules: list[nn.Module], selective: bool = False) -> Any:
        again = honest(forward, modules, selective)
        return lambda *args, **kwargs: again(*args, **kwargs) * 1.5

    monkeypatch.setattr(recompute, "recomputed", sabotaged)
    assert not tightfit.verify(job, tightfit.Plan(recompute="full")).passed
