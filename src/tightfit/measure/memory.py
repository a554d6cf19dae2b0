"""Measures the peak memory of one step by row: parameters, gradients, optimizer, activations,
temporaries.

On CPU it adds up the storages of live tensors. On CUDA the allocator gives the total, and the
storages give its rows. Inside a compiled region storages are not visible, so the total is that of
the allocator's events. Only one step is sampled (a few in a pipeline that never drains); the others
run unobserved.
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

_FORWARD = "tightfit: forward"  # marks a forward among the profiler's events


class MemorySample:
    """Samples the memory of one step, or of several consecutive steps of a pipeline that never
    drains.

    There it takes as many steps as are needed to see the allocation of everything that is in
    flight, including the weight versions that it began with.

    steps  number of sampled steps
    peak   their peak; None before they have run
    """

    def __init__(self, run: Run) -> None:
        self.steps = 1 + 2 * (run.executor.loss_delay if run.executor is not None else 0)
        self.peak: Peak | None = None
        self._taken = 0
        self._beside = 0  # bytes in flight when a step begins
        self._tracking = RunTracker(run) if run.plan.compile == "none" else None

    def take(self, run: Run, micro_batches: list[Batch], step: int) -> Step:
        """Run a real step and sample its memory. The optimizer's states must exist before the first
        one."""
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
    """Run one step and sample the peak of its memory. For a pipeline that never drains use
    `Sample`."""
    sample = MemorySample(run)
    sample.steps = 1
    result = sample.take(run, micro_batches, step)
    assert sample.peak is not None
    return result, sample.peak


def _with_total(peak: Peak, total: int) -> Peak:
    """The peak with the allocator's total. Its excess over the storages (rounding, workspaces)
    counts as temporaries."""
    beyond = max(total - peak.total, 0)
    return replace(
        peak, total=peak.total + beyond, rows={**peak.rows, "temporaries": peak.rows["temporaries"] + beyond}
    )


def _begins_with(run: Run, micro_batches: list[Batch]) -> int:
    """Bytes that are alive when a step begins, without those in flight from earlier steps."""
    return sum(_model_states(run).values()) + tensor_bytes(tensors_in(micro_batches))


def profiled(run: Run, micro_batches: list[Batch], take: Take[Result], beside: int = 0) -> tuple[Result, Peak]:
    """On CPU: the peak from the allocator's events, added to the bytes that were alive at the
    step's begin.

    beside  bytes in flight from earlier steps
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
    """(time in ns, the phase that begins) from the profiler's events; torch marks the optimizer's
    step."""
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
    """Within, the profiler does not print lines when it starts and stops.

    The first profile of a process decides for all later ones.
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
    """On CUDA: the allocator's peak in each forward, each backward and the update."""
    timeline: list[tuple[str, int]] = []

    def mark(phase: str) -> None:
        """Here `phase` ends."""
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
    """The peak of a timeline of totals, by row as far as known: model states are counted, the rest
    is activations.

    During the first backward gradients grow while activations shrink, and the totals do not show
    which is which. Gradients count as activations until all are complete.
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
    """Bytes that live from step to step, by row."""
    own = [*run.model.parameters(), *run.model.buffers()]
    return {"parameters": tensor_bytes(own), "gradients": 0, "optimizer": tensor_bytes(state_tensors(run.optimizer))}


def process_peak_bytes() -> int:
    """This process's largest resident set so far, in bytes (Linux: VmHWM); elsewhere the current
    one."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss
