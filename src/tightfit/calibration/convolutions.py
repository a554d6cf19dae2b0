"""Times convolutions. A calibration times a few kinds, and predictions for one model time its own."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tightfit.calibration.cases import Case, Work, in_turn
from tightfit.calibration.clock_drift import ClockDrift
from tightfit.calibration.timing import timed
from tightfit.cost.recorded_step import Convolution
from tightfit.machine import Machine

CHANNELS = (4, 16, 32, 64, 128)
LARGE_CHANNELS = (256, 512)  # in addition on a GPU
POINTWISE_CHANNELS = (16, 64, 256)
TRANSPOSED_CHANNELS = (16, 64, 128)
WINDOWS = (3, 5, 7)  # sides of depthwise convolutions
DEPTHWISE_CHANNELS = 64
SIDE = 32  # of the images of a calibration, in pixels
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# of the convolutions of one model: seconds for all, and for each at least
LIMIT_S, LEAST_S = 5.0, 0.008
GROUP_S = 1.0  # after so many seconds, the control is timed again


def convolution_work(
    shape: Convolution, samples: int, dtype: torch.dtype, device: torch.device, memory_format: torch.memory_format
) -> Work:
    """Return a function that computes a convolution, or its gradients.

    samples        number of images
    memory_format  of the images
    """
    convolve = partial(
        torch.convolution,
        bias=None,
        stride=shape.stride,
        padding=shape.padding,
        dilation=shape.dilation,
        transposed=shape.transposed,
        output_padding=shape.output_padding,
        groups=shape.groups,
    )

    def inputs() -> tuple[Tensor, ...]:
        image = torch.ones((samples, *shape.image), dtype=dtype, device=device)
        if image.dim() == 4:
            image = image.contiguous(memory_format=memory_format)
        return image, torch.ones(shape.weight, dtype=dtype, device=device)

    def run() -> tuple[Tensor, ...]:
        image, weight = inputs()
        output = convolve(image.requires_grad_(shape.gradients > 1), weight.requires_grad_())
        return image, weight, output, torch.ones_like(output)

    def gradients(image: Tensor, weight: Tensor, output: Tensor, gradient: Tensor) -> object:
        return torch.autograd.grad(output, (image, weight)[2 - shape.gradients :], gradient, retain_graph=True)

    return in_turn(gradients, run) if shape.gradients else in_turn(convolve, inputs)


def calibration_shapes(which: str, device: torch.device) -> Iterator[tuple[int, Convolution]]:
    """Yield (size, shape) of the convolutions of a calibration. Images have 32 x 32 pixels, and as many
    output as input channels.

    which  "": 3 x 3 windows, "pointwise": 1 x 1 windows, "transposed": 4 x 4 windows, which double the sides
           of the images; their size is the number of channels.
           "depthwise": each channel is a group; their size is the number of pixels of the window
    """
    if which == "depthwise":
        for side in WINDOWS:
            yield side**2, _square(DEPTHWISE_CHANNELS, side, groups=DEPTHWISE_CHANNELS)
        return
    channels, side = {"": (CHANNELS, 3), "pointwise": (POINTWISE_CHANNELS, 1), "transposed": (TRANSPOSED_CHANNELS, 4)}[
        which
    ]
    for count in channels if device.type == "cpu" else (*channels, *LARGE_CHANNELS):
        yield count, _square(count, side, transposed=which == "transposed")


def _square(channels: int, side: int, groups: int = 1, transposed: bool = False) -> Convolution:
    return Convolution(
        image=(channels, SIDE, SIDE),
        weight=(channels, channels // groups, side, side),
        stride=(2, 2) if transposed else (1, 1),
        padding=(1, 1) if transposed else (side // 2, side // 2),
        dilation=(1, 1),
        output_padding=(0, 0),
        groups=groups,
        transposed=transposed,
    )


def _cases(
    dtype: torch.dtype, device: torch.device, which: str, backward: bool, memory_format: torch.memory_format
) -> Iterator[Case]:
    """Yield convolutions to time, as cases (size, FLOPs, function).

    which     see `calibration_shapes`
    backward  time the gradients with respect to the image and the weight
    """
    samples = 16 if device.type == "cpu" else 64
    for size, forward in calibration_shapes(which, device):
        shape = replace(forward, gradients=2 * backward)
        yield size, float(samples * shape.flops), convolution_work(shape, samples, dtype, device, memory_format)


CONVOLUTIONS = {  # kind -> its cases
    " ".join(filter(None, (which, layout, f"convolution{' backward' * backward}"))): partial(
        _cases, which=which, backward=backward, memory_format=memory_format
    )
    for which in ("", "pointwise", "depthwise", "transposed")
    for layout, memory_format in (("", torch.contiguous_format), ("channels-last", torch.channels_last))
    for backward in (False, True)
}


@dataclass(frozen=True)
class ModelConvolution:
    """A convolution of a model, as a step runs it.

    shape          its shape
    samples        number of images
    dtype          torch's name, such as bfloat16
    channels_last  whether the images are in this memory format
    """

    shape: Convolution
    samples: int
    dtype: str
    channels_last: bool

    @property
    def rate_key(self) -> str:
        """The key of its rate in `Machine.rates`."""
        layout = "channels-last " * self.channels_last
        return f"{self.shape.rate_name(f'{layout}convolution' + ' backward' * (self.shape.gradients > 0))}/{self.dtype}"


def measure_convolutions(machine: Machine, wanted: Iterable[ModelConvolution]) -> tuple[Machine, float]:
    """Time convolutions of a model on this machine, a CPU, for at most five seconds. Return (a copy of
    `machine` with their rates, how many times longer than usual the control took at most). If the measurement
    fails, return `machine` itself.

    wanted  the most important first, of which the last may be left out

    The measurement runs in a process of its own, because it changes the state of the process's heap.
    """
    code = "import sys; from tightfit.calibration.convolutions import measured; sys.stdout.write(measured(sys.stdin.read()))"
    usual_s = machine.control_s.value if machine.control_s else None
    given = json.dumps([usual_s, [[astuple(one.shape), one.samples, one.dtype, one.channels_last] for one in wanted]])
    done = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, text=True, check=False)
    if done.returncode != 0:  # such as out of memory: rates of similar convolutions are used
        return machine, math.inf
    found = json.loads(done.stdout.splitlines()[-1])
    rates = {key: {int(size): rate for size, rate in table.items()} for key, table in found["rates"].items()}
    return machine.replace(rates={**machine.rates, **rates}), found["pace"]


def measured(text: str) -> str:
    """Time convolutions in this process, which `measure_convolutions` has started. Return JSON: "rates", by key
    of a rate and number of images, and "pace": see `measure_convolutions`.

    text  JSON: seconds that the control usually takes, or null; list of [shape, samples, dtype, channels_last]
    """
    usual_s, given = json.loads(text)
    device = torch.device("cpu")
    pace = ClockDrift(device, watched=usual_s is not None)
    rates: dict[str, dict[int, float]] = {}
    group: dict[str, tuple[int, float]] = {}
    began = started = time.perf_counter()

    def end_group() -> None:
        factor = pace.control_around_s() / usual_s if usual_s is not None else 1.0
        rates.update({key: {samples: rate * factor} for key, (samples, rate) in group.items()})
        group.clear()

    for sizes, samples, dtype, last in given:
        if time.perf_counter() - began > LIMIT_S:
            break
        if time.perf_counter() - started > GROUP_S:
            end_group()
            started = time.perf_counter()
        *tuples, groups, transposed, gradients = sizes
        shape = Convolution.of(map(tuple, tuples), groups, transposed, gradients)
        convolution = ModelConvolution(shape, samples, dtype, last)
        memory_format = torch.channels_last if last else torch.contiguous_format
        work = convolution_work(shape, samples, DTYPES[dtype], device, memory_format)
        group[convolution.rate_key] = (
            samples,
            samples * shape.flops / timed(work, device, least_s=LEAST_S, least_runs=3),
        )
    end_group()
    return json.dumps({"rates": rates, "pace": max(pace.control_times_s) / usual_s if usual_s is not None else 1.0})


__all__ = ["CONVOLUTIONS", "DTYPES", "ModelConvolution", "measure_convolutions"]
