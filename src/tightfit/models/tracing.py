"""Record a forward of a model on fake tensors as a `Dataflow`: the list of its operations with the
tensors that they read and make. The model is restored afterwards.

The pipeline's planner and runtime call `trace_dataflow` to find which tensors are sent between pipeline
stages; see `models/dataflow.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from tightfit._torch.fake import FakeTensor, FakeTensorMode, active_fake_mode
from tightfit._torch.modules import own_buffers, own_parameters, plain_attributes
from tightfit.errors import InputError, Untraceable
from tightfit.models.batches import Batch, map_tensors
from tightfit.models.dataflow import PP_FIELD, Dataflow, describe_line, innermost_model_line
from tightfit.models.dataflow_recorder import Recorder
from tightfit.models.fake_kernels import without_fake_tensor_logs


def trace_dataflow(
    model: nn.Module,
    total: Callable[[nn.Module, Batch], Tensor],
    batch: Batch,
    blocks: list[tuple[str, nn.Module]],
    numbers: tuple[int, ...] = (),
) -> Dataflow:
    """Run a forward of the model and its loss on fake tensors, and return its dataflow. The model
    is the same afterwards as before.

    total    (model, batch) -> the loss
    batch    a batch; only the shapes and types of its tensors are used
    blocks   the blocks whose calls are recorded, as (full name, module)
    numbers  the numbers of these blocks among all of the model's blocks; () if they are all of them

    If the first forward changes the model's parameters, buffers or attributes, or the batch, a
    second forward is recorded, because it may compute something else. Raises InputError if the
    model fails on fake tensors, or does not call each block once, in order.
    """
    mode = active_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True)
    in_evaluation = [module for module in model.modules() if not module.training]
    with restoring_state(model) as attributes, without_fake_tensor_logs(), mode:
        model.train()
        fakes = _with_fake_tensors(model)
        batch = map_tensors(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype), batch)
        recorder = Recorder(model, fakes, batch, blocks)
        try:
            with torch.enable_grad(), recorder:
                recorder.forward(total)
                before = attributes.read()
                if recorder.changes_persistent_state() or attributes.changed():
                    recorder.forward(total)
                changed = attributes.changed(before) if len(recorder.forwards) > 1 else []
        except InputError as error:
            if isinstance(error, Untraceable):
                raise
            raise InputError(error.asked, error.found, error.fix) from None
        except Exception as error:
            raise _trace_error(error) from error
    for module in in_evaluation:
        module.training = False
    return recorder.dataflow(changed, numbers or tuple(range(len(blocks))))


def _trace_error(error: Exception) -> InputError:
    message = (str(error).strip() or type(error).__name__).partition("\n")[0]
    return InputError(
        PP_FIELD,
        f"the model fails on fake tensors, so the tensors that are sent between pipeline stages cannot be found "
        f"({type(error).__name__}: {message}; {describe_line(innermost_model_line(error))})",
        "use pp: 1, and divide the model with zero: 3 or tp instead",
    )


class _Attributes:
    """Finds out which attributes of a model's modules change. Parameters, buffers, submodules and
    hooks are left out. `first` holds the attributes at the time when this object is created."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.first = self.read()

    def read(self) -> dict[tuple[str, str], Any]:
        found = {}
        for path, module in self.model.named_modules():
            for name, value in plain_attributes(module):
                found[path, name] = list(value) if isinstance(value, list | tuple | set | dict) else value
        return found

    def changed(self, before: dict[tuple[str, str], Any] | None = None) -> list[str]:
        """Return the full names of the attributes that have changed, sorted.

        before  the result of an earlier call of `read`, with which the attributes are compared;
                attributes that contain only tensors are then left out. None compares all attributes
                with those at the time when this object was created
        """
        old, now = before or self.first, self.read()
        names = []
        for key in old.keys() | now.keys():
            one, other = old.get(key), now.get(key)
            if _same(one, other) or (before is not None and _only_tensors(one) and _only_tensors(other)):
                continue
            names.append(".".join(filter(None, key)))
        return sorted(names)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    plain = (bool, int, float, str, bytes)
    return isinstance(one, plain) and isinstance(other, plain) and one == other


def _only_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list) and all(isinstance(one, Tensor) for one in value))


@contextmanager
def restoring_state(model: nn.Module) -> Iterator[_Attributes]:
    """Inside this context, a forward may change the attributes of the model's modules and draw
    random numbers. On exit, the attributes and the states of the random generators are restored,
    those of generators that are attributes included.
    The context manager yields an `_Attributes` object, whose method `changed` returns the names of
    the attributes that a forward has changed."""
    saved = []
    for module in model.modules():
        own = dict(vars(module))
        contents = {name: value.copy() for name, value in own.items() if isinstance(value, list | dict | set)}
        saved.append((module, own, contents))
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    rewinds = [rewind for _, own, _ in saved for value in own.values() if (rewind := _rewind_of(value)) is not None]
    try:
        yield _Attributes(model)
    finally:
        for rewind in rewinds:
            rewind()
        for module, own, contents in saved:
            for name, content in contents.items():
                held = own[name]
                held.clear()
                held.extend(content) if isinstance(held, list) else held.update(content)
            vars(module).clear()
            vars(module).update(own)
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _rewind_of(value: Any) -> Callable[[], Any] | None:
    """Return a function that sets a random number generator of torch, Python or NumPy to its present
    state, or None if `value` is no generator."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def _with_fake_tensors(model: nn.Module) -> dict[int, Tensor]:
    """Replace the model's parameters and buffers by fake tensors, in place. Return a dict {id() of
    a real tensor: the fake tensor in its place}."""
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return fakes.setdefault(id(tensor), tensor)
        if id(tensor) not in fakes:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            fakes[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        return fakes[id(tensor)]

    for module in model.modules():
        for held in (own_parameters(module), own_buffers(module)):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = fake(tensor)  # type: ignore[assignment]
    return fakes


__all__ = ["trace_dataflow"]
