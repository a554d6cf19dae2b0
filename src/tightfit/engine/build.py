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
from torch import Tensor

from tightfit.distributed.mesh import make_mesh
from tightfit.distributed.processes import local_device
from tightfit.engine.checkpoint.extra_state import check_extra_states
from tightfit.engine.refused_models import check_modules, check_samples, check_uses
from tightfit.engine.rng import seed_all
from tightfit.engine.split_loss import warn_of_split_loss
from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.machine import Machine, machine_of
from tightfit.methods import METHODS, loader, materialize, microbatch
from tightfit.models.batches import Batch
from tightfit.models.call_model import forward_parameters, map_inputs
from tightfit.models.masks import without_mask_checks
from tightfit.models.objective import Objective, objective_of_job
from tightfit.optim.groups import check_matches, names_of_parameters
from tightfit.optim.muon import head_of
from tightfit.optim.own_groups import own_groups
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
    run = new_run(job, plan, kind, objective_of_job(job), data, alone, job.train.seed)
    run = apply_methods(run, keeps_data=data is not None)
    check_samples(run)
    if not check_uses(run):
        warn_of_split_loss(run)
    microbatch.warn_of_dropped_tokens(run)
    return run


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


def new_run(
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


def _example(run: Run) -> Batch:
    """Return a micro-batch of the shapes and types in which training passes one to the model. Its
    values mean nothing if the plan has 16-bit weights, for which `precision` casts inputs."""
    dtype = materialize.weights_dtype(run.plan)

    def narrow(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=dtype) if tensor.is_floating_point() else tensor

    example = run.data.example()
    if not run.plan.has_16_bit_weights:
        return example
    return map_inputs(narrow, example, run.model, run.objective.calls_model_itself)


def apply_methods(run: Run, keeps_data: bool) -> Run:
    """Apply every method that the plan enables to `run`, which `new_run` has returned. Return the
    complete Run.

    keeps_data  whether the run has its data already, so that the method `loader` is left out
    """
    plan = run.plan
    for method in METHODS:
        if method.enabled(plan) and not (method is loader and keeps_data):
            run = method.apply(run, plan)
            assert isinstance(run, Run), f"{method.__name__}.apply returns no Run"
        if method is materialize:  # before a method leaves only a stage's parameters
            check_modules(run)
            forward_parameters(run.model)
            check_matches(run.job.train, names_of_parameters(run.model).values())
            if run.job.train.optimizer == "muon":
                run = replace(run, head=head_of(run.model, run.job.blocks_name))
            if run.job.train.uses_function("optimizer") and plan.devices > 1:
                run = replace(run, own_groups=own_groups(run.model, run.job.train))
        if method is loader and not keeps_data:
            loader.check_packing(run.model, run.job)
        if method is loader and plan.pp > 1:  # before any method changes the model
            run = boundaries.trace_boundaries(run, plan, _example(run))
    if run.device.type == "cuda" and plan.compile != "model":  # a compiled model does not check masks
        run = replace(run, loss_sum=without_mask_checks(run.loss_sum, run.model, bool(run.droppable_masks)))
    run.model.train()
    check_extra_states(run)
    frozen = tuple((name, parameter) for name, parameter in run.model.named_parameters() if not parameter.requires_grad)
    return replace(run, frozen=frozen)
