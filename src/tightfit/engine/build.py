"""Build a Run: check the plan, and then apply every method that the plan enables, in the order of
METHODS.

`build` refuses a plan that cannot work before it allocates anything. `tightfit.build`, the command
line and the dry run call it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from tightfit._torch.fake import active_fake_mode
from tightfit._torch.tensors import has_accumulation_hooks
from tightfit.distributed.mesh import make_mesh
from tightfit.distributed.processes import local_device
from tightfit.engine.checkpoint.extra_state import check_extra_states
from tightfit.engine.rng import seed_all
from tightfit.errors import InputError
from tightfit.job import Job, LossSpec
from tightfit.machine import Machine, machine_of
from tightfit.methods import METHODS, loader, materialize, microbatch
from tightfit.models import load_python, model_factory, task_of
from tightfit.models.fake_forward import uses_of_parameters
from tightfit.models.masks import without_mask_checks
from tightfit.models.objective import Objective, forward_parameters, objective_of
from tightfit.optim.groups import check_matches, names_of_parameters
from tightfit.parallel.fsdp.planning import uses_fully_shard
from tightfit.parallel.pipeline import boundaries
from tightfit.plan import Plan, plan_of
from tightfit.rules import check
from tightfit.runtime.offload_store import Store
from tightfit.runtime.run import Data, Run
from tightfit.target_device import TARGET


def build(
    job: Job,
    plan: Plan | Mapping[str, Any] | None = None,
    machine: Machine | str | None = None,
    data: Data | None = None,
    alone: bool = False,
) -> Run:
    """Return the Run that trains `job` with `plan` on this process's device: with its model, data
    and optimizer, ready for `train`.

    plan     the plan, or a mapping of its fields. It replaces the job's own `plan`. None: the
             reference plan `Plan()`, with the fields that the job's `plan` sets
    machine  a machine or its name, of which only the kind of device ("cpu" or "cuda") is used; None:
             detect this host
    data     samples to train on in place of the job's data, which is then not opened; None: the
             job's data
    alone    if True, build the run for a single device, although this process is one of several
             that train together

    Raises InputError if the plan cannot work, if the job does not allow it, or if tightfit does not
    train on this kind of device.
    """
    plan = plan_of(plan, job)
    kind = kind_of_device(machine)
    check(plan, job, TARGET.get() or kind)  # a dry run obeys the rules of its target device
    loss = load_python(job.loss.python) if isinstance(job.loss, LossSpec) else job.loss
    run = begin(job, plan, kind, objective_of(loss, task_of(job.model)), data, alone, job.train.seed)
    run = apply_methods(run, keeps_data=data is not None)
    _refuse_other_uses(run)
    microbatch.warn_of_dropped_tokens(run)
    return run


def _refuse_scripted(run: Run) -> None:
    """Raise InputError if a part of the model is scripted, and the plan has to change its modules."""
    scripted = next((name for name, one in run.model.named_modules() if isinstance(one, torch.jit.ScriptModule)), None)
    plan = run.plan
    if scripted is not None and (plan.pp > 1 or uses_fully_shard(plan, run.device.type)):
        raise InputError(
            f"plan: {f'pp={plan.pp}' if plan.pp > 1 else 'zero=3' if plan.zero == 3 else 'offload=parameters'}",
            f"{scripted or 'the model'} is scripted (torch.jit.script), and the parameters of such a module cannot be divided",
            "use the module without torch.jit.script, or use pp: 1 and zero: 2",
        )


def _refuse_accumulation_hooks(run: Run) -> None:
    """Raise InputError if the model has hooks that change accumulated gradients, and the plan accumulates
    them over micro-batches: the hooks would change the sums once for each micro-batch."""
    plan, batch = run.plan, run.job.train.batch
    hooked = next((name for name, one in run.model.named_parameters() if has_accumulation_hooks(one)), None)
    if hooked is not None and plan.micro_batch_of(batch) < plan.share_of(batch):
        raise InputError(
            f"plan: micro_batch={plan.micro_batch}",
            f"{hooked} has a hook for accumulated gradients, which would run after each micro-batch instead of once a step",
            "use micro_batch: null, or let an optimizer of your own do what the hook does",
        )


def _refuse_other_uses(run: Run) -> None:
    """Raise InputError if the forward of a user's own model changes parameters of the model, or reaches them
    in another way than as parameters, and the plan would lose the change or make copies that differ. The models of
    transformers do neither.
    """
    plan, kind = run.plan, run.device.type
    sharded = uses_fully_shard(plan, kind) or plan.tp > 1
    apart = sharded or plan.zero > 0 or plan.parameter_server != "none"
    tables = {n: one for n, one in run.model.named_modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)}
    renormalised = next((name for name, table in tables.items() if table.max_norm is not None), None)
    if renormalised is not None and plan.devices > 1:
        raise InputError(
            f"job: model ({renormalised})",
            "its max_norm rescales the rows that a batch reads, so several devices would have different weights",
            "leave out max_norm, or train on one device",
        )
    moved = apart or plan.data_parallel > 1 or plan.pp > 1 or "parameters" in plan.offload
    if run.job.of_transformers or not moved or active_fake_mode() is not None:
        return
    found = uses_of_parameters(model_factory(run.job.model), run.objective.total, run.data.example())
    if found.from_batch and plan.data_parallel > 1:
        raise InputError(
            f"plan: {plan.data_parallel} data-parallel devices",
            f"the forward sets the model's parameter {found.from_batch[0]} by its batch, and each device has other samples, "
            "so their weights would differ",
            "set it before the training, or train on one device",
        )
    copies = sharded or plan.pp > 1 or "parameters" in plan.offload or plan.parameter_server != "none"
    if found.aliases and copies:
        raise InputError(
            f"plan: {f'pp={plan.pp}' if plan.pp > 1 else _keeps_apart(plan)[0]}",
            f"{found.aliases[0]}, and the plan would make copies of it that differ",
            "tie weights by assigning the parameter (head.weight = embedding.weight), or use dp_replicate or zero: 1",
        )
    if found.differentiates and plan.zero == 3:
        raise InputError(
            "plan: zero=3",
            "the forward or the loss computes gradients itself (torch.autograd.grad), after which the gathered weights "
            "are freed, before backward needs them",
            "use zero: 2",
        )
    if plan.pp > 1 or not apart:
        return
    lost = found.replaced if plan.zero and not sharded else (*found.in_place, *found.replaced)
    if lost:
        asked, fix = _keeps_apart(plan)
        raise InputError(
            f"plan: {asked}",
            f"the model's forward changes its own parameter {lost[0]}, of which the plan keeps "
            + ("another copy" if plan.parameter_server != "none" else "shards")
            + ", so the change would be lost",
            f"{fix}; or keep what forward changes in a buffer",
        )


def _keeps_apart(plan: Plan) -> tuple[str, str]:
    """Return (the plan field because of which a change of a parameter in forward is lost, what to use
    instead)."""
    if plan.parameter_server != "none":
        return f"parameter_server={plan.parameter_server}", "use parameter_server: none"
    if plan.tp > 1:
        return f"tp={plan.tp}", "use tp: 1"
    if plan.zero == 3 or plan.zero == 0:
        field = "zero=3" if plan.zero else "offload=parameters"
        return field, "use zero: 2" if plan.zero else "leave parameters out of offload"
    return f"zero={plan.zero}", "use weight.copy_(...) under torch.no_grad instead of weight.data = ..., or zero: 0"


def kind_of_device(machine: Machine | str | None) -> str:
    """Return the kind of device, "cpu" or "cuda", of `machine`, a machine or its name; None: of this
    host. Raises InputError if tightfit only explains plans for these devices and does not train on
    them."""
    machine = machine_of(machine)
    if machine.explain_only:
        raise InputError(
            f"machine {machine.name}",
            "tightfit explains for it and does not train on it",
            "train on a CUDA or ROCm device, or on a CPU",
        )
    return machine.device


def begin(
    job: Job, plan: Plan, kind: str, objective: Objective, data: Data | None, alone: bool, seed: int | None
) -> Run:
    """Return a Run to which no method is applied yet. Its device, mesh, objective and store are
    set. The model, the optimizer and the other fields that methods fill in are None.

    kind       the kind of device: "cpu" or "cuda"
    objective  the job's loss
    data       samples to train on; None: the method `loader` sets them later
    alone      if True, create no mesh, although this process is one of several that train together
    seed       seed for the random number generators; None: do not seed them
    """
    device = local_device(kind)
    if kind == "cuda":  # before anything else, which would allocate memory on GPU 0, too
        torch.cuda.set_device(device)
    mesh = None if alone else make_mesh(plan, device)
    if seed is not None:
        seed_all(seed)
    unset = cast(Any, None)  # set by the methods
    return Run(
        job=job,
        plan=plan,
        device=device,
        objective=objective,
        model=unset,
        loss_sum=unset,
        data=cast(Any, data),
        optimizer=unset,
        learning_rate=unset,
        mesh=mesh,
        store=Store(plan, device) if plan.offload else None,
    )


def apply_methods(run: Run, keeps_data: bool) -> Run:
    """Apply every method that the plan enables to `run`, which `begin` has returned. Return the
    complete Run.

    keeps_data  whether the run has its data already, so that the method `loader` is left out
    """
    plan = run.plan
    for method in METHODS:
        if method.enabled(plan) and not (method is loader and keeps_data):
            run = method.apply(run, plan)
            assert isinstance(run, Run), f"{method.__name__}.apply returns no Run"
        if method is materialize:  # before a method leaves only a stage's parameters
            _refuse_scripted(run)
            _refuse_accumulation_hooks(run)
            forward_parameters(run.model)
            check_matches(run.job.train, names_of_parameters(run.model).values())
        if method is loader and not keeps_data:
            loader.check_packing(run.model, run.job)
        if method is loader and plan.pp > 1:  # before any method changes the model
            run = boundaries.trace_boundaries(run, plan)
    if run.device.type == "cuda" and plan.compile != "model":  # a compiled model does not check masks
        run = replace(run, loss_sum=without_mask_checks(run.loss_sum, run.model, bool(run.droppable_masks)))
    run.model.train()
    check_extra_states(run)
    frozen = tuple((name, one) for name, one in run.model.named_parameters() if not one.requires_grad)
    return replace(run, frozen=frozen)
