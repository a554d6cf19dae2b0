"""One optimizer step: forward and backward of every micro-batch, then one update.

`engine/loop.py` calls `take_step`, which runs the same code for every plan. The parts that depend
on the plan are fields of the Run: `executor` runs the stages of a pipeline or the workers of a
parameter server, `reduction` reduces gradients over data-parallel ranks, `loss_scale` scales the
loss in fp16, and `store` holds offloaded tensors.

Example: a batch of 32 samples on 2 data-parallel ranks with micro_batch = 4 gives each rank 16
samples in 4 micro-batches. The loss of a micro-batch is a sum over its items (tokens or samples).
Before backward it is divided by the number of items in the step on all ranks. So the gradient is
that of the mean loss over the step, for any number of micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointError

from tightfit.distributed.mesh import DATA, PendingSum
from tightfit.engine.agreement import all_ranks_true
from tightfit.engine.clipping import clip, optimizer_weights, shard_of
from tightfit.engine.delayed_readings import Reading, begin_reading, read_late
from tightfit.engine.failures import naming_failures
from tightfit.errors import InputError
from tightfit.models.batches import Batch, processed_count, sample_count
from tightfit.optim.groups import main_learning_rate, set_learning_rates
from tightfit.optim.per_parameter import PerParameter
from tightfit.parallel.gradient_buckets import gradients_filled
from tightfit.runtime.activity import note_activity
from tightfit.runtime.run import (
    DummyMicroBatch,
    Run,
    device_batches,
    optimizer_weights_named,
    refuse_unfrozen,
    wait_for_weights,
)


@read_late("loss", "gradient_norm", "samples", "items", "processed", "skipped", "seconds")
@dataclass(frozen=True)
class Step:
    """The results of one optimizer step, such as its loss. On CUDA, the first read of a result
    waits until the device has computed it.

    step           number of the step, from 0
    loss           mean loss over the items (tokens or samples) that count in the loss
    learning_rate  learning rate of this step's update, for parameters without a learning rate of
                   their own in the job
    gradient_norm  norm of the full gradient before clipping; None if the job does not clip
    samples        number of samples in the step, on all devices
    items          number of items that count in the loss, on all devices
    processed      number of token positions (or samples) that the model has processed, on all
                   devices. Throughput is computed from this number
    skipped        whether the update was skipped, because a gradient overflowed in fp16
    seconds        duration of the step, including the wait for data. On CUDA it is measured on the
                   device: from the end of all earlier work to the end of this step's work
    staleness      only with an asynchronous parameter server, else None: the largest number of
                   updates that the weights received between the computation of a gradient and its
                   use in an update
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
    """Run one training step: compute the gradients of `micro_batches`, and update the weights once.

    micro_batches  this device's samples of the step, in host memory
    step           number of the step, from 0

    Returns the step's results. The device may still be computing them. Raises InputError if a
    parameter was unfrozen after the run was built.
    """
    refuse_unfrozen(run)
    note_activity("forward and backward", step)
    real = [batch for batch in micro_batches if not isinstance(batch, DummyMicroBatch)]
    counts = [sum(map(count, real)) for count in (run.objective.count, sample_count, processed_count)]
    sums = CountSums(run, counts)
    scheduled = run.learning_rate(step)
    set_learning_rates(run.optimizer, scheduled, run.group_rates and run.group_rates(step))
    learning_rate = main_learning_rate(run.optimizer, scheduled)
    with naming_failures(run.plan):
        losses = accumulate(run, micro_batches, lambda: sums.wait()[0])
    norm, finite = update(run)
    figures: dict[str, float | torch.Tensor] = {"loss": losses.wait(), "finite": finite}
    if norm is not None:
        figures["norm"] = norm
    cp = run.mesh.cp if run.mesh is not None else 1
    items, samples, processed = sums.wait()
    if run.executor is not None and run.executor.counted is not None:
        (items, samples, processed), cp = run.executor.counted, 1
    figures.update(items=items, samples=samples, processed=processed)
    # a Step may have functions in place of values: see `read_late`
    late: Any = _LateFigures(begin_reading(figures), cp)
    return Step(
        step=step,
        loss=late.loss,
        learning_rate=learning_rate,
        gradient_norm=None if norm is None else late.gradient_norm,
        samples=late.samples,
        items=late.items,
        processed=late.processed,
        skipped=late.skipped,
        staleness=max(run.executor.staleness, default=None) if run.executor is not None else None,
    )


