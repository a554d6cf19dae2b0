"""Time the convolutions of a model on this machine before its plans are predicted.

The speed of a convolution on a CPU depends on its shape in a way that no few measured shapes describe:
those of mobile networks took half again as long as similar ones. So each convolution of the
model is timed itself, once for each precision and memory format that a plan may have. The rates are
stored with the machine's calibration. Only a CPU that was calibrated (`tightfit machine --calibrate`) and
runs this process is measured.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from tightfit.calibration.convolutions import DTYPES, ModelConvolution, measure_convolutions
from tightfit.capabilities import has_fast_bf16
from tightfit.cost.recorded_step import CHANNELS_LAST, Operation
from tightfit.distributed.processes import world_size
from tightfit.errors import TightfitError
from tightfit.plan import Plan

if TYPE_CHECKING:
    from tightfit.planner.estimator import Estimator

# the number of images is reduced until a convolution is expected to take at most this long, but not to a single
# one, for which other kernels may run
MOST_S, FEWEST_IMAGES = 0.02, 2
MOST_PACE = 1.5  # a measurement that is more than this many times slower than usual is not stored


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
        if not estimator.profiler.may_convolve:
            return
        ledger = estimator.profiler.ledger(plan.replace(compile="none", recompute="none"))
        operations = {
            operation
            for segment in ledger.training
            for operation in segment.timeline.operations
            if operation.convolution
        }
    except TightfitError:
        return
    samples = plan.micro_batch_of(estimator.job.train.batch)
    # wanted -> (whether it has the plan's own precision and format, expected seconds)
    importance: dict[ModelConvolution, tuple[bool, float]] = {}
    for operation in operations:
        expected_s = estimator.time_model.operation_s(operation, samples) * operation.count.at(samples)
        for wanted in _variants(estimator, operation, samples, pins):
            if wanted.rate_key not in machine.rates:
                is_own = (wanted.dtype, wanted.channels_last) == (
                    operation.dtype,
                    operation.name.endswith(CHANNELS_LAST),
                )
                importance[wanted] = max(importance.get(wanted, (False, 0.0)), (is_own, expected_s))
    if not importance:
        return
    machine, pace = measure_convolutions(machine, sorted(importance, key=importance.__getitem__, reverse=True))
    with contextlib.suppress(OSError):
        if pace < MOST_PACE:
            machine.keep()
    estimator.use_machine(machine)


def _variants(estimator: Estimator, operation: Operation, samples: int, pins: dict[str, Any]) -> list[ModelConvolution]:
    """Return the convolution `operation` in each precision and memory format that a plan may have."""
    assert operation.convolution is not None
    per_image = estimator.time_model.operation_s(operation, samples) / max(operation.sizes[0].at(samples), 1.0)
    images = min(operation.sizes[0].at(samples), max(MOST_S / max(per_image, 1e-12), FEWEST_IMAGES))
    return [
        ModelConvolution(operation.convolution, max(int(images), 1), dtype, last)
        for dtype in _dtypes(estimator, operation, pins)
        for last in _memory_formats(operation, pins)
    ]


def _dtypes(estimator: Estimator, operation: Operation, pins: dict[str, Any]) -> list[str]:
    """Return the types to time, of those that a calibration measures."""
    narrow = "bf16" in estimator.job.allowed and has_fast_bf16(estimator.machine)
    wanted = [operation.dtype] if "precision" in pins or not narrow else ["bfloat16", "float32"]
    return [dtype for dtype in wanted if dtype in DTYPES]


def _memory_formats(operation: Operation, pins: dict[str, Any]) -> list[bool]:
    """Return the values of `ModelConvolution.channels_last` to time. A compiled region chooses the format
    itself."""
    own = operation.name.endswith(CHANNELS_LAST)
    fixed = "memory_format" in pins and pins.get("compile") == "none"
    is_image = operation.convolution is not None and len(operation.convolution.image) == 3
    return [own] if fixed or not is_image else [False, True]


__all__ = ["measure_model"]
