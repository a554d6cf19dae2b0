"""The scripts that start a training on several hosts: valid shell or YAML, with the exact command
in them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tightfit.errors import InputError
from tightfit.report.scripts import script

JOB = "model: {preset: gpt2}\ndata: {synthetic: tokens}\ntrain: {steps: 2}\n"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "my job.yaml"
    path.write_text(JOB)
    return path


@pytest.mark.parametrize("kind", ["slurm", "torchrun"])
def test_a_shell_script_is_valid_and_has_the_command(kind: str, job: Path, tmp_path: Path) -> None:
    name, text = script(kind, job, 4, 8, "H100", ["plan.zero=3"])
    (tmp_path / name).write_text(text)
    subprocess.run(["bash", "-n", str(tmp_path / name)], check=True)
    assert f"tightfit train '{job}' --set plan.zero=3" in text
    assert "4" in text
    assert "8" in text


def test_a_skypilot_task_is_valid_and_has_the_command(job: Path) -> None:
    name, text = script("skypilot", job, 2, 4, "A100", [])
    task = yaml.safe_load(text)
    assert name.endswith("-sky.yaml")
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"] == "A100:4"
    assert f"-m tightfit train '{job}'" in task["run"]


def test_a_wrong_job_is_refused_before_it_queues(job: Path) -> None:
    job.write_text(JOB.replace("preset", "prest"))
    with pytest.raises(InputError, match="preset"):
        script("slurm", job, 1, 1, "H100", [])
