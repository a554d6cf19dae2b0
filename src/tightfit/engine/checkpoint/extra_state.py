"""The extra state of modules in a checkpoint: what a module returns from `get_extra_state` and takes
back in `set_extra_state`, as in torch's `state_dict`. The random number generators that a module holds
as attributes are saved in the same way, so that a resumed run draws the same numbers.

A checkpoint must not contain code that runs when it is read, so nothing is pickled. The tensors of
an extra state are saved in extra_state.safetensors, and its other values in state.json.

Example: the module "l" returns {"k": 4, "mean": tensor}. state.json then has, under "extra_state",

    {"l": {"dict": [["k", 4], ["mean", {"tensor": "l:0", "on_device": false}]]}}

and extra_state.safetensors has the tensor "l:0".
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from tightfit._torch.fake import active_fake_mode
from tightfit._torch.modules import plain_attributes
from tightfit.errors import InputError
from tightfit.runtime.run import Run
from tightfit.tensor_files import Reader, file_name

KIND = "extra_state"  # the key in state.json, and the first part of the file's name
FILE = file_name(KIND, 0, 1)

_PLAIN = (bool, int, float, str, type(None))
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict}
_DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)


@dataclass(frozen=True)
class ExtraStates:
    """The extra states of a model's modules, in the form in which a checkpoint has them.

    values   name of a module -> its extra state, in JSON types
    tensors  name of a tensor in `values` -> a copy of the tensor in host memory
    """

    values: dict[str, Any]
    tensors: dict[str, Tensor]


class _Generator:
    """A random number generator of torch, Python or NumPy, whose state is saved like the extra state
    of a module."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def get_extra_state(self) -> Any:
        generator = self.generator
        if isinstance(generator, torch.Generator):
            return generator.get_state()
        if isinstance(generator, random.Random):
            return generator.getstate()
        whole = isinstance(generator, numpy.random.Generator)
        return _without_numpy(generator.bit_generator.state if whole else generator.get_state(legacy=False))

    def set_extra_state(self, state: Any) -> None:
        generator = self.generator
        if isinstance(generator, torch.Generator):
            generator.set_state(state.cpu())
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        elif isinstance(generator, numpy.random.Generator):
            generator.bit_generator.state = state
        else:
            generator.set_state(state)


_GENERATORS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)


def _without_numpy(value: Any) -> Any:
    """Return a state of one of NumPy's generators with tuples and Python's numbers in place of NumPy's
    arrays and numbers. NumPy accepts both."""
    if isinstance(value, dict):
        return {key: _without_numpy(one) for key, one in value.items()}
    if isinstance(value, numpy.ndarray):
        return tuple(value.tolist())
    return value.item() if isinstance(value, numpy.generic) else value


def modules_with_extra_state(model: nn.Module) -> dict[str, Any]:
    """Return what has an extra state, by name: the modules whose class defines both `get_extra_state`
    and `set_extra_state`, and the random number generators that modules have as attributes. The name
    of the model itself is ""."""
    modules: dict[str, Any] = {}
    for name, module in model.named_modules():
        kind = type(module)
        if (
            kind.get_extra_state is not nn.Module.get_extra_state
            and kind.set_extra_state is not nn.Module.set_extra_state
        ):
            modules[name] = module
        for attribute, value in plain_attributes(module):
            if isinstance(value, _GENERATORS):
                modules[f"{name}.{attribute}".lstrip(".")] = _Generator(value)
    return modules


def extra_states_of(model: nn.Module) -> ExtraStates:
    """Return the extra states of the model's modules, for saving. Raises InputError if one of them
    contains a value that cannot be saved without a pickle."""
    tensors: dict[str, Tensor] = {}
    values = {
        name: _encode(module.get_extra_state(), name, module, tensors)
        for name, module in modules_with_extra_state(model).items()
    }
    return ExtraStates(values, tensors)


def restore_extra_states(
    model: nn.Module, saved: dict[str, Any], folder: Path, device: torch.device, is_whole: bool = True
) -> None:
    """Give each module its extra state from a checkpoint.

    saved     the extra states in the checkpoint's state.json, by name of the module
    folder    the checkpoint's folder
    device    where tensors go that were not in host memory when they were saved
    is_whole  whether `model` has all modules of the full model, as it does without a pipeline

    Raises RuntimeError if the checkpoint and the model do not have extra states of the same
    modules.
    """
    modules = modules_with_extra_state(model)
    for name in sorted(modules.keys() - saved.keys()):
        raise RuntimeError(f"it has no extra state of {_said(name, modules[name])}")
    for name in sorted(saved.keys() - modules.keys()):
        if is_whole:
            raise RuntimeError(f"it has an extra state of the module {name!r}, and the model has none")
    if not (folder / FILE).exists():
        for name, module in modules.items():
            module.set_extra_state(_decode(saved[name], _no_tensor))
        return
    with Reader(folder, KIND) as reader:

        def read(name: str, on_device: bool) -> Tensor:
            value = reader.get(name).clone()  # the file is mapped
            return value.to(device) if on_device else value

        for name, module in modules.items():
            module.set_extra_state(_decode(saved[name], read))


def check_extra_states(run: Run) -> None:
    """Raise InputError if the extra state of a module has a value that cannot be saved. Nothing is
    checked if the job saves no checkpoints, in a dry run, or in a loop of the user's own: `save`
    checks the values again.
    """
    if run.job.train.checkpoint_every != "never" and not run.own_loop and active_fake_mode() is None:
        extra_states_of(run.model)


def _encode(value: Any, owner: str, module: Any, tensors: dict[str, Tensor]) -> Any:
    """Return an extra state in JSON types. Copies of its tensors are added to `tensors`.

    owner   the name of the module
    module  the module whose extra state this is
    """

    def each(values: Any) -> list[Any]:
        return [_encode(one, owner, module, tensors) for one in values]

    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return each(value)
    if kind is tuple:
        return {"tuple": each(value)}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind in _MAPPINGS.values():
        return {kind.__name__: [each(pair) for pair in value.items()]}
    if kind in (Tensor, nn.Parameter) and value.layout is torch.strided and value.dtype in _DTYPES:
        name = f"{owner}:{len(tensors)}"
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name, "on_device": value.device.type != "cpu"}
    found = f"a tensor of type {kind.__name__}, {value.dtype}" if isinstance(value, Tensor) else f"a {kind.__name__}"
    raise InputError(
        f"job: model: get_extra_state of {_said(owner, module)}",
        f"returns {found}, which a checkpoint could only keep as a pickle",
        "return plain tensors, numbers, strings, bytes, None, and lists, tuples and dicts of these",
    )


def _decode(value: Any, read: Callable[[str, bool], Tensor]) -> Any:
    """Return the extra state that `_encode` has turned into `value`.

    read  a function of a tensor's name and of whether it was on the device. It returns the tensor
    """
    if isinstance(value, list):
        return [_decode(one, read) for one in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return read(value["tensor"], value["on_device"])
    ((kind, content),) = value.items()
    if kind == "bytes":
        return bytes.fromhex(content)
    inside = _decode(content, read)
    return tuple(inside) if kind == "tuple" else _MAPPINGS[kind](inside)


def _no_tensor(name: str, on_device: bool) -> Tensor:
    raise RuntimeError(f"it has no tensor {name}")


def _said(name: str, module: Any) -> str:
    module = module.generator if isinstance(module, _Generator) else module
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


__all__ = [
    "FILE",
    "KIND",
    "ExtraStates",
    "check_extra_states",
    "extra_states_of",
    "modules_with_extra_state",
    "restore_extra_states",
]
