"""Each method's `cost` predicts what its `apply` does: the ledger's peak is that of a dry run.

The variants are those of test_contract: a new module is held as soon as METHODS lists it.
"""

from __future__ import annotations

from functools import cache

import pytest

import tightfit
from tests.contract import cases
from tests.contract.test_contract import SINGLES, Variant, named
from tests.planner import cases as planned
from tightfit.machine import Machine
from tightfit.planner.dry_run import dry_run
from tightfit.planner.estimate import estimated_ledger
from tightfit.planner.tracing.profiler import Profiler
from tightfit.rules import check

JOB = planned.job("llama").replace(allow=cases.ALLOW)
ON_CPU_ONLY = {"allocator": "lean"}


@cache
def profiler(device: str) -> Profiler:
    return Profiler(JOB, device)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("items", SINGLES, ids=named)
def test_the_ledger_of_a_method_has_the_peak_of_its_dry_run(items: list[Variant]) -> None:
    ((_, fields),) = items
    device, plan = "cpu" if fields == ON_CPU_ONLY else "cuda", tightfit.Plan(**fields)
    check(plan, JOB, device)
    machine = Machine.named(f"h100-sxm:{plan.devices}")
    predicted = estimated_ledger(profiler(device), plan, machine).peak()
    assert predicted.total == pytest.approx(dry_run(JOB, plan, device).total, rel=0.01)
