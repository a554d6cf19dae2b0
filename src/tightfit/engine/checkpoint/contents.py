"""Collect the tensors of a run that a checkpoint saves. Their names and shapes do not depend on how
the run shards them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tightfit.distributed.sharding import on_mesh_device
from tightfit.optim.nested_states import flatten_state, is_nested
from tightfit.optim.per_parameter import dequantize_state
from tightfit.optim.whole_parameters import has_parameter_shape
from tightfit.runtime.run import Run, unshard


@dataclass(frozen=True)
class SavedTensors:
    """The tensors that a checkpoint saves in one kind of file: those of the model, or those of the
    optimizer. With a pipeline, these are the tensors of this device's stages.

    sizes   tensor name -> bytes of the full (unsharded) tensor
    fetch   a function of a tensor name that returns the full tensor. It all-gathers a sharded
            tensor, so all ranks that have a shard must call it
    counts  parameter name -> state name -> value, for optimizer states that are not tensors, such
            as step counts. Empty for the model
    """

    sizes: dict[str, int]
    fetch: Callable[[str], Tensor]
    counts: dict[str, dict[str, Any]] = field(default_factory=dict)


def model_of(run: Run) -> SavedTensors:
    """Return the model's parameters and persistent buffers, for saving. A tied parameter is in the
    result once."""
    # a hook may drop frozen parameters from the state dict, such as those of an encoder that the model loads itself
    trained = {name for name, parameter in run.model.named_parameters() if parameter.requires_grad}
    persistent = run.model.state_dict().keys() | trained
    named = {name: tensor.detach() for name, tensor in (*run.model.named_parameters(), *run.model.named_buffers())}
    stale = run.executor.stale_buffers if run.executor is not None else frozenset()
    named = {name: tensor for name, tensor in named.items() if name in persistent and name not in stale}

    def size(name: str) -> int:
        return unsharded_shape(run, name, named[name]).numel() * named[name].dtype.itemsize

    def fetch(name: str) -> Tensor:
        value = named[name]
        value = on_mesh_device(value).full_tensor() if isinstance(value, DTensor) else value
        return run.tp_shards[name].unshard(value) if name in run.tp_shards else value

    return SavedTensors({name: size(name) for name in named}, fetch)


def unsharded_shape(run: Run, name: str, tensor: Tensor) -> torch.Size:
    """Return the shape that a parameter or buffer has without tensor parallelism.

    name    its name in the model
    tensor  the tensor on this device, which tensor parallelism may have sharded
    """
    return run.tp_shards[name].shape if name in run.tp_shards else tensor.shape


def states_of(run: Run) -> SavedTensors:
    """Return the optimizer states, for saving. Their names have the form "state:parameter", such as
    "exp_avg:layers.0.weight".

    A state that is quantized to 8 or 4 bits consists of several tensors. Each of them is saved
    under a name of its own, such as "exp_avg.codes:layers.0.weight". If parameters are sharded, the
    state is dequantized and saved as one fp32 tensor instead. A nested state of a user's own optimizer is
    saved like this, too, as "state.number:parameter".
    """
    states, sharded = run.optimizer.state_dict()["state"], is_sharded(run)
    shapes = {name: unsharded_shape(run, name, p) for name, p in run.model.named_parameters()}
    sizes: dict[str, int] = {}
    makers: dict[str, Callable[[], Tensor]] = {}
    counts: dict[str, dict[str, Any]] = {}
    for number, (owner, weight) in enumerate(names_of(run)):
        for name, value in states.get(number, {}).items():
            key = f"{name}:{owner}"
            if is_nested(value):
                counts.setdefault(owner, {})[name], tensors = flatten_state(value)
                for index, tensor in enumerate(tensors):
                    key = f"{name}.{index}:{owner}"
                    sizes[key], makers[key] = tensor.nbytes, partial(_same, tensor)
            elif isinstance(value, dict) and not sharded:
                for what, tensor in value.items():
                    key = f"{name}.{what}:{owner}"
                    sizes[key], makers[key] = tensor.nbytes, partial(_same, tensor)
            elif isinstance(value, dict) or (sharded and has_parameter_shape(name, value, weight.shape)):
                width = 4 if isinstance(value, dict) else value.dtype.itemsize
                sizes[key] = shapes[owner].numel() * width
                makers[key] = partial(_unsharded, run, weight, name, value)
            elif isinstance(value, Tensor):
                sizes[key], makers[key] = value.nbytes, partial(_same, value)
            else:
                counts.setdefault(owner, {})[name] = value
    return SavedTensors(sizes, lambda key: makers[key](), counts)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _unsharded(run: Run, weight: Tensor, name: str, value: Tensor | dict[str, Tensor]) -> Tensor:
    value = dequantize_state(name, value, weight) if isinstance(value, dict) else value
    return unshard(run, weight, value.to(weight.device))


def names_of(run: Run) -> list[tuple[str, Tensor]]:
    """Return a list of (parameter name, tensor that the optimizer updates for this parameter), in
    the order in which the optimizer has these tensors."""
    names = {
        id(run.optimizer_weights.get(parameter, parameter)): name for name, parameter in run.model.named_parameters()
    }
    weights = [weight for group in run.optimizer.param_groups for weight in group["params"]]
    return [(names[id(weight)], weight) for weight in weights]


def is_sharded(run: Run) -> bool:
    """Return whether the optimizer on this device holds only shards of the parameters' states (ZeRO
    or tensor parallelism)."""
    return bool(run.tp_shards) or (run.reduction is not None and bool(run.reduction.shard_axes))


__all__ = ["SavedTensors", "is_sharded", "model_of", "names_of", "states_of", "unsharded_shape"]
