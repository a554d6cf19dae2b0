"""What `build` returns: a job that a plan has fitted to a device, ready to be trained.

A `Run` is a handful of fields and no behaviour. Each method's `apply` returns an edited copy.
The protocols here describe what methods put into it: data, a loss scale, a reduction of
gradients, a pipeline's step executor. The functions move batches to the device, and convert
tensors between a device's shard and the full tensor.
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
    steps         the micro-batches (on the host) of each optimizer step, beginning at the sample
                  `consumed` and ending at the sample `until` (the last step may be short)
    held_out      the micro-batches of the evaluation samples
    example       a few samples as a batch, with the shapes and types of micro-batches and whole
                  sequences
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

    def held_out(self, samples: int) -> Iterator[Batch]: ...

    def example(self) -> Batch: ...


class LossScale(Protocol):
    """Keeps small fp16 gradients from vanishing: the loss is multiplied by `value`, and the
    gradients are divided by it.

    value    the scale as a Python number
    skipped  updates skipped so far because a gradient was not finite
    factor   `value` in the form that the loss is multiplied by: a scalar tensor where the scale is
             on the device
    """

    value: float
    skipped: int

    @property
    def factor(self) -> float | Tensor: ...

    def unscale(self, parameters: Iterable[Tensor]) -> bool | Tensor:
        """Divide the gradients by `value`. Returns whether all of them are finite: a scalar tensor
        where the scale is on the device, else a bool.
        """

    def update(self, finite: bool | Tensor) -> None:
        """Adapt `value` after a step whose gradients were all finite, or were not."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class DummyMicroBatch:
    """Replaces a micro-batch in a step for which this rank has no samples, while others have some.

    It takes part in every collective, and adds nothing to the loss, the gradients or the counts.
    """

    batch: Batch


class Reduction(Protocol):
    """How gradients are reduced over devices, and how updated weights are distributed.

    shard_axes  the mesh axes along which each device's optimizer holds a different shard
    begin       call it before each micro-batch of a step; last: whether it is the step's last one
    end         call it after each micro-batch's backward. After the last one, the gradients that
                the optimizer holds are complete
    updated     call it after the optimizer's update. Updated weights may still be in transit
    wait        wait until they have arrived
    states      the tensors that it keeps from step to step
    unshard     a tensor as this device's optimizer holds it for `weight` -> that of the full
                parameter, on every device. A collective: all devices take part
    shard       the reverse: a full tensor, equal on all devices -> this device's shard
    """

    shard_axes: tuple[str, ...]

    def begin(self, last: bool) -> None: ...

    def end(self, last: bool) -> None: ...

    def updated(self) -> None: ...

    def wait(self) -> None: ...

    def states(self) -> list[Tensor]: ...

    def unshard(self, weight: Tensor, value: Tensor) -> Tensor: ...

    def shard(self, weight: Tensor, value: Tensor) -> Tensor: ...


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


