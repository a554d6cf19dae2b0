"""Parameter groups: the learning rate and the weight decay of each parameter.

`make_optimizer` divides a model's parameters with `parameter_groups`, and the engine sets the
learning rates of each step with `set_learning_rates`. By default, norms and biases get no weight
decay.

Example: a job with learning_rate 3e-4 and the group {match: "*.embed*", learning_rate: 1e-5} has
embeddings whose learning rate is 1/30 of the schedule's. In a warm-up step at 1e-4, it is 3.3e-6.

Source  transformers' Trainer: no weight decay for norms and biases. Others differ: nanoGPT exempts
        all parameters with fewer than two dims, and torchtitan exempts none.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tightfit.errors import InputError
from tightfit.job import Train
from tightfit.job_sections.train import WithoutDecay

# The parameters without weight decay if the job has no `no_decay`. If the user's own function
# creates the optimizer, this function decides instead.
DEFAULT_NO_DECAY: tuple[WithoutDecay, ...] = ("norms", "biases")
MOST_NAMES = 5  # parameters that an error names


def kind_of_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> WithoutDecay | None:
    """Return the kind of a parameter, by which a job may exempt it from weight decay
    (`train.no_decay`). Return None for all other parameters, such as the matrices of nn.Linear.

    embeddings  the weight of an nn.Embedding or nn.EmbeddingBag
    biases      a parameter whose name ends with "bias"
    norms       all other parameters with fewer than two dims, which are the weights of norms and
                other factors; also the weight of an nn.LayerNorm or nn.RMSNorm over several dims

    module  the module that has the parameter
    name    the parameter's name in this module
    """
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embeddings"
    if name.endswith("bias"):
        return "biases"
    if parameter.dim() < 2 or isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return "norms"
    return None


def parameters_without_decay(model: nn.Module, train: Train) -> set[nn.Parameter]:
    """Return the model's parameters that `train.no_decay` exempts from weight decay. If
    `train.no_decay` is None, these are norms and biases.

    A parameter that several modules share is exempt if it is exempt in one of them. Example: with
    [embeddings], an embedding whose weight is also the output head's is exempt.
    """
    words = DEFAULT_NO_DECAY if train.no_decay is None else train.no_decay
    return {
        parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if kind_of_parameter(module, name, parameter) in words
    }


def first_match(train: Train, names: Iterable[str]) -> int | None:
    """Return the index of the first group in `train.groups` whose pattern matches one of `names`;
    None if no group matches.

    names  the names of one parameter; a shared parameter has several
    """
    names = list(names)
    for number, group in enumerate(train.groups):
        if any(fnmatchcase(name, group.match) for name in names):
            return number
    return None


def names_of_parameters(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return a dict from each parameter of the model to the list of its names, in the order of
    `named_parameters`. A parameter that several modules share has several names."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name)
    return found


def parameter_groups(model: nn.Module, train: Train, parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Divide `parameters` into parameter groups, as torch's optimizers take them, and return these.

    The first two groups contain the parameters that match no pattern in `train.groups`: first those
    with weight decay, then those without. The parameters that match follow, pattern by pattern.
    They are divided in the same way, unless the job's group sets a weight decay of its own. Groups
    without parameters are left out.

    Each returned group has the keys `params`, `lr` (its full learning rate), `weight_decay`,
    `match` (the pattern; None for parameters that match none) and `name`, by which a checkpoint
    identifies the group.
    """
    found = []
    for (number, without), members in _divided(model, train, parameters_without_decay(model, train), parameters):
        own = None if number is None else train.groups[number]
        decay = train.weight_decay if own is None or own.weight_decay is None else own.weight_decay
        options = {"lr": full_rate(train, number), "weight_decay": 0.0 if without else decay}
        found.append({"params": members, **options, **_named(train, number, without)})
    return found


def function_groups(
    model: nn.Module, train: Train, parameters: Iterable[nn.Parameter]
) -> list[nn.Parameter] | list[dict[str, Any]]:
    """Return the argument for a function of the user's own that creates an optimizer: the list of
    `parameters`, or a list of parameter groups if the job has `groups` or `no_decay`.

    A parameter group has the key `lr` or `weight_decay` only if the job sets this value for the
    group. Otherwise, the value that the function gives the optimizer applies. Without `no_decay`,
    no parameters are exempt from weight decay.
    """
    if not train.groups and train.no_decay is None:
        return list(parameters)
    exempt = set() if train.no_decay is None else parameters_without_decay(model, train)
    found = []
    for (number, without), members in _divided(model, train, exempt, parameters):
        own = None if number is None else train.groups[number]
        options: dict[str, float] = {"weight_decay": 0.0} if without else {}
        if own is not None and own.learning_rate is not None:
            options["lr"] = own.learning_rate
        if own is not None and own.weight_decay is not None:
            options["weight_decay"] = own.weight_decay
        found.append({"params": members, **options, **_named(train, number, without)})
    return found


