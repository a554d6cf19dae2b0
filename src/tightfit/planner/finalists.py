"""Finalists: the fastest plan that fits not only as it is folded, but when it is rehearsed, with what its allocator reserves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tightfit.errors import InputError, Untraceable
from tightfit.job import Job
from tightfit.models import model_config, shallow
from tightfit.plan import Plan
from tightfit.planner.estimate import Estimate, Estimator
from tightfit.planner.rehearse import rehearse

REHEARSED_BLOCKS = 24  # of a model on several devices, at most
THIN = 6  # blocks that are rehearsed of a model on one device, where that finds what is folded of so many
NEARLY = 1e-3
ERROR = 0.1  # by which an estimate may exceed its dry run: of compiled blocks some of which is computed again, 7 % are known
NEAREST = 6  # plans that are too large by less than that and get a dry run before a refusal
FAILURES = 3  # dry runs that may fail before the others are no longer tried: what fails them is likely to be the model


@dataclass
class Finals:
    """What came of the dry runs: the fastest plan that fits, None where there is none, and those that were passed over.

    lacking      plans that do not fit in a dry run, or would not with what others were found to need beside their tensors
    refused      plans that the engine cannot run, and what it said
    unconfirmed  plans whose estimate fits and whose dry run failed, the fastest first; a failed dry run says nothing of memory
    """

    chosen: Estimate | None = None
    lacking: dict[Plan, Estimate] = field(default_factory=dict)
    refused: dict[Plan, InputError] = field(default_factory=dict)
    unconfirmed: dict[Plan, Estimate] = field(default_factory=dict)

    def seen(self, one: Estimate) -> Estimate:
        """What is known of a plan by now; of one that cannot be, why it was rejected."""
        if one.plan in self.refused:
            return replace(one, rejected_because=f"cannot be: {self.refused[one.plan].found}")
        return self.unconfirmed.get(one.plan) or self.lacking.get(one.plan, one)

    def add(self, other: Finals) -> None:
        """Take over what came of the dry runs of other plans."""
        self.chosen = self.chosen or other.chosen
        self.lacking |= other.lacking
        self.refused |= other.refused
        self.unconfirmed |= other.unconfirmed


def first_that_fits(estimator: Estimator, fitting: list[Estimate], job: Job) -> Finals:
    """The fastest that fits in a dry run, with what the allocator reserves.

    Where one is found not to, those that leave no more memory than it did, and update weights of the same type as it does, are
    put off, and come last, the leanest first.
    """
    finals = Finals()
    reserved, put_off = dict[tuple[str, ...], float](), []
    for one in fitting:
        kind = one.plan.precision, one.plan.rounding, one.plan.states  # each with buffers of its own for an update
        if one.peak_bytes + reserved.get(kind, 0.0) > one.limit_bytes:
            put_off.append(one)
            finals.lacking[one.plan] = _with_reserve(one, reserved.get(kind, 0.0))
        elif _is_chosen(finals, estimator, one, job):
            return finals
        elif one.plan in finals.lacking:
            more = finals.lacking[one.plan].peak_bytes - one.peak_bytes
            reserved[kind] = max(reserved.get(kind, 0.0), more)
    for one in sorted(put_off, key=lambda one: one.peak_bytes):
        if _is_chosen(finals, estimator, one, job):
            return finals
    return finals


def first_that_nearly_fits(estimator: Estimator, found: list[Estimate], finals: Finals, job: Job) -> Finals:
    """The leanest of the plans whose estimates are too large by no more than estimates may be wrong, and whose dry run fits.

    finals  what came of dry runs so far; found: estimates of all plans
    """
    more = Finals()
    seen = {one.plan: finals.seen(one) for one in found}
    near = [one for one in seen.values() if not one.rejected_because and _nearly_fits(one)]
    for one in sorted(near, key=lambda one: one.peak_bytes)[:NEAREST]:
        if _is_chosen(more, estimator, one, job, nearly=True):
            break
    return more


def _nearly_fits(one: Estimate) -> bool:
    """Whether device memory alone is too small, by an estimate that no dry run has confirmed, and by little."""
    needed = (one.peak_bytes + one.margin_bytes - one.peak.rows["runtime"]) / (1 + ERROR) + one.peak.rows["runtime"]
    open_ = one.rehearsed is None and not one.not_confirmed and has_dry_run(one)
    return open_ and one.lacks().keys() == {"memory"} and needed <= one.limit_bytes


def has_dry_run(one: Estimate) -> bool:
    """fully_shard on a hundred blocks takes a minute: there the estimate stands, which tests hold to a dry run. So it does of
    CUDA graphs, whose pools fake tensors do not show."""
    small = one.plan.devices == 1 or one.ledger.blocks <= REHEARSED_BLOCKS
    return small and not one.ledger.keeps_step


def _is_chosen(finals: Finals, estimator: Estimator, one: Estimate, job: Job, nearly: bool = False) -> bool:
    """Try a plan in a dry run, and note what came of it. Whether it fits. nearly: one whose estimate does not."""
    finals.lacking.pop(one.plan, None)
    failed = list(finals.unconfirmed.values())
    if len(failed) >= FAILURES:
        seen = replace(estimator.settle(one), not_confirmed=failed[0].not_confirmed)
    else:
        try:
            seen = _rehearse(estimator, one, job, nearly)
        except Untraceable as error:
            seen = replace(estimator.settle(one), not_confirmed=error.found)
        except (
            InputError
        ) as error:  # a combination that this model cannot have: sqrt where more than one block hands on
            finals.refused[one.plan] = error
            return False
    if not seen.fits:
        finals.lacking[one.plan] = seen
    elif seen.not_confirmed:
        finals.unconfirmed[one.plan] = seen
    else:
        finals.chosen = seen
    return finals.chosen is not None


def _with_reserve(one: Estimate, reserved: float) -> Estimate:
    rows = {**one.peak.rows, "allocator": reserved}
    return replace(one, peak=replace(one.peak, total=one.peak.total + reserved, rows=rows), settled=True)


def _rehearse(estimator: Estimator, one: Estimate, job: Job, nearly: bool) -> Estimate:
    """`one` with what the allocator reserves and, if that fits or nearly, the peak of its dry run. Raises InputError where the
    engine refuses it."""
    settled = estimator.settle(one)
    if not has_dry_run(one) or not (settled.fits or (nearly and _nearly_fits(settled))):
        return settled
    if _agrees_when_thin(estimator, one, job):
        return replace(settled, rehearsed=settled.peak.total)
    peak = rehearse(job, one.plan, one.machine.device, one.ledger.device)
    beside = settled.peak.rows["runtime"] + settled.peak.rows.get("allocator", 0.0)
    return replace(settled, rehearsed=peak.total + beside)


def _agrees_when_thin(estimator: Estimator, one: Estimate, job: Job) -> bool:
    """Whether a rehearsal of the model with few of its blocks finds, to the byte or nearly, what is folded of it: then so it is
    with all of them, which take the same again. Raises InputError where the engine refuses it."""
    few = shallow(job.model, THIN) if one.plan.devices == 1 else None
    if few is None or one.ledger.blocks != getattr(model_config(job.model), "num_hidden_layers", None):
        return False
    found = rehearse(job.replace(model=few), one.plan, one.machine.device).total
    return abs(found - estimator.peak_with_blocks(one.plan, THIN)) <= NEARLY * found


__all__ = ["Finals", "first_that_fits", "first_that_nearly_fits"]