class _LateFigures:
    """The results of a step that the device may still be computing. Each method waits for the
    results and returns one of them.

    read  a function that waits for the results and returns a dict of name -> value
    cp    size of context parallelism. Its ranks share the same samples, so each sample was counted
          `cp` times
    """

    def __init__(self, read: Reading, cp: int) -> None:
        self._read, self._cp = read, cp

    def loss(self) -> float:
        figures = self._read()
        return figures["loss"] / max(figures["items"], 1)

    def gradient_norm(self) -> float:
        return self._read()["norm"]

    def samples(self) -> int:
        return int(self._read()["samples"]) // self._cp

    def items(self) -> int:
        return int(self._read()["items"])

    def processed(self) -> int:
        return int(self._read()["processed"])

    def skipped(self) -> bool:
        return not self._read()["finite"]


def with_fields(step: Step, **fields: Any) -> Step:
    """Return a copy of `step` in which the given fields have new values.

    fields  field name -> its value, or a function that waits for the value and returns it

    Unlike `dataclasses.replace`, this function does not wait for results that the device is still
    computing.
    """
    copied = object.__new__(Step)
    vars(copied).update(vars(step), **fields)
    return copied


class CountSums:
    """Sums integers over the data-parallel ranks, while the device computes. The all-reduce begins
    when the object is created.

    counts  this device's integers, such as its numbers of items and samples

    `wait` returns the sums in the order of `counts`. On CUDA they are scalar tensors on the device,
    because reading a number would make the host wait for all queued work.
    """

    def __init__(self, run: Run, counts: list[int]) -> None:
        self._counts = counts
        self._sums: PendingSum | None = None  # None: there is nothing to sum over
        self._on_device = run.device.type == "cuda"
        if run.mesh is None or runs_unsynchronized(run) or all(run.mesh.size(axis) == 1 for axis in DATA):
            return
        numbers = torch.tensor(counts)
        if self._on_device:  # a copy from memory that is not page-locked would block
            numbers = numbers.pin_memory().to(run.device, non_blocking=True)
        self._sums = run.mesh.begin_all_reduce(numbers, DATA)

    def wait(self) -> list[int] | list[torch.Tensor]:
        if self._sums is None:
            return self._counts
        sums = self._sums.wait()
        return list(sums.unbind()) if self._on_device else [int(count) for count in sums]


def _begin_sum(run: Run, loss: torch.Tensor) -> PendingSum:
    """Begin to all-reduce `loss`, a scalar, over the data-parallel ranks and the pipeline stages.
    Return the pending sum. Ranks that train without waiting for each other keep their own loss."""
    if run.mesh is None or (run.executor is not None and run.executor.unsynchronized):
        return PendingSum(loss)
    return run.mesh.begin_all_reduce(loss, (*DATA, "pp"))


def runs_unsynchronized(run: Run) -> bool:
    """Return whether each device trains on its own samples and does not wait for the other devices
    in every step, as the workers of an asynchronous parameter server do."""
    return run.executor is not None and run.executor.unsynchronized and not run.executor.loss_delay


