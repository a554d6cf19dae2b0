"""What an optimizer does to each parameter: its own step is traced on fake tensors, once for each shape."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tightfit.ledger import Update, play
from tightfit.planner.storages import tensor_bytes, tensors_in
from tightfit.planner.trace import Recorder, recorded


def trace_updates(model: nn.Module, optimizer: Optimizer) -> dict[str, Update]:
    """By parameter: the state that it is left with, the bytes of its second update, and the operations of that.

    The first update makes the states. The model's parameters are fake, and have no gradients afterwards.
    """
    known: dict[object, Update] = {}
    groups = {parameter: number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    updates = {}
    for name, parameter in model.named_parameters():
        if parameter in groups:
            key = groups[parameter], tuple(parameter.shape), parameter.dtype
            if key not in known:
                known[key] = _update(optimizer, parameter)
            updates[name] = known[key]
    return updates


def _update(optimizer: Optimizer, parameter: Tensor) -> Update:
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
    return Update(tensor_bytes(tensors_in(optimizer.state[parameter])), transient, timeline.operations)
