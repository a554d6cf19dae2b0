"""One optimizer step: forward and backward of every micro-batch, then one update. The same for every plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tightfit.methods.run import Run
from tightfit.models.objective import Batch, map_tensors, processed_count, sample_count


@dataclass(frozen=True)
class Step:
    """What one optimizer step did.

    loss           mean over the step's items that count
    gradient_norm  norm of the whole gradient before clipping; None where the job does not clip
    items          how many items counted in the loss (tokens or samples); samples: how many samples
    processed      token positions (or samples) that went through the model: what throughput counts
    skipped        whether fp16 overflowed and the update was left out
    seconds        wall-clock time, waiting for data included
    """

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float | None
    samples: int
    items: int
    processed: int
    skipped: bool
    seconds: float = 0.0


def take_step(run: Run, micro_batches: list[Batch], step: int) -> Step:
    """Accumulate the gradients of `micro_batches` (on the host) and update the weights once."""
    items = sum(run.objective.count(batch) for batch in micro_batches)
    learning_rate = run.learning_rate(step)
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate
    loss = accumulate(run, micro_batches, items)
    norm, finite = update(run)
    samples, processed = sum(map(sample_count, micro_batches)), sum(map(processed_count, micro_batches))
    return Step(step, float(loss) / max(items, 1), learning_rate, norm, samples, items, processed, not finite)


def accumulate(run: Run, micro_batches: list[Batch], items: int) -> torch.Tensor:
    """Gradients of the mean loss over all `items` of the step, summed into .grad; returns the sum of the losses.

    A loss scale multiplies the mean before backward, so that 16-bit gradients of a long step do not vanish.
    """
    scale = (run.loss_scale.value if run.loss_scale else 1.0) / max(items, 1)
    total = torch.zeros((), device=run.device)
    for batch in micro_batches:
        loss = run.loss_sum(to_device(batch, run))
        (loss * scale).backward()
        total += loss.detach()
    return total


def to_device(batch: Batch, run: Run) -> Batch:
    return map_tensors(lambda tensor: tensor.to(run.device, non_blocking=run.plan.non_blocking), batch)


def update(run: Run) -> tuple[float | None, bool]:
    """Unscale, clip, step. Returns the gradient norm (where the job clips) and whether the gradients were finite."""
    finite, norm = True, None
    if run.loss_scale is not None:
        finite = run.loss_scale.unscale(run.optimizer)
        run.loss_scale.update(finite)
    if run.job.train.clip is not None:
        norm = float(torch.nn.utils.clip_grad_norm_(run.model.parameters(), run.job.train.clip))
    if finite:
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return norm, finite
