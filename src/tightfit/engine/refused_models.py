"""Refuse models of the user's own that a plan would train otherwise than plain PyTorch, or not at all.

`build` calls `check_modules` before the methods that divide the model, and `check_samples` and `check_uses` at
its end.
"""

from __future__ import annotations

import inspect
import warnings

import torch
from torch import nn

from tightfit._torch.fake import active_fake_mode
from tightfit._torch.tensors import has_accumulation_hooks
from tightfit.errors import InputError, TightfitWarning
from tightfit.models import model_factory
from tightfit.models.block_state import changed_after_forward
from tightfit.models.fake_forward import UsesOfParameters, uses_of_parameters
from tightfit.models.hook_linearity import nonlinear_hook
from tightfit.models.objective import objective_of_job
from tightfit.parallel.fsdp.planning import uses_fully_shard
from tightfit.plan import Plan
from tightfit.runtime.micro_batches import example_batches
from tightfit.runtime.run import Run


def check_modules(run: Run) -> None:
    """Raise InputError if the plan cannot train a module of the model, or would train it otherwise:

    - it has to change modules, and one is scripted
    - its adapters are those of AdaLoRA, which change their ranks between the steps
    - it accumulates gradients, and a parameter has a hook for accumulated gradients
    - it splits the batch or scales the loss, and a parameter has a hook on its gradient that is not linear
    - it uses several devices, and an embedding rescales the rows that it reads (max_norm)
    - it splits the batch, and an embedding counts how often the batch reads a row (scale_grad_by_freq)
    """
    _refuse_scripted(run)
    _refuse_adalora(run)
    _refuse_accumulation_hooks(run)
    _refuse_nonlinear_hooks(run)
    _refuse_max_norm(run)
    _refuse_counted_rows(run)


def check_uses(run: Run) -> bool:
    """Raise InputError if the forward of a user's own model changes parameters of the model, or reaches
    them in another way than as parameters, and the plan would lose the change or make copies that differ.
    Raise InputError, too, if the plan recomputes blocks, and a block would compute something else the second
    time.

    Issue a TightfitWarning if a plan with micro-batches repeats a change, if one with 16-bit weights rounds it,
    or if this could not be found out.

    The models of transformers change nothing. The forward runs on fake tensors, if it can.

    Returns whether micro-batches repeat a change.
    """
    plan, batch = run.plan, run.job.train.batch
    accumulates = plan.micro_batch_of(batch) < plan.share_of(batch)
    moves = _keeps_apart(run) or plan.data_parallel > 1 or plan.pp > 1 or "parameters" in plan.offload
    if run.job.of_transformers or active_fake_mode() is not None:
        return False
    if plan.recomputes_blocks:
        _refuse_changed_state(run)
    if not (moves or accumulates or plan.has_16_bit_weights):
        return False
    for example in example_batches(run.data, plan.micro_batch_of(batch)):
        uses = uses_of_parameters(model_factory(run.job.model), objective_of_job(run.job).total, example)
        if not uses.unchecked:
            break
    _warn_of_unchecked(plan, "what the forward does with the model's parameters", uses.unchecked)
    changed = (*uses.changed, *uses.attributes) if accumulates else ()
    if changed:
        warnings.warn(
            f"the forward changes {changed[0]}, and with plan.micro_batch={plan.micro_batch} it does so several times "
            "a step; without micro-batches it does so once",
            TightfitWarning,
            stacklevel=3,
        )
    if plan.has_16_bit_weights and uses.floating:
        warnings.warn(
            f"the forward changes {uses.floating[0]}, which this plan stores in 16 bits: small changes, such as those of an "
            "average or a counter, are lost; use precision: bf16-mixed",
            TightfitWarning,
            stacklevel=3,
        )
    if uses.from_batch and plan.data_parallel > 1:
        raise InputError(
            f"plan: {plan.data_parallel} data-parallel devices",
            f"the forward sets the model's parameter {uses.from_batch[0]} by its batch, and each device has other samples, "
            "so their weights would differ",
            "set it before the training, or train on one device",
        )
    if uses.buffers and plan.parameter_server == "async":
        raise InputError(
            "plan: parameter_server=async",
            f"each forward changes the buffer {uses.buffers[0]}, which would differ between workers, and the server would "
            "save its initial value",
            "use parameter_server: sync, or dp_replicate",
        )
    copies = _divides(run) or plan.pp > 1 or "parameters" in plan.offload or plan.parameter_server != "none"
    if uses.aliases and copies:
        raise InputError(
            f"plan: {f'pp={plan.pp}' if plan.pp > 1 else _field_and_fix(plan)[0]}",
            f"{uses.aliases[0]}, and the plan would make copies of it that differ",
            "tie weights by assigning the parameter (head.weight = embedding.weight), or use dp_replicate or zero: 1",
        )
    if uses.substituted and _divides(run):
        asked, fix = _field_and_fix(plan)
        raise InputError(
            f"plan: {asked}",
            f"the forward calls a module with another tensor in place of its parameter {uses.substituted[0]} (as "
            "torch.func.functional_call does), which the plan's own would replace",
            fix,
        )
    if uses.differentiates and plan.zero == 3:
        raise InputError(
            "plan: zero=3",
            "the forward or the loss computes gradients itself (torch.autograd.grad), after which the gathered weights "
            "are freed, before backward needs them",
            "use zero: 2",
        )
    if plan.pp == 1 and _keeps_apart(run):
        _refuse_lost_changes(run, uses)
    return bool(changed)


