"""Show how each method of a plan changes memory and time, as a table. The first row is the
reference plan: one device, fp32, all activations saved. Each further row adds one method."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from tightfit.methods import METHODS
from tightfit.plan import Plan
from tightfit.planner.estimator import Estimator
from tightfit.runtime.method import name_of


@dataclass(frozen=True)
class WaterfallRow:
    """A row of the waterfall: one more method, and the estimate of the plan with this method and
    the methods of all rows before it.

    method      the method's name in words, such as "+ recompute"
    changes     the plan fields that the method sets, such as "recompute=full"; "" in the first row
    peak_bytes  bytes of a device at the peak
    step_s      seconds per step
    """

    method: str
    changes: str
    peak_bytes: float
    step_s: float


def waterfall(estimator: Estimator, plan: Plan) -> list[WaterfallRow]:
    """Return the rows that lead from the reference plan to `plan`, one method after the other.

    Methods that distribute the job over devices come first, then all other methods. Both groups are
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
    """Return whether a method distributes the job over several devices."""
    return any(Plan(**fields).devices > 1 for fields in method.VARIANTS)
