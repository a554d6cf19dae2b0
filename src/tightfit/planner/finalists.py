"""Dry-run the fastest plans of a search until one fits in device memory. The bytes that the
allocator reserves beyond the tensors are counted, too.

An estimate is a sum over a ledger. A dry run executes training steps on fake tensors with the
engine that would train. It therefore confirms the estimate of the plan that `search` returns.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tightfit.errors import InputError, Untraceable
from tightfit.job import Job, ModelSpec
from tightfit.methods import recompute
from tightfit.models import model_config, with_fewer_blocks
from tightfit.plan import Plan
from tightfit.planner.dry_run import dry_run_bytes
from tightfit.planner.estimate import MARGIN, Estimate
from tightfit.planner.estimator import Estimator

MAX_DRY_RUN_BLOCKS = 24  # on several devices, a deeper model gets no dry run
FEWEST_BLOCKS = 4  # a model that is compiled as a whole is dry-run with this many blocks and with FEW_BLOCKS
FEW_BLOCKS = 6  # on one device, a deep model is dry-run with only this many blocks
MORE_BLOCKS = 8  # and with this many, if the dry run with FEW_BLOCKS does not confirm the estimate
# up to this relative difference, a dry run of FEW_BLOCKS corrects the estimate for the full depth by
# the same share
CLOSE = 3e-3
AGREEMENT = 1e-3  # relative difference up to which a dry run of FEW_BLOCKS confirms the estimate
# an estimate may exceed its dry run by this share. The largest share that was seen is 7 %, for
# compiled blocks with partial recomputation
MAX_OVERESTIMATE = 0.1
OVERESTIMATED_PHASES = ("forward", "backward")
MAX_NEAR_DRY_RUNS = 6  # dry runs of slightly too large estimates before the search refuses
MAX_FAILED_DRY_RUNS = 3  # after this many failures, the model is the likely reason: dry runs stop


@dataclass
class DryRunResults:
    """Collects the results of the dry runs of a search.

    chosen       the estimate of the first plan that fits in its dry run; None if no plan does
    too_large    the plans that do not fit, each with its estimate. They did not fit in a dry run,
                 or they would not fit if they needed as many allocator bytes as a similar plan
    refused      the plans that the engine cannot run, each with the engine's error
    unconfirmed  the plans whose estimate fits and whose dry run failed, in the order in which they
                 were tried. A failed dry run says nothing about memory
    uncertain    the plans that fit, but not surely, and for which a plan that surely fits was chosen
    """

    chosen: Estimate | None = None
    too_large: dict[Plan, Estimate] = field(default_factory=dict)
    refused: dict[Plan, InputError] = field(default_factory=dict)
    unconfirmed: dict[Plan, Estimate] = field(default_factory=dict)
    uncertain: dict[Plan, Estimate] = field(default_factory=dict)

    def latest(self, estimate: Estimate) -> Estimate:
        """Return the newest estimate of the plan of `estimate`: the one after its dry run,
        or `estimate` itself if it had none. If the engine refused the plan, return `estimate` with the
        engine's reason in `rejected_because`."""
        if estimate.plan in self.refused:
            return replace(estimate, rejected_because=f"the engine refuses it: {self.refused[estimate.plan].found}")
        return (
            self.unconfirmed.get(estimate.plan)
            or self.uncertain.get(estimate.plan)
            or self.too_large.get(estimate.plan, estimate)
        )

    def add(self, other: DryRunResults) -> None:
        """Add the results in `other`, of dry runs of other plans, to these results. A plan that is
        already chosen stays chosen."""
        self.chosen = self.chosen or other.chosen
        self.too_large |= other.too_large
        self.refused |= other.refused
        self.unconfirmed |= other.unconfirmed


