"""Finalists: the fastest plan that fits not only as it is folded, but when it is rehearsed, with what its allocator reserves."""

from __future__ import annotations

from dataclasses import replace

from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.models import model_config, shallow
from tightfit.planner.estimate import Estimate, Estimator
from tightfit.planner.rehearse import rehearse

REHEARSED_BLOCKS = 24  # of a model on several devices, at most
THIN = 6  # blocks that are rehearsed of a model on one device, where that finds what is folded of so many
NEARLY = 1e-3
REHEARSED = 3  # of those that an allocator may leave too little room for, at most


def first_that_fits(estimator: Estimator, fitting: list[Estimate], job: Job) -> Estimate | None:
    """The fastest that fits when it is rehearsed, with what the allocator reserves.

    Where one is found not to, those that leave no more room than it did are put off, and of them only the leanest tried.
    """
    reserved, put_off = 0.0, []
    for one in fitting:
        if one.peak_bytes + reserved > one.limit_bytes:
            put_off.append(one)
            continue
        seen = _rehearse(estimator, one, job)
        if seen is not None and seen.fits:
            return seen
        if seen is not None:
            reserved = max(reserved, seen.peak_bytes - one.peak_bytes)
    for one in sorted(put_off, key=lambda one: one.peak_bytes)[:REHEARSED]:
        seen = _rehearse(estimator, one, job)
        if seen is not None and seen.fits:
            return seen
    return None


def _rehearse(estimator: Estimator, one: Estimate, job: Job) -> Estimate | None:
    """`one` with what the allocator reserves and, if it still fits, as rehearsed; None where the engine refuses it."""
    settled = estimator.settle(one)
    if not settled.fits:
        return settled
    if one.plan.devices > 1 and one.ledger.blocks > REHEARSED_BLOCKS:
        return (
            settled  # fully_shard on a hundred blocks takes a minute: the folded figure stands, which tests hold to it
        )
    try:
        if _agrees_when_thin(estimator, one, job):
            return replace(settled, rehearsed=settled.peak.total)
        peak = rehearse(job, one.plan, one.machine.device, one.ledger.device)
    except InputError:  # a combination that this model cannot have: sqrt where more than one block hands on
        return None
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


__all__ = ["first_that_fits"]
