"""The tensors of a run that a checkpoint saves, under names that do not depend on how they are
sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tightfit.distributed.mesh import on_mesh
from tightfit.optim.per_parameter import unpack
from tightfit.optim.whole_parameters import lies_as
from tightfit.runtime.run import Run, whole


@dataclass(frozen=True)
class Tensors:
    """The tensors of one kind of file (model or optimizer) of this device's stages.

    sizes   by name: bytes of the full tensor
    fetch   name -> the full tensor. A collective: all ranks with a shard of it call it
    counts  by parameter: optimizer states that are no tensors, such as step counts
    """

    sizes: dict[str, int]
    fetch: Callable[[str], Tensor]
    counts: dict[str, dict[str, Any]] = field(default_factory=dict)


def model_of(run: Run) -> Tensors:
    """The model's parameters and persistent buffers; tied ones once."""
    persistent = run.model.state_dict().keys()
    named = {name: tensor.detach() for name, tensor in (*run.model.named_parameters(), *run.model.named_buffers())}
    stale = run.stages.stale if run.stages is not None else frozenset()
    named = {name: tensor for name, tensor in named.items() if name in persistent and name not in stale}

    def size(name: str) -> int:
        return whole_shape(run, name, named[name]).numel() * named[name].dtype.itemsize

    def fetch(name: str) -> Tensor:
        value = named[name]
        value = on_mesh(value).full_tensor() if isinstance(value, DTensor) else value
        return run.slices[name].whole(value) if name in run.slices else value

    return Tensors({name: size(name) for name in named}, fetch)


def whole_shape(run: Run, name: str, tensor: Tensor) -> torch.Size:
    """The parameter's shape before tensor parallelism sharded it."""
    return run.slices[name].shape if name in run.slices else tensor.shape


def states_of(run: Run) -> Tensors:
    """The optimizer's states, under names such as "exp_avg:layers.0.weight".

    States that are stored packed, in 8 or 4 bits, are saved as their parts, such as
    "exp_avg.codes:layers.0.weight". If they are sharded they are saved in fp32.
    """
    states, sharded = run.optimizer.state_dict()["state"], is_divided(run)
    shapes = {name: whole_shape(run, name, p) for name, p in run.model.named_parameters()}
    sizes: dict[str, int] = {}
    makers: dict[str, Callable[[], Tensor]] = {}
    counts: dict[str, dict[str, Any]] = {}
    for number, (owner, weight) in enumerate(names_of(run)):
        for name, value in states.get(number, {}).items():
            key = f"{name}:{owner}"
            if isinstance(value, dict) and not sharded:
                for what, tensor in value.items():
                    key = f"{name}.{what}:{owner}"
                    sizes[key], makers[key] = tensor.nbytes, partial(_same, tensor)
            elif isinstance(value, dict) or (sharded and lies_as(name, value, weight.shape)):
                width = 4 if isinstance(value, dict) else value.dtype.itemsize
                sizes[key] = shapes[owner].numel() * width
                makers[key] = partial(_unsharded, run, weight, name, value)
            elif isinstance(value, Tensor):
                sizes[key], makers[key] = value.nbytes, partial(_same, value)
            else:
                counts.setdefault(owner, {})[name] = value
    return Tensors(sizes, lambda key: makers[key](), counts)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _unsharded(run: Run, weight: Tensor, name: str, value: Tensor | dict[str, Tensor]) -> Tensor:
    value = unpack(name, value, weight) if isinstance(value, dict) else value
    return whole(run, weight, value.to(weight.device))


def names_of(run: Run) -> list[tuple[str, Tensor]]:
    """(parameter's name, weight) for each weight of the optimizer, in the optimizer's order."""
    names = {id(run.weights.get(parameter, parameter)): name for name, parameter in run.model.named_parameters()}
    weights = [weight for group in run.optimizer.param_groups for weight in group["params"]]
    return [(names[id(weight)], weight) for weight in weights]


def is_divided(run: Run) -> bool:
    """Whether this device's optimizer holds shards of parameters."""
    return bool(run.slices) or (run.reduction is not None and bool(run.reduction.parts))


__all__ = ["Tensors", "is_divided", "model_of", "names_of", "states_of", "whole_shape"]
