"""Run: what a build leaves behind, a handful of fields and no behaviour. Each method's `apply` returns it edited."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.methods.mesh import Mesh, Slice
from tightfit.methods.stores import TARGET, Store
from tightfit.methods.uploads import Uploads
from tightfit.models.dataflow import Dataflow
from tightfit.models.objective import LABELLED, Batch, Labelled, Objective, map_tensors
from tightfit.plan import Plan


def kind_of(device: torch.device) -> str:
    """The kind of device (cpu, cuda) that a run is meant for: where fake tensors stand in, not the one they lie on."""
    return TARGET.get() or device.type


class Data(Protocol):
    """Samples in an order that is a function of the seed and of how many were consumed.

    samples       how many there are in one epoch; None for an endless stream
    sample_items  tokens in a full sample (1 for images): what throughput counts
    ragged        whether micro-batches differ in shape beyond the number of samples
    steps         the micro-batches (on the host) of each optimizer step, from the sample `consumed` on; ends after
                  the sample `until` (the last step may be short)
    held_out      the micro-batches of the evaluation samples
    example       a few samples as a batch: shapes and types like those of micro-batches, whole sequences
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
    """What keeps small fp16 gradients from vanishing: the loss is multiplied by `value`, the gradients divided by it.

    factor  `value` as the loss is multiplied by it: a scalar tensor where it lies on the device
    """

    value: float
    skipped: int

    @property
    def factor(self) -> float | Tensor: ...

    def unscale(self, parameters: Iterable[Tensor]) -> bool | Tensor:
        """Divide the gradients by `value`; whether all of them are finite, as a scalar tensor where `value` lies on the device."""

    def update(self, finite: bool | Tensor) -> None:
        """Adapt `value` after a step that was finite or not."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Filler:
    """Stands in a step for a micro-batch that this device has no samples for, while others do: it counts for nothing."""

    batch: Batch


class Reduction(Protocol):
    """How the gradients of several devices come together, and the updated weights go back.

    parts    the axes along which the optimizer of each device holds other parts of the model
    begin    before a micro-batch of a step; last: whether it is the step's last one
    end      after its backward; after the last one's, the gradients that the optimizer holds are complete
    updated  after the optimizer's update, whose weights may then be on their way; wait: until they are there
    states   the tensors that it keeps from step to step
    whole    a tensor as the optimizer of this device holds it, for a parameter of its own -> that of the whole
             parameter, on every device. All devices take part
    part     the reverse, of a tensor that every device has whole
    """

    parts: tuple[str, ...]

    def begin(self, last: bool) -> None: ...

    def end(self, last: bool) -> None: ...

    def updated(self) -> None: ...

    def wait(self) -> None: ...

    def states(self) -> list[Tensor]: ...

    def whole(self, weight: Tensor, value: Tensor) -> Tensor: ...

    def part(self, weight: Tensor, value: Tensor) -> Tensor: ...


class Undivided:
    """What a `Reduction` does, unless it says otherwise, where each device's optimizer holds whole parameters."""

    parts: tuple[str, ...] = ()

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

    def whole(self, weight: Tensor, value: Tensor) -> Tensor:
        return value

    def part(self, weight: Tensor, value: Tensor) -> Tensor:
        return value


class Stages(Protocol):
    """How a device that has a piece of the model does its part of a step. All devices of the row take part in each.

    copies      names of weights that another device has too, and counts; stale: of buffers that another device has right
    accumulate  (run, micro-batches, what to multiply their losses by) -> sum of the losses that this device saw
    evaluate    (run, micro-batch) -> its loss, on the last device; 0 on the others
    delay       how many steps later than taken a step's loss is known; then accumulate returns NaN
    losses      those that became known, in order, each a scalar tensor that nobody changes
    free        whether devices go on without waiting for each other at each step
    counted     items, samples and positions of the last step, where the micro-batches do not say; staleness: how many
                updates its gradients were behind
    drain       does what is left of earlier steps, and yields before each update that has to follow
    """

    delay: int
    free: bool
    counted: tuple[int, int, int] | None
    staleness: list[int]
    losses: deque[Tensor]

    copies: frozenset[str]
    stale: frozenset[str]

    def accumulate(self, run: Run, micro_batches: list[Batch], scale: float | Tensor) -> Tensor: ...

    def evaluate(self, run: Run, batch: Batch) -> Tensor: ...

    def drain(self, run: Run) -> Iterator[None]: ...


