"""Chooses the kernels of a plan: those of dropout, convolutions, attention and the loss, torch.compile,
and 8-bit products. They are chosen one at a time, because each value needs a trace of the model."""

from __future__ import annotations

from typing import Any

from tightfit.capabilities import has_fast_float8, has_fast_tf32
from tightfit.errors import InputError, Untraceable
from tightfit.methods import float8, microbatch
from tightfit.methods.compile import COMPILE_S
from tightfit.plan import Plan
from tightfit.planner.candidates import is_legal
from tightfit.planner.estimate import Estimate
from tightfit.planner.estimator import Estimator

# shares of a step's time that an option must be predicted to save, because it costs memory (another
# loss), or because a smaller predicted saving was not found when measured (compile)
MIN_KERNEL_SAVING, MIN_COMPILE_SAVING = 0.02, 0.04


def with_best_kernels(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """Choose the kernels (attention, loss, compile, precision) with which the job is predicted to
    finish first. Each kernel option of `start` is changed only if the job is then faster.

    pins  plan fields that the user fixed: they are not changed

    Returns (plan, leaner): the plan with the fastest kernels, and plan fields that would need less
    memory, such as {"chunked_loss": 1024}. These are values of `start` that were changed because
    others are faster. If memory is short, the search tries them again.

    Compile is decided late and only once, because traces with compile take longest. It is not tried
    if the job is so short that compiling takes longer than it could save. compile: model is decided
    with a micro-batch that is expected to fit, so that the search can use the same trace.
    """
    distributed = start.tp * start.pp * start.cp > 1
    best = estimator.estimate(start if "compile" in pins else start.replace(compile="none"))
    for fields in _kernels_to_try(estimator, start, best, pins):
        if fields.get("compile") == "model" and "micro_batch" not in pins:
            best = estimator.estimate(best.plan.replace(micro_batch=_expected_to_fit(estimator, best)))
        try:
            least = (
                MIN_COMPILE_SAVING if "compile" in fields else MIN_KERNEL_SAVING if "chunked_loss" in fields else 0.0
            )
            best = _faster(estimator, best, best.plan.replace(**fields), least)
        except InputError as error:  # the model does not support it
            if isinstance(error, Untraceable):
                options = ", ".join(f"{name}: {value}" for name, value in fields.items())
                estimator.untraceable[options] = f"{error.asked.removeprefix('job: ')} {error.found}"
    wider = "tf32" if has_fast_tf32(estimator.machine) else "fp32"
    if "precision" not in pins and not distributed and _wider_may_be_faster(estimator, best, wider):
        best = _faster(estimator, best, best.plan.replace(precision=wider))
    for plan in in_float8(estimator, best.plan, pins):
        best = _faster(estimator, best, plan)
    names = [name for name in ("chunked_loss", "precision") if getattr(best.plan, name) != getattr(start, name)]
    plan = best.plan if "micro_batch" in pins else best.plan.replace(micro_batch=start.micro_batch)
    return plan, {name: getattr(start, name) for name in names}


def _expected_to_fit(estimator: Estimator, best: Estimate) -> int | None:
    """Return the largest micro-batch with which the plan of `best` is expected to fit, if its memory
    beside parameters, gradients and optimizer states is in proportion to the micro-batch. Return the
    plan's own micro-batch if none is."""
    plan, batch = best.plan, estimator.job.train.batch
    fixed, whole = estimator.memory_lower_bound(plan), plan.micro_batch_of(batch)
    for size in microbatch.sizes(plan, batch):
        share = plan.replace(micro_batch=size).micro_batch_of(batch) / whole
        if fixed + share * (best.peak_bytes - fixed) <= estimator.limit_bytes:
            return size
    return plan.micro_batch


def _faster(estimator: Estimator, best: Estimate, plan: Plan, least: float = 0.0) -> Estimate:
    """Estimate `plan`. Return this estimate if it finishes the job sooner than `best`, and saves
    more than the share `least` of its time; otherwise return `best`."""
    other = estimator.estimate(plan)
    return other if saves(other, best, least) else best


def saves(estimate: Estimate, other: Estimate, least: float) -> bool:
    """Return whether `estimate` finishes the job sooner than `other`, and saves more than the share
    `least` of its time."""
    return estimate.total_s < other.total_s * (1 - least)


def _kernels_to_try(estimator: Estimator, start: Plan, best: Estimate, pins: dict[str, Any]) -> list[dict[str, Any]]:
    """Return changes of kernel options that may make `best` faster, each as a dict of plan fields,
    such as {"attention": "sdpa"}.

    start  the plan with the default kernels
    best   the estimate of `start` without compile, or with the pinned value of compile
    pins   plan fields that the user fixed: they are not changed

    On a CPU, convolutional models are compiled as a whole, because torch.compile converts images
    between memory formats at the boundaries of its regions.
    """
    on_cpu, distributed = estimator.machine.device == "cpu", start.tp * start.pp * start.cp > 1
    convolves = sum(row[2] for row in best.time.rows if "convolution" in row[1]) > best.time.step_s / 4
    regions = "model" if convolves and on_cpu and start.compile == "block" and not distributed else start.compile
    pays = best.plan.compile != start.compile and COMPILE_S[estimator.machine.device] < max_compile_saving_s(best)
    found: list[tuple[str, Any, bool]] = [
        ("dropout", "16-bit", on_cpu and any("random" in row[1] for row in best.time.rows)),
        ("memory_format", "channels_last", convolves),
        ("attention", "sdpa", start.attention != "sdpa"),
        (
            "attention",
            "blocked",
            start.attention == "sdpa" and on_cpu and start.cp == 1 and estimator.job.of_transformers,
        ),
        ("chunked_loss", None, start.chunked_loss is not None and not distributed),
        ("compile", regions, pays),
    ]
    return [{field: value} for field, value, worth_trying in found if worth_trying and field not in pins]


def in_float8(estimator: Estimator, plan: Plan, pins: dict[str, Any]) -> list[Plan]:
    """Return a list of plans: `plan` with each float8 recipe (such as "rowwise") that speeds up the
    machine's matrix products.

    The list is empty if the job does not allow float8, if the user pinned float8 (it is in `pins`),
    or if the package torchao is not installed.
    """
    if "float8" in pins or "float8" not in estimator.job.allowed or not float8.is_installed():
        return []
    machine = estimator.machine
    recipes = [recipe for recipe in ("tensorwise", "rowwise") if has_fast_float8(machine, recipe)]
    plans = [plan.replace(float8=recipe) for recipe in recipes]
    return [one for one in plans if is_legal(one, estimator.job, machine.device)]


def _wider_may_be_faster(estimator: Estimator, estimate: Estimate, wider: str) -> bool:
    """Return whether the precision `wider` ("fp32" or "tf32") may be faster than the mixed
    precision of the plan of `estimate`. Return False if that plan has no mixed precision.

    A wider precision needs no autocast casts. It may be faster if the casts take longer than the
    narrower matrix products save.
    """
    narrow_rate, rate = estimator.machine.rate(estimate.plan.precision), estimator.machine.rate(wider)
    if not estimate.plan.precision.endswith("mixed") or narrow_rate is None or rate is None:
        return False
    launch_s = estimator.time_model.launch_s
    casts_s = sum(seconds + count * launch_s for _, kind, seconds, count in estimate.time.rows if kind == "cast")
    return casts_s > (narrow_rate / rate - 1) * estimate.time.compute_s


def max_compile_saving_s(estimate: Estimate) -> float:
    """Return an upper bound on the seconds that compile can save in the entire job, whose estimate
    without compile is `estimate`.

    The bound is the time of everything except matrix products, the optimizer update, loading
    samples and communication.
    """
    time = estimate.time
    return (time.memory_s + time.launch_s + time.allocation_s) * (estimate.total_s - estimate.compile_s) / time.step_s
