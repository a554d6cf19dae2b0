"""The `Run`, which `build` returns: a job that a plan has fitted to a device, ready to be trained.

A `Run` has fields and no behaviour. Each method's `apply` returns an edited copy. The protocols in
this module describe what methods put into a Run: data, a loss scale, a reduction of gradients, a
pipeline's step executor. The functions move batches to the device, and convert tensors between a
device's shard and the full tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tightfit._torch.fake import is_fake
from tightfit._torch.tensors import has_gradient_hooks
from tightfit.distributed.mesh import Mesh
from tightfit.distributed.sharding import ParameterSharding
from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.models.dataflow import Dataflow
from tightfit.models.objective import LABEL_COUNT_KEY, Batch, LabelCount, Objective, map_tensors
from tightfit.plan import Plan
from tightfit.runtime.copy_stream import BatchPrefetcher
from tightfit.runtime.offload_store import Store


class Data(Protocol):
    """Samples in an order that depends only on the seed and on how many were consumed.

    samples       number of samples in one epoch; None for an endless stream
    sample_items  tokens in a full sample (1 for images): the unit of throughput
    ragged        whether micro-batches differ in shape beyond the number of samples
    damaged       how many samples were left out because they are damaged
    tokenizer     a transformers tokenizer, or None
    steps         the micro-batches (on the host) of each optimizer step, from sample number
                  `consumed` to sample number `until`, or without end if that is None. The last
                  step may be short
    held_out      the micro-batches of the first `samples` evaluation samples; None: of all
    example       a few samples as a batch, with the shapes and types of micro-batches, and with
                  sequences of full length
    """

    @property
    def samples(self) -> int | None: ...

    @property
    def sample_items(self) -> int: ...

    @property
    def ragged(self) -> bool: ...

    @property
    def damaged(self) -> int: ...

    @property
    def tokenizer(self) -> Any: ...

    def steps(self, consumed: int, until: int | None) -> Iterator[list[Batch]]: ...

    def held_out(self, samples: int | None) -> Iterator[Batch]: ...

    def example(self) -> Batch: ...


class LossScale(Protocol):
    """Keeps small fp16 gradients from vanishing: the loss is multiplied by `value`, and the
    gradients are divided by it.

    value    the scale as a Python number
    skipped  updates skipped so far because a gradient was not finite
    factor   what the loss is multiplied by: a scalar tensor if the scale is on the device, else
             `value`
    """

    value: float
    skipped: int

    @property
    def factor(self) -> float | Tensor: ...

    def unscale(self, parameters: Iterable[Tensor]) -> bool | Tensor:
        """Divide the gradients by `value`. Returns whether all of them are finite: a scalar tensor
        if the scale is on the device, else a bool.
        """

    def update(self, finite: bool | Tensor) -> None:
        """Adapt `value` after a step. finite: whether all gradients of the step were finite."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class DummyMicroBatch:
    """Takes the place of a micro-batch on a rank that has no samples for it, while other ranks have
    some. Its values do not matter.

    With a dummy micro-batch the rank takes part in every collective, and adds nothing to the loss,
    the gradients or the counts.
    """

    batch: Batch


class Reduction(Protocol):
    """How gradients are reduced over devices, and how updated weights are distributed.

    shard_axes  the mesh axes along which each device's optimizer holds a different shard
    begin       call it before each micro-batch of a step; last: whether it is the step's last one
    end         call it after each micro-batch's backward. After the last one, the gradients that
                the optimizer holds are complete
    updated     call it after the optimizer's update. Updated weights may still be in transit
    wait        wait until the updated weights have arrived
    states      the tensors that the reduction keeps from step to step
    unshard     (weight, this device's shard of a tensor that belongs to it, such as an optimizer
                state) -> the full tensor, on every device. A collective: all devices take part
    shard       the reverse: (weight, the full tensor, equal on all devices) -> this device's shard
    forget      drop the gradients that were reduced since the last update
    """

    shard_axes: tuple[str, ...]

    def begin(self, last: bool) -> None: ...

    def end(self, last: bool) -> None: ...

    def updated(self) -> None: ...

    def wait(self) -> None: ...

    def states(self) -> list[Tensor]: ...

    def unshard(self, weight: Tensor, value: Tensor) -> Tensor: ...

    def shard(self, weight: Tensor, value: Tensor) -> Tensor: ...

    def forget(self) -> None: ...


