"""Dry-run the fastest plans, and prefer one that surely fits.

A plan fits surely if the upper end of its memory's interval is within the device's memory (see
`intervals.py`). Such a plan is chosen before a faster one that may not fit, if it is hardly slower.
"""

from __future__ import annotations

from tightfit.planner.candidates import is_legal
from tightfit.planner.estimate import Estimate
from tightfit.planner.estimator import Estimator
from tightfit.planner.finalists import DryRunResults, first_that_fits
from tightfit.planner.variants import by_time

# a plan that surely fits is chosen before one whose interval exceeds the memory, if it is at most this much slower
WORTH_OF_CERTAINTY = 0.03
MOST_CERTAIN_TRIED = 2  # such plans that are dry-run


def dry_run_fastest(
    finals: DryRunResults, estimator: Estimator, estimates: list[Estimate], any_micro_batch: bool
) -> list[Estimate]:
    """Dry-run the plans whose estimates fit, the fastest first, until one fits in its dry run too.
    Add the results to `finals`. If it does not surely fit, prefer one that does (`_prefer_certain`), and
    return the estimates of the plans with smaller micro-batches that were tried for this.

    estimates        estimates of all plans so far; those that do not fit are skipped
    any_micro_batch  whether the search may choose the micro-batch
    """
    fitting = sorted(
        (estimate for estimate in estimates if estimate.fits and estimate.plan not in finals.refused), key=by_time
    )
    if fitting:
        _dry_run_ahead(estimator, fitting, any_micro_batch)
    finals.add(first_that_fits(estimator, fitting, estimator.job))
    if finals.chosen is None or finals.chosen.fits_surely:
        return []
    return _prefer_certain(finals, estimator, finals.chosen, fitting, any_micro_batch)


def _dry_run_ahead(estimator: Estimator, fitting: list[Estimate], any_micro_batch: bool) -> None:
    """Let a copy of this process, if the search has copies, make the dry run that will probably be
    needed after that of the fastest plan: that of a plan that surely fits, or of the second fastest.

    fitting          estimates of the plans that fit, the fastest first
    any_micro_batch  whether the search may choose the micro-batch
    """
    work = estimator.profiler.shared_work
    if work is None:
        return

    def dry_run_next() -> None:  # in the copy, so that the estimates here are those of a search alone
        fastest, following = estimator.include_allocator(fitting[0]), fitting[1:]
        if fastest.fits and not fastest.fits_surely:
            smaller = _with_smaller_micro_batches(estimator, fastest, any_micro_batch)
            following = _certain(fastest, [*fitting, *smaller])
        first_that_fits(estimator, following[:1], estimator.job)

    work.restart_copies([dry_run_next])


def _prefer_certain(
    finals: DryRunResults, estimator: Estimator, fastest: Estimate, fitting: list[Estimate], any_micro_batch: bool
) -> list[Estimate]:
    """Make the fastest plan that surely fits the chosen one, if it is at most 3 % slower than the
    fastest plan, whose interval exceeds the memory. Return the estimates of the plans with smaller
    micro-batches than the fastest, which are tried as well.

    finals   the results of the dry runs so far
    fastest  the fastest plan that fits in its dry run
    fitting  estimates of all plans that fit without the allocator's bytes
    any_micro_batch  whether the search may choose the micro-batch
    """
    smaller = _with_smaller_micro_batches(estimator, fastest, any_micro_batch)
    certain = [one for one in _certain(fastest, [*fitting, *smaller]) if one.plan not in finals.too_large]
    for estimate in certain[:MOST_CERTAIN_TRIED]:
        found = first_that_fits(estimator, [estimate], estimator.job)
        finals.add(found)  # the fastest plan stays chosen
        if found.chosen is not None and found.chosen.fits_surely:
            finals.chosen, finals.uncertain[fastest.plan] = found.chosen, fastest
            break
    return smaller


def _with_smaller_micro_batches(estimator: Estimator, fastest: Estimate, any_micro_batch: bool) -> list[Estimate]:
    """Return estimates of the plan of `fastest` with half of its micro-batch, a quarter and so on,
    until one surely fits or is too slow.

    With `compile: model`, there are none: each would need a trace of the whole model.
    """
    smaller: list[Estimate] = []
    may_shrink = any_micro_batch and fastest.plan.compile != "model"
    size = fastest.plan.micro_batch_of(estimator.job.train.batch) // 2 if may_shrink else 0
    while size:
        plan = fastest.plan.replace(micro_batch=size)
        if not is_legal(plan, estimator.job, estimator.machine.device):
            break
        smaller.append(estimator.estimate(plan))
        if smaller[-1].fits_surely or not _is_worth(smaller[-1], fastest):
            break
        size //= 2
    return smaller


def _certain(fastest: Estimate, others: list[Estimate]) -> list[Estimate]:
    """Return those of `others` that surely fit and are at most 3 % slower than the fastest plan, the
    fastest first."""
    worth = (other for other in others if other.plan != fastest.plan and _is_worth(other, fastest))
    return [one for one in sorted(worth, key=by_time) if one.fits_surely]


def _is_worth(estimate: Estimate, fastest: Estimate) -> bool:
    """Return whether the plan of `estimate` is at most 3 % slower than the fastest plan."""
    return estimate.total_s <= (1 + WORTH_OF_CERTAINTY) * fastest.total_s


__all__ = ["dry_run_fastest"]