def _divided(
    model: nn.Module, train: Train, exempt: set[nn.Parameter], parameters: Iterable[nn.Parameter]
) -> list[tuple[tuple[int | None, bool], list[nn.Parameter]]]:
    """Divide `parameters` by the job's group and by weight decay.

    Returns a list of ((number, without), members). `number` is the index of the group in
    `train.groups`, or None for parameters that match none, which come first. `without` is True if
    the members have no weight decay, because they are in `exempt` and their group sets none.
    """
    names, found = names_of_parameters(model), dict[tuple[int | None, bool], list[nn.Parameter]]()
    for parameter in parameters:
        number = first_match(train, names[parameter])
        decided = number is not None and train.groups[number].weight_decay is not None
        found.setdefault((number, not decided and parameter in exempt), []).append(parameter)
    return sorted(found.items(), key=lambda item: (-1 if item[0][0] is None else item[0][0], item[0][1]))


def _named(train: Train, number: int | None, without: bool) -> dict[str, str | None]:
    match = None if number is None else train.groups[number].match
    return {"match": match, "name": f"{match or 'others'}{', no decay' if without else ''}"}


def full_rate(train: Train, number: int | None) -> float:
    """Return the full learning rate of `train.groups[number]`. If `number` is None, return that of
    the parameters that match no group. Both include the factor of `train.scale_learning_rate`."""
    own = None if number is None else train.groups[number].learning_rate
    return train.scaled_learning_rate if own is None else train.scaled_learning_rate * (own / train.learning_rate)


def check_matches(train: Train, names: Iterable[Iterable[str]]) -> None:
    """Raise InputError if a group in `train.groups` gets no parameter, because its pattern matches
    none, or because earlier groups match all of the parameters that it matches.

    names  for each parameter of the full model, all of its names
    """
    names = [list(each) for each in names]
    used = {first_match(train, each) for each in names}
    for number, group in enumerate(train.groups):
        if number in used:
            continue
        asked = f"job: train.groups: match={group.match}"
        if any(fnmatchcase(name, group.match) for each in names for name in each):
            raise InputError(
                asked, "earlier groups match all of its parameters", "move this group before them, or leave it out"
            )
        known = [name for each in names for name in each]
        near = difflib.get_close_matches(group.match.replace("*", ""), known, MOST_NAMES, 0.4)
        named = list(dict.fromkeys([*near, *known]))[:MOST_NAMES]
        raise InputError(
            asked,
            "matches no parameter",
            f"use a pattern that matches a parameter's whole name, such as {', '.join(named)}",
        )


def begin_schedule(optimizer: Optimizer, full: float) -> None:
    """Prepare a new optimizer for `set_learning_rates`.

    full  the full learning rate of the job's schedule

    Each parameter group gets four keys: `lr_ratio`, its learning rate divided by `full`;
    `base_lr`, the learning rate that the schedule gives it; `lr_factor`, the factor by which
    the user has changed this rate, 1.0 at first; and `first_options`, its options as they are now. A
    group without the key `match` gets match=None, and a group without `name` gets a name such as "group 0".
    """
    for number, group in enumerate(optimizer.param_groups):
        rate = float(group["lr"])
        group.setdefault("match", None)
        group.setdefault("name", f"group {number}")
        group.update(lr_ratio=rate / full, lr_factor=1.0, base_lr=rate, first_options=_options(group))


def set_learning_rates(optimizer: Optimizer, rate: float, of_groups: Sequence[float] | None = None) -> None:
    """Set the learning rate of each group for the next update.

    rate       the schedule's learning rate, which the groups follow in proportion
    of_groups  the learning rate of each group, of a scheduler that computes them itself; None: in proportion

    If the user has changed a group's `lr` since the last call, the change is kept: the schedule is
    multiplied by it from now on. Example: under a cosine schedule at 2e-4, a group's `lr` was set
    to 1e-4. Its learning rate is then half of the schedule's until the end of the training.
    """
    for number, group in enumerate(optimizer.param_groups):
        _note_change(group)
        _set_base(group, rate * group["lr_ratio"] if of_groups is None else of_groups[number])