def accumulate(run: Run, micro_batches: list[Batch], items: Callable[[], int | torch.Tensor]) -> PendingSum:
    """Run forward and backward of each micro-batch. They add up, in `.grad`, the gradient of the
    mean loss over all items (tokens or samples) of the step.

    In fp16 the loss is multiplied by the loss scale before backward, so that the small gradients of
    a step with many items do not become zero.

    items  a function that returns the number of items in the step on all devices. It is called
           after the first forward, so that its all-reduce overlaps with that forward

    Returns the pending sum of the loss over all items and all devices. Its all-reduce begins after
    the last forward.
    """

    if run.executor is not None:
        return _begin_sum(run, run.executor.accumulate(run, micro_batches, _loss_factor(run, items())))
    total: torch.Tensor | None = None  # in fp32
    on_device = device_batches(micro_batches, run)
    for number, batch in enumerate(micro_batches):
        last = number == len(micro_batches) - 1
        note_activity(f"forward and backward of micro-batch {number + 1}")
        counts = not isinstance(batch, DummyMicroBatch)
        if run.reduction is not None:
            run.reduction.begin(last)
        with _compiled_indices_named(run):
            loss = run.loss_sum(next(on_device))
        factor = _loss_factor(run, items())  # a collective, so also called for dummy micro-batches
        if not counts:
            factor = 0.0
        elif total is None:  # copied: CUDA graphs overwrite the loss of an earlier micro-batch
            total = loss.detach().to(torch.float32, copy=True)
        else:
            total += loss.detach()
        if last:
            losses = _begin_sum(run, torch.zeros((), device=run.device) if total is None else total)
        with _recomputation_named(run):
            loss.backward(_initial_gradient(loss, factor))
        if run.reduction is not None:
            run.reduction.end(last)
    return losses