def check_samples(run: Run) -> None:
    """Raise InputError if samples are tuples of three or more items and the model's forward needs more
    arguments than the first item, which is all that it gets. Issue a TightfitWarning if it takes more."""
    if run.objective.calls_model_itself or active_fake_mode() is not None or run.data is None:
        return
    example = run.data.example()
    if not isinstance(example, list | tuple) or len(example) < 3:
        return
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        arguments = inspect.signature(run.model.forward).parameters.values()
    except ValueError:  # a traced module has no signature
        return
    more = [argument for argument in arguments if argument.kind in kinds][1:]
    needed = [one.name for one in more if one.default is inspect.Parameter.empty]
    found = f"samples are tuples of {len(example)} items, of which the model gets only the first"
    remedy = "let samples be dicts that name the arguments of forward, beside what the loss reads"
    if needed:
        raise InputError("data", f"{found}, and its forward also needs {', '.join(needed)}", remedy)
    if more:
        names = ", ".join(one.name for one in more)
        warnings.warn(
            f"{found}, although its forward also takes {names}. To pass more, {remedy}", TightfitWarning, stacklevel=3
        )


def _refuse_changed_state(run: Run) -> None:
    job = run.job
    total = objective_of_job(job).total  # without the methods, which belong to the run's own model
    for example in example_batches(run.data, run.plan.micro_batch_of(job.train.batch)):
        state = changed_after_forward(model_factory(job.model), total, example, job.blocks_name)
        if not state.unchecked:
            break
    if state.changed:
        raise InputError(
            f"plan: recompute={run.plan.recompute}",
            state.changed,
            "use recompute: none or attention, or pass what changes to the block as an argument",
        )
    _warn_of_unchecked(run.plan, "whether blocks compute the same when they are recomputed", state.unchecked)


def _warn_of_unchecked(plan: Plan, what: str, why: str) -> None:
    """Issue a TightfitWarning if a check could not be made whole.

    what  what the check should find out
    why   why it could not; "" if it could
    """
    if why:
        warnings.warn(
            f"could not check {what}, because the forward does not run apart from the training ({why}); compare a few steps "
            f"with the reference plan: {plan}",
            TightfitWarning,
            stacklevel=4,
        )


def _refuse_scripted(run: Run) -> None:
    scripted = next(
        (name for name, module in run.model.named_modules() if isinstance(module, torch.jit.ScriptModule)), None
    )
    plan = run.plan
    if scripted is not None and (plan.pp > 1 or uses_fully_shard(plan, run.device.type)):
        raise InputError(
            f"plan: {f'pp={plan.pp}' if plan.pp > 1 else 'zero=3' if plan.zero == 3 else 'offload=parameters'}",
            f"{scripted or 'the model'} is scripted (torch.jit.script), and the parameters of such a module cannot be divided",
            "use the module without torch.jit.script, or use pp: 1 and zero: 2",
        )


