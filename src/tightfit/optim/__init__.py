"""Optimizers: torch's, and LAMB, LARS and Lion, which torch does not have. `make_optimizer` reads a job's Train."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tightfit.errors import InputError
from tightfit.job import Train
from tightfit.optim.lamb import LAMB
from tightfit.optim.lars import LARS
from tightfit.optim.lion import Lion
from tightfit.optim.muon import MuonWithAdamW, hidden_matrices
from tightfit.optim.per_parameter import load_plain

FUSED = ("adamw", "sgd")  # what torch has a fused kernel for


def make_optimizer(
    model: nn.Module,
    train: Train,
    fused: bool = False,
    weights: dict[nn.Parameter, nn.Parameter] | None = None,
) -> Optimizer:
    """The job's optimizer over the model's trainable parameters, shared ones once.

    Matrices (dim >= 2) decay, the others (norms, biases) do not. `fused` takes torch's fused kernel, on any device.
    It also loads what a PerParameter around an optimizer like it has saved.
    weights  what is updated in place of a parameter: a view of the part of it that this device keeps
    `train.epsilon` is that of AdamW and LAMB; Adafactor keeps torch's own, which mean something else.
    Raises InputError where nothing is trainable, where gradients would be sparse, or where the optimizer has no fused kernel.
    """
    _check_dense(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise InputError("job: model", "has no trainable parameter", "set requires_grad on the parameters to train")
    if fused and train.optimizer not in FUSED:
        raise InputError(
            f"job: train.optimizer={train.optimizer}",
            "torch has a fused kernel for AdamW and SGD only",
            f"use fused_optimizer: false with {train.optimizer}",
        )
    if train.optimizer == "muon":
        optimizer = _make_muon(model, trainable, train)
    else:
        optimizer = _make(train, decay_groups(trainable, train.weight_decay), fused)
    if weights:
        _put(optimizer, weights)
    optimizer.register_load_state_dict_pre_hook(load_plain)
    return optimizer


def _check_dense(model: nn.Module) -> None:
    """Refuse sparse gradients, which neither accumulate in place, nor are divided, nor saved in what an optimizer keeps of them."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise InputError(
                f"job: model ({name})",
                f"is an {type(module).__name__} with sparse gradients, which no plan trains",
                f"create it with sparse=False, or freeze it: {name}.weight.requires_grad_(False)",
            )


def _put(optimizer: Optimizer, weights: dict[nn.Parameter, nn.Parameter]) -> None:
    """`weights` in place of a fresh optimizer's parameters."""
    for group in optimizer.param_groups:
        group["params"] = [weights.get(parameter, parameter) for parameter in group["params"]]


def decay_groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Up to two parameter groups: what decays (dim >= 2) and what does not."""
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    others = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _make(train: Train, groups: list[dict[str, Any]], fused: bool) -> Optimizer:
    rate = train.scaled_learning_rate
    kernel = True if fused else None  # None: torch chooses among its other kernels
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
            return LAMB(groups, lr=rate, betas=train.betas, eps=train.epsilon, clamp=clamp)
        case "lars":
            return LARS(groups, lr=rate, momentum=train.momentum, trust=train.trust)
        case "lion":
            return Lion(groups, lr=rate, betas=train.betas)
    raise AssertionError(train.optimizer)


def _begin_late_momenta(optimizer: Optimizer, *arguments: Any) -> None:
    """Zeros as momentum where a parameter's first gradient comes late: torch's fused kernel knows only a first step of all."""
    for group in optimizer.param_groups:
        moving = [parameter for parameter in group["params"] if parameter.grad is not None and group["momentum"]]
        late = [one for one in moving if optimizer.state.get(one, {}).get("momentum_buffer") is None]
        if len(late) < len(moving):
            for parameter in late:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _make_muon(model: nn.Module, trainable: list[nn.Parameter], train: Train) -> Optimizer:
    hidden = hidden_matrices(model)
    others = [parameter for parameter in trainable if parameter not in set(hidden)]
    if not hidden or not others:
        found = "no hidden matrix" if not hidden else "hidden matrices only, and no embedding, head, norm or bias"
        raise InputError("job: train.optimizer=muon", f"the model has {found}", "use optimizer: adamw")
    rate = train.scaled_learning_rate
    muon = torch.optim.Muon(
        hidden, lr=rate, weight_decay=train.weight_decay, momentum=train.momentum, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(decay_groups(others, train.weight_decay), lr=rate, betas=train.betas, eps=train.epsilon)
    return MuonWithAdamW(muon, adamw)