def _initial_gradient(loss: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
    """Return a tensor like `loss`, a scalar, with the value `factor`: the gradient from which
    backward starts, so that it computes the gradient of the product of both."""
    if isinstance(factor, torch.Tensor):
        return factor.to(loss.dtype)
    return torch.full_like(loss, factor)


def _loss_factor(run: Run, items: int | torch.Tensor) -> float | torch.Tensor:
    """Return the factor by which the loss of a micro-batch is multiplied before backward: the fp16
    loss scale (1 without fp16) divided by `items`.

    items  number of items (tokens or samples) in the step on all devices. The loss of a micro-batch
           is a sum over its items
    """
    scale = run.loss_scale.factor if run.loss_scale else 1.0
    if isinstance(items, torch.Tensor):  # in fp64, like Python's floats, to round only once
        return scale / items.clamp(min=1).double()
    return scale / max(items, 1)


@contextmanager
def _compiled_indices_named(run: Run) -> Iterator[None]:
    """Context manager that turns the RuntimeError "index out of bounds" of a compiled model into an
    InputError about the data: a label or a token id is too large.

    If the model is not compiled, its loss checks the labels and raises such an InputError itself.
    """
    try:
        yield
    except RuntimeError as error:
        if run.plan.compile != "model" or "index out of bounds" not in str(error):
            raise
        raise InputError(
            "data",
            "contains a label that is not one of the model's classes, or a token id without an embedding",
            "number labels from 0 to below the number of classes, and token ids from 0 to below model.vocab_size; to see "
            "which label or id is wrong, run with --set plan.compile=none",
        ) from error


@contextmanager
def _recomputation_named(run: Run) -> Iterator[None]:
    """Context manager that turns torch's CheckpointError into an InputError about the plan or the
    model. torch raises CheckpointError if the recomputation of a block in backward differs from its
    original forward, and a RuntimeError if a selective one runs other operations."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, CheckpointError) and "encountered during backward but not found" not in str(error):
            raise
        raise InputError(
            f"plan: recompute={run.plan.recompute}" if run.plan.recompute != "none" else "job: model",
            "a block's recomputation differs from its forward: the block keeps state from its first forward, or changes its "
            "inputs in place",
            "use recompute: none"
            if run.plan.recompute != "none"
            else "turn off the recomputation (gradient checkpointing) that the model itself does",
        ) from error


def update(run: Run, limit: float | None = None) -> tuple[torch.Tensor | None, bool | torch.Tensor]:
    """Clip the gradients and update the weights. In fp16, first divide the fp32 gradients by the loss
    scale; 16-bit gradients are divided by it in the fp32 of the update.

    limit  the largest gradient norm: larger gradients are scaled down to it. None: the job's `clip`

    Returns (gradient norm before clipping, whether all gradients were finite). The norm is None if
    gradients are not clipped. The weights stay unchanged if a gradient is not finite, which only
    fp16 checks. The second value is a scalar bool tensor on the device if the optimizer's kernels
    read it there, so that the host need not wait; otherwise it is a bool.
    """
    note_activity("update")
    all_reduce_replicated(run)
    finite, narrow_factor = _unscale(run)
    limit = run.job.train.clip if limit is None else limit
    norm = None if limit is None else clip(run, limit, narrow_factor)
    if narrow_factor is not None:
        assert isinstance(run.optimizer, PerParameter)  # which updates 16-bit weights in fp32
        run.optimizer.multiply_narrow_gradients(narrow_factor)
    _step_if_finite(run.optimizer, finite)
    if run.store is not None:
        run.store.factor = None
    run.optimizer.zero_grad(set_to_none=True)
    if run.reduction is not None and (isinstance(finite, torch.Tensor) or finite):
        run.reduction.updated()  # after zero_grad, so that the gradients' memory is free
    return norm, finite


def _unscale(run: Run) -> tuple[bool | torch.Tensor, float | torch.Tensor | None]:
    """In fp16, divide the fp32 gradients by the loss scale, and choose the next step's loss scale.

    Returns (whether all gradients on all devices are finite, the factor by which the 16-bit gradients
    still have to be multiplied, or None). The first is a scalar tensor on the device if the optimizer
    reads it there, otherwise a bool; True without fp16.
    """
    if run.loss_scale is None:
        return True, None
    finite, narrow_factor = run.loss_scale.unscale(optimizer_weights(run))
    finite = all_ranks_true(run, finite)
    if isinstance(finite, torch.Tensor):
        on_device = finite.device.type == run.device.type  # False if the gradients are offloaded
        finite = finite if on_device and skips_on_found_inf(run.optimizer) else bool(finite)
    run.loss_scale.update(finite)
    return finite, narrow_factor


def _step_if_finite(optimizer: torch.optim.Optimizer, finite: bool | torch.Tensor) -> None:
    """Update the weights, unless a gradient is not finite. finite: see `_unscale`."""
    if isinstance(finite, bool):
        if finite:
            optimizer.step()
        return
    _skip_update_unless(optimizer, finite)
    optimizer.step()
    if not isinstance(optimizer, PerParameter):
        optimizer.found_inf = None  # type: ignore[attr-defined]


def _skip_update_unless(optimizer: torch.optim.Optimizer, finite: torch.Tensor) -> None:
    """Make the optimizer skip its next update if the gradients are not finite.

    finite  whether all gradients are finite: a scalar bool tensor on the device
    """
    if isinstance(optimizer, PerParameter):
        reading = begin_reading({"finite": finite})
        optimizer.skip_step_if(~finite, lambda: not reading()["finite"])
    else:
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]


def skips_on_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer can skip its next update on the device, so that the host need not
    wait for the result of the check for infinite gradients.

    torch's fused kernels can: they read `found_inf` on the device and change nothing if it is 1.
    Optimizers that update parameters one by one or in batches (`PerParameter`) can if they are able
    to undo their changes. The first update of SGD with momentum cannot: it would leave
    uninitialized memory in place of the momenta. For all other optimizers, the host has to read the
    result and decide.
    """
    if isinstance(optimizer, PerParameter):
        return optimizer.can_skip_step()
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


def all_reduce_replicated(run: Run) -> None:
    """Sum, over the tensor-parallel ranks, the gradients of weights that every rank has in full,
    such as norms under sequence parallelism. Each rank has computed these gradients from its part
    of the token positions only. The sums are written into `.grad`."""
    weights = [weight for weight in optimizer_weights_named(run, run.tp_replicated) if weight.requires_grad]
    if not weights:
        return
    assert run.mesh is not None
    total = partial(run.mesh.all_reduce, axes=("tp",))
    with gradients_filled(weights, total):
        gradients = [shard_of(weight.grad) for weight in weights if weight.grad is not None]
        flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
        total(flat)
        for gradient, whole in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(whole.view(gradient.shape))


def drain(run: Run) -> None:
    """Finish all pending work of the run: wait for weights that are still being gathered, and
    complete the steps and updates of an asynchronous pipeline that are in flight."""
    wait_for_weights(run)
    if run.executor is not None:
        with torch.enable_grad():
            for _ in run.executor.drain(run):
                update(run)
