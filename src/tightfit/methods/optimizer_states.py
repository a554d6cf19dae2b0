"""Creates the optimizer: sets the number format of its states, and when each weight is updated. It
is for training in which optimizer states or gradients take much of the memory.

Saves   bytes per parameter: the states of AdamW and LAMB take 8 in fp32, 4 in bf16, 2 in 8-bit and
        1 in 4-bit (plus 4 bytes for each block of 256 or 128 numbers). SGD with momentum, LARS and
        Lion take half of that, Muon 4, and Adafactor, whose second moment is factored, nearly 0.
        Example: for 3B parameters, Adam takes 24 GB, and 6 GB in 8-bit. Adafactor with a first
        moment would take 12 GB; here it has none and takes a few MB. With `states: fp32`, the
        states have the type that the optimizer chooses: bf16 for bf16-true weights, but fp32 if
        rounding is not nearest, or with fp16-true. update_in_backward saves the gradients, of which
        only one exists at a time.
Costs   all options but fused_optimizer update one parameter after another instead of all at once.
        On a GPU, AdamW, SGD and Lion update batches of as many elements as the largest parameter
        has. States in bf16, 8-bit or 4-bit are converted to fp32 before an update and back after
        it, one pass over each state in both directions. These states, and rounding, need fp32
        copies of one parameter, or of one batch. kahan takes 2 bytes per weight. With fp16 on one
        GPU without fused_optimizer, updates are separate, too, and each first copies what it
        changes, to restore it if the step overflows.
When    optimizer states are the largest row of the ledger, as they are if every weight is trained
        with small batches; update_in_backward if gradients are the next largest.
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

from torch import Tensor, nn
from torch.optim import Optimizer

from tightfit.cost.entries import Update
from tightfit.cost.ledger import Ledger
from tightfit.cost.recorded_step import BatchLinear, Operation
from tightfit.cost.remembered import remembered
from tightfit.errors import InputError
from tightfit.job import Job, Train
from tightfit.machine import Machine
from tightfit.models import has_complex_parameters
from tightfit.optim import make_optimizer
from tightfit.optim.functions import SchedulerRates, full_rate_of, kind_of_update, nested_state, subclassed_state
from tightfit.optim.groups import names_of_parameters
from tightfit.optim.in_batches import ELEMENTWISE, MultiTensor, update_batches
from tightfit.optim.norms import mark_shard
from tightfit.optim.own_groups import OwnGroups
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

# an optimizer call, measured during a backward, takes as long as this many kernel launches
LAUNCHES_PER_CALL = 50
COMPLEX = ("adamw", "sgd")  # optimizers that update a complex number as two real ones


def enabled(plan: Plan) -> bool:
    return True


def defaults(job: Job, machine: Machine) -> Iterator[Default]:
    if not has_complex_parameters(job.model):
        yield Default("fused_optimizer", True, "one pass over the states instead of several")


def candidates(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    """Return the values that search tries: for `states`, fp32 and the smaller formats that the job
    allows; for `update_in_backward`, False and True.
    """
    widths = [width for width in ("bf16", "8-bit", "4-bit") if f"{width}-states" in job.allowed]
    return {"states": ["fp32", *([] if facts.is_complex else widths)], "update_in_backward": [False, True]}


def leanest(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    return candidates(start, job, facts)


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Return the ledger (the predicted memory and time of a step) with the plan's way to update:
    whether in backward or after it, and whether one parameter, a batch of parameters or all
    parameters at once. The ledger already has the states, the temporaries and the operations of
    each update.

    On CUDA, torch's default (foreach) kernels update all parameters together, and the temporaries
    of all updates exist at the same time. Separate updates, of one parameter or of one batch of
    parameters, take the time of one optimizer call each in addition.
    """
    together = uses_foreach(plan, machine.device)
    ledger = replace(ledger, update_in_backward=plan.update_in_backward, foreach=together)
    if not _updates_separately(plan, machine.device):
        return ledger
    updates, count = _updates_and_calls(ledger.updates)
    calls = Operation(
        "call",
        "float32",
        BatchLinear(),
        BatchLinear(),
        count=BatchLinear(float(LAUNCHES_PER_CALL * count)),
    )
    return replace(ledger, updates=updates, once_per_step=(*ledger.once_per_step, calls))


@remembered(16)
def _updates_and_calls(updates: dict[str, Update]) -> tuple[dict[str, Update], int]:
    """Return (updates, with those that run together merged; number of calls of the optimizer)."""
    found = _batched_updates(updates)
    merged = {**updates, **{name: one for batch in found for name, one in batch.items()}}
    alone = sum(not update.elements for update in merged.values())
    return merged, alone + len(found)


