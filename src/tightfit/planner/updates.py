"""What an optimizer does to each parameter: its own step is traced on fake tensors, once for each shape; and clipping."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tightfit.entries import Update
from tightfit.methods.precision import LossScaler
from tightfit.planner.storages import tensor_bytes, tensors_in
from tightfit.planner.trace import Recorder, recorded
from tightfit.program import Operation, play


def trace_updates(model: nn.Module, optimizer: Optimizer, together: bool = False) -> dict[str, Update]:
    """By parameter: the state that it is left with, the bytes of its second update, and the operations of that.

    together  torch's kernels that take all parameters at once, where the optimizer has them

    The first update makes the states. The model's parameters are fake, and have no gradients afterwards.
    """
    known: dict[object, Update] = {}
    groups = {parameter: number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    if together:
        take_all_at_once(optimizer)
    updates = {}
    for name, parameter in model.named_parameters():
        if parameter in groups:
            key = groups[parameter], tuple(parameter.shape), parameter.dtype
            if key not in known:
                at_once = bool(optimizer.param_groups[groups[parameter]].get("foreach"))
                known[key] = _update(optimizer, parameter, at_once)
            updates[name] = known[key]
    return updates


def take_all_at_once(optimizer: Optimizer) -> None:
    """Ask for the kernels over all parameters that torch chooses by itself on CUDA, where the optimizer has them."""
    for group in optimizer.param_groups:
        if "foreach" in group:
            group["foreach"] = True


def _update(optimizer: Optimizer, parameter: Tensor, at_once: bool) -> Update:
    for _ in range(2):
        parameter.grad = torch.empty_like(parameter)
        recorder = Recorder({})
        recorder.know([parameter, parameter.grad, optimizer.state])
        with recorder:
            recorder.begin("update")
            optimizer.step()
        parameter.grad = None
    passages = recorded(recorder)
    timeline = passages[0].timeline
    transient = int(sum(play(timeline, 1).largest.values()))
    states = tensor_bytes(tensors_in(optimizer.state[parameter]))
    return Update(states, transient, timeline.operations, transient if at_once else 0)


def trace_clipping(parameters: list[nn.Parameter], scaled: bool, clip: float | None) -> tuple[Operation, ...]:
    """What is done to the gradients of all of these together before the update. One may stand for several that are alike.

    scaled  by a loss scale, so that they are divided by it and looked at; clip: the job's, None for none
    """
    if not scaled and clip is None:
        return ()
    for parameter in set(parameters):
        parameter.grad = torch.empty_like(parameter)
    recorder = Recorder({})
    recorder.know([*parameters, *(parameter.grad for parameter in parameters)])
    with recorder:
        recorder.begin("clipping")
        if scaled:
            LossScaler(1.0, dynamic=False).unscale(parameters)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
    for parameter in parameters:
        parameter.grad = None
    return recorded(recorder)[0].timeline.operations
