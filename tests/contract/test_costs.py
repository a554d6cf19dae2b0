"""Each method's `cost` predicts what its `apply` does: the ledger's peak is that of a dry run.

The variants are those of test_contract: a new module is held as soon as METHODS lists it.
"""

from __future__ import annotations

from functools import cache

import pytest

import tightfit
from tests.contract import cases
from tests.contract.test_contract import SINGLES, Variant, is_compiled, named
from tests.planner import cases as planned
from tightfit.errors import InputError
from tightfit.machine import Machine
from tightfit.planner.dry_run import dry_run
from tightfit.planner.estimator import estimated_ledger
from tightfit.planner.tracing.profiler import Profiler
from tightfit.rules import check

ON_CPU_ONLY = {"allocator": "lean"}
OTHERS = ("bert", "vit")  # tried by the slow suite, without the compiler
CASES = [
    *(pytest.param("llama", items, id=f"llama-{named(items)}") for items in SINGLES),
    *(
        pytest.param(name, items, id=f"{name}-{named(items)}", marks=pytest.mark.slow)
        for name in OTHERS
        for items in SINGLES
        if not is_compiled(items)
    ),
]


def job(name: str) -> tightfit.Job:
    return planned.job(name).replace(allow=cases.ALLOW)


@cache
def profiler(name: str, device: str) -> Profiler:
    return Profiler(job(name), device)


@pytest.mark.sweep(16)
@pytest.mark.parametrize(("name", "items"), CASES)
def test_the_ledger_of_a_method_has_the_peak_of_its_dry_run(name: str, items: list[Variant]) -> None:
    ((_, fields),) = items
    device, plan = "cpu" if fields == ON_CPU_ONLY else "cuda", tightfit.Plan(**fields)
    machine = Machine.named(f"h100-sxm:{plan.devices}")
    try:
        check(plan, job(name), device)
        predicted = estimated_ledger(profiler(name, device), plan, machine).peak()
    except InputError:  # the model does not support it: no method is refused for Llama
        assert name in OTHERS
        return
    assert predicted.total == pytest.approx(dry_run(job(name), plan, device).total, rel=0.01)
