"""Create a job's optimizer: one of torch's, or LAMB, LARS or Lion, which torch does not have.

`make_optimizer` creates the optimizer that a job's `train` section names.
`methods/optimizer_states.py` wraps this optimizer if the plan asks for more, such as 8-bit or
offloaded states.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tightfit.errors import InputError
from tightfit.job import Train
from tightfit.optim.functions import ExistingOptimizer, full_rate_of, optimizer_by_function
from tightfit.optim.groups import begin_schedule, function_groups, parameter_groups
from tightfit.optim.lamb import LAMB
from tightfit.optim.lars import LARS
from tightfit.optim.lion import Lion
from tightfit.optim.muon import MuonWithAdamW, head_of, hidden_matrices
from tightfit.optim.own_groups import OwnGroups, regroup, replaced
from tightfit.optim.per_parameter import load_plain

FUSED = ("adamw", "sgd")  # the optimizers for which torch has a fused kernel


def make_optimizer(
    model: nn.Module,
    train: Train,
    fused: bool = False,
    weights: dict[nn.Parameter, nn.Parameter] | None = None,
    head: frozenset[str] | None = None,
    groups: OwnGroups | None = None,
) -> Optimizer:
    """Return a new optimizer for the model's trainable parameters, as the job's `train` section
    describes it. A parameter that several modules share is included once.

    train    the job's optimizer and its options. `epsilon` applies to AdamW and LAMB. Adafactor
             keeps torch's own epsilons, which have another meaning
    fused    whether to use torch's fused kernel, on any device; False: torch chooses
    weights  maps a parameter to the tensor that the optimizer updates in its place: a view of this
             device's shard of the parameter. None: the optimizer updates the parameters themselves
    head     names of the parameters of the output head, for Muon; None: `model` is not divided, and the
             head is looked for
    groups   the parameter groups that the user's own function makes of the whole model; None: `model` is not
             divided

    `tightfit.optim.groups` sets the learning rate and weight decay of each parameter. The returned
    optimizer's `load_state_dict` also accepts a state dict that a PerParameter saved (the wrapper
    for low-bit or offloaded states), if it wrapped the same kind of optimizer.

    Raises InputError if no parameter is trainable, if an embedding has sparse gradients, or if
    torch has no fused kernel for the optimizer. With Muon, it also raises InputError if the model
    has no hidden matrix for Muon, or no other parameter for AdamW. For the errors of an optimizer
    that the user's own function creates, see `optimizer_by_function`.
    """
    _check_dense(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise InputError("job: model", "has no trainable parameter", "set requires_grad on the parameters to train")
    if train.uses_function("optimizer"):
        return _by_function(model, train, trainable, weights, groups)
    if fused and train.optimizer not in FUSED:
        raise InputError(
            f"job: train.optimizer={train.optimizer}",
            "torch has a fused kernel for AdamW and SGD only",
            f"use fused_optimizer: false with {train.optimizer}",
        )
    if train.optimizer == "muon":
        optimizer = _make_muon(model, trainable, train, head_of(model) if head is None else head)
    else:
        optimizer = _make_torch_or_own(train, parameter_groups(model, train, trainable), fused)
    if weights:
        _replace_parameters(optimizer, weights)
    begin_schedule(optimizer, train.scaled_learning_rate)
    optimizer.register_load_state_dict_pre_hook(load_plain)
    return optimizer


def _by_function(
    model: nn.Module,
    train: Train,
    trainable: list[nn.Parameter],
    weights: dict[nn.Parameter, nn.Parameter] | None,
    groups: OwnGroups | None,
) -> Optimizer:
    parameters, others = function_groups(model, train, trainable), weights or {}
    if not isinstance(train.optimizer, ExistingOptimizer):  # it may create states for its parameters
        parameters = replaced(parameters, others)
        others = {}
    optimizer = optimizer_by_function(train.optimizer, parameters)
    _replace_parameters(optimizer, others)
    if groups is not None and not isinstance(train.optimizer, ExistingOptimizer):
        regroup(model, optimizer, groups, weights or {})
    begin_schedule(optimizer, full_rate_of(optimizer))
    optimizer.register_load_state_dict_pre_hook(load_plain)
    return optimizer


def _check_dense(model: nn.Module) -> None:
    """Raise InputError if a trainable embedding has sparse gradients (`sparse=True`). Sparse
    gradients cannot be accumulated in place, sharded, or saved in an optimizer's states."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise InputError(
                f"job: model ({name})",
                f"is an {type(module).__name__} with sparse gradients, which tightfit does not support",
                f"create this layer with sparse=False, or freeze its weight: {name}.weight.requires_grad_(False)",
            )


def _replace_parameters(optimizer: Optimizer, weights: dict[nn.Parameter, nn.Parameter]) -> None:
    """In the groups of a new optimizer, replace each parameter that is a key of `weights` by its
    value."""
    for group in optimizer.param_groups:
        group["params"] = [weights.get(parameter, parameter) for parameter in group["params"]]


def _make_torch_or_own(train: Train, groups: list[dict[str, Any]], fused: bool) -> Optimizer:
    rate = train.scaled_learning_rate
    kernel = True if fused else None  # None: torch chooses foreach or a plain loop
    match train.optimizer:
        case "adamw":
            return torch.optim.AdamW(groups, lr=rate, betas=train.betas, eps=train.epsilon, fused=kernel)
        case "sgd":
            sgd = torch.optim.SGD(groups, lr=rate, momentum=train.momentum, fused=kernel)
            sgd.register_step_pre_hook(_begin_late_momenta)
            return sgd
        case "adafactor":
            return torch.optim.Adafactor(groups, lr=rate)
        case "lamb":
            clamp = train.norm_clamp or (0.0, math.inf)
            return LAMB(groups, lr=rate, betas=train.betas, eps=train.epsilon, clamp=clamp, decay_vectors=True)
        case "lars":
            return LARS(groups, lr=rate, momentum=train.momentum, trust=train.trust, decay_vectors=True)
        case "lion":
            return Lion(groups, lr=rate, betas=train.betas)
    raise AssertionError(train.optimizer)


def _begin_late_momenta(optimizer: Optimizer, *arguments: Any) -> None:
    """Give zero momenta to parameters without a momentum if other parameters of the group have one.

    This is a pre-hook of SGD's `step`; `arguments` are those of `step`, and not used. A parameter
    has no momentum yet if it gets its first gradient later than the others. torch's fused kernel
    expects that either all parameters have a momentum or none has.
    """
    for group in optimizer.param_groups:
        moving = [parameter for parameter in group["params"] if parameter.grad is not None and group["momentum"]]
        without_momentum = [one for one in moving if optimizer.state.get(one, {}).get("momentum_buffer") is None]
        if len(without_momentum) < len(moving):
            for parameter in without_momentum:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _make_muon(model: nn.Module, trainable: list[nn.Parameter], train: Train, head: frozenset[str]) -> Optimizer:
    hidden = hidden_matrices(model, head)
    others = [parameter for parameter in trainable if parameter not in set(hidden)]
    if not hidden or not others:
        found = "no hidden matrix" if not hidden else "hidden matrices only, and no embedding, head, norm or bias"
        raise InputError(
            "job: train.optimizer=muon",
            f"muon needs weight matrices in the blocks, and the model has {found}",
            "use optimizer: adamw",
        )
    rate = train.scaled_learning_rate
    matrices, rest = (parameter_groups(model, train, parameters) for parameters in (hidden, others))
    muon = torch.optim.Muon(matrices, lr=rate, momentum=train.momentum, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=rate, betas=train.betas, eps=train.epsilon)
    return MuonWithAdamW(muon, adamw)