def _set_base(group: dict[str, Any], base: float) -> None:
    group["base_lr"] = base
    rate = base * group["lr_factor"]
    if isinstance(group["lr"], Tensor):  # some optimizers compile their update with it
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _note_change(group: dict[str, Any]) -> None:
    """If the user has changed the `lr` of a parameter group since the schedule set it, store the
    ratio of the two rates as the group's `lr_factor`. If the schedule has set the rate to zero, the
    change is lost, because there is no ratio to zero."""
    if float(group["lr"]) != _rounded(group["base_lr"] * group["lr_factor"], group["lr"]) and group["base_lr"]:
        group["lr_factor"] = float(group["lr"]) / group["base_lr"]


def changed_rates(optimizer: Optimizer) -> dict[str, float]:
    """Return a dict from a group's name to the factor by which the user has changed its learning
    rate. Groups without a change are left out."""
    for group in optimizer.param_groups:
        _note_change(group)
    return {group["name"]: group["lr_factor"] for group in optimizer.param_groups if group["lr_factor"] != 1.0}


def restore_changed_rates(optimizer: Optimizer, factors: dict[str, float]) -> None:
    """Set the factors by which the user had changed learning rates before a resume.

    factors  maps a group's name to its factor, as `changed_rates` returned them. Groups that are
             not in it get the factor 1
    """
    for group in optimizer.param_groups:
        group["lr_factor"] = factors.get(group["name"], 1.0)
        _set_base(group, group["base_lr"])


# keys of a group that are no option
_NOT_OPTIONS = ("params", "name", "match", "base_lr", "lr_factor", "first_options")


def group_options(optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return the options of each parameter group that JSON can hold, such as lr, betas and weight_decay: name
    of the group -> option -> value."""
    return {group["name"]: _options(group) for group in optimizer.param_groups}


def changed_options(optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return the options that the user has changed since `begin_schedule`, such as weight_decay: name of the group
    -> option -> value. A change of the learning rate is in `changed_rates`."""
    found = {}
    for group in optimizer.param_groups:
        first = group["first_options"]
        options = _options(group).items()
        changed = {key: value for key, value in options if key not in ("lr", "lr_ratio") and first.get(key) != value}
        if changed:
            found[group["name"]] = changed
    return found


def _options(group: dict[str, Any]) -> dict[str, Any]:
    plain = (bool, int, float, str, type(None))
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in group.items()
        if key not in _NOT_OPTIONS and all(isinstance(item, plain) for item in _items(value))
    }


def restore_group_options(optimizer: Optimizer, saved: dict[str, dict[str, Any]]) -> None:
    """Set the options that `group_options` or `changed_options` returned, of those groups that the optimizer still
    has."""
    for group in optimizer.param_groups:
        for key, value in saved.get(group["name"], {}).items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _items(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def base_learning_rates(optimizer: Optimizer) -> list[float]:
    """Return, for each parameter group in order, the learning rate that the schedule set last,
    without the user's own changes."""
    return [group["base_lr"] for group in optimizer.param_groups]


def put_base_learning_rates(optimizer: Optimizer, rates: list[float]) -> None:
    """Set the learning rates that the schedule gives the parameter groups to `rates`, one for each
    group, which `base_learning_rates` returned in an earlier step. The factors by which the user
    has changed learning rates still apply."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        _note_change(group)
        _set_base(group, rate)


def main_learning_rate(optimizer: Optimizer, rate: float) -> float:
    """Return the current learning rate of the parameters that match no pattern in `train.groups`.
    Return `rate` if every parameter matches one."""
    return next((float(group["lr"]) for group in optimizer.param_groups if group.get("match") is None), rate)


def _rounded(rate: float, like: float | Tensor) -> float:
    """Return a rate as a tensor of the type of `like` would hold it."""
    return float(torch.tensor(rate, dtype=like.dtype)) if isinstance(like, Tensor) else rate


__all__ = [
    "base_learning_rates",
    "begin_schedule",
    "changed_options",
    "changed_rates",
    "check_matches",
    "first_match",
    "full_rate",
    "kind_of_parameter",
    "main_learning_rate",
    "names_of_parameters",
    "parameter_groups",
    "parameters_without_decay",
    "put_base_learning_rates",
    "restore_changed_rates",
    "set_learning_rates",
]
