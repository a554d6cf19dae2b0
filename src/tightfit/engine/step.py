"""One optimizer step: forward and backward of every micro-batch, then one update. The same for every plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointError

from tightfit.engine.readings import begin_reading, read_late
from tightfit.errors import InputError
from tightfit.methods import optimizer_states
from tightfit.methods.buckets import made_everywhere
from tightfit.methods.compile import compiler_failures_named
from tightfit.methods.mesh import AXES, DATA, Mesh
from tightfit.methods.progress import doing
from tightfit.methods.run import Filler, Run, arriving, kind_of, slices_of, wait_for_weights, weights_named
from tightfit.models.objective import Batch, processed_count, sample_count
from tightfit.optim.per_parameter import PerParameter


@read_late("loss", "gradient_norm", "samples", "items", "processed", "skipped", "seconds")
@dataclass(frozen=True)
class Step:
    """What one optimizer step did. On CUDA whoever first reads a figure waits until the device has it.

    loss           mean over the step's items that count
    gradient_norm  norm of the whole gradient before clipping; None where the job does not clip
    items          how many items counted in the loss (tokens or samples); samples: how many samples
    processed      token positions (or samples) that went through the model: what throughput counts
    skipped        whether fp16 overflowed and the update was left out
    seconds        wall-clock time, waiting for data included: on CUDA that of the device, from the end of what it was asked to do
                   before (the step before this one, or what the caller asked for in between) to the end of this step
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
    figures: dict[str, float | torch.Tensor] = {"loss": losses(), "finite": finite}
    if norm is not None:
        figures["norm"] = norm
    cp = run.mesh.cp if run.mesh is not None else 1
    items, samples, processed = counted()
    if run.stages is not None and run.stages.counted is not None:
        (items, samples, processed), cp = run.stages.counted, 1
    read = begin_reading({**figures, "items": items, "samples": samples, "processed": processed})

    def late(value: Callable[[dict[str, float]], Any]) -> Any:
        return lambda: value(read())

    return Step(
        step=step,
        loss=late(lambda figures: figures["loss"] / max(figures["items"], 1)),
        learning_rate=learning_rate,
        gradient_norm=None if norm is None else late(lambda figures: figures["norm"]),
        samples=late(lambda figures: int(figures["samples"]) // cp),  # of whose sequences cp devices have a piece each
        items=late(lambda figures: int(figures["items"])),
        processed=late(lambda figures: int(figures["processed"])),
        skipped=late(lambda figures: not figures["finite"]),
        staleness=max(run.stages.staleness, default=None) if run.stages is not None else None,
    )


def changed(step: Step, **fields: Any) -> Step:
    """The step with other fields, which may be functions, and without waiting for those that are. `replace` would wait."""
    return Step(**{**vars(step), **fields})


def over_data(run: Run, counts: list[int]) -> Callable[[], list[int] | list[torch.Tensor]]:
    """Whole numbers, summed over the devices that divide the samples: under way from now on, and waited for when asked. On CUDA
    they stay on the device: to read one here, the host would wait until the device has done all it was given."""
    if run.mesh is None or is_free(run) or all(run.mesh.size(axis) == 1 for axis in DATA):
        return lambda: counts
    numbers = torch.tensor(counts)
    if run.device.type == "cuda":  # from pageable memory the copy would be waited for
        numbers = numbers.pin_memory().to(run.device, non_blocking=True)
        sums = run.mesh.begin_sum(numbers, DATA)
        return cache(lambda: list(sums().unbind()))
    sums = run.mesh.begin_sum(numbers, DATA)
    return cache(lambda: [int(count) for count in sums()])


def _begin_sum(run: Run, loss: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The losses of all devices, summed: under way from now on, and waited for when asked."""
    if run.mesh is None or (run.stages is not None and run.stages.free):
        return lambda: loss
    return run.mesh.begin_sum(loss, (*DATA, "pp"))


def is_free(run: Run) -> bool:
    """Whether each device trains on its own samples without waiting for the others at each step."""
    return run.stages is not None and run.stages.free and not run.stages.delay


def accumulate(
    run: Run, micro_batches: list[Batch], items: Callable[[], int | torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """Gradients of the mean loss over all items of the step, summed into .grad; returns what waits for the sum of all devices'
    losses, which is under way from the last forward on.

    items   how many there are, over all devices: asked for when the first forward is done. A loss scale multiplies the mean
            before backward, so that 16-bit gradients of a long step do not vanish.
    """

    def scale() -> float | torch.Tensor:
        whole, count = run.loss_scale.factor if run.loss_scale else 1.0, items()
        if isinstance(count, torch.Tensor):  # in fp64, as the host divides: the product's gradient is rounded once
            return whole / count.clamp(min=1).double()
        return whole / max(count, 1)

    if run.stages is not None:
        return _begin_sum(run, run.stages.accumulate(run, micro_batches, scale()))
    total = torch.zeros((), device=run.device)
    coming = arriving(micro_batches, run)
    for number, batch in enumerate(micro_batches):
        last = number == len(micro_batches) - 1
        doing(f"forward and backward of micro-batch {number + 1}")
        counts = not isinstance(batch, Filler)
        if run.reduction is not None:
            run.reduction.begin(last)
        with _compiled_indices_named(run):
            loss = run.loss_sum(next(coming))
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


def update(run: Run) -> tuple[torch.Tensor | None, bool | torch.Tensor]:
    """Unscale, clip, step. Returns the gradient norm (where the job clips) and whether the gradients were finite: a scalar tensor
    where the device alone knows it, and leaves out the update by itself."""
    finite: bool | torch.Tensor = True
    norm = None
    doing("update")
    sum_shared(run)
    if run.loss_scale is not None:
        finite = everywhere(run, run.loss_scale.unscale(_weights(run)))
        on_device = (
            isinstance(finite, torch.Tensor) and finite.device.type == run.device.type
        )  # not of offloaded gradients
        if isinstance(finite, torch.Tensor) and not (on_device and leaves_out_updates(run.optimizer)):
            finite = bool(finite)
        run.loss_scale.update(finite)
    if run.job.train.clip is not None:
        norm = clip(run, run.job.train.clip)
    if isinstance(finite, torch.Tensor):
        _say_what_to_leave_out(run.optimizer, finite)
    if isinstance(finite, torch.Tensor) or finite:
        run.optimizer.step()
    if isinstance(finite, torch.Tensor) and not isinstance(run.optimizer, PerParameter):
        run.optimizer.found_inf = None  # type: ignore[attr-defined]
    if run.store is not None:
        run.store.factor = None
    run.optimizer.zero_grad(set_to_none=True)
    if run.reduction is not None and (isinstance(finite, torch.Tensor) or finite):
        run.reduction.updated()  # without the gradients' memory
    return norm, finite


def _say_what_to_leave_out(optimizer: torch.optim.Optimizer, finite: torch.Tensor) -> None:
    """The next step changes nothing where the gradients are not finite."""
    if isinstance(optimizer, PerParameter):
        reading = begin_reading({"finite": finite})
        optimizer.leave_out(~finite, lambda: not reading()["finite"])
    else:
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]


def leaves_out_updates(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer can leave out an update without a host that waits for the number that says so: torch's fused kernels
    look at `found_inf`, and change nothing where it is 1; what updates parameters one by one or in batches puts back what it
    has changed. Of SGD with momentum not the first, which would take memory as it finds it for momenta. Others are asked to
    update or not by the host: on CUDA those whose rows or slices devices share, without a fused kernel."""
    if isinstance(optimizer, PerParameter):
        return optimizer.can_leave_out()
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.SGD):
        return False
    if not all(group["fused"] for group in optimizer.param_groups):
        return False
    if isinstance(optimizer, torch.optim.Adam):
        return True
    return all(
        not group["momentum"] or optimizer.state[weight].get("momentum_buffer") is not None
        for group in optimizer.param_groups
        for weight in group["params"]
        if weight.grad is not None
    )


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
    """Bring what is still under way to its end: weights that come from other devices, and of an asynchronous pipeline the steps,
    updates included."""
    wait_for_weights(run)
    if run.stages is not None:
        with torch.enable_grad():
            for _ in run.stages.drain(run):
                update(run)


def everywhere(run: Run, holds: bool | torch.Tensor) -> bool | torch.Tensor:
    """Whether something holds on every device; a scalar tensor, and nobody waits, where it is one."""
    if run.mesh is None:
        return holds
    if isinstance(holds, torch.Tensor):
        return run.mesh.sum((~holds).to(run.device, torch.int64), AXES, dist.ReduceOp.MAX) == 0
    return not greatest(run, int(not holds))


def greatest(run: Run, number: int) -> int:
    """The greatest of all devices' numbers."""
    return int(_begin_greatest(run, number)()["greatest"])


def _begin_greatest(run: Run, number: int) -> Callable[[], dict[str, float]]:
    if run.mesh is None:
        return begin_reading({"greatest": number})
    there = torch.full((), number, device=run.device)  # not copied from the host, which would wait
    return begin_reading({"greatest": run.mesh.sum(there, AXES, dist.ReduceOp.MAX)})


def asker(run: Run) -> Callable[[int], int]:
    """What asks each step for the greatest of all devices' numbers, and gives all of them the same answer: of the step before on
    several CUDA devices, of this step elsewhere."""
    if run.mesh is None or run.device.type != "cuda":
        return partial(greatest, run)
    asked: list[Callable[[], dict[str, float]]] = [begin_reading({"greatest": 0})]

    def ask(number: int) -> int:
        asked.append(_begin_greatest(run, number))
        return int(asked.pop(0)()["greatest"])

    return ask


def clip(run: Run, limit: float) -> torch.Tensor:
    """Scale the gradients so that the norm of all of them together, on all devices, is at most `limit`; returns it. Those that
    are brought to the device for their updates are scaled there."""
    weights = [weight for weight in _weights(run) if weight.grad is not None]
    comes = run.store is not None and optimizer_states.brings(run.plan, kind_of(run.device))
    if run.mesh is None and not comes:
        return torch.nn.utils.clip_grad_norm_(weights, limit)
    gradients = [local(weight.grad) for weight in weights if weight.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients) if run.mesh is None else gradient_norm(run, run.mesh)
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    if comes:
        assert run.store is not None
        run.store.factor = factor
    elif gradients:
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))
    return norm


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
