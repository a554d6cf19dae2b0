"""Sets the number format of the optimizer's states and when each weight is updated. It is for
training in which the optimizer's states, or the gradients, take much of the memory.

Saves   bytes per parameter: AdamW and LAMB take 8 in fp32, 4 in bf16, 2 in 8-bit and 1 in 4-bit
        (plus 4 for each block of 256 or 128 numbers); SGD with momentum, LARS and Lion half of
        that; Muon 4; Adafactor, which is factored, nearly 0. For 3B parameters: Adam 24 GB, in 8
        bits 6 GB; Adafactor 12 GB with a first moment, and a few MB without one, as here. `states:
        fp32` is the optimizer's own choice: bf16 with bf16-true weights, but fp32 where rounding is
        not nearest, or in fp16-true. update_in_backward saves the gradients: one exists at a time.
Costs   all options but fused_optimizer update one parameter after another instead of all at once;
        on a GPU, in batches of as many elements as the largest parameter has, for AdamW, SGD and
        Lion. Narrow states need another pass over each state in either direction. Narrow states and
        rounding need the fp32 copies of one parameter, or batch. kahan takes 2 bytes per weight.
        fp16 on one GPU without fused_optimizer is updated in the same way, with a copy of what each
        update changes, which is restored where a step overflows.
When    optimizer states are the largest row of the ledger (every weight is trained, with small
        batches); update_in_backward where gradients are next.
Order   after the model is final, because it needs the parameters; after the loader, which knows the
        length of an epoch.
Source  Adafactor: Shazeer & Stern 2018, arXiv:1804.04235; 8-bit: Dettmers et al. 2022,
        arXiv:2110.02861; 4-bit: Li et al. 2023, arXiv:2309.01507; update in backward: Lv et al.
        2023, arXiv:2306.09782.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tightfit.cost.entries import Update
from tightfit.cost.ledger import Ledger
from tightfit.cost.recorded_step import BatchLinear, Operation
from tightfit.errors import InputError
from tightfit.job import Job, Train
from tightfit.machine import Machine
from tightfit.models import has_complex_parameters
from tightfit.optim import make_optimizer
from tightfit.optim.in_batches import ELEMENTWISE, MultiTensor, update_batches
from tightfit.optim.norms import mark_shard
from tightfit.optim.per_parameter import PerParameter
from tightfit.optim.schedule import learning_rate, total_steps
from tightfit.optim.whole_parameters import UnshardingOptimizer
from tightfit.plan import Plan
from tightfit.rules import BY_MATRIX
from tightfit.runtime.method import Default, SearchFacts
from tightfit.runtime.offload_store import Store
from tightfit.runtime.run import Run, shard, shard_axes_of, unshard
from tightfit.target_device import kind_of

FIELDS = ("states", "fused_optimizer", "update_in_backward")
VARIANTS = (
    {"fused_optimizer": True},
    {"states": "bf16"},
    {"states": "8-bit"},
    {"states": "4-bit"},
    {"update_in_backward": True},
)

# between the products of a backward, an optimizer's call takes as long as 50 launches
LAUNCHES_PER_CALL = 50
COMPLEX = ("adamw", "sgd")  # optimizers that treat a complex number as two real ones, as torch's do


def enabled(plan: Plan) -> bool:
    return True


def defaults(job: Job, machine: Machine) -> Iterator[Default]:
    if not has_complex_parameters(job.model):
        yield Default("fused_optimizer", True, "one pass over the states in place of several")


def candidates(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    """fp32 states and the narrower ones that the job allows; updates after the step, or in
    backward.
    """
    widths = [width for width in ("bf16", "8-bit", "4-bit") if f"{width}-states" in job.allowed]
    return {"states": ["fp32", *([] if facts.is_complex else widths)], "update_in_backward": [False, True]}


def leanest(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    return candidates(start, job, facts)


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """When the updates happen, and how many at once; states, transients and operations of each
    update are traced.

    On CUDA, torch's default kernels update all parameters at once, and their transients exist for
    all of them. An update of one parameter by itself, or of a batch, costs a call of the whole
    optimizer.
    """
    together = uses_foreach(plan, machine.device)
    ledger = replace(ledger, update_in_backward=plan.update_in_backward, foreach=together)
    if not _updates_separately(plan, machine.device):
        return ledger
    found = _batched_updates(ledger.updates)
    updates = {**ledger.updates, **{name: one for batch in found for name, one in batch.items()}}
    alone = sum(not update.elements for update in updates.values())
    calls = Operation(
        "call",
        "float32",
        BatchLinear(),
        BatchLinear(),
        count=BatchLinear(float(LAUNCHES_PER_CALL * (alone + len(found)))),
    )
    return replace(ledger, updates=updates, whole_step=(*ledger.whole_step, calls))


def _batched_updates(updates: dict[str, Update]) -> list[dict[str, Update]]:
    """The updates that are made in batches, by batch. The first update of each has the batch's
    transients and operations.
    """
    alike: dict[tuple[int, str], list[str]] = {}
    for name, update in updates.items():
        if update.elements:
            alike.setdefault((update.group, update.dtype), []).append(name)
    largest = max((update.elements for update in updates.values()), default=0)
    found = []
    for names in alike.values():
        for numbers in update_batches([updates[name].elements for name in names], largest):
            batch = [updates[names[number]] for number in numbers]
            first = replace(
                batch[0],
                transient_bytes=sum(update.transient_bytes for update in batch),
                comes=sum(update.comes for update in batch),
                leaves=sum(update.leaves for update in batch),
                operations=_merged_operations(batch),
            )
            rest = (replace(update, transient_bytes=0, comes=0, leaves=0, operations=()) for update in batch[1:])
            found.append(dict(zip((names[number] for number in numbers), (first, *rest), strict=True)))
    return found


def _merged_operations(batch: list[Update]) -> tuple[Operation, ...]:
    """The operations of updates that are made together: each common operation becomes one kernel
    over all of them.
    """
    alike: dict[object, list[Update]] = {}
    for update in batch:
        alike.setdefault(tuple((one.name, one.dtype, one.count) for one in update.operations), []).append(update)
    return tuple(
        replace(
            same[0],
            flops=BatchLinear(sum(one.flops.at(1) for one in same)),
            bytes_accessed=BatchLinear(sum(one.bytes_accessed.at(1) for one in same)),
        )
        for those in alike.values()
        for same in zip(*(update.operations for update in those), strict=True)
    )


def uses_foreach(plan: Plan, device: str) -> bool:
    """Whether torch's default kernels update all parameters together (foreach): on CUDA, unless the
    plan asks for something else.
    """
    return device == "cuda" and not plan.fused_optimizer and not _updates_separately(plan, device)


def uploads_for_update(plan: Plan, device: str) -> bool:
    """Whether weights or gradients are copied to this kind of device for the update. A CPU updates
    them where they are mapped.
    """
    return device == "cuda" and bool({"parameters", "gradients"} & set(plan.offload))


def _updates_separately(plan: Plan, device: str) -> bool:
    """Whether parameters are updated one after another, or in batches, instead of all at once."""
    return (
        "states" in plan.offload
        or uploads_for_update(plan, device)
        or plan.precision == "fp16-true"
        or _skips_on_device(plan, device)
        or plan.states != "fp32"
        or plan.rounding != "nearest"
        or plan.update_in_backward
    )


def _skips_on_device(plan: Plan, device: str) -> bool:
    """Whether the device itself skips fp16 steps that overflow, without a fused kernel that does
    so.

    With sharded parameters (ZeRO, tp), the host skips them, and waits for the device.
    """
    return (
        device == "cuda"
        and plan.precision.startswith("fp16")
        and not plan.fused_optimizer
        and not plan.zero
        and plan.tp == 1
    )


def keeps_undo_copies(plan: Plan, device: str) -> bool:
    """Whether updates of one parameter, or of a batch, copy what they change, to restore it where a
    step overflows.
    """
    return device == "cuda" and plan.precision.startswith("fp16") and _updates_separately(plan, device)


def updates_in_batches(plan: Plan, train: Train, device: str) -> bool:
    """Whether separate updates are made in batches: on CUDA, where each kernel costs a launch, for
    element-wise optimizers.
    """
    return (
        device == "cuda"
        and _updates_separately(plan, device)
        and not plan.update_in_backward
        and train.optimizer in ELEMENTWISE
    )


def optimizer_of(
    model: nn.Module,
    train: Train,
    plan: Plan,
    weights: dict[nn.Parameter, nn.Parameter] | None = None,
    store: Store | None = None,
    device: str = "cpu",
) -> Optimizer:
    """The job's optimizer with the plan's kernels, format of states and rounding.

    weights  parameter -> the weight that is updated in its place, such as a shard; None for the
             parameters themselves
    store    the memory for what the plan offloads; None for the device's
    device   the kind of the device that updates: "cpu" or "cuda"

    Raises InputError for parameters that cannot be optimized, or not with these options.
    """
    check_complex(model, train, plan)
    optimizer: Optimizer = make_optimizer(model, train, plan.fused_optimizer, weights)
    # squares of gradients underflow in fp16, so its states are fp32
    wide = plan.precision == "fp16-true"
    if _updates_separately(plan, device):
        keep = store if "states" in plan.offload else None
        apart = store if uploads_for_update(plan, device) else None
        kind = MultiTensor if updates_in_batches(plan, train, device) else PerParameter
        return kind(
            optimizer, plan.states, plan.rounding, train.seed, wide, keep, apart, keeps_undo_copies(plan, device)
        )
    return optimizer


def check_complex(model: nn.Module, train: Train, plan: Plan) -> None:
    """Refuse options that only exist for real numbers, if the model has complex parameters. Raises
    InputError.
    """
    name = next((name for name, parameter in model.named_parameters() if parameter.is_complex()), None)
    if name is None:
        return
    found = f"the model has complex parameters ({name}), and"
    if train.optimizer not in COMPLEX:
        raise InputError(
            f"job: train.optimizer={train.optimizer}",
            f"{found} this optimizer is defined for real numbers only",
            f"use optimizer: {' or '.join(COMPLEX)}, or keep two real numbers for each (torch.view_as_complex)",
        )
    for asked, why, fix in (
        (plan.fused_optimizer, "torch's fused kernels support real numbers only", "use fused_optimizer: false"),
        (plan.is_true, "there are no 16-bit complex numbers", "use precision: fp32 or bf16-mixed"),
        (plan.states != "fp32", "narrow states exist for real numbers only", "use states: fp32"),
        (
            plan.compressed_gradients == "powersgd",
            "PowerSGD supports real numbers only",
            "use compressed_gradients: bf16 or none",
        ),
    ):
        if asked:
            raise InputError(f"plan: {plan}", f"{found} {why}", fix)


def apply(run: Run, plan: Plan) -> Run:
    """Construct the optimizer and the learning-rate schedule."""
    train = run.job.train
    optimizer = optimizer_of(run.model, train, plan, run.optimizer_weights, run.store, kind_of(run.device))
    if plan.zero or run.tp_shards:
        assert run.mesh is not None
        for weight in [weight for group in optimizer.param_groups for weight in group["params"]]:
            if axes := shard_axes_of(run, weight):
                mark_shard(weight, partial(run.mesh.all_reduce, axes=axes))
        if train.optimizer in BY_MATRIX:
            optimizer = UnshardingOptimizer(optimizer, partial(unshard, run), partial(shard, run))
    if plan.update_in_backward:
        assert isinstance(optimizer, PerParameter)
        optimizer.attach()
    samples = run.data.samples if train.steps is None else None
    return replace(run, optimizer=optimizer, learning_rate=learning_rate(train, total_steps(train, samples)))
