"""The `Run`, which `build` returns: a job that a plan has fitted to a device, ready to be trained.

A `Run` has fields and no behaviour. Each method's `apply` gets a Run and returns a changed copy.
The protocols in this module describe the objects that methods put into a Run: the data, the loss
scale, the reduction of gradients, and the executor of a pipeline's steps. The functions move
batches to the device, and convert tensors between a device's shard and the full tensor.
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
from tightfit.models.batches import LABEL_COUNT_KEY, Batch, LabelCount, map_tensors
from tightfit.models.dataflow import Dataflow
from tightfit.models.objective import Objective
from tightfit.optim.own_groups import OwnGroups
from tightfit.plan import Plan
from tightfit.runtime.copy_stream import BatchPrefetcher
from tightfit.runtime.offload_store import Store


class Data(Protocol):
    """The training samples and the evaluation samples of a run. The order of samples depends only
    on the seed, so a training can continue from any sample number.

    samples       number of samples in one epoch; None for an endless stream
    sample_items  number of tokens in a full sample; 1 for images
    ragged        whether the shapes of micro-batches differ in other dimensions than the number of
                  samples
    damaged       how many samples were left out because they are damaged
    tokenizer     a transformers tokenizer, or None
    steps         (consumed, until) -> an iterator over optimizer steps, each a list of
                  micro-batches on the host. The steps contain the samples from number `consumed` up
                  to number `until` (exclusive); until = None never ends. The last step may have
                  fewer samples
    held_out      (number of samples) -> an iterator over the micro-batches of that many evaluation
                  samples, from the first on; None: of all evaluation samples
    example       () -> a batch of a few samples, with the same types as micro-batches and with
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
    """The loss scale of fp16 training: the loss is multiplied by it before backward, so that small
    gradients do not become zero, and the gradients are divided by it before the update.

    value    the scale as a Python number
    skipped  number of updates that were skipped so far because a gradient was not finite
    factor   the scale to multiply the loss by: a scalar tensor if the scale is kept on the device,
             else `value`
    """

    value: float
    skipped: int

    @property
    def factor(self) -> float | Tensor: ...

    def unscale(self, parameters: Iterable[Tensor]) -> tuple[bool | Tensor, float | Tensor | None]:
        """Divide the fp32 gradients of `parameters` by the scale. 16-bit gradients stay scaled: the
        quotients of the smallest would be 0.

        Returns (finite, factor). `finite` tells whether all gradients are finite: a scalar bool
        tensor if the scale is kept on the device, else a bool. `factor` is what the 16-bit
        gradients still have to be multiplied by, in fp32; None if there are none.
        """

    def update(self, finite: bool | Tensor) -> None:
        """Adapt the scale after a step.

        finite  whether all gradients of the step were finite, as `unscale` returned it
        """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class DummyMicroBatch:
    """A stand-in for a micro-batch, on a rank that has no samples left while other ranks still have
    some.

    The rank runs forward and backward on `batch`, so that it takes part in every collective. Nothing
    is added to the loss, the gradients or the counts. BatchNorm's statistics change, as in every
    forward: its momentum is set for the number of micro-batches (`methods/microbatch.py`). So
    `batch` contains samples of the rank.
    """

    batch: Batch


