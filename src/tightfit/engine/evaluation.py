"""Evaluates a model: computes its mean loss and the job's metrics over the evaluation samples."""

from __future__ import annotations

from functools import partial

import torch

from tightfit.distributed.mesh import DATA
from tightfit.engine.metrics import EvaluationMetrics
from tightfit.engine.rng import evaluating, rng_preserved
from tightfit.engine.step import drain
from tightfit.errors import InputError
from tightfit.job_sections.selection import LOSS
from tightfit.models.batches import Batch, map_tensors
from tightfit.runtime.activity import note_activity
from tightfit.runtime.run import DummyMicroBatch, Run, check_run, to_device


def evaluate(run: Run, samples: int | None = None) -> float:
    """Return the mean loss over the evaluation samples. The model runs in evaluation mode, without
    gradients, on one micro-batch at a time.

    samples  how many samples to use at most; None: the job's `evaluate_samples`

    After the call, the model has its previous mode (training or evaluation), and its running
    statistics and the random number generators are unchanged. All devices must call this function,
    and all get the same value. Raises InputError if the job has no evaluation samples.
    """
    check_run(run, "evaluate")
    return _evaluate(run, samples, None)[LOSS]


def evaluate_metrics(run: Run, samples: int | None = None) -> dict[str, float]:
    """Return a dict of metric name -> value over the evaluation samples: the mean loss, named
    "loss", and each metric of the job.

    samples  how many samples to use at most; None: the job's `evaluate_samples`

    A metric that returns a dict yields one entry for each of its keys, such as "segmentation.iou"
    for the key "iou" of the metric "segmentation". All devices must call this function, and all get
    the same values. Raises InputError if a metric fails or if the job has no evaluation samples.
    """
    check_run(run, "evaluate_metrics")
    return _evaluate(run, samples, EvaluationMetrics(run) if run.job.has_metrics else None)


@torch.no_grad()
def _evaluate(run: Run, samples: int | None, metrics: EvaluationMetrics | None) -> dict[str, float]:
    try:
        if metrics is None:
            return {LOSS: _mean_loss(run, samples, None)}
        with metrics.observed():
            loss = _mean_loss(run, samples, metrics)
        return {LOSS: loss, **metrics.values()}
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise InputError(
            "train: evaluate_every",
            "the model or its loss computes gradients, and an evaluation runs without autograd",
            "write `with torch.enable_grad():` around them, in forward or in the loss, or leave out evaluate_every",
        ) from error


def _mean_loss(run: Run, samples: int | None, metrics: EvaluationMetrics | None) -> float:
    """Run the evaluation samples and return their mean loss.

    samples  how many samples to use at most; None: the job's `evaluate_samples`
    metrics  gets each micro-batch and the model's outputs; None: only the loss is computed

    Raises InputError if there are no evaluation samples.
    """
    drain(run)
    total, items = torch.zeros((), dtype=torch.float64, device=run.device), 0
    with evaluating(run.model), rng_preserved():
        for number, batch in enumerate(run.data.held_out(samples or run.job.evaluate_samples)):
            note_activity(f"evaluation, micro-batch {number + 1}")
            counts = not isinstance(batch, DummyMicroBatch)
            if run.executor is not None:
                items += run.objective.count(batch) if counts else 0
                total += run.executor.evaluate(run, batch)
            elif not counts:  # gathering sharded parameters needs all ranks
                run.loss_sum(to_device(batch.batch, run))
            else:
                items += run.objective.count(batch)
                total += run.loss_sum(to_device(batch, run))
            if metrics is not None and counts:
                metrics.add(partial(_on_device, run, batch))
            elif metrics is not None:
                metrics.discard()
    if run.mesh is not None:
        run.mesh.all_reduce(total, ("pp",))
        run.mesh.all_reduce(total, DATA)
        items = int(run.mesh.all_reduce(torch.tensor(items, device=run.device), DATA))
    if not items:
        raise InputError(
            "evaluate",
            "the data has no evaluation samples with items that count in the loss",
            "give evaluate.data, or set data.held_out: 0.01 for data that is not streamed",
        )
    return float(total) / items


def _on_device(run: Run, batch: Batch) -> Batch:
    """Return `batch` with all of its tensors on the run's device, for the metrics. Unlike the batch
    that the model gets, it still has the masks that are all ones."""
    return map_tensors(lambda tensor: tensor.to(run.device), batch)


__all__ = ["evaluate", "evaluate_metrics"]
