"""Show how each method changes memory and time, from one device in fp32 with everything saved to a
plan."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from tightfit.methods import METHODS
from tightfit.plan import Plan
from tightfit.planner.estimate import Estimator
from tightfit.runtime.method import name_of


@dataclass(frozen=True)
class WaterfallRow:
    """One more method: the plan fields that it sets, and the peak bytes and seconds per step with
    this method and all before it."""

    method: str
    changes: str
    peak_bytes: float
    step_s: float


def waterfall(estimator: Estimator, plan: Plan) -> list[WaterfallRow]:
    """The rows from the reference plan to `plan`.

    Methods that distribute the job over devices come first, then those of one device, each group
    in the order of METHODS. Methods that the plan does not use are left out.
    """
    whole, differences = Plan(), plan.differences()
    first = estimator.include_allocator(estimator.estimate(whole))
    stages = [WaterfallRow("one device, fp32, keep everything", "", first.peak_bytes, first.time.step_s)]
    for method in sorted(METHODS, key=lambda method: not _distributes(method)):
        changed = {name: differences[name] for name in method.FIELDS if name in differences}
        if changed:
            whole = whole.replace(**changed)
            one = estimator.include_allocator(estimator.estimate(whole))
            said = ", ".join(f"{name}={value}" for name, value in changed.items())
            stages.append(WaterfallRow(f"+ {name_of(method).replace('_', ' ')}", said, one.peak_bytes, one.time.step_s))
    return stages


def _distributes(method: ModuleType) -> bool:
    return any(Plan(**fields).devices > 1 for fields in method.VARIANTS)
