"""Estimate: what a plan will cost, folded: every method's `cost` over the profiled ledger. Milliseconds, no tensors."""

from __future__ import annotations

from tightfit.ledger import Ledger
from tightfit.machine import Machine
from tightfit.methods import METHODS
from tightfit.plan import Plan
from tightfit.planner.profile import Profiler


def fold(profiler: Profiler, plan: Plan, machine: Machine) -> Ledger:
    """The ledger of a plan: the profiled one, edited by the cost of each method that the plan wants."""
    ledger = profiler.ledger(plan)
    for method in METHODS:
        if method.wanted(plan):
            ledger = method.cost(ledger, plan, machine)
    return ledger
