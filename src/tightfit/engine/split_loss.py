"""Find out on a few samples whether a job's loss depends on how a batch is split.

A plan divides a batch into micro-batches and over devices, and adds up what the parts give. That is
the loss of the whole batch only if each sample's loss is its own. It is not if the model or the loss
compares the samples of a batch with each other, as a contrastive loss does, or if the loss is a mean
over something of which samples have unequal numbers, such as boxes, or weights of classes.

Example: CLIP's loss of 4 pairs of image and text is a cross entropy over 4 candidates. The mean of
the losses of two halves is one over 2 candidates, and that of single samples is always 0.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tightfit._torch.fake import active_fake_mode
from tightfit._torch.modules import RunningNorm
from tightfit._torch.tensors import has_backward_hooks
from tightfit.data.rng import generators_restored, numbers_drawn, seed_generators
from tightfit.distributed.processes import is_rank_zero
from tightfit.errors import TightfitWarning
from tightfit.job import Job
from tightfit.methods.materialize import create_on_host
from tightfit.models.batches import Batch, map_tensors, sample_count
from tightfit.models.dropout import switch_off_dropout
from tightfit.models.equal_draws import EqualDraws
from tightfit.models.hook_linearity import nonlinear_hook
from tightfit.models.loss_state import keeping_losses
from tightfit.models.objective import Objective, objective_of_job
from tightfit.models.tensors import tensors_in
from tightfit.runtime.micro_batches import OrderedData, StreamedData
from tightfit.runtime.run import Run

SAMPLES = 8
LOSS_TOLERANCE = 1e-4  # relative difference of two losses from which on they are different; rounding changes 1e-6
GRADIENT_TOLERANCE = 1e-3  # the norm of the difference of two gradients, relative to that of one of them
# bytes of the parameters and of the samples up to which `build` checks a loss; a search predicts the
# memory of the check
MOST_PARAMETER_BYTES, MOST_INPUT_BYTES = 2**28, 2**24


def how_loss_depends_on_split(job: Job, objective: Objective, batches: tuple[Batch, Batch, Batch]) -> str:
    """Return how the loss or the gradient of a batch changes if it is split in halves, as a phrase such
    as "8 samples have a loss of 1.3021, and their halves together 0.6484". Return an empty text if
    neither changes, or if it is not known, because the model or the loss fails.

    job        its model is created on the CPU, with new weights
    objective  the job's loss
    batches    a batch of an even number of samples, its first half and its second half. Each is padded
               to its own longest sample

    Each sample gets the same random numbers. Dropout is switched off, and norms with running statistics,
    such as BatchNorm, use these: that they normalise each micro-batch by itself is no surprise to their
    users.
    """
    whole_batch, *halves = (map_tensors(_in_fp32, batch) for batch in batches)
    count, full = sample_count(whole_batch), [whole_batch]
    try:
        with generators_restored(), keeping_losses() as states:
            seed_generators(job.train.seed)
            model = create_on_host(job.model, torch.device("cpu"), torch.float32)
            _switch_off_randomness(model)
            if hooked := nonlinear_hook(model):
                return f"a hook on the gradient of {hooked} is not linear"

            drawn: set[Any] = set()

            def result_of(parts: list[Any]) -> tuple[float, list[Tensor]]:
                """The loss of all parts together, and its gradient."""
                total, gradients = 0.0, dict[int, Tensor]()
                for part in parts:
                    made = copy.deepcopy(model)  # a forward may change buffers, as one that counts its calls does
                    seed_generators(job.train.seed)
                    with EqualDraws():
                        loss = objective.total(made, part) / count
                        loss.backward()
                    drawn.add(numbers_drawn())
                    total += float(loss.detach())
                    for number, weight in enumerate(made.parameters()):
                        if weight.grad is not None and not has_backward_hooks(weight):
                            gradients[number] = gradients[number] + weight.grad if number in gradients else weight.grad
                return total, [gradients[number] for number in sorted(gradients)]

            whole = result_of(full)
            if any(state.has_changed for state in states):
                return "each call of the loss changes an attribute of it"
            again, split = result_of(full), result_of(halves)
    except Exception:  # whatever the user's code raises: the training reports it where it matters
        return ""
    if _losses_differ(whole[0], again[0]) or _gradients_differ(whole[1], again[1]):
        return ""
    if len(drawn) > 1:  # Python or NumPy draws other numbers for fewer samples, as wav2vec 2.0 does to mask its inputs
        return ""
    if _losses_differ(whole[0], split[0]):
        return f"{count} samples have a loss of {whole[0]:.5g}, and their halves together {split[0]:.5g}"
    if _gradients_differ(whole[1], split[1]):
        return f"the gradient of {count} samples is not the sum of those of their halves"
    return ""


def warn_of_split_loss(run: Run) -> None:
    """Issue a TightfitWarning if the plan splits the batch and the loss depends on how. Only the first
    process checks this, and only on small models and samples (MOST_PARAMETER_BYTES, MOST_INPUT_BYTES).
    The losses of transformers' models do not depend on it."""
    job, plan = run.job, run.plan
    if plan.micro_batch_of(job.train.batch) >= job.train.batch or (job.of_transformers and job.loss is None):
        return
    if active_fake_mode() is not None or not is_rank_zero() or not isinstance(run.data, OrderedData | StreamedData):
        return
    if 4 * sum(weight.numel() for weight in run.model.parameters()) > MOST_PARAMETER_BYTES:
        return
    with generators_restored():
        batches = with_halves(run.data.samples_between, min(SAMPLES, job.train.batch, run.data.samples or SAMPLES))
    if not batches or sum(tensor.nbytes for tensor in tensors_in(batches[0])) > MOST_INPUT_BYTES:
        return
    if depends := how_loss_depends_on_split(job, objective_of_job(job), batches):
        warnings.warn(
            f"the training depends on how a batch is split: {depends}. This plan splits the batch, so it trains another loss "
            "than one device with the whole batch",
            TightfitWarning,
            stacklevel=3,
        )


def with_halves(read: Callable[[int, int], Batch], count: int) -> tuple[Batch, Batch, Batch] | None:
    """Return the batch of the first samples, and its two halves. Return None if there are fewer than two
    samples.

    read   returns the samples at the positions (begin, end) as one batch
    count  the number of samples; of an odd number, the last one is left out
    """
    half = count // 2
    return (read(0, 2 * half), read(0, half), read(half, 2 * half)) if half else None


def _switch_off_randomness(model: nn.Module) -> None:
    model.train()
    switch_off_dropout(model)
    for module in model.modules():
        if isinstance(module, RunningNorm):
            module.eval()


def _in_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _losses_differ(one: float, other: float) -> bool:
    return abs(one - other) > LOSS_TOLERANCE * max(abs(one), abs(other), 1e-6)


def _gradients_differ(one: list[Tensor], other: list[Tensor]) -> bool:
    if len(one) != len(other):
        return True
    difference, norm = (
        math.hypot(*(float(torch.linalg.vector_norm(tensor)) for tensor in tensors))
        for tensors in ([a - b for a, b in zip(one, other, strict=True)], one)
    )
    return difference > GRADIENT_TOLERANCE * max(norm, 1e-6)
