"""Peak memory of one step by row: parameters, gradients, optimizer, activations, temporaries.

On CPU the bytes are those of the storages of live tensors; on CUDA the allocator counts, and the storages say how its
total divides. Inside a compiled region storages are not seen: the total is then that of the allocator's own events.
Either way one step is sampled (of a pipeline that never drains a few) and the others run untouched; the process's resident set
stands beside.
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
from tightfit.methods.run import Run
from tightfit.models.objective import Batch
from tightfit.planner.storages import Peak, Tracking, state_tensors, tensor_bytes, tensors_in

Result = TypeVar("Result")
Take = Callable[[Run], Result]

_FORWARD = "tightfit: forward"  # what marks a forward among the profiler's events


class Sample:
    """Looks into the memory of steps in a row: of one, or of a pipeline that never drains of as many as it takes until all that
    is under way, and the weights that this began with, were seen to begin.

    steps   how many; peak: of them, once they were taken
    """

    def __init__(self, run: Run) -> None:
        self.steps = 1 + 2 * (run.stages.delay if run.stages is not None else 0)
        self.peak: Peak | None = None
        self._taken = 0
        self._beside = 0  # bytes that are under way when a step begins
        self._tracking = Tracking(run) if run.plan.compile == "none" else None

    def take(self, run: Run, micro_batches: list[Batch], step: int) -> Step:
        """Take a step (a real one), and see its memory. Take the first of them when the optimizer's states exist."""
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
    """Take one step and see the peak of its memory: see `Sample`, for a pipeline that never drains."""
    sample = Sample(run)
    sample.steps = 1
    result = sample.take(run, micro_batches, step)
    assert sample.peak is not None
    return result, sample.peak


def _with_total(peak: Peak, total: int) -> Peak:
    """The peak with the allocator's total: what it holds beyond storages (rounding, workspaces) is temporary."""
    beyond = max(total - peak.total, 0)
    return replace(
        peak, total=peak.total + beyond, rows={**peak.rows, "temporaries": peak.rows["temporaries"] + beyond}
    )


def _begins_with(run: Run, micro_batches: list[Batch]) -> int:
    """Bytes alive when a step begins, but for what an earlier one left under way."""
    return sum(_model_states(run).values()) + tensor_bytes(tensors_in(micro_batches))


def profiled(run: Run, micro_batches: list[Batch], take: Take[Result], beside: int = 0) -> tuple[Result, Peak]:
    """On CPU: the allocator's events of a step, added to the bytes alive when it began. beside: those of earlier steps."""

    def forward(batch: Batch) -> Tensor:
        with record_function(_FORWARD):
            return run.loss_sum(batch)

    total = _begins_with(run, micro_batches) + beside
    # acc_events, or torch 2.11 warns of cycles, of which there is one
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
    """(when, the phase that began) among the profiler's events; torch itself marks the optimizer's step."""
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
    """The profiler's own switch against the lines that it writes to the terminal when it starts and stops."""
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
        """What ends here was of `phase`."""
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
    """The peak of a timeline of totals, by row as far as is known: model states are counted, activations are the rest.

    While the first backward runs, gradients come and activations go, and nobody sees which: they are counted among
    the activations until all are there.
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
    """Bytes of what lives from step to step, by row."""
    own = [*run.model.parameters(), *run.model.buffers()]
    return {"parameters": tensor_bytes(own), "gradients": 0, "optimizer": tensor_bytes(state_tensors(run.optimizer))}


def process_peak_bytes() -> int:
    """The largest resident set this process has had, in bytes (Linux: VmHWM), else the present one."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss
