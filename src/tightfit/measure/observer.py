"""Observer: measures the steps of a training run and summarizes the measurements in a Record."""

from __future__ import annotations

import json
import math
import statistics
from bisect import insort
from dataclasses import replace

import torch
import torch.distributed as dist

from tightfit.cost.entries import passes_of
from tightfit.data import describe_tokenizer
from tightfit.engine.step import Step, take_step
from tightfit.machine import Machine
from tightfit.measure.flops import forward_flops, matrix_utilization, mfu
from tightfit.measure.kernels import AttentionCalls
from tightfit.measure.memory import MemorySample, process_peak_bytes
from tightfit.models.batches import Batch, sample_count
from tightfit.planner.tracing.live_storages import Peak
from tightfit.record import PeakBytes, Record, code_version
from tightfit.runtime.run import DummyMicroBatch, Run, parameter_count

SAMPLED = 2  # index, from 0, of the run's first step whose memory is sampled; later steps are timed


class Observer:
    """Collects the measurements of a training run. Pass `take` to `train` as the function that runs
    a step, and call `add` with each result.

    The first step may compile, the second allocates the optimizer states, and the third is sampled
    for memory. Timing begins after the sampled step, so that timed steps do not include these
    costs.

    start  number of the run's first step: above 0 after a resume
    """

    def __init__(self, run: Run, start: int) -> None:
        self.run, self.start = run, start
        self.steps: list[Step] = []
        self._speeds: list[float] = []  # items per second of the timed steps, sorted, so that the median is cheap
        self._seconds: list[float] = []
        self.sample: MemorySample | None = None
        self.flops_per_step: float | None = None
        self.attention: str | None = None

    def take(self, run: Run, micro_batches: list[Batch], step: int) -> Step:
        """Run a training step, and return its results. If it is the step to sample, also measure
        its memory, count its FLOPs and find out which attention kernel it uses.

        micro_batches  this device's samples of the step, on the host
        step           number of the step, from 0
        """
        if self.sample is None and step - self.start == SAMPLED and micro_batches:
            self.sample = MemorySample(run)
        if self.sample is None or self.sample.ended:
            return take_step(run, micro_batches, step)
        result = self.sample.take(run, micro_batches, step)
        if not self.sample.ended:
            return result
        calls = AttentionCalls()
        with calls:
            flops = None if isinstance(micro_batches[0], DummyMicroBatch) else forward_flops(run, micro_batches[0])
        self.attention = calls.kernel(run)
        if flops is not None:
            weights = [(parameter.numel(), parameter.requires_grad) for parameter in run.model.parameters()]
            passes = passes_of(sum(count for count, trained in weights if trained), sum(count for count, _ in weights))
            self.flops_per_step = passes * flops * run.job.train.batch / sample_count(micro_batches[0])
        return result

    def add(self, step: Step) -> None:
        """Add the results of a finished step to the measurements. The device may still be computing
        them; they are not read here."""
        self.steps.append(step)

    def _order(self) -> None:
        """Insert the speeds and the seconds of the timed steps since the last call into sorted
        lists, from which medians are read."""
        for step in self.steps[self.timed_from + len(self._seconds) :]:
            insort(self._speeds, self.items(step) / step.seconds)
            insort(self._seconds, step.seconds)

    @property
    def peak(self) -> Peak | None:
        return self.sample.peak if self.sample is not None else None

    @property
    def timed_from(self) -> int:
        """The number of steps of this run before the first timed step."""
        return SAMPLED + (self.sample.steps if self.sample is not None else 1)

    @property
    def timed(self) -> list[Step]:
        return self.steps[self.timed_from :]

    @property
    def unit(self) -> str:
        """The unit of throughput: "tokens" for a language model, else "samples"."""
        return self.run.objective.unit

    def items(self, step: Step) -> int:
        return step.processed if self.unit == "tokens" else step.samples

    def speed(self, latest: Step) -> float:
        """Return the tokens or samples per second (see `unit`): the median of the timed steps so
        far, or the speed of `latest` if no step was timed yet."""
        self._order()
        return _middle(self._speeds) if self._speeds else self.items(latest) / latest.seconds

    def step_s(self, latest: Step) -> float:
        """Return how many seconds a step is expected to take: the median of the timed steps so far,
        or the seconds of `latest` if no step was timed yet."""
        self._order()
        return _middle(self._seconds) if self._seconds else latest.seconds

    def peak_bytes(self) -> int | None:
        """Return the largest number of bytes that tensors have used so far on this device. On a
        CPU, only one step is sampled for memory: return its peak, or None before that step."""
        if self.run.device.type == "cuda":
            counters = torch.cuda.memory_stats_as_nested_dict(
                self.run.device
            )  # called each step: flattening it would cost time
            peak: int = counters["allocated_bytes"]["all"]["peak"]
            return peak
        return self.peak.total if self.peak else None

    def _largest_peak(self) -> Peak | None:
        """Return the peak of the device whose peak is the largest, because predictions are for that
        device. Return None if no device has sampled a step. All ranks must call this method."""
        if self.run.mesh is None:
            return self.peak
        everyones: list[Peak | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, self.peak and replace(self.peak, timeline=[]))
        return max((peak for peak in everyones if peak is not None), key=lambda peak: peak.total, default=None)

    def record(self, machine: Machine) -> Record:
        """Return the Record of the training so far: the job, the plan, the machine, and all
        measurements. All ranks must call this method."""
        run, timed, peak = self.run, self.timed, self._largest_peak()
        median_s = statistics.median(step.seconds for step in timed) if timed else None
        items_per_s = statistics.median(self.items(step) / step.seconds for step in timed) if timed else None
        samples_per_s = statistics.median(step.samples / step.seconds for step in timed) if timed else None
        utilization = self.flops_per_step, median_s, machine, run.plan.precision, run.plan.devices
        return Record(
            job=json.loads(run.job.to_json()),
            plan=run.plan,
            machine=machine,
            code=code_version(),
            step_s=[step.seconds for step in timed],
            tokens_per_s=items_per_s if self.unit == "tokens" else None,
            samples_per_s=samples_per_s,
            peak_bytes=PeakBytes(
                measured=peak.total if peak else None,
                reserved=torch.cuda.max_memory_reserved(run.device) if run.device.type == "cuda" else None,
                process=process_peak_bytes(),
                rows=peak.rows if peak else {},
            ),
            mfu=mfu(*utilization),
            matrix_utilization=matrix_utilization(*utilization),
            compile_s=self._compile_s(median_s),
            loss=[(step.step + 1, step.loss if math.isfinite(step.loss) else None) for step in self.steps],
            skipped_steps=sum(step.skipped for step in self.steps),
            damaged_samples=run.data.damaged,
            parameters=parameter_count(run),
            attention=self.attention,
            tokenizer=describe_tokenizer(run.job),
        )

    def _compile_s(self, median_s: float | None) -> float | None:
        """Return the seconds of compilation, estimated as the first step's time minus the median
        step's time. Return None if the plan does not compile or if no step was timed.

        median_s  median seconds of the timed steps; None if no step was timed
        """
        if self.run.plan.compile == "none" or not self.steps or median_s is None:
            return None
        return max(self.steps[0].seconds - median_s, 0.0)


def _middle(ordered: list[float]) -> float:
    """Return the median of a sorted list."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