class StepExecutor(Protocol):
    """Executes a rank's part of a pipelined step. All ranks of the pipeline take part in each call.

    replicated      names of weights that another rank has too, and counts (in norms, for example)
    stale_buffers   names of buffers whose correct values are on another rank
    accumulate      (run, micro-batches, factor of their losses) -> sum of the losses on this rank
    evaluate        (run, micro-batch) -> its loss on the last rank; 0 on the others
    loss_delay      how many steps after its forward a step's loss becomes known. Above 0,
                    `accumulate` returns NaN, and `losses` has the losses
    losses          the losses that became known, in order: scalar tensors that nobody changes
    unsynchronized  whether ranks continue without waiting for each other at each step
    counted         items, samples and positions of the last step, where the micro-batches do not
                    tell; staleness: by how many updates its gradients were stale
    drain           completes earlier steps that are still in flight, and yields before each update
                    that has to follow
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
    loss_sum       how the loss is computed here: a micro-batch on the device -> sum of its losses
    data           set by `loader`
    optimizer      set by `optimizer_states`
    learning_rate  number of a step -> its learning rate
    loss_scale     fp16 only
    mesh           the devices of the run; None for a single device
    reduction      set by `data_parallel` or `zero`
    tp_shards      set by `tensor_parallel`: by name, how a parameter is sharded over the tp axis
    tp_replicated  set by `tensor_parallel`: names of parameters that are replicated over the tp
                   axis and whose gradients have to be all-reduced over it
    optimizer_weights  what the optimizer updates in place of a parameter: a view of its shard
    executor       set by `pipeline`. Then `loss_sum` runs this rank's stage of the model only
    store          memory outside of the device's, where the plan offloads
    blocks         set by `pipeline`: the model's blocks that this rank has
    dataflow       set by `boundaries`: what the full model does in a forward
    count_labels   set by `loss`: a batch on the host -> how many of its labels count; None where
                   the batch has no values
    prefetcher     set by `loader`, where micro-batches are copied to the device during the
                   computation of the preceding ones
    droppable_masks  set by `loader`: names of a batch's masks that the host leaves out where they
                   hide nothing
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


def to_device(batch: Batch, run: Run, copy: Callable[[Tensor], Tensor] | None = None) -> Batch:
    """Copy a batch from the host to the device, with the label count that the loss needs.

    Masks that hide nothing are left out. copy: how one tensor is copied; by default on the compute
    stream, asynchronously where the plan says `non_blocking`.
    """
    batch = with_label_count(without_full_masks(batch, run), run)
    own: Callable[[Tensor], Tensor] = lambda tensor: tensor.to(run.device, non_blocking=run.plan.non_blocking)  # noqa: E731
    return map_tensors(copy or own, batch)


def device_batches(micro_batches: Sequence[Batch | DummyMicroBatch], run: Run) -> Iterator[Batch]:
    """Yield the micro-batches of a step on the device, in order, dummy micro-batches included.

    The caller has to take all of them.
    """
    batches = [one.batch if isinstance(one, DummyMicroBatch) else one for one in micro_batches]
    if run.prefetcher is None:
        return (to_device(batch, run) for batch in batches)
    return run.prefetcher.prefetch(batches, lambda batch, copy: to_device(batch, run, copy))


def with_label_count(batch: Batch, run: Run) -> Batch:
    """Add the number of labels that count to a batch on the host, where the loss ignores some
    labels."""
    if run.count_labels is None or not isinstance(batch, dict) or LABEL_COUNT_KEY in batch:
        return batch
    labelled = run.count_labels(batch)
    return batch if labelled is None else {**batch, LABEL_COUNT_KEY: labelled}


def without_full_masks(batch: Batch, run: Run) -> Batch:
    """Drop a host batch's masks that hide nothing.

    A model given such a mask would ask the device whether it hides anything, and so wait for it.
    """
    if not isinstance(batch, dict):
        return batch
    full = [name for name in run.droppable_masks if _is_all_ones(batch.get(name))]
    return {name: value for name, value in batch.items() if name not in full} if full else batch


def _is_all_ones(mask: Any) -> bool:
    """Whether the host can tell that a mask hides nothing: a 2-dimensional CPU tensor of ones."""
    if not isinstance(mask, Tensor) or is_fake(mask) or mask.device.type != "cpu" or mask.dim() != 2:
        return False
    return bool((mask == 1).all())


def optimizer_weights_named(run: Run, names: frozenset[str]) -> list[nn.Parameter]:
    """The tensors that the optimizer updates for the parameters with these names."""
    if not names:
        return []
    return [run.optimizer_weights.get(p, p) for name, p in run.model.named_parameters() if name in names]


def wait_for_weights(run: Run) -> None:
    """Wait until the weights that other devices updated have arrived (see `parallel/weight_gathers.py`).

    Call it before anything reads or writes weights between two steps. It is no collective: each
    device waits for itself.
    """
    if run.reduction is not None:
        run.reduction.wait()


def tp_shards_of(run: Run) -> dict[nn.Parameter, ParameterSharding]:
    """What the optimizer of `run` updates for each tp-sharded parameter -> how that is sharded."""
    parameters = dict(run.model.named_parameters())
    return {run.optimizer_weights.get(parameters[name], parameters[name]): part for name, part in run.tp_shards.items()}


def refuse_hooks(model: nn.Module, asked: str) -> None:
    """Raise InputError where a parameter has a hook on its gradient.

    For methods that replace parameters by shards: the hook would be lost. asked: the plan's field.
    """
    for name, parameter in model.named_parameters():
        if has_gradient_hooks(parameter):
            raise InputError(
                asked,
                f"{name} has a hook on its gradient, but a device has only a shard of that gradient",
                "remove the hook, or this field of the plan",
            )


def unshard(run: Run, weight: Tensor, value: Tensor) -> Tensor:
    """Unshard a tensor: as this device's optimizer holds it for `weight` -> of the full parameter.

    A collective: all devices call it, and all get the full tensor.
    """
    if run.reduction is not None and run.reduction.shard_axes:
        value = run.reduction.unshard(weight, value)
    part = tp_shards_of(run).get(weight)  # type: ignore[call-overload]
    return value if part is None else part.unshard(value)


def shard(run: Run, weight: Tensor, value: Tensor) -> Tensor:
    """Shard: a full tensor -> the shard of it that this device's optimizer holds for `weight`."""
    cut = tp_shards_of(run).get(weight)  # type: ignore[call-overload]
    if cut is not None:
        value = cut.shard(value)
    if run.reduction is not None and run.reduction.shard_axes:
        value = run.reduction.shard(weight, value)
    return value


def shard_axes_of(run: Run, weight: Tensor) -> tuple[str, ...]:
    """The mesh axes along which devices hold different shards of `weight`."""
    divided = run.reduction.shard_axes if run.reduction is not None else ()
    return (*divided, "tp") if weight in tp_shards_of(run) else divided  # type: ignore[operator]


def parameter_count(run: Run) -> int:
    """The number of parameters of the whole model, whatever shard or stage this device has.

    On several devices it is a collective: all of them call it.
    """
    copies = run.executor.replicated if run.executor is not None else frozenset()
    own = [(name, parameter) for name, parameter in run.model.named_parameters() if name not in copies]
    count = sum(run.tp_shards[name].shape.numel() if name in run.tp_shards else p.numel() for name, p in own)
    if run.mesh is None:
        return count
    return int(run.mesh.all_reduce(torch.tensor(count, device=run.device), ("pp",)))