def first_that_fits(estimator: Estimator, fitting: list[Estimate], job: Job) -> DryRunResults:
    """Dry-run plans in the given order until one fits. The bytes that the allocator reserves beyond
    the tensors are counted, too. Return the results of all these dry runs; `chosen` is the plan
    that fits.

    estimator  adds the allocator's bytes to an estimate
    fitting    estimates of plans that fit without the allocator's bytes, the fastest first
    job        the job that the plans train

    Plans with the same precision, rounding and optimizer states need about the same allocator
    bytes. Once such a plan turned out not to fit, later plans of its kind that would not fit with
    its allocator bytes are postponed. They are dry-run after all other plans, the one with the
    smallest peak first.

    Example: a plan of 70 GiB needs 78 GiB with its allocator, 8 GiB more, and 75 GiB are available.
    A later plan of the same kind with 68 GiB is postponed, because it may need 76 GiB.
    """
    finals = DryRunResults()
    reserved, put_off = dict[tuple[str | bool, ...], float](), []
    for estimate in fitting:
        plan = estimate.plan  # each kind needs other buffers for the update
        kind = plan.precision, plan.rounding, plan.master_weights, plan.states
        if estimate.peak_bytes + reserved.get(kind, 0.0) > estimate.limit_bytes:
            put_off.append(estimate)
            finals.too_large[estimate.plan] = _with_allocator_row(estimate, reserved.get(kind, 0.0))
        elif _try(finals, estimator, estimate, job):
            return finals
        elif estimate.plan in finals.too_large:
            more = finals.too_large[estimate.plan].peak_bytes - estimate.peak_bytes
            reserved[kind] = max(reserved.get(kind, 0.0), more)
    for estimate in sorted(put_off, key=lambda estimate: estimate.peak_bytes):
        if _try(finals, estimator, estimate, job):
            return finals
    return finals


def first_that_nearly_fits(
    estimator: Estimator, estimates: list[Estimate], finals: DryRunResults, job: Job
) -> DryRunResults:
    """Dry-run plans whose estimates are slightly too large, the one with the smallest peak first,
    until a plan fits. An estimate is slightly too large if it would fit with 10 % less memory in
    forward and backward, because estimates may exceed their dry runs by that much.

    estimator  adds the allocator's bytes to an estimate
    estimates  estimates of all plans of the search
    finals     results of the dry runs so far
    job        the job that the plans train

    Returns the results of the new dry runs only, which are at most 6.
    """
    more = DryRunResults()
    latest = [finals.latest(estimate) for estimate in {estimate.plan: estimate for estimate in estimates}.values()]
    hopeless = {_update_memory_key(estimate.plan) for estimate in latest if _is_too_large_for_certain(estimate)}
    near = [estimate for estimate in latest if not estimate.rejected_because and _nearly_fits(estimate)]
    runs = 0
    for estimate in sorted(near, key=lambda estimate: estimate.peak_bytes):
        if _update_memory_key(estimate.plan) in hopeless or runs == MAX_NEAR_DRY_RUNS:
            continue
        if _try(more, estimator, estimate, job, nearly=True):
            break
        tried = more.too_large.get(estimate.plan)
        if tried is not None and _is_too_large_for_certain(tried):
            hopeless.add(_update_memory_key(estimate.plan))
        else:
            runs += 1
    return more


def _update_memory_key(plan: Plan) -> Plan:
    """Return a key that is equal for plans that need the same memory outside of forward and backward: the
    plan without its micro-batch, recompute, chunked loss and compile."""
    return plan.replace(micro_batch=None, recompute="none", chunked_loss=None, compile="none")


def _is_too_large_for_certain(estimate: Estimate) -> bool:
    """Return whether the plan of `estimate` does not fit outside of forward and backward,
    where no dry run finds less memory than the estimate."""
    outside = estimate.includes_allocator and estimate.peak.phase not in OVERESTIMATED_PHASES
    return outside and estimate.dry_run_bytes is None and "memory" in estimate.shortages()


def _nearly_fits(estimate: Estimate) -> bool:
    """Return whether a dry run may still show that the plan of `estimate` fits: the plan
    had no dry run yet, and only device memory is too small, by at most 10 % of the bytes in forward
    and backward. Estimates of the other phases are exact."""
    if estimate.dry_run_bytes is not None or estimate.not_confirmed or estimate.shortages().keys() != {"memory"}:
        return False
    rows = estimate.peak.rows
    exact = estimate.peak.phase not in OVERESTIMATED_PHASES
    runtime, needed = rows["runtime"], estimate.peak.total - rows["runtime"] if exact else 0.0
    for phase, _, bytes_by_row in estimate.ledger.instants():
        size = sum(bytes_by_row.values()) - runtime
        needed = max(needed, size / (1 + MAX_OVERESTIMATE) if phase in OVERESTIMATED_PHASES else size)
    return has_dry_run(estimate) and runtime + (1 + MARGIN) * needed <= estimate.limit_bytes


