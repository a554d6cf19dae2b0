"""Measures the peak memory of one training step by row: parameters, gradients, optimizer,
activations, temporaries.

- Without torch.compile, the storages of live tensors are added up by row. On CUDA, the total is
that
  of the caching allocator.
- With torch.compile, the storages inside a compiled region are not visible. The total then comes
  from the profiler's memory events (CPU) or from the caching allocator (CUDA), and its rows are
  estimated.

Only one step is sampled, because sampling takes time. In a pipeline without flush (pipedream) a few
consecutive steps are sampled.
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
from tightfit.models.objective import Batch
from tightfit.models.tensors import tensors_in
from tightfit.planner.tracing.live_storages import Peak, RunTracker, state_tensors
from tightfit.planner.tracing.storages import tensor_bytes
from tightfit.runtime.run import Run

Result = TypeVar("Result")
Take = Callable[[Run], Result]

_FORWARD = "tightfit: forward"  # name of the profiler event that spans a forward


class MemorySample:
    """Samples the peak memory of one step, or of several consecutive steps in a pipeline without
    flush (pipedream).

    A step of such a pipeline begins with activations and weight versions of earlier steps. So
    enough steps are sampled that everything in memory at the end was allocated during the sampled
    steps.

    steps  number of sampled steps
    peak   peak over the sampled steps; None before the last of them has run (compiled: the peak of
           the latest sampled step)
    """

    def __init__(self, run: Run) -> None:
        self.steps = 1 + 2 * (run.executor.loss_delay if run.executor is not None else 0)
        self.peak: Peak | None = None
        self._taken = 0
        self._beside = 0  # bytes of earlier steps' tensors in memory when a step begins
        self._tracking = RunTracker(run) if run.plan.compile == "none" else None

    def take(self, run: Run, micro_batches: list[Batch], step: int) -> Step:
        """Run one training step and sample its memory. The optimizer states must have been
        allocated before the first sampled step."""
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
    """Run one step and return its result and its peak memory. For a pipeline without flush
    (pipedream) use `MemorySample`, which samples several steps."""
    sample = MemorySample(run)
    sample.steps = 1
    result = sample.take(run, micro_batches, step)
    assert sample.peak is not None
    return result, sample.peak


def _with_total(peak: Peak, total: int) -> Peak:
    """Return the peak with the caching allocator's total. The bytes by which this total exceeds the
    tensors' storages (rounding, workspaces) are added to the temporaries."""
    beyond = max(total - peak.total, 0)
    return replace(
        peak, total=peak.total + beyond, rows={**peak.rows, "temporaries": peak.rows["temporaries"] + beyond}
    )


def _begins_with(run: Run, micro_batches: list[Batch]) -> int:
    """Bytes of parameters, buffers, optimizer states and the step's data: all that is in memory
    when a step begins, except tensors that earlier steps left in flight."""
    return sum(_model_states(run).values()) + tensor_bytes(tensors_in(micro_batches))


def profiled(run: Run, micro_batches: list[Batch], take: Take[Result], beside: int = 0) -> tuple[Result, Peak]:
    """Run a step on a CPU and find its peak memory from the profiler's memory events.

    Each event changes the total, which begins with `_begins_with` plus `beside`.

    take    runs the step with the run that it gets, and returns the step's result
    beside  bytes of tensors that earlier steps left in flight

    Returns the result of `take` and the peak.
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
    """Return (time in ns, phase that begins then) from the profiler's events, in order of time.

    optimizer: name of the optimizer's class, which is part of the event that torch adds for its
    step.
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
    """Context manager: the profiler prints no lines when it starts and stops.

    torch reads this setting once, at the first profile of a process.
    """
    switch = "KINETO_LOG_LEVEL"
    before = os.environ.get(switch)
    os.environ.setdefault(switch, "6")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(switch)


def by_phase(run: Run, take: Take[Result]) -> tuple[Result, Peak]:
    """Run a step on CUDA and find its peak memory from the caching allocator's peak in each
    forward, each backward and the update. `take` is as in `profiled`."""
    timeline: list[tuple[str, int]] = []

    def mark(phase: str) -> None:
        """Record the peak of `phase`, which ends now, and reset the allocator's peak."""
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
    """Find the peak in a timeline of total bytes, and divide it into rows.

    timeline: (phase, total bytes) in order. Parameters and optimizer states are counted from the
    run's tensors, and all other bytes count as activations.

    During the first backward, gradients grow while activations shrink, and the totals do not tell
    them apart. So gradients count as activations until all gradients of a micro-batch are complete.
    """
    position = max(range(len(timeline)), key=lambda index: timeline[index][1])
    phase, total = timeline[position]
    passed = [name for name, _ in groupby(name for name, _ in timeline[: position + 1])]
    complete = passed.count("backward") > (phase == "backward") and not run.plan.update_in_backward
    rows = _model_states(run)
    gradients = tensor_bytes(p for p in run.model.parameters() if p.requires_grad) if complete else 0
    rows["gradients"] = min(gradients, total - sum(rows.values()))
    return Peak(total, {**rows, "activations": total - sum(rows.values()), "temporaries": 0}, phase, timeline)


def _model_states(run: Run) -> dict[str, int]:
    """Bytes of parameters, buffers and optimizer states, by row."""
    own = [*run.model.parameters(), *run.model.buffers()]
    return {"parameters": tensor_bytes(own), "gradients": 0, "optimizer": tensor_bytes(state_tensors(run.optimizer))}


def process_peak_bytes() -> int:
    """Return the largest resident set size of this process so far, in bytes. If the system does not
    record it (only Linux does, as VmHWM), return the current resident set size."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss
