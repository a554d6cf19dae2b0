"""Trace the optimizer's update of each parameter, and gradient clipping.

The optimizer's own `step` runs on fake tensors, once for each parameter shape.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tightfit.cost.entries import Update
from tightfit.cost.recorded_step import Operation, Timeline, replay
from tightfit.methods.precision import LossScaler
from tightfit.models.tensors import tensors_in
from tightfit.optim.gradient_dtype import copy_gradient_dtype, empty_gradient
from tightfit.optim.in_batches import MultiTensor
from tightfit.optim.per_parameter import PerParameter
from tightfit.planner.tracing.recorder import Recorder, recorded_segments
from tightfit.planner.tracing.storages import tensor_bytes


def trace_updates(
    model: nn.Module, optimizer: Optimizer, foreach: bool = False, scaled: bool = False
) -> dict[str, Update]:
    """Trace the optimizer's update of each parameter. Return parameter name -> `Update`: the bytes
    of its optimizer states, and the temporary bytes and operations of one update.

    The second update is recorded, because the first one creates the states.

    model      a model with fake parameters; afterwards their gradients are None
    optimizer  an optimizer of the model's parameters
    foreach    whether to use torch's foreach kernels, which update all parameters at once, if the
               optimizer has such kernels
    scaled     whether the update of 16-bit gradients divides them by a loss scale (fp16)
    """
    known: dict[object, Update] = {}
    groups = {parameter: number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    if foreach:
        enable_foreach(optimizer)
    updates: dict[str, Update] = {}
    largest: dict[int, tuple[Update, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter in groups:
            number = groups[parameter]
            key = number, tuple(parameter.shape), parameter.dtype
            if key not in known:
                known[key] = _trace_update(optimizer, parameter, number, scaled)
            updates[name] = known[key]
            if number not in largest or known[key].transient_bytes > largest[number][0].transient_bytes:
                largest[number] = known[key], parameter
    left = {
        number: _left_share(optimizer, parameter, update, scaled) for number, (update, parameter) in largest.items()
    }
    return {
        name: replace(update, held_into_next_bytes=int(update.transient_bytes * left[update.group]))
        for name, update in updates.items()
    }


def trace_states(model: nn.Module, optimizer: Optimizer, foreach: bool, scaled: bool) -> dict[str, Update]:
    """Return what `trace_updates` returns, with the bytes of optimizer states alone. Each update runs once
    and is not recorded, which takes a fraction of the time. Arguments: see `trace_updates`."""
    known: dict[object, int] = {}
    groups = {parameter: number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    if foreach:
        enable_foreach(optimizer)
    updates: dict[str, Update] = {}
    for name, parameter in model.named_parameters():
        if parameter not in groups:
            continue
        number = groups[parameter]
        key = number, tuple(parameter.shape), parameter.dtype
        if key not in known:
            _update(optimizer, [parameter], scaled)
            known[key] = tensor_bytes(tensors_in(optimizer.state[parameter]))
            parameter.grad = None
        updates[name] = Update(known[key], 0, (), 0, group=number)
    return updates


def enable_foreach(optimizer: Optimizer) -> None:
    """Enable the optimizer's foreach kernels, as torch does by default on CUDA. An optimizer
    without such kernels is unchanged, and so is one whose user has set `foreach`."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None:
            group["foreach"] = True


def _trace_update(optimizer: Optimizer, parameter: Tensor, group: int, scaled: bool) -> Update:
    timeline = _second_update(optimizer, [parameter], scaled)
    transient = _peak_bytes(timeline)
    states = tensor_bytes(tensors_in(optimizer.state[parameter]))
    unpacked = _unpacked(optimizer.state[parameter], parameter, states)
    at_once = optimizer.param_groups[group].get("foreach")
    if isinstance(optimizer, MultiTensor):
        elements, dtype = parameter.numel(), str(parameter.dtype)
        return Update(states, transient, timeline.operations, 0, 0, group, elements, dtype, fp32_state_bytes=unpacked)
    foreach = transient if at_once else 0
    return Update(states, transient, timeline.operations, foreach, group=group, fp32_state_bytes=unpacked)


