"""Time the convolutions of a model on this machine before its plans are predicted.

The speed of a convolution on a CPU depends on its shape in a way that no few measured shapes describe:
those of mobile networks took two to three times as long as similar ones. So each convolution of the
model is timed itself, once for each precision and memory format that a plan may have. The rates are
stored with the machine's calibration. Only a CPU that was calibrated (`tightfit machine --calibrate`) and
runs this process is measured.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from tightfit.calibration.calibrate import is_busy
from tightfit.calibration.convolutions import ModelConvolution, measure_convolutions
from tightfit.capabilities import has_fast_bf16
from tightfit.cost.recorded_step import CHANNELS_LAST, Operation
from tightfit.distributed.processes import world_size
from tightfit.errors import TightfitError
from tightfit.plan import Plan

if TYPE_CHECKING:
    from tightfit.planner.estimator import Estimator

MOST_S = 0.02  # the number of images is reduced until a convolution is expected to take at most this long


def measure_model(estimator: Estimator, plan: Plan, pins: dict[str, Any]) -> None:
    """Time those convolutions of the estimator's model that were never timed on this machine, for at most
    five seconds. Afterwards the estimator predicts from their rates.

    plan  a plan of the job, without parallelism; its micro-batch is timed
    pins  plan fields that the user fixed: other values are not timed

    Does nothing if the model cannot be traced: its first estimate reports the error.
    """
    machine = estimator.machine
    if not (machine.is_here and machine.device == "cpu" and machine.control_s) or world_size() > 1:
        return
    try:
        ledger = estimator.profiler.ledger(plan.replace(compile="none", recompute="none"))
        operations = {one for segment in ledger.training for one in segment.timeline.operations if one.convolution}
    except TightfitError:
        return
    samples = plan.micro_batch_of(estimator.job.train.batch)
    seconds: dict[ModelConvolution, float] = {}
    for one in operations:
        for wanted in _variants(estimator, one, samples, pins):
            expected_s = estimator.time_model.operation_s(one, samples) * one.count.at(samples)
            if wanted.rate_key not in machine.rates:
                seconds[wanted] = max(seconds.get(wanted, 0.0), expected_s)
    if not seconds:
        return
    busy = is_busy(machine)
    machine = measure_convolutions(machine, sorted(seconds, key=lambda one: -seconds[one]))
    with contextlib.suppress(OSError):
        if not busy:
            machine.keep()
    estimator.use_machine(machine)


def _variants(estimator: Estimator, one: Operation, samples: int, pins: dict[str, Any]) -> list[ModelConvolution]:
    """Return the convolution `one` in each precision and memory format that a plan may have."""
    assert one.convolution is not None
    per_image = estimator.time_model.operation_s(one, samples) / max(one.sizes[0].at(samples), 1.0)
    images = max(min(one.sizes[0].at(samples), MOST_S / max(per_image, 1e-12)), 1.0)
    return [
        ModelConvolution(one.convolution, int(images), dtype, last)
        for dtype in _dtypes(estimator, one, pins)
        for last in _memory_formats(one, pins)
    ]


def _dtypes(estimator: Estimator, one: Operation, pins: dict[str, Any]) -> list[str]:
    narrow = "bf16" in estimator.job.allowed and has_fast_bf16(estimator.machine)
    return [one.dtype] if "precision" in pins or not narrow else ["bfloat16", "float32"]


def _memory_formats(one: Operation, pins: dict[str, Any]) -> list[bool]:
    """Return the values of `ModelConvolution.channels_last` to time. A compiled region chooses the format
    itself."""
    own = one.name.endswith(CHANNELS_LAST)
    fixed = "memory_format" in pins and pins.get("compile") == "none"
    is_image = one.convolution is not None and len(one.convolution.image) == 3
    return [own] if fixed or not is_image else [False, True]


__all__ = ["measure_model"]
