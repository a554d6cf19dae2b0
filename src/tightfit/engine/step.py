"""One optimizer step: forward and backward of every micro-batch, then one update. The same for every plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointError

from tightfit.errors import InputError
from tightfit.methods.buckets import made_everywhere
from tightfit.methods.compile import compiler_failures_named
from tightfit.methods.mesh import AXES, DATA, Mesh
from tightfit.methods.progress import doing
from tightfit.methods.run import Filler, Run, slices_of, to_device, weights_named
from tightfit.models.objective import Batch, processed_count, sample_count


@dataclass(frozen=True)
class Step:
    """What one optimizer step did.

    loss           mean over the step's items that count
    gradient_norm  norm of the whole gradient before clipping; None where the job does not clip
    items          how many items counted in the loss (tokens or samples); samples: how many samples
    processed      token positions (or samples) that went through the model: what throughput counts
    skipped        whether fp16 overflowed and the update was left out
    seconds        wall-clock time, waiting for data included
    staleness      the most updates that came between a gradient's weights and its own (an asynchronous server's)
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
    staleness: int | None = None


def take_step(run: Run, micro_batches: list[Batch], step: int) -> Step:
    """Accumulate the gradients of `micro_batches` (on the host; this device's part) and update the weights once."""
    doing("forward and backward", step)
    real = [batch for batch in micro_batches if not isinstance(batch, Filler)]
    counts = [sum(map(count, real)) for count in (run.objective.count, sample_count, processed_count)]
    counted = over_data(run, counts)
    learning_rate = run.learning_rate(step)
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate
    with compiler_failures_named(run.plan):
        losses = accumulate(run, micro_batches, lambda: counted()[0])
    norm, finite = update(run)
    loss = losses()
    items, samples, processed = counted()
    if run.mesh is not None:
        samples //= run.mesh.cp  # each of which they all have a piece of
    if run.stages is not None and run.stages.counted is not None:
        items, samples, processed = run.stages.counted
    late = max(run.stages.staleness, default=None) if run.stages is not None else None
    return Step(
        step, float(loss) / max(items, 1), learning_rate, norm, samples, items, processed, not finite, staleness=late
    )


def over_data(run: Run, counts: list[int]) -> Callable[[], list[int]]:
    """Whole numbers, summed over the devices that divide the samples: under way from now on, and waited for when asked."""
    if run.mesh is None or is_free(run) or all(run.mesh.size(axis) == 1 for axis in DATA):
        return lambda: counts
    sums = run.mesh.begin_sum(torch.tensor(counts, device=run.device), DATA)
    counted = cache(lambda: [int(count) for count in sums()])
    if run.device.type != "cpu":
        counted()  # its queue is empty now, and would have to be waited for later
    return counted


def _begin_sum(run: Run, loss: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The losses of all devices, summed: under way from now on, and waited for when asked."""
    if run.mesh is None or (run.stages is not None and run.stages.free):
        return lambda: loss
    return run.mesh.begin_sum(loss, (*DATA, "pp"))


def is_free(run: Run) -> bool:
    """Whether each device trains on its own samples without waiting for the others at each step."""
    return run.stages is not None and run.stages.free and not run.stages.delay


def accumulate(run: Run, micro_batches: list[Batch], items: Callable[[], int]) -> Callable[[], torch.Tensor]:
    """Gradients of the mean loss over all items of the step, summed into .grad; returns what waits for the sum of all devices'
    losses, which is under way from the last forward on.

    items   how many there are, over all devices: asked for when the first forward is done. A loss scale multiplies the mean
            before backward, so that 16-bit gradients of a long step do not vanish.
    """

    def scale() -> float:
        return (run.loss_scale.value if run.loss_scale else 1.0) / max(items(), 1)

    if run.stages is not None:
        return _begin_sum(run, run.stages.accumulate(run, micro_batches, scale()))
    total = torch.zeros((), device=run.device)
    for number, batch in enumerate(micro_batches):
        last = number == len(micro_batches) - 1
        doing(f"forward and backward of micro-batch {number + 1}")
        counts = not isinstance(batch, Filler)
        if run.reduction is not None:
            run.reduction.begin(last)
        with _compiled_indices_named(run):
            loss = run.loss_sum(to_device(batch if counts else batch.batch, run))
        share = scale()  # asked for by all devices at the same point, also where nothing counts
        if counts:
            total += loss.detach()
        if last:
            losses = _begin_sum(run, total)
        with _recomputation_named(run):
            (loss * (share if counts else 0.0)).backward()
        if run.reduction is not None:
            run.reduction.end(last)
    return losses


@contextmanager
def _compiled_indices_named(run: Run) -> Iterator[None]:
    """Turn the bare index that a compiled model says is out of bounds into what it is; uncompiled, the loss says it itself."""
    try:
        yield
    except RuntimeError as error:
        if run.plan.compile != "model" or "index out of bounds" not in str(error):
            raise
        raise InputError(
            "data",
            "has a label that is none of the model's classes, or an id that it has no embedding for",
            "number labels and ids from 0 and below what the model has; --set plan.compile=none says which it is",
        ) from error


@contextmanager
def _recomputation_named(run: Run) -> Iterator[None]:
    """Turn what torch says of a block that is not the same when it is computed again into what is wrong with the plan."""
    try:
        yield
    except CheckpointError as error:
        raise InputError(
            f"plan: recompute={run.plan.recompute}" if run.plan.recompute != "none" else "job: model",
            "a block computes something else the second time: it keeps something of its first forward, or changes what it is given",
            "use recompute: none" if run.plan.recompute != "none" else "leave the model's own recomputation out",
        ) from error


def update(run: Run) -> tuple[float | None, bool]:
    """Unscale, clip, step. Returns the gradient norm (where the job clips) and whether the gradients were finite."""
    finite, norm = True, None
    doing("update")
    sum_shared(run)
    if run.loss_scale is not None:
        finite = everywhere(run, run.loss_scale.unscale(_weights(run)))
        run.loss_scale.update(finite)
    if run.job.train.clip is not None:
        norm = clip(run, run.job.train.clip)
    if finite:
        run.optimizer.step()
        if run.reduction is not None:
            run.reduction.updated()
    run.optimizer.zero_grad(set_to_none=True)
    return norm, finite


def sum_shared(run: Run) -> None:
    """Gradients that each tp device has of its part of the sequences, summed over them."""
    weights = [weight for weight in weights_named(run, run.shared) if weight.requires_grad]
    if not weights:
        return
    assert run.mesh is not None
    total = partial(run.mesh.sum, axes=("tp",))
    with made_everywhere(weights, total):
        gradients = [local(weight.grad) for weight in weights if weight.grad is not None]
        flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
        total(flat)
        for gradient, whole in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(whole.view(gradient.shape))


def _weights(run: Run) -> list[torch.Tensor]:
    return [weight for group in run.optimizer.param_groups for weight in group["params"]]


def drain(run: Run) -> None:
    """Bring what an asynchronous pipeline still has under way to its end, updates included."""
    if run.stages is not None:
        with torch.enable_grad():
            for _ in run.stages.drain(run):
                update(run)


def everywhere(run: Run, holds: bool) -> bool:
    """Whether something holds on every device."""
    return not greatest(run, int(not holds))


def greatest(run: Run, number: int) -> int:
    """The greatest of all devices' numbers."""
    if run.mesh is None:
        return number
    return int(run.mesh.sum(torch.tensor(number, device=run.device), AXES, dist.ReduceOp.MAX))


def clip(run: Run, limit: float) -> float:
    """Scale the gradients so that the norm of all of them together, on all devices, is at most `limit`; returns it."""
    weights = [weight for weight in _weights(run) if weight.grad is not None]
    if run.mesh is None:
        return float(torch.nn.utils.clip_grad_norm_(weights, limit))
    gradients = [local(weight.grad) for weight in weights if weight.grad is not None]
    norm = gradient_norm(run, run.mesh)
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    if gradients:
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))  # which may be offloaded
    return float(norm)


def gradient_norm(run: Run, mesh: Mesh) -> torch.Tensor:
    """Of all gradients together, on all devices."""
    elsewhere = set(weights_named(run, run.stages.copies)) if run.stages is not None else set()
    squares = torch.zeros(2, device=run.device)  # of what is cut among the tp devices, and of what each of them has
    cut = slices_of(run)
    for weight in _weights(run):
        if weight.grad is None or weight in elsewhere:
            continue
        gradient = local(weight.grad)
        real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        squares[int(weight not in cut)] += torch.linalg.vector_norm(
            real, dtype=torch.promote_types(real.dtype, torch.float32)
        ).square()
    squares[1] /= mesh.size("tp")
    divided = run.reduction.parts if run.reduction is not None else ()
    if run.plan.servers:  # which have all gradients, and the workers none
        divided = (*divided, "dp_replicate")
    return mesh.sum(squares, (*divided, "tp", "pp")).sum().sqrt()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This device's part of a tensor that several hold."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
