"""What a search asks of a user's own model and loss before it splits a batch or recomputes blocks.

A loss may depend on how a batch is split (`engine/split_loss.py`). A plan with micro-batches also runs
forward and backward several times a step. A model that changes something in each, such as the weights
of a teacher, then changes it several times.
"""

from __future__ import annotations

from torch import Tensor

from tightfit.data import SampleStream, open_samples, order_of
from tightfit.data.rng import generators_restored
from tightfit.engine.split_loss import SAMPLES, how_loss_depends_on_split, with_halves
from tightfit.errors import InputError
from tightfit.job import DataSpec, Job
from tightfit.models import model_factory
from tightfit.models.batches import IGNORED, Batch, map_tensors
from tightfit.models.block_state import changed_after_forward
from tightfit.models.fake_forward import UsesOfParameters, uses_of_parameters
from tightfit.plan import Plan
from tightfit.planner.estimator import Estimator

MOST_BYTES = 2**30  # of the parameters, and of a step with SAMPLES samples, in fp32: larger jobs are not checked


def splits_batch(estimator: Estimator, plan: Plan) -> bool:
    """Return whether the plan divides a step's batch into micro-batches or over devices."""
    batch = estimator.job.train.batch
    return plan.micro_batch_of(batch) < batch


def loss_depends_on_split(estimator: Estimator) -> str:
    """Return how the loss of a few samples changes if they are split in halves, as a phrase such as
    "8 samples have a loss of 1.3021, and their halves together 0.6484". Return an empty text if it does not
    change, or if it is not known: the check runs the model on the CPU, so it leaves out large models,
    and models and losses that fail.
    """
    job = estimator.job
    if (job.of_transformers and job.loss is None) or not _is_small(estimator):
        return ""
    batches = _first_batches(estimator)
    return how_loss_depends_on_split(job, estimator.profiler.model.objective(), batches) if batches else ""


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
    estimate = estimator.estimate(plan)
    return estimate.peak_bytes - estimate.peak.rows["runtime"] <= MOST_BYTES


def _first_batches(estimator: Estimator) -> tuple[Batch, Batch, Batch] | None:
    """Return the first samples of the training, in its order, and their halves, as far as they can be read:
    those of a folder of images are sorted by class, for example, and the first of them have one class. Text
    need not exist yet: for it, return the example of the prediction. Return None if there are fewer than two."""
    job, example = estimator.job, estimator.profiler.batch

    def of_example(begin: int, end: int) -> Batch:
        return map_tensors(lambda tensor: tensor[begin:end], example)

    most = min(SAMPLES, job.train.batch)
    if isinstance(job.data, DataSpec) and not (job.data.python or job.data.images):
        example = _unevenly_labelled(example, job)
        return with_halves(of_example, min(most, estimator.profiler.samples))
    try:
        with generators_restored():
            source = open_samples(job)
            if isinstance(source, SampleStream):
                return with_halves(lambda begin, end: next(source.batches([(begin, end)])), most)
            order = order_of(source, job.held_out, job.train.seed)
            return with_halves(
                lambda begin, end: source.batch(*order.training_samples(begin, end)), min(most, len(source))
            )
    except (InputError, OSError):  # the data of another machine
        return with_halves(of_example, min(most, estimator.profiler.samples))


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


__all__ = ["accumulates", "changed_state", "loss_depends_on_split", "model_uses", "splits_batch"]
