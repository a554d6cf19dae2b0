"""What explain shows of a plan whose dry run found another peak, and of one that only offloads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

import tightfit
from tests import tiny
from tightfit.machine import Machine
from tightfit.planner.estimate import Estimate
from tightfit.planner.estimator import Estimator
from tightfit.report.explain import rows_table


def estimate_of(**fields: object) -> Estimate:
    job = tiny.job(steps=2)
    job = job.replace(allow=[*(job.allow or []), "offload"])
    return Estimator(job, Machine.named("rtx-4090")).estimate(tightfit.Plan(**fields))


@pytest.mark.parametrize(("share", "shown"), [(1.0, False), (1.004, False), (1.1, True), (0.9, True)])
def test_a_row_has_what_the_dry_run_found_beyond_the_others(share: float, shown: bool) -> None:
    estimate = estimate_of()
    console = Console(width=120)
    with console.capture() as captured:
        console.print(rows_table(replace(estimate, dry_run_bytes=share * estimate.peak.total)))
    assert ("found by the dry run" in captured.get()) is shown


def test_offloading_changes_no_numerics() -> None:
    assert estimate_of(offload=("states",)).changes_math == []
    assert estimate_of(offload=("states",), precision="bf16-mixed").changes_math == ["bf16"]
