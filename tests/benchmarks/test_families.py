"""The families' jobs allow what their plain loops do, and ratios are those within a round."""

from __future__ import annotations

import sys

import pytest

import tightfit
from benchmarks import families, single_device
from benchmarks.families import AUTOCAST, FAMILIES, NARROW, SINGLE, TIGHTFIT, job_of, summarise
from tightfit.machine import Figure, Machine
from tightfit.planner.candidates import is_legal


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_may_do_what_the_plain_loops_do(family: str) -> None:
    job = job_of(family, 10)
    assert job.train.clip == 1.0
    for precision in ("bf16-mixed", "bf16-true"):
        plan = tightfit.Plan.parse({"precision": precision, "compile": "model", "fused_optimizer": True}, "plan")
        assert is_legal(plan, job, "cpu")


def rounds_of(names: list[str], *seconds: tuple[float, ...]) -> list[dict[str, dict[str, object]]]:
    return [
        {name: {"step_s": [one], "rss_bytes": 100 * one, "loss": one} for name, one in zip(names, round_, strict=True)}
        for round_ in seconds
    ]


def test_the_ratio_is_to_the_faster_plain_loop_of_each_round() -> None:
    chosen = {"plan": {"precision": "bf16-true"}, "differences": {"precision": "bf16-true"}, "predicted_s": 1.0}
    found = summarise(
        "some", chosen, rounds_of([AUTOCAST, NARROW, TIGHTFIT], (4.0, 3.0, 2.0), (6.0, 8.0, 2.0), (5.0, 6.0, 4.0))
    )
    assert found["faster_by_round"] == [1.5, 3.0, 1.25]
    assert found["faster"] == 1.5
    assert found["best_plain"] == "plain loop, bf16 autocast"  # by the medians, 5.0 and 6.0
    assert found["rss_to_plain"] == 400 / 800  # the largest of each, in the plan's precision
    assert found["contenders"][TIGHTFIT]["step_s"] == 2.0


@pytest.mark.parametrize(
    ("rates", "plain"), [((1e11, 3e11), (AUTOCAST, NARROW)), ((3e11, 6e10), (SINGLE,)), (None, (AUTOCAST, NARROW))]
)
def test_where_bf16_is_slow_the_plain_loop_is_in_fp32(
    rates: tuple[float, float] | None, plain: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"fp32": Figure(value=rates[0]), "bf16": Figure(value=rates[1])} if rates else {}
    machine = Machine.named("l4").replace(matrix_flops_per_s=known)
    monkeypatch.setattr(Machine, "detect", lambda: machine)
    assert families.plain_loops() == plain
    chosen = {"plan": {"precision": "fp32"}, "differences": {}, "predicted_s": 1.0}
    found = summarise("some", chosen, rounds_of([plain[0], TIGHTFIT], (4.0, 2.0)))
    assert (found["faster"], found["best_plain"], found["rss_to_plain"]) == (2.0, plain[0], 0.5)


def test_an_unknown_family_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["single_device.py", "--family", "gpt2-124m,gtp3"])
    with pytest.raises(SystemExit) as left:
        single_device.main()
    assert left.value.code == 2
    assert "gtp3: unknown" in capsys.readouterr().err
