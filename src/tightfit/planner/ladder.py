"""Predict the ladder of a job. Its first rung is the plain training loop, and each further rung is
a plan with one more method than the rung below. Also predict each method alone.

The rungs follow from METHODS: they use the values that a method proposes for its plan fields
(`defaults`, `candidates`, VARIANTS), as far as the job's `allow`, the RULES and the machine permit.
A new method gets its rung without a change of this module.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tightfit.capabilities import has_fast_float8, has_fast_tf32, missing_for_compile
from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.methods import METHODS, float8
from tightfit.methods.precision import rounding_of
from tightfit.plan import Plan
from tightfit.planner.candidates import is_legal
from tightfit.planner.estimate import Estimate
from tightfit.planner.estimator import Estimator
from tightfit.planner.leanest import offloads
from tightfit.rules import RULES, needed_permissions
from tightfit.runtime.method import SearchFacts, name_of

# the order of the rungs, by plan field. It is the order in which guides to training in little
# memory present the methods. Other fields come after these, in the order of METHODS
ORDER = (
    "micro_batch", "precision", "float8", "states", "fused_optimizer", "recompute", "chunked_loss", "attention",
    "compile", "allocator", "materialize", "pin_memory", "loader_workers", "update_in_backward", "offload",
)  # fmt: skip
_logger = logging.getLogger(__name__)
NOTICED = 0.005  # a smaller share of time or memory counts as no change


@dataclass(frozen=True)
class Option:
    """A way to use a method, such as `recompute: full`. `str` gives its plan fields, such as
    "recompute=full".

    method  the method's name
    field   the plan field whose rung this option belongs to
    fields  the plan fields that this option sets, with their values
    """

    method: str
    field: str
    fields: dict[str, Any]

    def __str__(self) -> str:
        said = {
            name: f"[{', '.join(value)}]" if isinstance(value, tuple) else value for name, value in self.fields.items()
        }
        return ", ".join(f"{name}={value}" for name, value in said.items())


@dataclass(frozen=True)
class Rung:
    """A plan of the ladder, with its estimate and that of the plain loop for comparison.

    option    what this rung adds to the rung below; None for the plain loop
    estimate  the estimate of this rung's plan
    plain     the estimate of the plain loop: the reference plan `Plan()`
    """

    option: Option | None
    estimate: Estimate
    plain: Estimate

    @property
    def memory_ratio(self) -> float:
        """The bytes that this rung's plan needs for training divided by those of the plain loop.
        Example: 0.5 is half the memory."""
        return training_bytes(self.estimate) / training_bytes(self.plain)

    @property
    def time_ratio(self) -> float:
        """The seconds of a step with this rung's plan divided by those of the plain loop. Example:
        0.5 is twice as fast."""
        return self.estimate.time.step_s / self.plain.time.step_s

    @property
    def verdict(self) -> str:
        """How the rung compares with the plain loop: "faster", "smaller" (less memory), "both" or
        "neither"."""
        return verdict(self.time_ratio, self.memory_ratio)

    def content(self) -> dict[str, Any]:
        """Return the rung as the dict that `tightfit ladder --json` prints. Its sizes are in
        bytes."""
        return {
            "method": "plain loop" if self.option is None else self.option.method,
            "adds": {} if self.option is None else self.option.fields,
            "plan": self.estimate.plan.content(),
            "fits": self.estimate.fits,
            "memory_bytes": round(self.estimate.peak_bytes),
            "training_bytes": round(training_bytes(self.estimate)),
            "tensor_bytes": round(tensor_bytes(self.estimate)),
            "step_s": self.estimate.time.step_s,
            "tokens_per_s": self.estimate.tokens_per_s,
            "samples_per_s": self.estimate.samples_per_s,
            "memory_ratio": self.memory_ratio,
            "time_ratio": self.time_ratio,
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Ladder:
    """The predicted ladder of a job.

    rungs     the plain loop, then one rung for each method that pays; a rung's plan also has the
              methods of all rungs before it
    alone     for each method, a rung of the plain loop with this method only
    left_out  pairs (method or option, why it has no rung)
    """

    rungs: list[Rung]
    alone: list[Rung]
    left_out: list[tuple[str, str]]


def verdict(time_ratio: float, memory_ratio: float) -> str:
    """Return a word for how a plan compares with another: "faster", "smaller" (less memory), "both"
    or "neither". Changes below 0.5 % do not count.

    time_ratio    its seconds per step divided by those of the other plan
    memory_ratio  its bytes divided by those of the other plan
    """
    faster, smaller = time_ratio < 1 - NOTICED, memory_ratio < 1 - NOTICED
    return "both" if faster and smaller else "faster" if faster else "smaller" if smaller else "neither"


def training_bytes(estimate: Estimate) -> float:
    """Return the device bytes that training needs: the peak without the row "runtime", which is
    memory that a process needs before it trains, such as the CUDA context. The cuBLAS workspaces
    are a part of that row, but are counted."""
    return estimate.peak_bytes - estimate.peak.rows["runtime"] + estimate.workspace_bytes


def tensor_bytes(estimate: Estimate) -> float:
    """Return the predicted device bytes of tensors at the peak, and of the workspaces that cuBLAS
    allocates through torch. The bytes that the allocator reserves beyond them are not counted."""
    rows = estimate.peak.rows.items()
    return sum(size for row, size in rows if row not in ("runtime", "allocator")) + estimate.workspace_bytes


def climb(job: Job, machine: Machine) -> Ladder:
    """Predict the ladder of a job on one device of a machine: the plain training loop, then plans
    with one more method each.

    If a method has several values, its rung uses the value with the smallest product of memory and
    time. A method that does not make this product smaller than the rung below gets no rung: its
    cost in time exceeds its saving in memory, or the reverse.

    Example: a method that needs 0.92 of the memory and 1.63 times the time gets no rung, because
    0.92 * 1.63 = 1.5 is larger than 1.

    Raises InputError if the job's model cannot be traced.
    """
    machine = machine.replace(devices_per_node=1, nodes=1)
    estimator = Estimator(job, machine)
    plain = estimator.include_allocator(estimator.estimate(Plan()))
    first = Rung(None, plain, plain)
    rungs, alone, left_out = [first], [], []
    for options in options_of(estimator):
        name = f"{options[0].method} ({options[0].field})"
        _logger.info("predicting the rung of %s", name)
        single, why = _best(estimator, first, options)
        if single is None:
            left_out.append((name, why))
            continue
        alone.append(single)
        added, why = _best(estimator, rungs[-1], options)
        if added is None:
            left_out.append((name, f"not possible on top of the rung below: {why}"))
            continue
        below = rungs[-1].estimate
        time_ratio = added.estimate.time.step_s / below.time.step_s
        memory_ratio = training_bytes(added.estimate) / training_bytes(below)
        if time_ratio * memory_ratio > 1 - NOTICED:
            said = f"{memory_ratio:.2f}x the memory and {time_ratio:.2f}x the time of the rung below"
            left_out.append((str(added.option), said))
        else:
            rungs.append(added)
    return Ladder(rungs, alone, left_out)


def _best(estimator: Estimator, below: Rung, options: Sequence[Option]) -> tuple[Rung | None, str]:
    """Return (rung, reason). The rung adds one of `options` to the plan of the rung `below`: the
    option with the smallest product of memory and time.

    If no option is possible, the rung is None and the reason says why the first one is not.
    """
    best: Rung | None = None
    why = ""
    for option in options:
        plan = below.estimate.plan.replace(**option.fields)
        said = _obstacle(estimator, plan, option)
        if said:
            why = why or said
            continue
        try:
            found = estimator.include_allocator(estimator.estimate(plan))
        except InputError as error:  # the model does not support it
            why = why or error.found
            continue
        rung = Rung(option, found, below.plain)
        if best is None or rung.memory_ratio * rung.time_ratio < best.memory_ratio * best.time_ratio:
            best = rung
    return best, why


def _obstacle(estimator: Estimator, plan: Plan, option: Option) -> str:
    """Return why a plan is not possible on the machine, of no use there, or not permitted by the
    job; "" if there is no such reason.

    plan  the plan of the rung below, with the fields of `option`
    """
    job, machine = estimator.job, estimator.machine
    refused = sorted(needed_permissions(plan) - job.allowed)
    if refused:
        return f"the job does not allow {', '.join(refused)}"
    if not is_legal(plan, job, machine.device):
        return next(rule.text for rule in RULES if not rule.holds(plan, job, machine.device))
    if plan.precision == "bf16-true" and plan.loses_small_updates and rounding_of(job) != "nearest":
        return "rounding to nearest loses small updates, which the job does not allow"
    if option.field == "compile" and (lacking := missing_for_compile(machine)):
        return f"torch.compile needs {lacking}"
    if option.field == "float8" and not float8.is_installed():
        return "float8 needs the package torchao"
    recipe = option.fields.get("float8")
    if (recipe and not has_fast_float8(machine, recipe)) or (plan.precision == "tf32" and not has_fast_tf32(machine)):
        return "matrix products in this type are not faster on this device"
    return ""


def options_of(estimator: Estimator) -> Iterator[list[Option]]:
    """Yield, for each rung of the ladder, the list of options to choose from: the ways to use one
    method. The rungs come in the order of ORDER, a constant of this module. Options that need
    several devices are left out."""
    found: dict[str, list[Option]] = {}
    for method in METHODS:
        for option in _options(method, estimator):
            if Plan(**option.fields).devices == 1:
                found.setdefault(option.field, []).append(option)
    positions = {field: position for position, field in enumerate(ORDER)}
    for field in sorted(found, key=lambda name: positions.get(name, len(ORDER))):  # stable: METHODS' order
        yield found[field]


def _options(method: ModuleType, estimator: Estimator) -> Iterator[Option]:
    """Yield the options of a method (a module of METHODS): the ways to use it for the estimator's
    job and machine. Values that the reference plan `Plan()` already has are left out.

    The options are what the method proposes (`defaults`, `candidates`), then its VARIANTS: the plan
    fields with which tests use the method. The numbers in VARIANTS are chosen for tests, so a
    number is used only if nothing is proposed for its field.
    """
    proposed = _proposed(method, estimator)
    yielded: list[dict[str, Any]] = []
    for fields in (*proposed, *method.VARIANTS):
        changed = {name: value for name, value in fields.items() if value != getattr(Plan(), name)}
        own = [name for name in method.FIELDS if name in changed]
        if not own or changed in yielded:
            continue
        value = changed[own[0]]
        known = any(own[0] in one for one in proposed)
        if known and fields not in proposed and not isinstance(value, str | bool):
            continue
        yielded.append(changed)
        yield Option(name_of(method), own[0], changed)


def _proposed(method: ModuleType, estimator: Estimator) -> list[dict[str, Any]]:
    """Return the values that a method proposes, as a list of dicts from plan field to value.

    They are the method's candidates, its defaults and, for offload, the combinations of offloaded
    tensors that search tries. Defaults of fields that work only together are in one dict.
    """
    job, machine = estimator.job, estimator.machine
    proposed: list[dict[str, Any]] = []
    if hasattr(method, "candidates"):
        facts = SearchFacts(estimator.profiler.is_complex, lambda: True)
        for start in (Plan(), *_default_plans(method, job, machine)):
            for field, values in method.candidates(start, job, facts).items():
                proposed += [{field: value} for value in values if value != getattr(Plan(), field)]
    alone = {next(name for name in method.FIELDS if name in one) for one in method.VARIANTS}
    alone |= {field for one in proposed for field in one}
    together: dict[str, Any] = {}
    for field, value, _ in method.defaults(job, machine) if hasattr(method, "defaults") else ():
        if field in alone:
            proposed.append({field: value})
        else:
            together[field] = value
    if together:
        proposed.append(together)
    if "offload" in method.FIELDS:
        proposed += [fields for fields in offloads(estimator, {}) if fields]
    return [one for number, one in enumerate(proposed) if one not in proposed[:number]]


def _default_plans(method: ModuleType, job: Job, machine: Machine) -> Iterator[Plan]:
    """Yield one plan for each default that the method proposes: the reference plan `Plan()` with
    only this default."""
    for field, value, _ in method.defaults(job, machine) if hasattr(method, "defaults") else ():
        yield Plan().replace(**{field: value})


__all__ = ["Ladder", "Option", "Rung", "climb", "options_of", "tensor_bytes", "training_bytes", "verdict"]
