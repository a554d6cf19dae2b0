"""What a plan is predicted to cost: its memory, its time, and whether it fits.

`estimator.py` makes estimates. `search` ranks plans by them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tightfit.capabilities import missing_for_compile
from tightfit.cost.entries import PeakInstant
from tightfit.cost.ledger import Ledger
from tightfit.cost.pipeline_schedule import ScheduledAction
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.methods import float8, microbatch, precision
from tightfit.methods.compile import pays_to_compile
from tightfit.models.nf4 import element_count
from tightfit.plan import Plan
from tightfit.planner.intervals import Interval, interval_of
from tightfit.planner.operation_kinds import is_of_unknown_arithmetic
from tightfit.planner.time_model import Time
from tightfit.rules import needed_permissions
from tightfit.runtime.run_length import length_of
from tightfit.units import format_bytes, format_seconds

UNKNOWN_ARITHMETIC = (
    "the arithmetic of {} is unknown: only the bytes that it reads and writes are counted. "
    "torch.utils.flop_counter.register_flop_formula gives it a formula"
)
# safety margin for what no row predicts, as a share of the predicted bytes without the runtime row,
# which is known
MARGIN = 0.03


def workspace_bytes(architecture: str) -> int:
    """Return the bytes of the workspaces that cuBLAS and cuBLASLt (on ROCm: hipBLAS and hipBLASLt)
    use on one GPU.

    torch allocates them in its caching allocator at the first matrix product: two cuBLAS workspaces
    (one for the thread of forward, one for that of backward) and one of cuBLASLt.

    architecture  the GPU's architecture, such as "sm_90" or "gfx942"

    Source: torch's CublasHandlePool.cpp.
    """
    if architecture.startswith("gfx"):
        large = architecture.startswith(("gfx94", "gfx95"))
        return (2 * (128 if large else 32) + 76) * 2**20
    handle = 32 * 2**20 if architecture == "sm_90" else (2 * 4096 + 8 * 16) * 2**10
    return 2 * handle + 2**20


@dataclass(frozen=True, repr=False)
class Estimate:
    """What a plan costs on a machine, per device: bytes by row at the peak, and seconds per step. A
    row is a use of memory, such as "parameters", "activations" or "runtime".

    job, plan, machine  what is trained, how, and on which devices
    ledger              the ledger (buffers and operations of a step) of a device; in a pipeline, of
                        the rank with the highest peak
    peak                the instant of a step with the most memory: its phase and its bytes by row
    limit_bytes         device memory that the plan may use
    time                seconds of one step, by kind of work
    compile_s           seconds that torch.compile takes before the first step
    samples_per_s       throughput of all devices together
    tokens_per_s        the same in tokens; None if the job's samples are not counted in tokens
    dry_run_bytes       the peak that a dry run on fake tensors found, plus the bytes of the
                        estimate's runtime and allocator rows; None before the dry run
    includes_allocator  whether the peak includes what the allocator reserves beyond the tensors
    not_confirmed       why the dry run failed, so that the estimate is not confirmed; "" if no dry
                        run failed
    rejected_because    why a search rejected the plan; "" for the chosen plan
    notes               what the job's own code makes uncertain, and what the search found out, as
                        sentences
    untraceable         options with which the search could not trace the model, and why, such as
                        "compile: block: the model fails on fake tensors: ..."
    schedule            in a pipeline: when each rank runs each action; else empty
    host                bytes of one host's memory by purpose, summed over the processes of its
                        devices; on a CPU, without the memory that counts as device memory
    disk                bytes of files on a host by purpose: offloaded tensors, checkpoints
    limits              the bytes that may be used of "host memory" and of "disk"; a resource
                        without a limit has no entry
    """

    job: Job
    plan: Plan
    machine: Machine
    ledger: Ledger
    peak: PeakInstant
    limit_bytes: float
    time: Time
    compile_s: float
    samples_per_s: float
    tokens_per_s: float | None
    dry_run_bytes: float | None = None
    includes_allocator: bool = False
    not_confirmed: str = ""
    rejected_because: str = ""
    notes: tuple[str, ...] = ()
    untraceable: tuple[str, ...] = ()
    schedule: tuple[ScheduledAction, ...] = ()
    host: dict[str, float] = field(default_factory=dict)
    disk: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> float:
        """Device bytes at the peak of a step, or at the peak outside of steps (while the model is
        created or a checkpoint is saved), whichever is larger. The peak of a step is that of the
        dry run, if there was one."""
        step = self.peak.total if self.dry_run_bytes is None else max(self.dry_run_bytes, self.peak.rows["runtime"])
        return max(step, *self._outside_steps.values())

    @cached_property
    def _outside_steps(self) -> dict[str, float]:
        """The peak of each phase outside of steps: phase -> device bytes."""
        return self.ledger.peaks_outside_steps()

    @property
    def peak_phase(self) -> str:
        """The phase in which `peak_bytes` occurs: forward, backward, optimizer, materialize
        (creating the model) or checkpoint (saving one)."""
        outside = self._outside_steps
        name = max(outside, key=lambda phase: outside[phase])
        return name if outside[name] == self.peak_bytes else self.peak.phase

    @property
    def fits(self) -> bool:
        return not self.shortages()

    @property
    def fits_surely(self) -> bool:
        """Whether the plan fits even if it needs as much memory as the interval of its peak allows."""
        return self.fits and self.peak_range[1] <= self.limit_bytes

    @property
    def margin_bytes(self) -> float:
        """The safety margin: bytes of device memory that must stay free beside `peak_bytes`. They
        are 3 % of the peak without its runtime row, which is known and needs no margin."""
        return MARGIN * (self.peak_bytes - self.peak.rows["runtime"])

    def shortages(self) -> dict[str, tuple[float, float]]:
        """Return the resources that are too small for the plan, as a dict: name -> (needed bytes,
        available bytes). The dict is empty if the plan fits.

        The names are "memory" (of a device), "host memory" and "disk". "memory" is also listed if
        the peak fits but leaves less free than the safety margin. The needed bytes do not contain
        the margin.
        """
        found = {}
        if self.peak_bytes + self.margin_bytes > self.limit_bytes:
            found["memory"] = self.peak_bytes, self.limit_bytes
        for name, needed in (("host memory", self.host_bytes), ("disk", sum(self.disk.values()))):
            if name in self.limits and needed > self.limits[name]:
                found[name] = needed, self.limits[name]
        return found

    @property
    def fullness(self) -> float:
        """The largest ratio of needed to available bytes, of device memory (with the safety
        margin), host memory and disk. It is at most 1 if the plan fits."""
        needed = {"host memory": self.host_bytes, "disk": sum(self.disk.values())}
        shares = [(self.peak_bytes + self.margin_bytes) / self.limit_bytes]
        return max(shares + [needed[name] / limit for name, limit in self.limits.items()])

    @property
    def host_bytes(self) -> float:
        """Bytes of one host's memory that the plan needs. On a CPU, they include the peak of each
        device."""
        devices = self.machine.devices_per_node * self.peak_bytes if self.machine.device == "cpu" else 0.0
        return devices + sum(self.host.values())

    @property
    def total_s(self) -> float:
        """Seconds to finish the job: the compile time and all steps. A job whose number of steps is
        not known counts as 1,000 steps."""
        return self.compile_s + self.time.step_s * length_of(self.job).steps

    @property
    def step_interval(self) -> Interval:
        """How far measured step times of runs like this one were from their predictions."""
        return interval_of("time", self.machine, self.plan, self.tokens_per_s is not None)

    @property
    def memory_interval(self) -> Interval:
        """How far the measured memory of runs like this one was from its prediction."""
        return interval_of("memory", self.machine, self.plan, self.tokens_per_s is not None)

    @property
    def peak_range(self) -> tuple[float, float]:
        """The interval, in bytes of a device, that holds 9 of 10 measured peaks of runs like this
        one. The runtime row is known, and does not vary."""
        runtime = self.peak.rows["runtime"]
        low, high = self.memory_interval.around(self.peak_bytes - runtime)
        return low + runtime, high + runtime

    @property
    def changes_math(self) -> list[str]:
        """The permissions (words of the job's `allow`, such as "bf16") that the plan needs because
        it changes the job's mathematics. They are sorted. Offloading changes nothing."""
        return sorted(needed_permissions(self.plan) - {"offload"})

    @cached_property
    def phases(self) -> dict[str, float]:
        """The peak of each phase in device bytes: phase -> bytes. Evaluation is one of the
        phases."""
        return self.ledger.peaks()

    @cached_property
    def mfu(self) -> float | None:
        """MFU (model FLOPs utilization): the model FLOP/s divided by the device's published peak
        for dense matrices in the plan's precision. None if no peak is published.
        `Ledger.model_flops` says which FLOPs count."""
        return self._utilization(self.machine.peak(self.plan.precision))

    @cached_property
    def matrix_utilization(self) -> float | None:
        """The model FLOP/s divided by the FLOP/s that large matrix products achieve on the device
        in the plan's precision. None if that rate is unknown."""
        return self._utilization(self.machine.rate(self.plan.precision))

    def _utilization(self, flops_per_s: float | None) -> float | None:
        return self.ledger.model_flops() / self.time.step_s / flops_per_s if flops_per_s else None

    @cached_property
    def bytes_per_parameter(self) -> dict[str, float]:
        """The most bytes of parameters, of gradients and of optimizer states that a device holds in
        a step, each divided by the number of parameters in the ledger. Example for fp32 with AdamW:
        {"parameters": 4.0, "gradients": 4.0, "optimizer": 8.0}."""
        count = sum(element_count(parameter.name, parameter.shape) for parameter in self.ledger.parameters)
        rows = [rows for _, _, rows in self.ledger.instants()]
        return {name: max(row[name] for row in rows) / count for name in ("parameters", "gradients", "optimizer")}

    @property
    def workspace_bytes(self) -> int:
        """The bytes of cuBLAS workspaces; 0 on a CPU. They are part of the runtime row. Unlike the
        rest of this row, they appear in torch's memory statistics, because torch's caching
        allocator allocates them."""
        return 0 if self.machine.device == "cpu" else workspace_bytes(self.machine.architecture)

    @property
    def advice(self) -> list[str]:
        """Hints for the user, one line each.

        - Which model dimensions and micro-batches would fill the hardware's tiles. There is no such
          hint for plans with tensor parallelism, which shards the layers.
        - What the search found out: that the training depends on how a batch is split.
        - Which operations of the user's own have unknown arithmetic.
        - That the device has fast fp16, which the job does not allow, and no fast bf16.
        - What the machine lacks for torch.compile.
        - Which fields of the job have no effect, because its optimizer or schedule does not read them.
        - Which package is missing for float8, if the job allows float8.
        - Which options the search could not consider, because they cannot be predicted.
        """
        hints = [] if self.plan.tp > 1 else microbatch.advice(self.ledger, self.machine.device)
        hints += precision.advice(self.plan, self.job, self.machine)
        lacking = missing_for_compile(self.machine) if self.plan.compile == "none" and pays_to_compile(self.job) else ""
        if lacking:
            hints.append(f"compile is none: torch.compile needs {lacking}")
        if "float8" in self.job.allowed and self.plan.float8 == "none" and not float8.is_installed():
            hints.append("float8 is none: float8 needs the package torchao")
        hints += self.job.train.without_effect
        hints += self.all_notes
        return hints + [f"{option}. The search did not consider this option" for option in self.untraceable]

    @property
    def all_notes(self) -> list[str]:
        """`notes`, and a sentence for each operation of the user's own whose arithmetic is unknown."""
        timelines = {id(segment.timeline): segment.timeline for segment in self.ledger.training}
        operations = (operation for timeline in timelines.values() for operation in timeline.operations)
        unknown = sorted({operation.name for operation in operations if is_of_unknown_arithmetic(operation)})
        return [*self.notes, *(UNKNOWN_ARITHMETIC.format(name.replace(".", "::", 1)) for name in unknown)]

    def __repr__(self) -> str:
        """Return one line with the main figures: the ledger alone would fill pages."""
        verdict = "" if self.fits else " (does not fit)"
        figures = f"{format_bytes(self.peak_bytes)}{verdict}, {format_seconds(self.time.step_s)} a step"
        return f"Estimate({figures}, {self.plan})"

    def explain(self) -> str:
        """Return three or four lines of text: the plan, its memory by row at the peak, its time by
        kind of operation, and why it was rejected, if it was."""
        rows = sorted(self.peak.rows.items(), key=lambda row: -row[1])
        lines = [
            str(self.plan),
            f"memory  {format_bytes(self.peak_bytes)} of {format_bytes(self.limit_bytes)} in {self.peak_phase}: "
            + ", ".join(f"{row} {format_bytes(size)}" for row, size in rows if size),
            f"time    {format_seconds(self.time.step_s)} a step: "
            + ", ".join(f"{phase} {kind} {format_seconds(seconds)}" for phase, kind, seconds, _ in self.time.rows[:5]),
        ]
        if self.rejected_because:
            lines.append(f"not chosen: {self.rejected_because}")
        return "\n".join(lines)

    def content(self) -> dict[str, Any]:
        """Return the estimate as the dict that `tightfit explain --json` prints for a plan. Sizes
        are in bytes per device, except those of "host_memory" and "disk", which are per host. Times
        are in seconds."""
        time = self.time
        return {
            "plan": self.plan.content(),
            "fits": self.fits,
            "fits_surely": self.fits_surely,
            "not_confirmed": self.not_confirmed,
            "changes_math": self.changes_math,
            "bytes_per_parameter": self.bytes_per_parameter,
            "advice": self.advice,
            "notes": self.all_notes,
            "memory": {
                **{row: round(size) for row, size in self.peak.rows.items()},
                "peak": round(self.peak_bytes),
            },
            "host_memory": {**{row: round(size) for row, size in self.host.items()}, "peak": round(self.host_bytes)},
            "disk": {**{row: round(size) for row, size in self.disk.items()}, "peak": round(sum(self.disk.values()))},
            "phases": {phase: round(size) for phase, size in self.phases.items()},
            "time": {
                "compute_s": time.compute_s,
                "memory_s": time.memory_s + time.launch_s + time.optimizer_s + time.allocation_s,
                "communication_s": time.communication_s,
                "bubble_s": time.bubble_s,
                "input_s": time.input_s,
                "step_s": time.step_s,
                "compile_s": self.compile_s,
            },
            "intervals": {
                name: {"low": low, "high": high, "class": one.name, "runs": one.runs}
                for name, one, (low, high) in (
                    ("step_s", self.step_interval, self.step_interval.around(time.step_s)),
                    ("peak", self.memory_interval, self.peak_range),
                )
            },
            "tokens_per_s": self.tokens_per_s,
            "samples_per_s": self.samples_per_s,
            "mfu": self.mfu,
            "matrix_utilization": self.matrix_utilization,
            "workspace_bytes": self.workspace_bytes,
            "rejected_because": self.rejected_because,
        }


__all__ = ["MARGIN", "Estimate", "workspace_bytes"]