class Reduction(Protocol):
    """Reduces gradients over devices, and distributes updated weights.

    shard_axes  names of the mesh axes along which each device's optimizer holds a different shard
    begin       call it before each micro-batch of a step. last: whether it is the step's last one
    end         call it after each micro-batch's backward. After the last one, the gradients that
                the optimizer reads are complete
    updated     call it after the optimizer's update. It begins to distribute the updated weights,
                which may still be in transit when it returns
    wait        waits until the updated weights have arrived
    states      () -> the tensors that the reduction keeps from step to step
    unshard     (weight, this device's shard of the weight, of its gradient or of an optimizer
                state) -> the full tensor, on every device. All devices must call it
    shard       (weight, a full tensor that is equal on all devices) -> this device's shard: the
                reverse of `unshard`
    forget      drops the gradients that were reduced since the last update
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
    """A `Reduction` that does nothing: each device's optimizer holds full parameters, and nothing
    is reduced. Subclasses override the methods that they need."""

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
    """Runs a rank's part of a step whose work is divided over ranks, such as a pipeline's. All of
    these ranks take part in each call.

    copies_of_earlier_ranks
                    names of the weights that an earlier rank has, too. This rank leaves them out of
                    the gradient norm, so that each weight counts once
    stale_buffers   names of the buffers whose correct values are on another rank
    accumulate      (run, micro-batches, factor by which losses are multiplied before backward) ->
                    sum of the losses on this rank. It runs all forwards and backwards
    evaluate        (run, micro-batch) -> its loss on the last rank; 0 on the other ranks
    loss_delay      how many steps later the loss of a step becomes known. If it is above 0,
                    `accumulate` returns NaN, and the losses are in `losses`
    losses          the losses that became known, oldest first: scalar tensors that are not modified
                    any more
    unsynchronized  whether ranks continue without waiting for each other in each step
    counted         three numbers of the last step: items in the mean loss (such as target tokens),
                    samples, and token positions. None if the caller can count them in the
                    micro-batches
    staleness       for each gradient of the last step, how many updates the weights received
                    between its computation and its use. Empty if gradients are never stale
    drain           completes the steps that are still in flight. It yields after the backward of
                    each, and the caller then updates the weights
    """

    loss_delay: int
    unsynchronized: bool
    counted: tuple[int, int, int] | None
    staleness: list[int]
    losses: deque[Tensor]

    copies_of_earlier_ranks: frozenset[str]
    stale_buffers: frozenset[str]

    def accumulate(self, run: Run, micro_batches: list[Batch], scale: float | Tensor) -> Tensor: ...

    def evaluate(self, run: Run, batch: Batch) -> Tensor: ...

    def drain(self, run: Run) -> Iterator[None]: ...


@dataclass(frozen=True)
class Run:
    """A job that a plan has fitted to a device, ready to be trained.

    model              set by `materialize`. Its parameters keep their names, also if a method wraps
                       its blocks
    objective          the job's loss
    loss_sum           the forward with the plan's methods: a micro-batch on the device -> the sum
                       of its losses. With a pipeline, it runs only this rank's stage of the model
    data               set by `loader`
    optimizer          set by `optimizer_states`
    learning_rate      number of a step -> its learning rate
    group_rates        number of a step -> the learning rate of each parameter group, for a scheduler of torch with
                       the groups of an optimizer of the user's own; None: they follow learning_rate in proportion
    loss_scale         only in fp16, else None
    mesh               the devices of the run; None for a single device
    reduction          set by `data_parallel`, `zero` or `parameter_server`
    tp_shards          set by `tensor_parallel`: name of a parameter -> how it is sharded over the
                       tp axis
    tp_replicated      set by `tensor_parallel`: names of the parameters that every rank of the tp
                       axis has in full and whose gradients have to be summed over it
    optimizer_weights  parameter -> the tensor that the optimizer updates in its place, such as a
                       view of this device's shard. Other parameters are updated themselves
    executor           set by `pipeline` and `parameter_server`: runs the step's forwards and
                       backwards
    store              the memory outside of the device; None if the plan does not offload
    blocks             set by `pipeline`: the model's blocks on this rank
    dataflow           set by `boundaries`: a record of the full model's forward, such as which
                       blocks use which parameters
    count_labels       set by `loss`: a batch on the host -> how many of its labels count in the
                       loss; None if the labels have no values
    prefetcher         set by `loader` if each micro-batch is copied to the device while the
                       preceding one is computed
    head               names of the output head's parameters in the whole model, which Muon does not
                       update; None for other optimizers
    own_groups         the parameter groups that the user's own function makes of the whole model; None: the model
                       is not divided
    own_loop           whether the user's code runs forward and backward (see
                       `engine/custom_loop.py`). It may then call `loss_sum` with any number of
                       samples
    droppable_masks    set by `loader`: names of a batch's masks that are not copied to the device
                       if they are all ones
    frozen             (name, parameter) of each parameter that was frozen when the run was built,
                       so that the optimizer does not have it
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
    group_rates: Callable[[int], list[float]] | None = None
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
    frozen: tuple[tuple[str, nn.Parameter], ...] = ()
    head: frozenset[str] | None = None
    own_groups: OwnGroups | None = None
    own_loop: bool = False


