"""Find out on a few samples whether a job's loss depends on how a batch is split.

A plan divides a batch into micro-batches and over devices, and adds up what the parts give. That is
the loss of the whole batch only if each sample's loss is its own. It is not if the model or the loss
compares the samples of a batch with each other, as a contrastive loss does.

Example: CLIP's loss of 4 pairs of image and text is a cross entropy over 4 candidates. The mean of
the losses of two halves is one over 2 candidates, and that of single samples is always 0.

A plan with micro-batches also runs forward and backward several times a step. A model that changes
something in each, such as the weights of a teacher, then changes it several times.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from tightfit._torch.modules import RunningNorm
from tightfit.data.rng import generators_restored, seed_generators
from tightfit.job import DataSpec, Job
from tightfit.methods.materialize import create_on_host
from tightfit.models import model_factory
from tightfit.models.block_state import changed_after_forward
from tightfit.models.dropout import switch_off_dropout
from tightfit.models.fake_forward import UsesOfParameters, uses_of_parameters
from tightfit.models.loss_state import keeping_losses
from tightfit.models.objective import IGNORED, Batch, map_tensors
from tightfit.plan import Plan
from tightfit.planner.equal_draws import EqualDraws
from tightfit.planner.estimate import Estimate
from tightfit.planner.estimator import Estimator

SAMPLES = 4
TOLERANCE = 1e-4  # relative difference of two losses from which on they are different; rounding changes 1e-6
MOST_BYTES = 2**30  # of the parameters, and of a step with SAMPLES samples, in fp32: larger jobs are not checked


def splits_batch(estimator: Estimator, plan: Plan) -> bool:
    """Return whether the plan divides a step's batch into micro-batches or over devices."""
    batch = estimator.job.train.batch
    return plan.micro_batch_of(batch) < batch


def loss_depends_on_split(estimator: Estimator) -> str:
    """Return how the loss of a few samples changes if they are split in halves, as a phrase such as
    "4 samples have a loss of 1.3021, and their halves together 0.6484". Return an empty text if it does not
    change, or if it is not known: the check runs the model on the CPU, so it leaves out large models,
    and models and losses that fail.

    Each sample gets the same random numbers. Dropout is switched off, and norms with running statistics,
    such as BatchNorm, use these: that they normalise each micro-batch by itself is no surprise to their
    users.
    """
    job = estimator.job
    if (job.of_transformers and job.loss is None) or not _is_small(estimator):
        return ""
    batch, objective = _unevenly_labelled(estimator.profiler.batch, job), estimator.profiler.model.objective()
    try:
        with generators_restored(), keeping_losses() as states:
            seed_generators(job.train.seed)
            model = create_on_host(job.model, torch.device("cpu"), torch.float32)
            _switch_off_randomness(model)

            def loss_of(made: nn.Module, part: Any) -> float:
                seed_generators(job.train.seed)
                with EqualDraws():
                    return float(objective.total(made, part).detach()) / SAMPLES

            def losses(parts: list[Any]) -> list[float]:
                made = copy.deepcopy(model)  # a forward may change buffers, as one that counts its calls does
                return [loss_of(made, part) for part in parts]

            full = [_samples(batch, 0, SAMPLES)]
            (whole,) = losses(full)
            if any(state.has_changed for state in states):
                return "each call of the loss changes an attribute of it"
            (again,), halves = losses(full), losses(_halves(batch))
    except Exception:  # whatever the user's code raises: the search reports it where it matters
        return ""
    if _differ(whole, again) or not _differ(whole, sum(halves)):
        return ""
    return f"{SAMPLES} samples have a loss of {whole:.5g}, and their halves together {sum(halves):.5g}"


def accumulates(estimator: Estimator, plan: Plan) -> bool:
    """Return whether a device of the plan has several micro-batches in a step."""
    batch = estimator.job.train.batch
    return plan.micro_batch_of(batch) < plan.share_of(batch)


def model_uses(estimator: Estimator) -> UsesOfParameters:
    """Return which parameters and buffers a forward of the job's model changes, and which of them have
    hooks. The forward runs on fake tensors. Models of transformers do nothing of the kind."""
    job, profiler = estimator.job, estimator.profiler
    if job.of_transformers:
        return UsesOfParameters()
    return uses_of_parameters(model_factory(job.model), profiler.model.objective().total, profiler.batch)


def changed_state(estimator: Estimator) -> str:
    """Return a sentence on a block of the job's model whose recomputation would compute something else than
    its forward; "" if there is none. See `models/block_state.py`."""
    job, profiler = estimator.job, estimator.profiler
    if job.of_transformers:
        return ""
    total = profiler.model.objective().total
    return changed_after_forward(model_factory(job.model), total, profiler.batch, job.blocks_name).changed


def _is_small(estimator: Estimator) -> bool:
    plan = Plan(micro_batch=SAMPLES) if estimator.job.train.batch > SAMPLES else Plan()
    if estimator.profiler.samples < SAMPLES or estimator.job.train.batch < SAMPLES:
        return False
    one: Estimate = estimator.estimate(plan)
    return one.peak_bytes - one.peak.rows["runtime"] <= MOST_BYTES


def _switch_off_randomness(model: nn.Module) -> None:
    model.train()
    switch_off_dropout(model)
    for module in model.modules():
        if isinstance(module, RunningNorm):
            module.eval()


def _samples(batch: Batch, first: int, stop: int) -> Batch:
    def part(tensor: Tensor) -> Tensor:
        return tensor[first:stop].float() if tensor.is_floating_point() else tensor[first:stop]

    return map_tensors(part, batch)


def _unevenly_labelled(batch: Batch, job: Job) -> Batch:
    """Return the batch with fewer labels that count in each sample than in the one before, if it has
    labels for each position, and some may not count. Samples of padded text and of conversations have
    unequal numbers of them, but a prediction's example has equal ones. A mean over tokens is then
    another one in each half."""
    labels = batch.get("labels") if isinstance(batch, dict) else None
    if not isinstance(labels, Tensor) or labels.dim() != 2:
        return batch
    if not (labels == IGNORED).any() and not (isinstance(job.data, DataSpec) and job.data.packing != "packed"):
        return batch
    labels = labels.clone()
    for number, row in enumerate(labels[:SAMPLES]):
        counted = (row != IGNORED).nonzero()[:, 0]
        row[counted[len(counted) // (number + 1) :]] = IGNORED
    return {**batch, "labels": labels}


def _halves(batch: Batch) -> list[Any]:
    return [_samples(batch, *ends) for ends in itertools.pairwise(range(0, SAMPLES + 1, SAMPLES // 2))]


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > TOLERANCE * max(abs(one), abs(other), 1e-6)


__all__ = ["accumulates", "changed_state", "loss_depends_on_split", "model_uses", "splits_batch"]
