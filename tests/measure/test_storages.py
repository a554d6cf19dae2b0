"""The tracker against truths worked out by hand, on models small enough to follow every storage."""

from __future__ import annotations

import gc
import weakref
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from tightfit.measure.storages import ROWS, Peak, StorageTracker, storages_of

ROWS_IN, WIDE, OUT, SAMPLES = 8, 16, 4, 5
X, HIDDEN, Y, SCALAR = 4 * SAMPLES * ROWS_IN, 4 * SAMPLES * WIDE, 4 * SAMPLES * OUT, 4
FIRST, SECOND = 4 * ROWS_IN * WIDE, 4 * WIDE * OUT
PARAMETERS = FIRST + SECOND


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(ROWS_IN, WIDE, bias=False), nn.ReLU(), nn.Linear(WIDE, OUT, bias=False))


def summed(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum()


def filled(**bytes_by_row: int) -> dict[str, int]:
    return {**dict.fromkeys(ROWS, 0), **bytes_by_row}


def tracked(model: nn.Module, x: Tensor) -> tuple[StorageTracker, Any]:
    """A tracker and the forward that it watches."""
    tracker = StorageTracker(model.parameters())
    return tracker, tracker.forward(lambda: summed(model, x)) if x is None else tracker.forward(lambda x: summed(model, x))


def test_forward_keeps_the_input_and_what_relu_saved() -> None:
    model, x = perceptron(), torch.ones(SAMPLES, ROWS_IN)
    tracker, forward = tracked(model, x)
    with tracker:
        loss = forward(x)
    peak = tracker.peak()
    assert peak.timeline[-1] == ("forward", PARAMETERS + X + HIDDEN + SCALAR)
    # the largest instant is the ReLU's, which holds its input and makes its output; only the output is kept
    assert peak == Peak(PARAMETERS + X + 2 * HIDDEN, filled(parameters=PARAMETERS, activations=X + HIDDEN, temporaries=HIDDEN),
                        "forward", peak.timeline)
    assert loss.item() != 0


def test_backward_peaks_where_the_relu_is_undone() -> None:
    model, x = perceptron(), torch.ones(SAMPLES, ROWS_IN)
    tracker, forward = tracked(model, x)
    with tracker:
        loss = forward(x)
        loss.backward()
    peak = tracker.peak()
    # by then the second weight has its gradient; the gradients of the ReLU's output and input are both there
    rows = filled(parameters=PARAMETERS, gradients=SECOND, activations=X + HIDDEN + SCALAR, temporaries=2 * HIDDEN)
    print(peak, rows)
    assert peak.rows == rows
    assert peak.total == sum(rows.values())
    assert peak.phase == "backward"
    assert peak.timeline[-1] == ("backward", 2 * PARAMETERS + X + SCALAR)
