"""Parameter groups that the user's own function makes, on devices that have only a part of the model."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tightfit.errors import InputError, TightfitWarning
from tightfit.job import Train
from tightfit.optim.functions import ExistingOptimizer, optimizer_by_function
from tightfit.optim.groups import function_groups


@dataclass(frozen=True)
class OwnGroups:
    """The parameter groups that the user's function makes of the parameters of a whole model, which it may tell
    apart by their shapes and their order. On a device that has a part of the model, both differ.

    numbers  name of a parameter -> the number of its group
    options  the options of each group, such as its learning rate
    """

    numbers: dict[str, int]
    options: tuple[dict[str, Any], ...]


def own_groups(model: nn.Module, train: Train) -> OwnGroups | None:
    """Return the groups that the user's function makes of the parameters of `model`, which is whole. The function gets
    parameters of the same shapes without values. Return None if it fails on these, with a warning, or if the optimizer
    exists."""
    if isinstance(train.optimizer, ExistingOptimizer):
        return None
    named = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    shapes = {
        one: nn.Parameter(torch.empty(one.shape, dtype=one.dtype, device="meta"), requires_grad=True) for one in named
    }
    names = {shapes[one]: name for one, name in named.items()}
    try:
        optimizer = optimizer_by_function(train.optimizer, replaced(function_groups(model, train, list(named)), shapes))
    except InputError as error:
        warnings.warn(
            "train.optimizer: its groups are made of this device's part of the model, for the function fails on parameters "
            f"without values ({error.found}). Groups by shape or position may differ from those of one device",
            TightfitWarning,
            stacklevel=2,
        )
        return None
    numbers = {names[one]: number for number, group in enumerate(optimizer.param_groups) for one in group["params"]}
    return OwnGroups(numbers, tuple(_options_of(group) for group in optimizer.param_groups))


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def regroup(
    model: nn.Module, optimizer: Optimizer, groups: OwnGroups, weights: dict[nn.Parameter, nn.Parameter]
) -> None:
    """Divide the optimizer's parameters into the groups of the whole model. A group may be empty here."""
    members: list[list[nn.Parameter]] = [[] for _ in groups.options]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            members[groups.numbers[name]].append(weights.get(parameter, parameter))
    optimizer.param_groups = [
        {**options, "params": params} for options, params in zip(groups.options, members, strict=True)
    ]


def replaced(
    parameters: list[nn.Parameter] | list[dict[str, Any]], weights: dict[nn.Parameter, nn.Parameter]
) -> list[Any]:
    """Return `parameters`, in which each parameter that is a key of `weights` is replaced by its
    value.

    parameters  a list of parameters, or of parameter groups (dicts with the key "params")
    """
    return [
        {**entry, "params": replaced(entry["params"], weights)}
        if isinstance(entry, dict)
        else weights.get(entry, entry)
        for entry in parameters
    ]


__all__ = ["OwnGroups", "own_groups", "regroup", "replaced"]
