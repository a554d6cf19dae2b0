"""A cluster planner's question: what does this training cost, on which machine, with which plan?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.report.test_run_folder import command

PRICE, STEPS, BATCH, LENGTH = 2.5, 1000, 64, 1024
JOB: dict[str, Any] = {
    "model": {"preset": "llama-2-7b"},
    "data": {"synthetic": "tokens", "sequence_length": LENGTH, "samples": 64},
    "train": {"batch": BATCH, "steps": STEPS},
    "allow": ["bf16"],
}
PINNED = ("--set", "plan.compile=none", "--set", "plan.zero=3", "--set", "plan.dp_shard=8")


def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert command(monkeypatch, *arguments, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
def test_a_cluster_is_planned_with_its_price(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(JOB))
    answer = told(monkeypatch, capsys, "explain", str(job), "--machine", "p5.48xlarge", "--price", str(PRICE), *PINNED)
    chosen = answer["plans"][answer["chosen"]]
    run, plan, step_s = chosen["run"], chosen["plan"], chosen["time"]["step_s"]
    assert (plan["zero"], plan["dp_shard"]) == (3, 8)
    assert chosen["fits"]
    assert 6.7e9 * 16 / 8 < chosen["memory"]["peak"] < answer["machine"]["memory_bytes"]["value"]
    assert run["steps"] == STEPS
    assert run["tokens"] == STEPS * BATCH * LENGTH
    assert run["hours"] == pytest.approx(STEPS * step_s / 3600, rel=0.01)
    assert run["device_hours"] == pytest.approx(8 * run["hours"])
    assert run["cost"] == pytest.approx(PRICE * run["device_hours"])


@pytest.mark.slow
def test_a_node_that_is_too_small_is_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(JOB))
    assert command(monkeypatch, "explain", str(job), "--machine", "l4", "--set", "plan.compile=none") == 3
    said = capsys.readouterr().err
    assert "GiB at least" in said
    assert "23.6 GiB are available" in said
    assert "a larger device" in said
    assert "Traceback" not in said