def check_run(run: Any, function: str) -> None:
    """Raise InputError if `run` is not a Run. Functions that users call check their argument with it.

    function  the name of the function that was called, for the error message
    """
    if not isinstance(run, Run):
        raise InputError(
            f"{function}: run",
            f"is of type {type(run).__name__}, and must be a Run",
            f"give what tightfit.build returns: run = tightfit.build(job), then tightfit.{function}(run, ...)",
        )


def refuse_unfrozen(run: Run) -> None:
    """Raise InputError if a parameter that was frozen when the run was built is not frozen any more.
    The optimizer does not have this parameter, so it would never be updated."""
    for name, parameter in run.frozen:
        if parameter.requires_grad:
            raise InputError(
                f"model: {name}.requires_grad",
                "was set to True after the run was built, but the run's optimizer has only the parameters that were "
                "trainable before: this parameter would never be updated",
                "unfreeze it where the model is created, and build the run again",
            )


def to_device(batch: Batch, run: Run, copy: Callable[[Tensor], Tensor] | None = None) -> Batch:
    """Return `batch` on the device. The label count that the loss needs is added, and masks that
    are all ones are left out, because they hide nothing.

    batch  a batch on the host
    copy   copies one tensor to the device. None: copy on the compute stream, asynchronously if the
           plan's `non_blocking` is set
    """
    batch = with_label_count(without_full_masks(batch, run), run)
    own: Callable[[Tensor], Tensor] = lambda tensor: tensor.to(run.device, non_blocking=run.plan.non_blocking)  # noqa: E731
    return map_tensors(copy or own, batch)


def device_batches(micro_batches: Sequence[Batch | DummyMicroBatch], run: Run) -> Iterator[Batch]:
    """Yield the micro-batches of a step, in order, each copied to the device. Of a DummyMicroBatch,
    yield the batch that it contains. The caller has to iterate to the end."""
    batches = [
        micro_batch.batch if isinstance(micro_batch, DummyMicroBatch) else micro_batch for micro_batch in micro_batches
    ]
    if run.prefetcher is None:
        return (to_device(batch, run) for batch in batches)
    return run.prefetcher.prefetch(batches, lambda batch, copy: to_device(batch, run, copy))


def with_label_count(batch: Batch, run: Run) -> Batch:
    """Return `batch`, a batch on the host, with one more entry if the job's loss ignores some
    labels: the number of labels that count."""
    if run.count_labels is None or not isinstance(batch, dict) or LABEL_COUNT_KEY in batch:
        return batch
    labelled = run.count_labels(batch)
    return batch if labelled is None else {**batch, LABEL_COUNT_KEY: labelled}


def without_full_masks(batch: Batch, run: Run) -> Batch:
    """Return `batch`, a batch on the host, without the droppable masks that are all ones. They hide
    nothing.

    If a model gets such a mask on a GPU, it reads from the device whether the mask hides anything,
    and the host has to wait.
    """
    if not isinstance(batch, dict):
        return batch
    full = [name for name in run.droppable_masks if _is_all_ones(batch.get(name))]
    return {name: value for name, value in batch.items() if name not in full} if full else batch


