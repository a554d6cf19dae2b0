"""A search that keeps compilations between traces gives the ledgers of one that does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tightfit
from tests.planner import cases
from tightfit._torch.compiler import forget_compilations, keeping_compilations
from tightfit.planner.dry_run import dry_run
from tightfit.planner.tracing import profiler
from tightfit.planner.tracing.profiler import Profiler

PLANS: list[dict[str, Any]] = [
    {"compile": "block"},
    {"compile": "block", "precision": "bf16-mixed"},
    {"compile": "block", "precision": "bf16-true"},
    {"compile": "block", "recompute": "selective"},
    {"compile": "block", "recompute": "attention"},
    {"compile": "block", "micro_batch": 4, "chunked_loss": 64},
    {"compile": "model"},
]


@pytest.fixture
def resets(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each time that all compilations are forgotten."""
    seen: list[int] = []
    reset = torch.compiler.reset
    monkeypatch.setattr(torch.compiler, "reset", lambda: (seen.append(1), reset()))
    return seen


@pytest.fixture(autouse=True)
def _traces_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "cached", lambda key, make: make())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tried"),
    [
        ("llama", [PLANS[1], PLANS[3], PLANS[6]]),
        pytest.param("llama", PLANS, marks=pytest.mark.slow),
        pytest.param("bert", PLANS[1:3], marks=pytest.mark.slow),
    ],
    ids=["some", "llama", "bert"],
)
def test_kept_compilations_change_no_ledger(name: str, tried: list[dict[str, Any]]) -> None:
    job = cases.job(name)
    plans = [tightfit.Plan(**fields) for fields in tried]

    def peaks() -> list[tuple[float, dict[str, float]]]:
        known = Profiler(job, "cuda")
        return [(found.total, found.rows) for found in (known.ledger(plan).peak() for plan in plans)]

    apart = peaks()
    with keeping_compilations():
        assert peaks() == apart
        assert peaks() == apart, "from the compilations of the first traces"


def test_dry_runs_share_compilations(resets: list[int]) -> None:
    job, plan = cases.job("llama"), tightfit.Plan(compile="block")
    apart = dry_run(job, plan, "cuda").total
    with keeping_compilations():
        resets.clear()
        assert [dry_run(job, plan, "cuda").total for _ in range(2)] == [apart, apart]
        assert len(resets) <= 1


def test_compilations_are_kept_for_one_key(resets: list[int]) -> None:
    forget_compilations("a")
    forget_compilations("a")
    assert len(resets) == 2, "outside, they are always forgotten"
    with keeping_compilations():
        forget_compilations("a")
        assert len(resets) == 3
        forget_compilations("a")
        with keeping_compilations():
            forget_compilations("a")
        assert len(resets) == 3, "a context within another changes nothing"
        forget_compilations("b")
        assert len(resets) == 4
    assert len(resets) == 5


def test_the_limit_of_recompilations_is_restored() -> None:
    before = torch.compiler.config.recompile_limit

    def fails() -> None:
        with keeping_compilations():
            assert torch.compiler.config.recompile_limit > before
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fails()
    assert torch.compiler.config.recompile_limit == before