@dataclass(frozen=True)
class Run:
    """A job fitted to a device by a plan, ready to be trained.

    model          set by `materialize`; its parameters keep their plain names whatever wraps its blocks
    objective      the job's loss; `loss_sum` is how it is computed here: a micro-batch on the device -> sum of losses
    data           set by `loader`
    optimizer      set by `optimizer_states`
    learning_rate  step -> learning rate
    loss_scale     fp16 only
    mesh           the devices of the run; None for one
    reduction      set by `data_parallel` or `zero`
    slices         set by `tensor_parallel`: by name, how a parameter is cut among the devices of the tp axis
    shared         set by `tensor_parallel`: names of parameters whose gradients are sums over the tp axis too
    weights        what the optimizer updates in place of a parameter: a view of this device's part of it
    stages         set by `pipeline`: then `loss_sum` runs this device's piece of the model only
    store          memory beside the device's, where the plan offloads
    blocks         set by `pipeline`: those of the model's blocks that this device has
    dataflow       set by `boundaries`: what the model does in a forward, seen before it was cut
    labelled       set by `loss`: how many labels of a batch on the host count; None where it has no values
    uploads        set by `loader`, where micro-batches are copied to the device while it works at those before
    maskless       set by `loader`: names of a batch's masks that are left out on the host where they hide nothing
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
    slices: dict[str, Slice] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()
    weights: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    stages: Stages | None = None
    store: Store | None = None
    blocks: tuple[nn.Module, ...] | None = None
    dataflow: Dataflow | None = None
    labelled: Callable[[Batch], Labelled | None] | None = None
    uploads: Uploads | None = None
    maskless: tuple[str, ...] = ()


def to_device(batch: Batch, run: Run, copy: Callable[[Tensor], Tensor] | None = None) -> Batch:
    """A batch on the host as one on the device, with what has to be known of it before.

    copy  how a tensor gets there; left out, when the device's own stream comes to it
    """
    batch = with_labelled(without_full_masks(batch, run), run)
    own: Callable[[Tensor], Tensor] = lambda tensor: tensor.to(run.device, non_blocking=run.plan.non_blocking)  # noqa: E731
    return map_tensors(copy or own, batch)


def arriving(micro_batches: Sequence[Batch | Filler], run: Run) -> Iterator[Batch]:
    """The micro-batches of a step on the device, one after another, fillers' too. All of them have to be taken."""
    batches = [one.batch if isinstance(one, Filler) else one for one in micro_batches]
    if run.uploads is None:
        return (to_device(batch, run) for batch in batches)
    return run.uploads.one_ahead(batches, lambda batch, copy: to_device(batch, run, copy))


def with_labelled(batch: Batch, run: Run) -> Batch:
    """A batch on the host that says how many of its labels count, where the run's loss leaves out those that do not."""
    if run.labelled is None or not isinstance(batch, dict) or LABELLED in batch:
        return batch
    labelled = run.labelled(batch)
    return batch if labelled is None else {**batch, LABELLED: labelled}


def without_full_masks(batch: Batch, run: Run) -> Batch:
    """A batch on the host without the masks that hide nothing: a model would ask the device whether they do."""
    if not isinstance(batch, dict):
        return batch
    full = [name for name in run.maskless if _hides_nothing(batch.get(name))]
    return {name: value for name, value in batch.items() if name not in full} if full else batch


def _hides_nothing(mask: Any) -> bool:
    """Whether the host can tell that it does."""
    if not isinstance(mask, Tensor) or is_fake(mask) or mask.device.type != "cpu" or mask.dim() != 2:
        return False
    return bool((mask == 1).all())


def weights_named(run: Run, names: frozenset[str]) -> list[nn.Parameter]:
    """What the optimizer holds of the parameters of these names."""
    if not names:
        return []
    return [run.weights.get(p, p) for name, p in run.model.named_parameters() if name in names]


def wait_for_weights(run: Run) -> None:
    """Until the weights that other devices have updated are here (see `methods/gathers.py`): for whatever reads or writes them between
    two steps. Devices wait by themselves, and need not do so together."""
    if run.reduction is not None:
        run.reduction.wait()


def slices_of(run: Run) -> dict[nn.Parameter, Slice]:
    """What the optimizer of `run` holds of a parameter that is cut among the tp devices -> how it is cut."""
    parameters = dict(run.model.named_parameters())
    return {run.weights.get(parameters[name], parameters[name]): part for name, part in run.slices.items()}


def refuse_hooks(model: nn.Module, asked: str) -> None:
    """Raise InputError for a parameter with a hook on its gradient, which a method would lose that puts another in its place."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise InputError(
                asked,
                f"{name} has a hook on its gradient, of which a device has only a part",
                "use neither, or no hook",
            )


def whole(run: Run, weight: Tensor, value: Tensor) -> Tensor:
    """A tensor as this device's optimizer holds it for a parameter -> that of the whole parameter, on every device."""
    if run.reduction is not None and run.reduction.parts:
        value = run.reduction.whole(weight, value)
    part = slices_of(run).get(weight)  # type: ignore[call-overload]
    return value if part is None else part.whole(value)


def part(run: Run, weight: Tensor, value: Tensor) -> Tensor:
    """The reverse: what this device's optimizer holds of a tensor that is there whole."""
    cut = slices_of(run).get(weight)  # type: ignore[call-overload]
    if cut is not None:
        value = cut.part(value)
    if run.reduction is not None and run.reduction.parts:
        value = run.reduction.part(weight, value)
    return value


def parts_of(run: Run, weight: Tensor) -> tuple[str, ...]:
    """The axes along which devices hold other parts of a parameter."""
    divided = run.reduction.parts if run.reduction is not None else ()
    return (*divided, "tp") if weight in slices_of(run) else divided  # type: ignore[operator]


def parameter_count(run: Run) -> int:
    """Of the whole model, whatever part this device has. On several devices all of them call it."""
    copies = run.stages.copies if run.stages is not None else frozenset()
    own = [(name, parameter) for name, parameter in run.model.named_parameters() if name not in copies]
    count = sum(run.slices[name].shape.numel() if name in run.slices else p.numel() for name, p in own)
    if run.mesh is None:
        return count
    return int(run.mesh.sum(torch.tensor(count, device=run.device), ("pp",)))
