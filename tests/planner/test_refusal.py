"""A search refuses only where no plan fits, and says what would help; a dry run that fails is no refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tightfit
from tests.planner import cases
from tightfit.errors import Untraceable
from tightfit.machine import Machine
from tightfit.planner import finalists
from tightfit.planner.rehearse import rehearse
from tightfit.planner.search import search
from tightfit.report.commands import explain_command

GPU = Machine.named("a100-80gb")


def test_a_failed_dry_run_says_nothing_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiles cannot be confirmed: the fastest of the others is taken, and what is said of the rest is why."""

    def failing(job: tightfit.Job, plan: tightfit.Plan, *arguments: Any) -> Any:
        if plan.compile != "none":
            raise Untraceable("job: model", "fails on tensors without values", "run it")
        return rehearse(job, plan, *arguments)

    monkeypatch.setattr(finalists, "rehearse", failing)
    job = cases.job("llama").replace(train=tightfit.Train(batch=4, steps=100_000_000))
    chosen, *others = search(job, GPU)
    assert chosen.plan.compile == "none"
    assert chosen.fits
    assert not chosen.not_confirmed
    reasons = [one.rejected_because for one in others if one.plan.compile != "none" and one.fits]
    assert any("not confirmed" in reason for reason in reasons)


def test_where_no_dry_run_succeeds_the_estimate_stands_and_is_marked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any) -> Any:
        raise Untraceable("job: model", "fails on tensors without values", "run it")

    monkeypatch.setattr(finalists, "rehearse", fail)
    path = tmp_path / "job.yaml"
    path.write_text(cases.job("llama").to_yaml())
    explain_command(path, None, "a100-80gb", None, 3, False, None, [], True)
    said = json.loads(capsys.readouterr().out)
    chosen = said["plans"][said["chosen"]]
    assert chosen["fits"]
    assert chosen["not_confirmed"] == "fails on tensors without values"
    explain_command(path, None, "a100-80gb", None, 3, False, None, [], False)
    assert "not confirmed, its dry run failed" in capsys.readouterr().out