def has_dry_run(estimate: Estimate) -> bool:
    """Return whether the search dry-runs the plan of `estimate`. If not, the estimate alone
    decides whether the plan fits.

    A deep model on several devices gets no dry run, because fully_shard takes a minute for a
    hundred blocks. A plan with CUDA graphs gets no dry run either, because fake tensors do not show
    the graphs' memory pools.
    """
    small = estimate.plan.devices == 1 or estimate.ledger.blocks <= MAX_DRY_RUN_BLOCKS
    return small and not estimate.ledger.uses_cuda_graphs


def _try(finals: DryRunResults, estimator: Estimator, estimate: Estimate, job: Job, nearly: bool = False) -> bool:
    """Dry-run the plan of `estimate` and record the result in `finals`. Return whether the
    plan fits, so that it is the chosen one.

    nearly  whether the plan is tried although its estimate is slightly too large

    After three failed dry runs, plans are no longer dry-run, and count as unconfirmed if they fit.
    """
    finals.too_large.pop(estimate.plan, None)
    failed = list(finals.unconfirmed.values())
    if twin := _twin_that_is_too_large(finals, estimate):
        settled = estimator.include_allocator(estimate)
        result = replace(settled, dry_run_bytes=max(twin.dry_run_bytes or 0.0, settled.peak.total))
    elif len(failed) >= MAX_FAILED_DRY_RUNS:
        result = replace(estimator.include_allocator(estimate), not_confirmed=failed[0].not_confirmed)
    else:
        try:
            result = _with_dry_run(estimator, estimate, job, nearly)
        except Untraceable as error:
            result = replace(estimator.include_allocator(estimate), not_confirmed=error.found)
        except InputError as error:
            # the model does not support the plan: for example `recompute: sqrt`, if a block uses
            # outputs of other blocks than the one before it
            finals.refused[estimate.plan] = error
            return False
    if not result.fits:
        finals.too_large[estimate.plan] = result
    elif result.not_confirmed:
        finals.unconfirmed[estimate.plan] = result
    else:
        finals.chosen = result
    return finals.chosen is not None


def _twin_that_is_too_large(finals: DryRunResults, estimate: Estimate) -> Estimate | None:
    """Return the estimate of a plan that did not fit in its dry run and that differs from the plan
    of `estimate` only in the dtype of its optimizer states. Return None if there is none, or if the
    states matter.

    They do not matter if they are offloaded, and both plans have the same peak in forward or
    backward. So `estimate` needs no dry run of its own.
    """
    if "states" not in estimate.plan.offload or estimate.peak.phase == "optimizer":
        return None
    for plan, candidate in finals.too_large.items():
        same = plan.replace(states=estimate.plan.states) == estimate.plan and candidate.dry_run_bytes is not None
        beside = candidate.peak.rows.get("allocator", 0.0)
        if same and (candidate.peak.phase, candidate.peak.total - beside) == (estimate.peak.phase, estimate.peak.total):
            return candidate
    return None


def _with_allocator_row(estimate: Estimate, reserved: float) -> Estimate:
    """Return the estimate with an allocator row of `reserved` bytes: the bytes that the allocator
    reserves beyond the tensors. The peak grows by as much."""
    rows = {**estimate.peak.rows, "allocator": reserved}
    return replace(
        estimate, peak=replace(estimate.peak, total=estimate.peak.total + reserved, rows=rows), includes_allocator=True
    )


def _with_dry_run(estimator: Estimator, estimate: Estimate, job: Job, nearly: bool) -> Estimate:
    """Return `estimate` with the bytes that the allocator reserves beyond the tensors and,
    if it then fits, with the peak of its dry run.

    nearly  whether to dry-run the plan also if its estimate is slightly too large

    Raises Untraceable if the dry run fails, and InputError if the engine refuses the plan.
    """
    settled = estimator.include_allocator(estimate)
    if not has_dry_run(estimate) or not (settled.fits or (nearly and _nearly_fits(settled))):
        return settled
    total = _peak_by_few_blocks(estimator, estimate, job)
    if total is None:
        work = estimator.profiler.shared_work
        total = dry_run_bytes(job, estimate.plan, estimate.machine.device, estimate.ledger.pipeline_rank, work)
    beside = settled.peak.rows["runtime"] + settled.peak.rows.get("allocator", 0.0)
    return replace(settled, dry_run_bytes=total + beside)