def _refuse_adalora(run: Run) -> None:
    configs = getattr(run.model, "peft_config", None) or {}
    if not run.own_loop and any(getattr(config, "peft_type", None) == "ADALORA" for config in configs.values()):
        raise InputError(
            "job: model",
            "has adapters of AdaLoRA, whose loss has a penalty of its own, and which change their ranks after each step",
            "use another kind of adapters, such as model.lora; or prepare the model for a loop of your own, which adds the "
            "penalty and calls update_and_allocate",
        )


def _refuse_accumulation_hooks(run: Run) -> None:
    """Such hooks would change the sums of gradients once for each micro-batch."""
    plan, batch = run.plan, run.job.train.batch
    hooked = next((name for name, parameter in run.model.named_parameters() if has_accumulation_hooks(parameter)), None)
    if hooked is not None and plan.micro_batch_of(batch) < plan.share_of(batch):
        raise InputError(
            f"plan: micro_batch={plan.micro_batch}",
            f"{hooked} has a hook for accumulated gradients, which would run after each micro-batch instead of once a step",
            "use micro_batch: null, or let an optimizer of your own do what the hook does",
        )


def _refuse_nonlinear_hooks(run: Run) -> None:
    plan, batch = run.plan, run.job.train.batch
    splits, scales = plan.micro_batch_of(batch) < batch, plan.precision.startswith("fp16")
    if not (splits or scales) or active_fake_mode() is not None or not (hooked := nonlinear_hook(run.model)):
        return
    if not splits:
        asked, what = f"precision={plan.precision}", "gradients that are multiplied by the loss scale"
        fix = "use bf16-mixed or fp32"
    else:
        over_devices = plan.micro_batch_of(batch) == plan.share_of(batch)
        asked = f"{plan.data_parallel} data-parallel devices" if over_devices else f"micro_batch={plan.micro_batch}"
        what, fix = "the gradients of parts of the batch", "train on one device with micro_batch: null"
    raise InputError(
        f"plan: {asked}",
        f"a hook on the gradient of {hooked} is not linear, and it would get {what}",
        f"let an optimizer of your own do what the hook does, or {fix}",
    )


def _refuse_max_norm(run: Run) -> None:
    tables = {
        n: module for n, module in run.model.named_modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    renormalised = next((name for name, table in tables.items() if table.max_norm is not None), None)
    if renormalised is not None and run.plan.devices > 1:
        raise InputError(
            f"job: model ({renormalised})",
            "its max_norm rescales the rows that a batch reads, so several devices would have different weights",
            "leave out max_norm, or train on one device",
        )


def _refuse_counted_rows(run: Run) -> None:
    plan, batch = run.plan, run.job.train.batch
    tables = {
        n: module for n, module in run.model.named_modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    counting = next((name for name, table in tables.items() if table.scale_grad_by_freq), None)
    if counting is not None and plan.micro_batch_of(batch) < batch:
        raise InputError(
            f"job: model ({counting})",
            "its scale_grad_by_freq divides gradients by how often a row occurs in a batch, and this plan splits the batch",
            "leave out scale_grad_by_freq, or train on one device without micro-batches",
        )


def _refuse_lost_changes(run: Run, uses: UsesOfParameters) -> None:
    plan = run.plan
    lost = uses.replaced if plan.zero and not _divides(run) else (*uses.in_place, *uses.replaced)
    if lost:
        asked, fix = _field_and_fix(plan)
        raise InputError(
            f"plan: {asked}",
            f"the model's forward changes its own parameter {lost[0]}, of which the plan keeps "
            + ("another copy" if plan.parameter_server != "none" else "shards")
            + ", so the change would be lost",
            f"{fix}; or keep what forward changes in a buffer",
        )


def _divides(run: Run) -> bool:
    """Return whether the plan divides the parameters that a forward reads."""
    return uses_fully_shard(run.plan, run.device.type) or run.plan.tp > 1


def _keeps_apart(run: Run) -> bool:
    """Return whether the plan keeps parameters elsewhere than in the model: in shards, or on a server."""
    return _divides(run) or run.plan.zero > 0 or run.plan.parameter_server != "none"


def _field_and_fix(plan: Plan) -> tuple[str, str]:
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


__all__ = ["check_modules", "check_samples", "check_uses"]