def _is_all_ones(mask: Any) -> bool:
    """Return whether a mask is known to hide nothing, because it is a 2-dimensional CPU tensor of
    ones. False for any other value, also for a fake tensor."""
    if not isinstance(mask, Tensor) or is_fake(mask) or mask.device.type != "cpu" or mask.dim() != 2:
        return False
    return bool((mask == 1).all())


def optimizer_weights_named(run: Run, names: frozenset[str]) -> list[nn.Parameter]:
    """Return the tensors that the optimizer updates for the parameters with the given names."""
    if not names:
        return []
    return [run.optimizer_weights.get(p, p) for name, p in run.model.named_parameters() if name in names]


def wait_for_weights(run: Run) -> None:
    """Wait until the weights that other devices have updated have arrived on this device (see
    `parallel/weight_gathers.py`).

    Call it before code reads or writes weights between two steps. It is not a collective: other
    devices need not call it.
    """
    if run.reduction is not None:
        run.reduction.wait()


def tp_shards_of(run: Run) -> dict[nn.Parameter, ParameterSharding]:
    """Return, for each parameter that is sharded over the tp axis: the tensor that the optimizer
    updates -> how the parameter is sharded."""
    parameters = dict(run.model.named_parameters())
    return {run.optimizer_weights.get(parameters[name], parameters[name]): part for name, part in run.tp_shards.items()}


def refuse_hooks(model: nn.Module, asked: str) -> None:
    """Raise InputError if a parameter of `model` has a hook on its gradient. Methods that replace
    parameters by shards call this function, because a shard would lose the hook.

    asked  the plan field of the method, for the error message
    """
    for name, parameter in model.named_parameters():
        if has_gradient_hooks(parameter):
            raise InputError(
                asked,
                f"{name} has a hook on its gradient, but a device has only a shard of that gradient",
                "remove the hook, or leave out this field of the plan",
            )


def unshard(run: Run, weight: Tensor, value: Tensor) -> Tensor:
    """Return the full tensor of which `value` is this device's shard. All devices must call this
    function.

    weight  the tensor that the optimizer updates
    value   this device's shard of the weight, of its gradient or of one of its optimizer states
    """
    if run.reduction is not None and run.reduction.shard_axes:
        value = run.reduction.unshard(weight, value)
    part = tp_shards_of(run).get(weight)  # type: ignore[call-overload]
    return value if part is None else part.unshard(value)


def shard(run: Run, weight: Tensor, value: Tensor) -> Tensor:
    """Return this device's shard of a full tensor: the reverse of `unshard`.

    weight  the tensor that the optimizer updates
    value   the full weight, or its full gradient or optimizer state
    """
    cut = tp_shards_of(run).get(weight)  # type: ignore[call-overload]
    if cut is not None:
        value = cut.shard(value)
    if run.reduction is not None and run.reduction.shard_axes:
        value = run.reduction.shard(weight, value)
    return value


def shard_axes_of(run: Run, weight: Tensor) -> tuple[str, ...]:
    """Return the names of the mesh axes along which devices have different shards of `weight`, a
    tensor that the optimizer updates. Empty if every device has the full weight."""
    divided = run.reduction.shard_axes if run.reduction is not None else ()
    return (*divided, "tp") if weight in tp_shards_of(run) else divided  # type: ignore[operator]


def parameter_count(run: Run) -> int:
    """Return the number of parameters of the full model, although this device may have only shards
    or a pipeline stage of it. All devices must call this function."""
    copies = run.executor.copies_of_earlier_ranks if run.executor is not None else frozenset()
    own = [(name, parameter) for name, parameter in run.model.named_parameters() if name not in copies]
    count = sum(run.tp_shards[name].shape.numel() if name in run.tp_shards else p.numel() for name, p in own)
    if run.mesh is None:
        return count
    return int(run.mesh.all_reduce(torch.tensor(count, device=run.device), ("pp",)))