def _peak_by_few_blocks(estimator: Estimator, estimate: Estimate, job: Job) -> float | None:
    """Return the peak bytes that dry runs of the model with only a few blocks show for the plan of
    `estimate`, without the runtime and allocator rows. Return None if they do not show it,
    so that the model has to be dry-run at its full depth.

    On one device, a deep model is dry-run with six blocks. If the dry run's peak matches the
    estimate for six blocks within 0.1 %, the estimate for the full depth is accepted, because every
    further block adds the same memory.

    If it differs by up to 0.3 %, the estimate for the full depth is corrected by the same share. That is
    at most a tenth of the safety margin.

    If it differs by more, the model is dry-run with eight blocks as well. If the dry run exceeds the
    estimate by the same bytes with six and with eight blocks, it exceeds the estimate for the full
    depth by these bytes, too.

    Example: the estimate is 10.000 GiB for 6 blocks and 41.2 GiB for 48. If the dry run of 6 blocks
    finds 10.004 GiB (0.04 % more), 41.2 GiB is accepted without a dry run of 48 blocks. If it finds
    11.2 GiB, and the dry run of 8 blocks finds 1.2 GiB more than the estimate for 8 blocks, too,
    the result is 42.4 GiB.

    Returns None, without a dry run, on several devices and for models whose depth cannot be
    changed. Raises InputError if the engine refuses the plan.
    """
    known_depth = estimate.plan.devices == 1 and isinstance(job.model, ModelSpec)
    depth = getattr(model_config(job.model), "num_hidden_layers", None) if known_depth else None
    if depth is not None and estimate.plan.compile == "model":
        return _peak_by_two_depths(estimator, estimate, job, depth)
    if depth is None or estimate.ledger.blocks != depth:
        return None
    known = estimate.peak.total - estimate.peak.rows["runtime"] - estimate.peak.rows.get("allocator", 0.0)
    estimates: list[float] = []
    excess: list[float] = []  # bytes by which the dry run exceeds the estimate, with few and with more blocks
    for count in (FEW_BLOCKS, MORE_BLOCKS):
        few = with_fewer_blocks(job.model, count)
        if few is None:
            return None
        # a pattern of parameter names may match only blocks that are left out; groups take no memory
        shallow = job.replace(model=few, train=job.train.replace(groups=()))
        plan = recompute.at_depth(estimate.plan, estimate.ledger.blocks, count)
        dry_run_peak = dry_run_bytes(shallow, plan, estimate.machine.device, 0, estimator.profiler.shared_work)
        estimates.append(estimator.peak_with_blocks(plan, count))
        excess.append(dry_run_peak - estimates[-1])
        if abs(excess[0]) <= AGREEMENT * dry_run_peak:
            return known
        if estimate.plan.recompute.startswith(("sqrt", "first-")):  # not linear in the depth
            return None
        if abs(excess[0]) <= CLOSE * dry_run_peak:
            return known * dry_run_peak / estimates[0]
    further = (depth - FEW_BLOCKS) / (MORE_BLOCKS - FEW_BLOCKS)
    grown, expected = (some[0] + further * (some[1] - some[0]) for some in (excess, estimates))
    is_constant = abs(grown - excess[0]) <= AGREEMENT * known
    return known + grown if is_constant and abs(expected - known) <= AGREEMENT * known else None


def _peak_by_two_depths(estimator: Estimator, estimate: Estimate, job: Job, depth: int) -> float | None:
    """Return the peak bytes of a model that is compiled as a whole, without the runtime and allocator rows, as dry runs
    with four and with six blocks show them: every further block adds the same memory. Return None if
    that differs from the estimate by more than 0.3 %, or if the model has no more than twelve blocks.

    A compiled model has no estimate for fewer blocks, because its blocks are not traced one by one.

    depth  number of the model's blocks
    """
    if depth <= 2 * FEW_BLOCKS or estimate.plan.recompute.startswith(("sqrt", "first-")):
        return None
    peaks: list[float] = []
    for count in (FEWEST_BLOCKS, FEW_BLOCKS):
        few = with_fewer_blocks(job.model, count)
        if few is None:
            return None
        shallow = job.replace(model=few, train=job.train.replace(groups=()))
        device, work = estimate.machine.device, estimator.profiler.shared_work
        peaks.append(dry_run_bytes(shallow, estimate.plan, device, 0, work))
    more = (peaks[1] - peaks[0]) * (depth - FEW_BLOCKS) / (FEW_BLOCKS - FEWEST_BLOCKS)
    total = peaks[1] + more
    known = estimate.peak.total - estimate.peak.rows["runtime"] - estimate.peak.rows.get("allocator", 0.0)
    return total if abs(total - known) <= CLOSE * known else None


__all__ = ["DryRunResults", "first_that_fits", "first_that_nearly_fits"]