def _batched_updates(updates: dict[str, Update]) -> list[dict[str, Update]]:
    """Return a list of the batches of updates that run together: for each batch, a dict from the
    name of a parameter to its update. Updates that do not run in batches are left out.

    updates  for each parameter, by name, its update

    The first update of a batch gets the temporaries and operations of the whole batch, and the
    others get none.
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
                upload_bytes=sum(update.upload_bytes for update in batch),
                download_bytes=sum(update.download_bytes for update in batch),
                operations=_merged_operations(batch),
            )
            rest = (
                replace(update, transient_bytes=0, upload_bytes=0, download_bytes=0, operations=())
                for update in batch[1:]
            )
            found.append(dict(zip((names[number] for number in numbers), (first, *rest), strict=True)))
    return found


def _merged_operations(batch: list[Update]) -> tuple[Operation, ...]:
    """Return the operations of a batch of updates that run together. Updates with the same sequence
    of operations share their kernels: each operation becomes one kernel over all their parameters,
    with the sum of their FLOPs and bytes.
    """
    alike: dict[object, list[Update]] = {}
    for update in batch:
        alike.setdefault(
            tuple((operation.name, operation.dtype, operation.count) for operation in update.operations), []
        ).append(update)
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
    """Return whether torch's default (foreach) kernels update all parameters together. They do on
    CUDA, if the plan uses neither the fused kernel nor an option that updates parameters one by one
    or in batches.

    device  the kind of device: "cpu" or "cuda"
    """
    return device == "cuda" and not plan.fused_optimizer and not _updates_separately(plan, device)


def _updates_separately(plan: Plan, device: str) -> bool:
    """Return whether the optimizer updates parameters one by one, or in batches, instead of all at
    once. `device` is "cpu" or "cuda"."""
    return (
        "states" in plan.offload
        or plan.uploads_for_update(device)
        or plan.precision == "fp16-true"
        or _skips_on_device(plan, device)
        or plan.states != "fp32"
        or plan.rounding != "nearest"
        or plan.master_weights
        or plan.update_in_backward
    )


def _skips_on_device(plan: Plan, device: str) -> bool:
    """Return whether the device itself undoes the updates of an fp16 step that overflowed, so that
    the host need not wait to learn about the overflow.

    Return False with fused_optimizer, whose kernel skips such steps itself. Also return False with
    sharded parameters (ZeRO, tp): there the host waits for the device and skips the step.

    device  the kind of device: "cpu" or "cuda"
    """
    return (
        device == "cuda"
        and plan.precision.startswith("fp16")
        and not plan.fused_optimizer
        and not plan.zero
        and plan.tp == 1
    )


def keeps_undo_copies(plan: Plan, device: str) -> bool:
    """Return whether each update first copies the weights and states that it changes, to restore
    them if the fp16 step overflowed. `device` is "cpu" or "cuda".
    """
    return device == "cuda" and plan.precision.startswith("fp16") and _updates_separately(plan, device)


def updates_in_batches(plan: Plan, train: Train, device: str) -> bool:
    """Return whether the optimizer updates parameters in batches instead of one by one or all at
    once. It does for elementwise optimizers on CUDA, where each kernel costs a launch, if an option
    of the plan rules out updating all parameters at once.

    device  the kind of device: "cpu" or "cuda"
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
    head: frozenset[str] | None = None,
    groups: OwnGroups | None = None,
) -> Optimizer:
    """Return the job's optimizer with the plan's kernels, format of states and rounding.

    weights  maps a parameter to the weight that is updated in its place, such as this device's
             shard of it; None: the parameters themselves are updated
    store    the memory for offloaded data; None: nothing is offloaded
    device   the kind of device that updates: "cpu" or "cuda"
    head     names of the output head's parameters, for Muon; None: `model` is whole
    groups   the parameter groups that the user's own function makes of the whole model; None: `model` is whole

    Raises InputError if the optimizer does not support a parameter (complex numbers, sparse
    gradients), or if it has no fused kernel although the plan asks for one. Also raises it for the
    other reasons that `make_optimizer` lists.
    """
    check_complex(model, train, plan)
    optimizer: Optimizer = make_optimizer(model, train, plan.fused_optimizer, weights, head, groups)
    # squares of gradients underflow in fp16, so its states are fp32
    wide = plan.precision == "fp16-true"
    if _updates_separately(plan, device):
        keep = store if "states" in plan.offload else None
        apart = store if plan.uploads_for_update(device) else None
        kind = MultiTensor if updates_in_batches(plan, train, device) else PerParameter
        names: dict[Tensor, str] = {
            (weights or {}).get(one, one): named[0] for one, named in names_of_parameters(model).items()
        }
        return kind(
            optimizer,
            plan.states,
            plan.rounding,
            train.seed,
            wide,
            keep,
            apart,
            keeps_undo_copies(plan, device),
            plan.master_weights,
            names,
        )
    return optimizer


