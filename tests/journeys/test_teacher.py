"""A teacher's overview: what does each technique do to a small ViT, predicted and measured?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.report.test_run_folder import command

JOB: dict[str, Any] = {
    "model": {
        "architecture": "vit",
        "image_size": 32,
        "patch_size": 8,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_labels": 10,
        "attention_probs_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0,
    },
    "data": {"synthetic": "images", "samples": 256, "image_size": 32},
    "train": {"batch": 32, "steps": 20, "learning_rate": 1e-3},
    "allow": [],
}


@pytest.mark.slow  # a process for each rung
def test_the_ladder_of_a_small_vit_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(JOB))
    assert command(monkeypatch, "ladder", str(job), "--run", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["rungs"]) > 3
    assert len(told["alone"]) > 3
    measured = [rung["measured"] for rung in (*told["rungs"], *told["alone"])]
    assert not [one["failed"] for one in measured if one["failed"]]
    assert [one["loss"] for one in measured] == pytest.approx([measured[0]["loss"]] * len(measured), rel=1e-4)
    for rung in (*told["rungs"], *told["alone"]):
        assert rung["tensor_bytes"] == pytest.approx(rung["measured"]["tensor_bytes"], rel=0.05), rung["method"]
