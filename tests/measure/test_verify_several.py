"""verify on several processes: the reference runs in the first, the plan in all, and all give the
same answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tightfit
from tests import tiny
from tests.pool import together
from tightfit.errors import InputError
from tightfit.methods import recompute

HERE = "tests.measure.test_verify_several:"


def make_job() -> tightfit.Job:
    return tiny.job(clip=0.5).replace(model={**tiny.MODEL, "attention_dropout": 0.0})


def verified(fields: dict[str, Any], factor: float = 1.0) -> tightfit.Verification | str:
    """factor: what recomputed blocks multiply their output by, to be wrong."""
    honest = recompute.recomputed

    def sabotaged(*arguments: Any) -> Any:
        again = honest(*arguments)
        return lambda *args, **kwargs: again(*args, **kwargs) * factor

    recompute.recomputed = sabotaged if factor != 1.0 else honest
    try:
        return tightfit.verify(make_job(), tightfit.Plan(**fields))
    except InputError as error:
        return str(error)
    finally:
        recompute.recomputed = honest


@pytest.mark.parametrize(
    "fields",
    [
        {"dp_replicate": 2, "precision": "fp16-mixed"},
        {"zero": 2, "dp_shard": 2},
        {"zero": 3, "dp_shard": 2, "precision": "bf16-mixed"},
        {"tp": 2, "sequence_parallel": True},
        {"cp": 2},
        {"pp": 2, "micro_batch": 2},
    ],
    ids=str,
)
def test_equivalent_plans_pass_on_two_processes(fields: dict[str, Any]) -> None:
    one, other = together(2, HERE + "verified", fields)
    assert one == other
    assert one.passed, one
    if "precision" not in fields:
        assert max(one.loss, one.gradients, one.weights) < 2e-6


def test_a_method_that_changes_the_job_fails_on_two_processes() -> None:
    one, other = together(2, HERE + "verified", {"dp_replicate": 2, "recompute": "full"}, 1.5)
    assert one == other
    assert not one.passed
    assert one.gradients > one.tolerances.gradients


def test_a_schedule_with_delayed_updates_is_refused() -> None:
    plan = {"pp": 2, "schedule": "pipedream", "micro_batch": 2}
    job_allows = together(2, HERE + "refused", plan)
    assert all("verify the plan with schedule: 1f1b" in said for said in job_allows)


def refused(fields: dict[str, Any]) -> str:
    job = make_job().replace(allow=["asynchronous"]).replace(train=make_job().train.replace(clip=None))
    with pytest.raises(InputError) as caught:
        tightfit.verify(job, tightfit.Plan(**fields))
    return str(caught.value)


@pytest.mark.slow
def test_the_verify_command_starts_processes(tmp_path: Path) -> None:
    job = tiny.write(tmp_path, clip=0.5)
    command = [sys.executable, "-m", "tightfit", "verify", str(job), "--nproc", "2", "--json"]
    command += [
        "--set",
        "plan.tp=2",
        "--set",
        "plan.precision=fp32",
        "--set",
        "plan.compile=none",
        "--set",
        "model.attention_dropout=0.0",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["passed"] is True
