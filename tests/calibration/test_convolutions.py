"""Convolutions that are timed: their shapes, and those of one model."""

from __future__ import annotations

import json
import math
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tightfit.calibration import convolutions
from tightfit.calibration.convolutions import ModelConvolution, convolution_work, measure_convolutions, measured
from tightfit.cost.recorded_step import Convolution
from tightfit.machine import Machine

DILATED = Convolution((6, 9, 12), (4, 3, 3, 2), (2, 1), (1, 0), (2, 1), (0, 0), groups=2)
TRANSPOSED = Convolution((6, 5), (6, 2, 4), (2,), (1,), (1,), (1,), groups=3, transposed=True)
VOLUME = Convolution((2, 3, 4, 5), (3, 2, 1, 3, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1), (0, 0, 0))
SHAPES = [DILATED, TRANSPOSED, VOLUME]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gradients", [0, 1, 2])
def test_the_function_computes_the_convolution_of_the_shape(shape: Convolution, gradients: int) -> None:
    """Its FLOPs are those that torch counts, but for the weight's gradient, whose groups torch ignores."""
    shape = replace(shape, gradients=gradients)
    work = convolution_work(shape, 3, torch.float32, torch.device("cpu"), torch.contiguous_format)
    with FlopCounterMode(display=False) as counter:
        work()
    too_many = (shape.groups - 1) * 3 * shape.flops // gradients if gradients else 0
    assert counter.get_total_flops() == 3 * shape.flops + too_many


def test_shapes_are_written_as_text_with_what_is_unusual() -> None:
    assert str(VOLUME) == "2x3x4x5 by 3x2x1x3x3, padding 0x1x1"
    assert str(DILATED) == "6x9x12 by 4x3x3x2, stride 2x1, padding 1x0, dilation 2x1, 2 groups"
    backward = replace(TRANSPOSED, gradients=1)
    said = "6x5 by 6x2x4, stride 2, padding 1, output padding 1, 3 groups, transposed, of the weight alone"
    assert str(backward) == said


def wanted() -> list[ModelConvolution]:
    backward = replace(DILATED, gradients=2)
    return [ModelConvolution(DILATED, 3, "float32", True), ModelConvolution(backward, 2, "bfloat16", False)]


def test_a_model_s_convolutions_are_timed_in_another_process() -> None:
    machine = Machine.detect()
    measured_machine, pace = measure_convolutions(machine, wanted())
    found = measured_machine.rates
    assert 0 < pace < math.inf
    first, second = (found[one.rate_key] for one in wanted())
    assert list(first) == [3]
    assert list(second) == [2]
    assert first[3] > 0 < second[2]
    assert wanted()[0].rate_key == f"channels-last convolution of {DILATED}/float32"
    assert wanted()[1].rate_key == f"convolution backward of {DILATED}/bfloat16"


def test_a_failed_measurement_leaves_the_machine_as_it_is() -> None:
    machine = Machine.detect()
    wrong = replace(DILATED, image=(5, 9, 12))
    assert measure_convolutions(machine, [ModelConvolution(wrong, 3, "float32", False)]) == (machine, math.inf)


def test_rates_are_scaled_to_the_machine_s_usual_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control takes twice its usual time, so the convolution usually takes half of its time, too."""
    monkeypatch.setattr("tightfit.calibration.clock_drift.control_s", lambda device: 0.02)
    monkeypatch.setattr(convolutions, "timed", lambda work, device, **named: 0.5)
    found = json.loads(measured(_given(0.01, wanted()[:1])))
    ((name, rates),) = found["rates"].items()
    assert found["pace"] == 2
    assert name == wanted()[0].rate_key
    assert rates == {"3": 3 * DILATED.flops / 0.5 * 2}


def test_the_last_convolutions_are_left_out_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "timed", lambda work, device, **named: 1.0)
    monkeypatch.setattr(convolutions, "LIMIT_S", -1.0)
    assert json.loads(measured(_given(None, wanted()))) == {"rates": {}, "pace": 1.0}


def _given(usual_s: float | None, wanted: list[ModelConvolution]) -> str:
    rows: list[Any] = [[astuple(one.shape), one.samples, one.dtype, one.channels_last] for one in wanted]
    return json.dumps([usual_s, rows])
