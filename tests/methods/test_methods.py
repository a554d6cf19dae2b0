"""METHODS is the only list: each plan field has one method, and a method that is listed there is
found everywhere."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any, get_args

import pytest

import tightfit
from tests.contract import test_contract
from tightfit.cost.ledger import Ledger
from tightfit.job import Permission
from tightfit.machine import Machine
from tightfit.methods import METHODS, loader
from tightfit.plan import Plan
from tightfit.planner.candidates import candidates
from tightfit.planner.defaults import complete
from tightfit.planner.estimator import Estimator
from tightfit.planner.waterfall import waterfall
from tightfit.report import method_docs
from tightfit.rules import needed_permissions
from tightfit.runtime.method import Default, SearchFacts

TOY_BYTES = 12345.0


def test_each_plan_field_belongs_to_exactly_one_method() -> None:
    for method in METHODS:
        assert isinstance(method.FIELDS, tuple), f"{method.__name__}.FIELDS is no tuple: is a comma missing?"
        assert isinstance(method.VARIANTS, tuple), f"{method.__name__}.VARIANTS is no tuple: is a comma missing?"
    owners = Counter(field for method in METHODS for field in method.FIELDS)
    assert sorted(Plan.model_fields.keys() - owners.keys()) == [], "in no method's FIELDS (is it listed in METHODS?)"
    assert sorted(owners.keys() - Plan.model_fields.keys()) == [], "no fields of Plan"
    assert [field for field, count in owners.items() if count > 1] == [], "in the FIELDS of several methods"


def test_variants_need_permissions_that_jobs_can_give() -> None:
    for method in METHODS:
        for fields in method.VARIANTS:
            assert needed_permissions(Plan(**fields)) <= set(get_args(Permission)), method.__name__


def test_methods_name_fields_of_their_own() -> None:
    for method in METHODS:
        assert set(getattr(method, "TRACED_FIELDS", ())) <= set(method.FIELDS)
        assert any(set(fields) & set(method.FIELDS) for fields in method.VARIANTS), method.__name__


class _Toy(ModuleType):
    """Toy: a method that takes `prefetch` over from the loader.

    Saves   nothing.
    Costs   a buffer of temporaries.
    When    never.
    Order   last.
    Source  this test.
    """

    FIELDS = ("prefetch",)
    VARIANTS = ({"prefetch": 3},)

    @staticmethod
    def enabled(plan: Plan) -> bool:
        return plan.prefetch > 2

    @staticmethod
    def defaults(job: tightfit.Job, machine: Machine) -> Iterator[Default]:
        yield Default("prefetch", 4, "toys like four")

    @staticmethod
    def candidates(start: Plan, job: tightfit.Job, facts: SearchFacts) -> dict[str, list[Any]]:
        return {"prefetch": [4, 5]}

    @staticmethod
    def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
        return replace(ledger, fixed={**ledger.fixed, "temporaries": ledger.fixed.get("temporaries", 0.0) + TOY_BYTES})

    @staticmethod
    def apply(run: tightfit.Run, plan: Plan) -> tightfit.Run:
        run.model.toy = True
        return run


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A method that is listed in METHODS only, wherever that was imported."""
    added = _Toy("tightfit.methods.toy", _Toy.__doc__)
    fields = tuple(field for field in loader.FIELDS if field not in added.FIELDS)
    monkeypatch.setattr(loader, "FIELDS", fields)
    listed = (*METHODS, added)
    for module in list(sys.modules.values()):
        if getattr(module, "METHODS", None) is METHODS:
            monkeypatch.setattr(module, "METHODS", listed)
    return added


@pytest.mark.slow
def test_a_method_that_is_only_listed_is_found_everywhere(toy: ModuleType) -> None:
    machine = Machine.named("a100-80gb")
    job = tightfit.Job(
        model={"architecture": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
               "intermediate_size": 64, "vocab_size": 64},
        data={"synthetic": "tokens", "sequence_length": 16},
        train={"batch": 4, "steps": 2},
    )  # fmt: skip
    plan, reasons = complete(job, machine, {})
    assert (plan.prefetch, reasons["prefetch"]) == (4, "toys like four")
    estimator = Estimator(job, machine)
    assert {one.prefetch for plans in candidates(estimator, plan, {}) for one in plans} == {4, 5}
    without, with_toy = (estimator.estimate(Plan(prefetch=prefetch)) for prefetch in (2, 4))
    assert with_toy.peak_bytes == without.peak_bytes + TOY_BYTES
    stages = waterfall(estimator, Plan(prefetch=4))
    assert [stage.method for stage in stages][1:] == ["+ toy"]
    assert ("toy", {"prefetch": 3}) in test_contract.variants()
    assert (
        "| [toy](#toy) | `prefetch` | Toy: a method that takes `prefetch` over from the loader. |"
        in method_docs.table(test_contract.METHODS)
    )
    assert "## toy" in method_docs.page(test_contract.METHODS)
    assert tightfit.build(job, Plan(prefetch=4)).model.toy