def _unpacked(states: dict[str, Any], parameter: Tensor, stored_bytes: int) -> int:
    """Return the bytes that a parameter's states would have in fp32, if some of them are packed in
    blocks of 8-bit or 4-bit codes. Return 0 if no state is packed.

    states        name -> state of the parameter; a packed state is a dict
    stored_bytes  bytes of the states as they are
    """
    packed = [state for state in states.values() if isinstance(state, dict)]
    wide = 4 * parameter.numel() * len(packed)  # a state is packed from fp32
    return wide + stored_bytes - tensor_bytes(tensors_in(packed)) if packed else 0


def _left_share(optimizer: Optimizer, parameter: Tensor, alone: Update, scaled: bool) -> float:
    """Return the share of an update's temporary bytes that is still allocated while the next
    parameter is updated.

    A Python loop over parameters keeps its local variables until they are assigned again. To find
    the share, the update of `parameter` is traced together with that of a second parameter of the
    same shape.

    alone  the update of `parameter` alone

    Example: one update needs 8 MiB of temporaries. If both updates together need 12 MiB, the share
    is 0.5.
    """
    if alone.foreach_bytes or alone.elements or not alone.transient_bytes:
        return 0.0
    next_one, params = nn.Parameter(torch.empty_like(parameter)), optimizer.param_groups[alone.group]["params"]
    copy_gradient_dtype(next_one, parameter)
    params.append(next_one)
    try:
        both = _peak_bytes(_second_update(optimizer, [parameter, next_one], scaled))
    finally:
        params.pop()
        optimizer.state.pop(next_one, None)
    return both / alone.transient_bytes - 1


def _second_update(optimizer: Optimizer, parameters: list[Tensor], scaled: bool) -> Timeline:
    """Run the optimizer twice on `parameters` alone, and return the timeline (allocations, frees
    and operations) of the second update. The first one, which creates the states, is not recorded."""
    _update(optimizer, parameters, scaled)
    recorder = Recorder({})
    _update(optimizer, parameters, scaled, recorder)
    for parameter in parameters:
        parameter.grad = None
    return recorded_segments(recorder)[0].timeline


def _update(optimizer: Optimizer, parameters: list[Tensor], scaled: bool, recorder: Recorder | None = None) -> None:
    """Run the optimizer once on `parameters` alone, with new gradients, and record it with `recorder`."""
    for parameter in parameters:
        parameter.grad = empty_gradient(parameter)
    if isinstance(optimizer, PerParameter) and optimizer.can_skip_step():
        optimizer.skip_step_if(torch.zeros((), dtype=torch.bool), lambda: False)
    if isinstance(optimizer, PerParameter) and scaled:
        optimizer.multiply_narrow_gradients(1.0)
    if recorder is not None:
        recorder.mark_existing([*parameters, *(parameter.grad for parameter in parameters), optimizer.state])
        recorder.begin_segment("update")
    with recorder or nullcontext():
        optimizer.step()


def _peak_bytes(timeline: Timeline) -> int:
    return int(sum(replay(timeline, 1).at_peak.values()))


def trace_clipping(parameters: list[nn.Parameter], scaled: bool, clip: float | None) -> tuple[Operation, ...]:
    """Return the operations that run on all gradients before the update: dividing by the loss scale
    and clipping.

    parameters  all parameters; a parameter is listed several times if it represents equal
                parameters of removed blocks
    scaled      whether the loss is scaled (fp16), so that gradients are divided by the scale and
                checked for inf
    clip        the largest gradient norm; None for no clipping
    """
    if not scaled and clip is None:
        return ()
    for parameter in set(parameters):
        parameter.grad = empty_gradient(parameter)
    recorder = Recorder({})
    recorder.mark_existing([*parameters, *(parameter.grad for parameter in parameters)])
    with recorder:
        recorder.begin_segment("clipping")
        if scaled:
            LossScaler(1.0, dynamic=False).unscale(parameters)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
    for parameter in parameters:
        parameter.grad = None
    return recorded_segments(recorder)[0].timeline.operations