def _check_nested(train: Train, plan: Plan) -> None:
    """Raise InputError if states of the user's optimizer, which updates shards, are lists, tuples or dicts: a
    checkpoint would not know which of their tensors are shards."""
    if name := nested_state(train.optimizer):
        raise InputError(
            f"plan: {plan}",
            f"the optimizer of job: train.optimizer keeps its state {name!r} in a list or dict, and the plan shards states, "
            "which have to be tensors",
            f"keep each tensor under a name of its own (state['{name}_0']), or use zero: 0 and tp: 1",
        )


def _check_subclassed(train: Train) -> None:
    """Raise InputError if states of the user's optimizer are tensors of another class than torch's, which neither
    checkpoints nor shards can hold."""
    name, kind = subclassed_state(train.optimizer)
    if name:
        raise InputError(
            "job: train.optimizer",
            f"the optimizer keeps its state {name!r} in a {kind}, a class of tensors that checkpoints cannot store",
            "for states in 8 or 4 bits, use train.optimizer: adamw with plan.states: 8-bit or 4-bit",
        )


def check_complex(model: nn.Module, train: Train, plan: Plan) -> None:
    """Raise InputError if the model has complex parameters, and if the job's optimizer or an option
    of the plan supports real numbers only.
    """
    name = next((name for name, parameter in model.named_parameters() if parameter.is_complex()), None)
    if name is None:
        return
    found = f"the model has complex parameters ({name}), and"
    if train.optimizer not in COMPLEX:
        raise InputError(
            f"job: train.optimizer={train.optimizer_name}",
            f"{found} this optimizer is defined for real numbers only",
            f"use optimizer: {' or '.join(COMPLEX)}, or make the parameter real, with two numbers "
            "for each complex one, and call torch.view_as_complex in forward",
        )
    for asked, why, fix in (
        (plan.fused_optimizer, "torch's fused kernels support real numbers only", "use fused_optimizer: false"),
        (plan.has_16_bit_weights, "there are no 16-bit complex numbers", "use precision: fp32 or bf16-mixed"),
        (plan.states != "fp32", f"{plan.states} states support real numbers only", "use states: fp32"),
        (
            plan.compressed_gradients == "powersgd",
            "PowerSGD supports real numbers only",
            "use compressed_gradients: bf16 or none",
        ),
    ):
        if asked:
            raise InputError(f"plan: {plan}", f"{found} {why}", fix)


def apply(run: Run, plan: Plan) -> Run:
    """Create the optimizer and the learning-rate schedule, and return the run with both."""
    train = run.job.train
    kind = None
    if train.uses_function("optimizer"):
        _check_subclassed(train)
        kind = kind_of_update(train.optimizer)
    if kind == "together":
        _check_undivided(train, plan)
    optimizer = optimizer_of(
        run.model, train, plan, run.optimizer_weights, run.store, kind_of(run.device), run.head, run.own_groups
    )
    if kind == "elementwise" and (plan.zero or run.tp_shards):
        _check_nested(train, plan)
    if plan.zero or run.tp_shards:
        assert run.mesh is not None
        for weight in [weight for group in optimizer.param_groups for weight in group["params"]]:
            if axes := shard_axes_of(run, weight):
                mark_shard(weight, partial(run.mesh.all_reduce, axes=axes))
        if train.optimizer in BY_MATRIX or kind == "by parameter":
            optimizer = UnshardingOptimizer(optimizer, partial(unshard, run), partial(shard, run))
    if isinstance(optimizer, PerParameter):
        optimizer.follows_data = run.own_loop
    if plan.update_in_backward:
        assert isinstance(optimizer, PerParameter)
        optimizer.attach()
    samples = run.data.samples if train.steps is None else None
    full = full_rate_of(optimizer) if kind else None
    # groups that the user's function makes; those of train.groups follow the schedule in proportion
    own = [float(group["base_lr"]) for group in optimizer.param_groups] if kind and not train.groups else []
    rate = learning_rate(train, total_steps(train, samples), full, own)
    of_groups = rate.of_groups if own and isinstance(rate, SchedulerRates) else None
    return replace(run, optimizer=optimizer, learning_rate=rate, group_rates=of_groups)


def _check_undivided(train: Train, plan: Plan) -> None:
    """Raise InputError if the plan divides the parameters among devices (zero, tp or pp). It is
    called for an optimizer of the user's own that updates a parameter with the gradients of others,
    and so needs all of them on one device."""
    if plan.zero or plan.tp > 1 or plan.pp > 1:
        raise InputError(
            f"job: train.optimizer={train.optimizer_name}",
            "updates a parameter with the gradients of others, and this plan divides the parameters among the devices",
            "use zero: 0, tp: 1 and pp: 1",
        )
