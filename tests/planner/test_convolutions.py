"""Times of convolutions on GPUs: their FLOPs, the layout of images, groups; and those of normalizations beside them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from tightfit.achieved_rates import memory_bandwidth
from tightfit.cost.recorded_step import CHANNELS_LAST, BatchLinear, Convolution, Operation
from tightfit.machine import Machine
from tightfit.planner.time_model import TimeModel
from tightfit.planner.tracing.profiler import Profiler

H100, V100, MI300X = (Machine.named(name) for name in ("h100-sxm", "v100-32gb", "mi300x"))
SIDE = 32
# TFLOP/s of 3 x 3 convolutions in bf16 on an H100 (records/gpu.json), 32 x 32 pixels:
# (backward, channels last) -> (64 samples of 256 channels, 128 of 512)
MEASURED = {
    (False, True): (705, 807),
    (False, False): (431, 607),
    (True, True): (709, 856),
    (True, False): (436, 637),
}


def convolution(
    samples: int, channels: int, backward: bool = False, last: bool = True, dtype: str = "bfloat16", groups: int = 1
) -> Operation:
    """A 3 x 3 convolution of as many output as input channels."""
    places, inside = samples * SIDE**2, channels // groups
    flops = 2.0 * places * channels * inside * 9 * (2 if backward else 1)
    width = 4 if dtype in ("float32", "tf32") else 2
    moved = width * ((3 if backward else 2) * places * channels + channels * inside * 9)
    shape = Convolution(
        (channels, SIDE, SIDE), (channels, inside, 3, 3), (1, 1), (1, 1), (1, 1), (0, 0), groups, gradients=2 * backward
    )
    assert samples * shape.flops == flops
    name, images = f"aten.convolution{'_backward' * backward}{CHANNELS_LAST * last}", (BatchLinear(float(samples)),)
    return Operation(name, dtype, BatchLinear(flops), BatchLinear(float(moved)), images, convolution=shape)


@pytest.mark.parametrize(("backward", "last"), MEASURED)
def test_convolutions_follow_those_measured_on_an_h100(backward: bool, last: bool) -> None:
    for (samples, channels), tflops in zip(((64, 256), (128, 512)), MEASURED[backward, last], strict=True):
        one = convolution(samples, channels, backward, last)
        assert one.flops.at(1) / TimeModel(H100).operation_s(one, 1) / 1e12 == pytest.approx(tflops, rel=0.13)


def test_only_tensor_cores_need_the_channels_last() -> None:
    for machine, dtype, differ in (
        (H100, "tf32", True), (V100, "float16", True), (V100, "tf32", False), (V100, "float32", False),
        (MI300X, "bfloat16", False),
    ):  # fmt: skip
        first, last = (
            TimeModel(machine).operation_s(convolution(64, 64, last=one, dtype=dtype), 1) for one in (False, True)
        )
        assert (first > 1.2 * last) is differ


def test_a_depthwise_convolution_waits_for_memory() -> None:
    one = convolution(64, 256, backward=True, groups=256)
    seconds = TimeModel(H100).operation_s(one, 1)
    assert seconds == pytest.approx(
        one.bytes_accessed.at(1) / memory_bandwidth(H100, one.bytes_accessed.at(1)), rel=0.1
    )
    few = TimeModel(H100).operation_s(convolution(64, 256, groups=4), 1)
    assert few < TimeModel(H100).operation_s(convolution(64, 256), 1)


def test_a_measured_rate_of_convolutions_counts() -> None:
    machine = H100.replace(rates={"convolution/bfloat16": {64: 1e11, 256: 1e12}})
    for channels, rate in ((64, 1e11), (128, math.sqrt(1e11 * 1e12)), (256, 1e12), (512, 1e12)):
        one = convolution(64, channels)
        assert TimeModel(machine).operation_s(one, 1) == pytest.approx(one.flops.at(1) / rate)


def test_measured_convolutions_of_few_channels_are_slower() -> None:
    """A window of one pixel, groups of few channels and transposed convolutions have rates of their own."""
    rates = {
        "convolution/bfloat16": {64: 1e12},
        "pointwise convolution/bfloat16": {64: 1e11},
        "depthwise convolution/bfloat16": {9: 1e10},
        "transposed convolution/bfloat16": {64: 1e9},
    }
    model = TimeModel(H100.replace(rates=rates))

    def rate(groups: int, channels: int, depth: int, window: int, transposed: bool = False) -> float:
        weight = (channels * groups, depth, window, window)
        if transposed:
            weight = (depth * groups, channels, window, window)
        one, none = (1, 1), (0, 0)
        shape = Convolution((groups * depth, 32, 32), weight, one, none, one, none, groups, transposed)
        operation = Operation(
            f"aten.convolution{CHANNELS_LAST}",
            "bfloat16",
            BatchLinear(float(shape.flops)),
            BatchLinear(1.0),
            (BatchLinear(1.0),),
            convolution=shape,
        )
        return shape.flops / model.operation_s(operation, 1)

    assert rate(1, 64, 64, 3) == pytest.approx(1e12)
    assert rate(1, 64, 64, 1) == pytest.approx(1e11)
    assert rate(64, 1, 1, 3) == rate(16, 4, 4, 3) == pytest.approx(1e10)
    assert rate(4, 64, 64, 3) == pytest.approx(1e12)
    assert rate(1, 64, 64, 4, transposed=True) == pytest.approx(1e9)


def test_a_bound_holds_for_both_layouts() -> None:
    for last in (False, True):
        one = convolution(8, 64, backward=True, last=last)
        assert TimeModel(H100, assumes_best_shapes=True).operation_s(one, 1) <= TimeModel(H100).operation_s(one, 1)


class Grouped(nn.Module):
    def __init__(self, groups: int, transposed: bool) -> None:
        super().__init__()
        kind: Any = nn.ConvTranspose2d if transposed else nn.Conv2d
        self.before = nn.Conv2d(3, 8, 1)
        self.inner = kind(8, 16, 3, groups=groups, stride=2)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(self.before(x))).mean((2, 3))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("groups", "transposed"), [(1, False), (4, False), (8, False), (4, True)])
def test_a_backward_has_twice_the_flops_of_its_forward(groups: int, transposed: bool) -> None:
    data = [(torch.zeros(3, 9, 9), 0)] * 4
    job = tightfit.Job(model=lambda: Grouped(groups, transposed), data=data, train=tightfit.Train(batch=2, steps=1))
    ledger = Profiler(job, "cuda").ledger(tightfit.Plan())
    flops = {
        (segment.phase, operation.convolution.weight): (operation.convolution, operation.flops.at(2))
        for segment in ledger.training
        for operation in segment.timeline.operations
        if operation.convolution
    }
    forward = {weight: found for (phase, weight), found in flops.items() if phase == "forward"}
    assert set(forward) == {(8, 3, 1, 1), (8, 16 // groups, 3, 3) if transposed else (16, 8 // groups, 3, 3)}
    for weight, (shape, count) in forward.items():
        assert count == 2 * shape.flops
        is_first = weight == (8, 3, 1, 1)  # its image needs no gradient
        backward, double = flops["backward", weight]
        assert double == 2 * backward.flops == count * (1 if is_first else 2)
        assert backward.gradients == (1 if is_first else 2)


def test_a_normalization_over_a_batch_reads_its_input_twice() -> None:
    moved = BatchLinear(1e9)
    for name, passes in (
        ("aten.native_batch_norm", 3 / 2),
        ("aten.native_batch_norm_backward", 5 / 3),
        ("aten.relu", 1),
    ):
        one = Operation(name, "float32", BatchLinear(), moved)
        assert TimeModel(H100).operation_s(one, 1) == pytest.approx(passes * 1e9 / memory_bandwidth(H100, 1e9))
