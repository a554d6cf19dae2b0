"""Dry-run the plans that a search ranks highest, until one fits with the bytes of its allocator.

An estimate is a sum over a ledger. The dry run executes the training step on fake tensors with the
engine, so it confirms the estimate of the plan that `search` returns.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tightfit.errors import InputError, Untraceable
from tightfit.job import Job
from tightfit.models import model_config, with_fewer_blocks
from tightfit.plan import Plan
from tightfit.planner.dry_run import dry_run
from tightfit.planner.estimate import Estimate, Estimator

MAX_DRY_RUN_BLOCKS = 24  # on several devices, a deeper model gets no dry run
FEW_BLOCKS = 6  # on one device, a deep model is dry-run with so many blocks
AGREEMENT = 1e-3  # relative difference up to which that dry run confirms the estimate
# share by which an estimate may exceed its dry run; 7 % was seen for compiled blocks with partial
# recomputation
MAX_OVERESTIMATE = 0.1
MAX_NEAR_DRY_RUNS = 6  # dry runs of slightly too large estimates before the search refuses
MAX_FAILED_DRY_RUNS = 3  # after so many failures the model is the likely reason, and dry runs stop


@dataclass
class DryRunResults:
    """The results of dry runs.

    chosen       the fastest plan that fits; None if there is none
    too_large    plans that do not fit in a dry run, or would not fit with the allocator bytes that
                 a dry run found for a similar plan
    refused      plans that the engine cannot run, with its error
    unconfirmed  plans whose estimate fits and whose dry run failed, the fastest first. A failed dry
                 run says nothing about memory.
    """

    chosen: Estimate | None = None
    too_large: dict[Plan, Estimate] = field(default_factory=dict)
    refused: dict[Plan, InputError] = field(default_factory=dict)
    unconfirmed: dict[Plan, Estimate] = field(default_factory=dict)

    def latest(self, one: Estimate) -> Estimate:
        """The newest estimate of a plan: its dry run's, if there was one. A refused plan gets its
        reason."""
        if one.plan in self.refused:
            return replace(one, rejected_because=f"the engine refuses it: {self.refused[one.plan].found}")
        return self.unconfirmed.get(one.plan) or self.too_large.get(one.plan, one)

    def add(self, other: DryRunResults) -> None:
        """Merge the results of dry runs of other plans."""
        self.chosen = self.chosen or other.chosen
        self.too_large |= other.too_large
        self.refused |= other.refused
        self.unconfirmed |= other.unconfirmed


def first_that_fits(estimator: Estimator, fitting: list[Estimate], job: Job) -> DryRunResults:
    """Dry-run plans in the given order until one fits, with the bytes that the allocator reserves.

    fitting  estimates that fit, the fastest first

    Plans with the same precision, rounding and optimizer states need about the same allocator
    bytes. If a dry run shows that a plan does not fit, later plans of the same kind that leave less
    free memory are postponed. They come last, the one with the least memory first.
    """
    finals = DryRunResults()
    reserved, put_off = dict[tuple[str, ...], float](), []
    for one in fitting:
        kind = one.plan.precision, one.plan.rounding, one.plan.states  # each needs other buffers for the update
        if one.peak_bytes + reserved.get(kind, 0.0) > one.limit_bytes:
            put_off.append(one)
            finals.too_large[one.plan] = _with_allocator_row(one, reserved.get(kind, 0.0))
        elif _try(finals, estimator, one, job):
            return finals
        elif one.plan in finals.too_large:
            more = finals.too_large[one.plan].peak_bytes - one.peak_bytes
            reserved[kind] = max(reserved.get(kind, 0.0), more)
    for one in sorted(put_off, key=lambda one: one.peak_bytes):
        if _try(finals, estimator, one, job):
            return finals
    return finals


def first_that_nearly_fits(
    estimator: Estimator, found: list[Estimate], finals: DryRunResults, job: Job
) -> DryRunResults:
    """Dry-run plans whose estimates are slightly too large, the one with the least memory first,
    until one fits. "Slightly" is the error that estimates are known to have.

    found   estimates of all plans
    finals  results of the dry runs so far
    """
    more = DryRunResults()
    seen = {one.plan: finals.latest(one) for one in found}
    near = [one for one in seen.values() if not one.rejected_because and _nearly_fits(one)]
    for one in sorted(near, key=lambda one: one.peak_bytes)[:MAX_NEAR_DRY_RUNS]:
        if _try(more, estimator, one, job, nearly=True):
            break
    return more


def _nearly_fits(one: Estimate) -> bool:
    """Whether only device memory is too small, by at most MAX_OVERESTIMATE, and no dry run has
    tried the plan."""
    needed = (one.peak_bytes + one.margin_bytes - one.peak.rows["runtime"]) / (1 + MAX_OVERESTIMATE) + one.peak.rows[
        "runtime"
    ]
    open_ = one.dry_run_bytes is None and not one.not_confirmed and has_dry_run(one)
    return open_ and one.shortages().keys() == {"memory"} and needed <= one.limit_bytes


def has_dry_run(one: Estimate) -> bool:
    """Whether the plan gets a dry run. If not, its estimate decides.

    A deep model on several devices gets none, because fully_shard takes a minute for a hundred
    blocks; tests compare such estimates with dry runs. A plan with CUDA graphs gets none either,
    because fake tensors do not show the graphs' memory pools.
    """
    small = one.plan.devices == 1 or one.ledger.blocks <= MAX_DRY_RUN_BLOCKS
    return small and not one.ledger.keeps_step


def _try(finals: DryRunResults, estimator: Estimator, one: Estimate, job: Job, nearly: bool = False) -> bool:
    """Dry-run a plan and record the result. Returns whether a plan has been chosen.

    nearly  the estimate of the plan is slightly too large
    """
    finals.too_large.pop(one.plan, None)
    failed = list(finals.unconfirmed.values())
    if len(failed) >= MAX_FAILED_DRY_RUNS:
        seen = replace(estimator.include_allocator(one), not_confirmed=failed[0].not_confirmed)
    else:
        try:
            seen = _with_dry_run(estimator, one, job, nearly)
        except Untraceable as error:
            seen = replace(estimator.include_allocator(one), not_confirmed=error.found)
        except InputError as error:
            # the model does not support it: for example `recompute: sqrt`, if a block's successor
            # needs outputs of earlier blocks too
            finals.refused[one.plan] = error
            return False
    if not seen.fits:
        finals.too_large[one.plan] = seen
    elif seen.not_confirmed:
        finals.unconfirmed[one.plan] = seen
    else:
        finals.chosen = seen
    return finals.chosen is not None


def _with_allocator_row(one: Estimate, reserved: float) -> Estimate:
    rows = {**one.peak.rows, "allocator": reserved}
    return replace(one, peak=replace(one.peak, total=one.peak.total + reserved, rows=rows), includes_allocator=True)


def _with_dry_run(estimator: Estimator, one: Estimate, job: Job, nearly: bool) -> Estimate:
    """Add the allocator's bytes to an estimate and, if it then fits (or nearly fits), its dry
    run's peak.

    Raises InputError if the engine refuses the plan.
    """
    settled = estimator.include_allocator(one)
    if not has_dry_run(one) or not (settled.fits or (nearly and _nearly_fits(settled))):
        return settled
    if _agrees_with_few_blocks(estimator, one, job):
        return replace(settled, dry_run_bytes=settled.peak.total)
    peak = dry_run(job, one.plan, one.machine.device, one.ledger.device)
    beside = settled.peak.rows["runtime"] + settled.peak.rows.get("allocator", 0.0)
    return replace(settled, dry_run_bytes=peak.total + beside)


def _agrees_with_few_blocks(estimator: Estimator, one: Estimate, job: Job) -> bool:
    """Whether a dry run of the model with six blocks finds the peak that was estimated for six
    blocks.

    On one device, a deep model is dry-run with six blocks. If that matches the estimate for six
    blocks within 0.1 %, the estimate for the full depth is used, because every further block adds
    the same.

    Example: the estimate is 10.000 GiB for 6 blocks and 41.2 GiB for 48. If the dry run of 6 blocks
    finds 10.004 GiB (0.04 % more), 41.2 GiB is accepted without a dry run of 48 blocks.

    Raises InputError if the engine refuses the plan.
    """
    few = with_fewer_blocks(job.model, FEW_BLOCKS) if one.plan.devices == 1 else None
    if few is None or one.ledger.blocks != getattr(model_config(job.model), "num_hidden_layers", None):
        return False
    found = dry_run(job.replace(model=few), one.plan, one.machine.device).total
    return abs(found - estimator.peak_with_blocks(one.plan, FEW_BLOCKS)) <= AGREEMENT * found


__all__ = ["DryRunResults", "first_that_fits", "first_that_nearly_fits"]