class UnshardedReduction:
    """The default `Reduction`: each device's optimizer holds full parameters, nothing is sharded.

    Subclasses override the parts that they need.
    """

    shard_axes: tuple[str, ...] = ()

    def begin(self, last: bool) -> None:
        pass

    def end(self, last: bool) -> None:
        pass

    def updated(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def states(self) -> list[Tensor]:
        return []

    def unshard(self, weight: Tensor, value: Tensor) -> Tensor:
        return value

    def shard(self, weight: Tensor, value: Tensor) -> Tensor:
        return value

    def forget(self) -> None:
        pass


class StepExecutor(Protocol):
    """Executes a rank's part of a pipelined step. All ranks of the pipeline take part in each call.

    replicated      names of weights that another rank has, too. That rank counts them, in the
                    gradient norm for example
    stale_buffers   names of buffers whose correct values are on another rank
    accumulate      (run, micro-batches, factor of their losses) -> sum of the losses on this rank
    evaluate        (run, micro-batch) -> its loss on the last rank; 0 on the other ranks
    loss_delay      how many steps after its forward a step's loss becomes known. Above 0,
                    `accumulate` returns NaN, and `losses` has the losses
    losses          the losses that became known, in order: scalar tensors that are not modified
    unsynchronized  whether ranks continue without waiting for each other at each step
    counted         (items, samples, positions) of the last step; None if the caller can count them
                    in the micro-batches
    staleness       for each gradient of the last step, by how many updates it was stale; empty if
                    gradients are never stale
    drain           completes earlier steps that are still in flight. It yields after the backward
                    of each, and the caller then updates the weights
    """

    loss_delay: int
    unsynchronized: bool
    counted: tuple[int, int, int] | None
    staleness: list[int]
    losses: deque[Tensor]

    replicated: frozenset[str]
    stale_buffers: frozenset[str]

    def accumulate(self, run: Run, micro_batches: list[Batch], scale: float | Tensor) -> Tensor: ...

    def evaluate(self, run: Run, batch: Batch) -> Tensor: ...

    def drain(self, run: Run) -> Iterator[None]: ...


@dataclass(frozen=True)
class Run:
    """A job that a plan has fitted to a device, ready to be trained.

    model          set by `materialize`; its parameters keep their names, whatever wraps its blocks
    objective      the job's loss
    loss_sum       the loss with the plan's methods: a micro-batch on the device -> sum of its
                   losses
    data           set by `loader`
    optimizer      set by `optimizer_states`
    learning_rate  number of a step -> its learning rate
    loss_scale     fp16 only
    mesh           the devices of the run; None for a single device
    reduction      set by `data_parallel` or `zero`
    tp_shards      set by `tensor_parallel`: name of a parameter -> how it is sharded over the tp
                   axis
    tp_replicated  set by `tensor_parallel`: names of parameters that are replicated over the tp
                   axis and whose gradients have to be all-reduced over it
    optimizer_weights  parameter -> the weight that the optimizer updates in its place, such as a
                   view of this device's shard
    executor       set by `pipeline`. Then `loss_sum` runs this rank's stage of the model only
    store          set if the plan offloads: the memory outside of the device
    blocks         set by `pipeline`: the model's blocks that this rank has
    dataflow       set by `boundaries`: what the full model does in a forward
    count_labels   set by `loss`: a batch on the host -> how many of its labels count; None if the
                   batch has no values
    prefetcher     set by `loader` if each micro-batch is copied to the device while the preceding
                   one is computed
    own_loop       whether the user's code runs the forwards and backwards, and calls `loss_sum` with
                   samples of any number (see `engine/custom_loop.py`)
    droppable_masks  set by `loader`: names of a batch's masks that are not copied to the device if
                   they are all ones
    """

    job: Job
    plan: Plan
    device: torch.device
    objective: Objective
    model: nn.Module
    loss_sum: Callable[[Batch], Tensor]
    data: Data
    optimizer: torch.optim.Optimizer
    learning_rate: Callable[[int], float]
    loss_scale: LossScale | None = None
    mesh: Mesh | None = None
    reduction: Reduction | None = None
    tp_shards: dict[str, ParameterSharding] = field(default_factory=dict)
    tp_replicated: frozenset[str] = frozenset()
    optimizer_weights: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    executor: StepExecutor | None = None
    store: Store | None = None
    blocks: tuple[nn.Module, ...] | None = None
    dataflow: Dataflow | None = None
    count_labels: Callable[[Batch], LabelCount | None] | None = None
    prefetcher: BatchPrefetcher | None = None
    droppable_masks: tuple[str, ...] = ()
    own_loop: bool = False


def to_device(batch: Batch, run: Run, copy: Callable[[Tensor], Tensor] | None = None) -> Batch:
    """Copy a batch from the host to the device, with the label count that the loss needs.

    Masks of ones, which hide nothing, are left out.

    copy: copies one tensor to the device. By default, tensors are copied on the compute stream,
    asynchronously if the plan has `non_blocking`.
    """
    batch = with_label_count(without_full_masks(batch, run), run)
    own: Callable[[Tensor], Tensor] = lambda tensor: tensor.to(run.device, non_blocking=run.plan.non_blocking)  # noqa: E731
    return map_tensors(copy or own, batch)


def device_batches(micro_batches: Sequence[Batch | DummyMicroBatch], run: Run) -> Iterator[Batch]:
    """Yield the micro-batches of a step on the device, in order, dummy micro-batches included.

    The caller has to iterate to the end.
    """
    batches = [one.batch if isinstance(one, DummyMicroBatch) else one for one in micro_batches]
    if run.prefetcher is None:
        return (to_device(batch, run) for batch in batches)
    return run.prefetcher.prefetch(batches, lambda batch, copy: to_device(batch, run, copy))


def with_label_count(batch: Batch, run: Run) -> Batch:
    """Return a host batch with the number of labels that count added, if the loss ignores some
    labels."""
    if run.count_labels is None or not isinstance(batch, dict) or LABEL_COUNT_KEY in batch:
        return batch
    labelled = run.count_labels(batch)
    return batch if labelled is None else {**batch, LABEL_COUNT_KEY: labelled}


def without_full_masks(batch: Batch, run: Run) -> Batch:
    """Return a host batch without the masks that hide nothing, because they are all ones.

    A model with such a mask would read from the device whether the mask hides anything, and the
    host would wait for the device.
    """
    if not isinstance(batch, dict):
        return batch
    full = [name for name in run.droppable_masks if _is_all_ones(batch.get(name))]
    return {name: value for name, value in batch.items() if name not in full} if full else batch


def _is_all_ones(mask: Any) -> bool:
    """Return whether a mask is known to hide nothing: it is a 2-dimensional CPU tensor of ones."""
    if not isinstance(mask, Tensor) or is_fake(mask) or mask.device.type != "cpu" or mask.dim() != 2:
        return False
    return bool((mask == 1).all())


def optimizer_weights_named(run: Run, names: frozenset[str]) -> list[nn.Parameter]:
    """Return the tensors that the optimizer updates for the parameters with these names."""
    if not names:
        return []
    return [run.optimizer_weights.get(p, p) for name, p in run.model.named_parameters() if name in names]


def wait_for_weights(run: Run) -> None:
    """Wait until the weights that other devices updated have arrived (see
    `parallel/weight_gathers.py`).

    Call it before anything reads or writes weights between two steps. It is no collective: a device
    does not wait for the others to call it.
    """
    if run.reduction is not None:
        run.reduction.wait()


def tp_shards_of(run: Run) -> dict[nn.Parameter, ParameterSharding]:
    """For each parameter that is sharded over the tp axis, return the weight that the optimizer
    updates -> how the parameter is sharded."""
    parameters = dict(run.model.named_parameters())
    return {run.optimizer_weights.get(parameters[name], parameters[name]): part for name, part in run.tp_shards.items()}


def refuse_hooks(model: nn.Module, asked: str) -> None:
    """Raise InputError if a parameter has a hook on its gradient.

    Methods that replace parameters by shards call this, because they would lose the hook.
    asked: the plan field of the method, for the message.
    """
    for name, parameter in model.named_parameters():
        if has_gradient_hooks(parameter):
            raise InputError(
                asked,
                f"{name} has a hook on its gradient, but a device has only a shard of that gradient",
                "remove the hook, or leave out this field of the plan",
            )


def unshard(run: Run, weight: Tensor, value: Tensor) -> Tensor:
    """Return the full tensor of which `value` is this device's shard. A collective: all devices
    call it.

    weight  what the optimizer updates
    value   the shard of `weight` itself, or of its gradient or one of its optimizer states
    """
    if run.reduction is not None and run.reduction.shard_axes:
        value = run.reduction.unshard(weight, value)
    part = tp_shards_of(run).get(weight)  # type: ignore[call-overload]
    return value if part is None else part.unshard(value)


def shard(run: Run, weight: Tensor, value: Tensor) -> Tensor:
    """Return this device's shard of a full tensor: the reverse of `unshard`.

    weight  what the optimizer updates
    value   the full weight, or its full gradient or optimizer state
    """
    cut = tp_shards_of(run).get(weight)  # type: ignore[call-overload]
    if cut is not None:
        value = cut.shard(value)
    if run.reduction is not None and run.reduction.shard_axes:
        value = run.reduction.shard(weight, value)
    return value


def shard_axes_of(run: Run, weight: Tensor) -> tuple[str, ...]:
    """Return the names of the mesh axes along which devices hold different shards of `weight`."""
    divided = run.reduction.shard_axes if run.reduction is not None else ()
    return (*divided, "tp") if weight in tp_shards_of(run) else divided  # type: ignore[operator]


def parameter_count(run: Run) -> int:
    """Return the number of parameters of the full model, not only of this device's shard or stage.

    With several devices it is a collective: all devices call it.
    """
    copies = run.executor.replicated if run.executor is not None else frozenset()
    own = [(name, parameter) for name, parameter in run.model.named_parameters() if name not in copies]
    count = sum(run.tp_shards[name].shape.numel() if name in run.tp_shards else p.numel() for name, p in own)
    if run.mesh is None:
        return count
    return int(run.mesh.all_reduce(torch.tensor(count, device=run.device), ("pp",)))
