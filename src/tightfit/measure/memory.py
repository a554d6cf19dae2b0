"""Measures the peak memory of one step, divided into rows: parameters, gradients, optimizer,
activations, temporaries.

On a CPU, the peak is the sum of the storages of all live tensors. On CUDA, torch's allocator
reports the total, and the storages show how it is divided into rows. A compiled region creates
tensors that cannot be observed, so for a plan with `compile` the total is computed from the
allocator's events. Only one step is sampled (several with the pipedream schedule, whose pipeline
never drains); all other steps run unobserved.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from tightfit.engine.step import Step, take_step
from tightfit.models.batches import Batch
from tightfit.models.tensors import tensors_in
from tightfit.optim.gradient_dtype import gradient_dtype
from tightfit.planner.tracing.live_storages import Peak, RunTracker, state_tensors
from tightfit.planner.tracing.storages import tensor_bytes
from tightfit.runtime.run import Run

Result = TypeVar("Result")
Take = Callable[[Run], Result]

_FORWARD = "tightfit: forward"  # name of the profiler event that spans a forward


class MemorySample:
    """Samples the memory of one training step.

    The pipeline of the pipedream schedule never drains, so several consecutive steps are sampled:
    enough that every tensor and every version of the weights in flight was allocated during one of
    them.

    steps  number of steps to sample
    peak   the largest peak of the sampled steps; None until all of them have run
    """

    def __init__(self, run: Run) -> None:
        self.steps = 1 + 2 * (run.executor.loss_delay if run.executor is not None else 0)
        self.peak: Peak | None = None
        self._taken = 0
        self._beside = 0  # bytes of earlier steps' tensors in memory when a step begins
        self._tracking = RunTracker(run) if run.plan.compile == "none" else None

    def take(self, run: Run, micro_batches: list[Batch], step: int) -> Step:
        """Run a training step, sample its memory, and return its results. Call this method `steps`
        times, and only after the first update, because only then do the optimizer's states exist.

        micro_batches  this device's samples of the step, on the host
        step           number of the step, from 0
        """
        on_cuda = run.device.type == "cuda"

        def take(watched: Run) -> Step:
            return take_step(watched, micro_batches, step)

        if self._tracking is not None:
            if on_cuda:
                torch.cuda.reset_peak_memory_stats(run.device)
            last = self._taken + 1 == self.steps
            result = self._tracking.take(run, [] if on_cuda else micro_batches, take, last)
        elif on_cuda:
            result, self.peak = by_phase(run, take)
        else:
            result, self.peak = profiled(run, micro_batches, take, self._beside)
            self._beside = max(self.peak.timeline[-1][1] - _begins_with(run, micro_batches), 0)
        self._taken += 1
        if self._tracking is not None and self._taken == self.steps:
            self.peak = self._tracking.peak()
            if on_cuda:
                self.peak = _with_total(self.peak, torch.cuda.max_memory_allocated(run.device))
        return result

    @property
    def ended(self) -> bool:
        return self._taken == self.steps


def sample_step(run: Run, micro_batches: list[Batch], step: int) -> tuple[Step, Peak]:
    """Run one training step, and return (its results, its peak memory). With the pipedream
    schedule, use `MemorySample`, which samples several steps."""
    sample = MemorySample(run)
    sample.steps = 1
    result = sample.take(run, micro_batches, step)
    assert sample.peak is not None
    return result, sample.peak


def _with_total(peak: Peak, total: int) -> Peak:
    """Return a copy of `peak` whose total is the allocator's total. The allocator counts more bytes
    than the storages have, for rounding and for the workspaces of libraries. They are added to the
    row "temporaries".

    total  the allocator's peak, in bytes
    """
    beyond = max(total - peak.total, 0)
    return replace(
        peak, total=peak.total + beyond, rows={**peak.rows, "temporaries": peak.rows["temporaries"] + beyond}
    )


def _begins_with(run: Run, micro_batches: list[Batch]) -> int:
    """Return the bytes that are in memory when a step begins: parameters, buffers, optimizer states
    and micro-batches. Activations of earlier steps that are still in flight are not included."""
    return sum(_model_states(run).values()) + tensor_bytes(tensors_in(micro_batches))


def profiled(run: Run, micro_batches: list[Batch], take: Take[Result], beside: int = 0) -> tuple[Result, Peak]:
    """Run a step on a CPU under torch's profiler, and return (the result of `take`, the peak
    memory).

    The bytes in memory when the step begins are counted. The profiler reports every later
    allocation and free; added in order of time, they give the bytes in use at each moment. The
    largest of these numbers is the peak.

    take    runs a step of the Run that it gets. Its result is returned unchanged
    beside  bytes that are still in flight from earlier steps, such as activations with the
            pipedream schedule
    """

    def forward(batch: Batch) -> Tensor:
        with record_function(_FORWARD):
            return run.loss_sum(batch)

    total = _begins_with(run, micro_batches) + beside
    # without acc_events torch 2.11 warns about cycles, although there is only one
    watching = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with _silent_profiler(), watching as profiler:
        result = take(replace(run, loss_sum=forward))
    results = profiler.profiler and profiler.profiler.kineto_results
    assert results is not None
    events = sorted(results.events(), key=lambda event: event.start_ns())
    changes = _phase_changes(events, type(run.optimizer).__name__)
    timeline = []
    for event in events:
        if event.name() == "[memory]":
            total += event.nbytes()
            passed = bisect_right(changes, event.start_ns(), key=lambda change: change[0])
            timeline.append((changes[passed - 1][1] if passed else "forward", total))
    return result, _divided(run, timeline)


def _phase_changes(events: list[Any], optimizer: str) -> list[tuple[int, str]]:
    """Return a list of (time in ns, the phase that begins then), in order of time. The phases are
    "forward", "backward" and "optimizer".

    events     events of torch's profiler. `profiled` has marked forwards; torch itself marks the
               optimizer's step
    optimizer  class name of the optimizer
    """
    changes = []
    for event in events:
        if event.name() == _FORWARD:
            begin = event.start_ns()
            changes += [(begin, "forward"), (begin + event.duration_ns(), "backward")]
        elif event.name() == f"Optimizer.step#{optimizer}.step":
            changes.append((event.start_ns(), "optimizer"))
    return sorted(changes)


@contextmanager
def _silent_profiler() -> Iterator[None]:
    """Context manager in which torch's profiler prints nothing when it starts and stops. It has an
    effect only if this process has not used the profiler before, because the profiler reads the
    setting only once."""
    switch = "KINETO_LOG_LEVEL"
    before = os.environ.get(switch)
    os.environ.setdefault(switch, "6")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(switch)


def by_phase(run: Run, take: Take[Result]) -> tuple[Result, Peak]:
    """Run a step on CUDA, and return (the result of `take`, the peak memory). After each forward,
    each backward and the update, the peak is read from torch's allocator and then reset.

    take  runs a step of the Run that it gets. Its result is returned unchanged
    """
    timeline: list[tuple[str, int]] = []

    def mark(phase: str) -> None:
        """Record the allocator's peak since the last call as that of `phase`, which ends now, and
        reset the peak."""
        timeline.append((phase, torch.cuda.max_memory_allocated(run.device)))
        torch.cuda.reset_peak_memory_stats(run.device)

    def forward(batch: Batch) -> Tensor:
        if timeline:
            mark("backward")
        loss = run.loss_sum(batch)
        mark("forward")
        return loss

    hook = run.optimizer.register_step_pre_hook(lambda *_: mark("backward"))
    torch.cuda.reset_peak_memory_stats(run.device)
    try:
        result = take(replace(run, loss_sum=forward))
    finally:
        hook.remove()
    mark("optimizer")
    return result, _divided(run, timeline)


def _divided(run: Run, timeline: list[tuple[str, int]]) -> Peak:
    """Return the peak of a step, with its bytes divided into rows. The bytes of parameters and
    optimizer states are counted, and the rest of the total becomes the row "activations".

    During the first backward, gradients grow while activations shrink, and the totals do not show
    how much of them is gradients. So gradients count as activations until all of them are complete.

    timeline  (phase, total bytes) in order of time
    """
    position = max(range(len(timeline)), key=lambda index: timeline[index][1])
    phase, total = timeline[position]
    passed = [name for name, _ in groupby(name for name, _ in timeline[: position + 1])]
    complete = passed.count("backward") > (phase == "backward") and not run.plan.update_in_backward
    rows = _model_states(run)
    trained = [p for p in run.model.parameters() if p.requires_grad] if complete else []
    gradients = sum(tensor_bytes([p]) * gradient_dtype(p).itemsize // p.dtype.itemsize for p in trained)
    rows["gradients"] = min(gradients, total - sum(rows.values()))
    return Peak(total, {**rows, "activations": total - sum(rows.values()), "temporaries": 0}, phase, timeline)


def _model_states(run: Run) -> dict[str, int]:
    """Return the bytes of the tensors that persist between steps, by row: {"parameters": ...,
    "gradients": 0, "optimizer": ...}. Buffers count as parameters."""
    own = [*run.model.parameters(), *run.model.buffers()]
    return {"parameters": tensor_bytes(own), "gradients": 0, "optimizer": tensor_bytes(state_tensors(run.optimizer))}


def process_peak_bytes() -> int:
    """Return the largest resident set size of this process so far, in bytes (VmHWM on Linux). On
    other systems, return its current resident set size."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss
