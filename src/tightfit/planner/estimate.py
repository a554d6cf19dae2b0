"""Estimate: what a plan will cost, folded: every method's `cost` over the profiled ledger. Milliseconds, no tensors."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import psutil

from tightfit.capabilities import lacking_to_compile
from tightfit.entries import Peak, Sent
from tightfit.files import HELD, file_bytes
from tightfit.job import Job
from tightfit.ledger import Ledger
from tightfit.machine import Machine
from tightfit.methods import METHODS, float8, microbatch
from tightfit.methods.compile import pays_to_compile
from tightfit.plan import Plan
from tightfit.planner.deep import of_all_blocks
from tightfit.planner.heap import held_bytes
from tightfit.planner.profile import Profiler
from tightfit.planner.reserve import reserved_bytes
from tightfit.planner.thin import with_blocks
from tightfit.planner.time import WITHIN, Clock, Time
from tightfit.rules import needed_permissions
from tightfit.timetable import Slot
from tightfit.units import format_bytes, format_seconds

CONTEXT_BYTES = 500 * 2**20  # of a CUDA process beside its allocator: the context, and the kernels that torch loads
KERNELS_BYTES = 40 * 2**20  # that libraries of kernels take on a processor when they are first called
MARGIN = 0.03  # that is left free for what no row foresees: a share of what is predicted, not of what is there already
# Of a CUDA process in host memory: Python, torch and transformers 0.4 GiB (measured), the driver's libraries 1 (assumed).
HOST_PROCESS_BYTES = 1.4 * 2**30
STEPS = 1000  # of a job that does not say how long it trains


def workspace_bytes(architecture: str) -> int:
    """Bytes that torch gives to cuBLAS and cuBLASLt in its caching allocator, or to their likes of ROCm, from the first product
    on: to the former once for the thread of forward and once for that of backward. As in CublasHandlePool.cpp of torch."""
    if architecture.startswith("gfx"):
        large = architecture.startswith(("gfx94", "gfx95"))
        return (2 * (128 if large else 32) + 76) * 2**20
    handle = 32 * 2**20 if architecture == "sm_90" else (2 * 4096 + 8 * 16) * 2**10
    return 2 * handle + 2**20


@dataclass(frozen=True)
class Estimate:
    """What a plan costs on a machine: bytes by row at the largest instant, by phase, and seconds. Per device.

    limit_bytes       what the device may hold
    rehearsed         the peak that a rehearsal on fake tensors found, with the same runtime row; None until then
    settled           whether what the allocator takes beyond the tensors is in the peak
    not_confirmed     why the dry run failed, where it did: the figures are estimates, which nothing confirms
    host              bytes in the memory of one host, of all its devices' processes, by what they are for: on a processor, what
                      is there beside the devices'; disk: bytes of files, offloaded or of checkpoints
    limits            bytes that may be used, of what is limited: memory, host memory, disk
    slots             of a pipeline, which device does what when; the ledger is of the device that needs the most memory
    rejected_because  why a search passed it over; "" for the one that it chose
    """

    job: Job
    plan: Plan
    machine: Machine
    ledger: Ledger
    peak: Peak
    limit_bytes: float
    time: Time
    compile_s: float
    samples_per_s: float
    tokens_per_s: float | None
    rehearsed: float | None = None
    settled: bool = False
    not_confirmed: str = ""
    rejected_because: str = ""
    slots: tuple[Slot, ...] = ()
    host: dict[str, float] = field(default_factory=dict)
    disk: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> float:
        """At the largest instant of a step, or of what comes before and between steps where that takes more."""
        step = self.peak.total if self.rehearsed is None else max(self.rehearsed, self.peak.rows["runtime"])
        return max(step, *self.ledger.outside().values())

    @property
    def peak_phase(self) -> str:
        """The phase that the peak falls in: forward, backward, optimizer, materialize, checkpoint."""
        outside = self.ledger.outside()
        name = max(outside, key=lambda phase: outside[phase])
        return name if outside[name] == self.peak_bytes else self.peak.phase

    @property
    def fits(self) -> bool:
        return not self.lacks()

    @property
    def margin_bytes(self) -> float:
        """Device memory that is kept free beside the peak."""
        return MARGIN * (self.peak_bytes - self.peak.rows["runtime"])

    def lacks(self) -> dict[str, tuple[float, float]]:
        """Of what is too small, by name, the bytes that are needed and those that are there: memory, host memory, disk."""
        found = {}
        if self.peak_bytes + self.margin_bytes > self.limit_bytes:
            found["memory"] = self.peak_bytes, self.limit_bytes
        for name, needed in (("host memory", self.host_bytes), ("disk", sum(self.disk.values()))):
            if name in self.limits and needed > self.limits[name]:
                found[name] = needed, self.limits[name]
        return found

    @property
    def fullness(self) -> float:
        """The largest share of what is there that is needed, of memory, host memory and disk: at most 1 where the plan fits."""
        needed = {"host memory": self.host_bytes, "disk": sum(self.disk.values())}
        shares = [(self.peak_bytes + self.margin_bytes) / self.limit_bytes]
        return max(shares + [needed[name] / limit for name, limit in self.limits.items()])

    @property
    def host_bytes(self) -> float:
        """In the memory of one host; on a processor that of its devices and what is beside them."""
        devices = self.machine.devices_per_node * self.peak_bytes if self.machine.device == "cpu" else 0.0
        return devices + sum(self.host.values())

    @property
    def total_s(self) -> float:
        """Seconds to finish the job, compiling included; of 1,000 steps where it does not say how many."""
        return self.compile_s + self.time.step_s * (self.job.train.steps or STEPS)

    @property
    def changes_math(self) -> list[str]:
        return sorted(needed_permissions(self.plan))

    @cached_property
    def phases(self) -> dict[str, float]:
        """Device bytes at the largest instant of each phase, evaluation among them."""
        return self.ledger.peaks()

    @cached_property
    def mfu(self) -> float | None:
        """Model FLOP/s over the device's published dense peak; None where none is published. See `Ledger.model_flops`."""
        return self._share_of(self.machine.peak(self.plan.precision))

    @cached_property
    def matrix_utilization(self) -> float | None:
        """Model FLOP/s over the rate that the device's large matrix products achieve; None where that is unknown."""
        return self._share_of(self.machine.rate(self.plan.precision))

    def _share_of(self, flops_per_s: float | None) -> float | None:
        return self.ledger.model_flops() / self.time.step_s / flops_per_s if flops_per_s else None

    @cached_property
    def bytes_per_parameter(self) -> dict[str, float]:
        """Of the model's states, by row: the most of each that a device holds in a step, over the parameters that it works on."""
        count = sum(parameter.count for parameter in self.ledger.parameters)
        rows = [rows for _, _, rows in self.ledger.instants()]
        return {name: max(one[name] for one in rows) / count for name in ("parameters", "gradients", "optimizer")}

    @property
    def workspace_bytes(self) -> int:
        """Of `runtime`, what torch's allocator counts among a device's tensors: 0 on a processor."""
        return 0 if self.machine.device == "cpu" else workspace_bytes(self.machine.architecture)

    @property
    def advice(self) -> list[str]:
        """Sizes of the model, where devices have its layers whole, and of micro-batches that would fill the hardware's tiles; and
        what this machine lacks to compile, or to multiply in 8 bits as the job allows."""
        said = [] if self.plan.tp > 1 else microbatch.advice(self.ledger, self.machine.device)
        lacking = lacking_to_compile(self.machine) if self.plan.compile == "none" and pays_to_compile(self.job) else ""
        if lacking:
            said.append(f"compile is none: torch.compile needs {lacking}")
        if "float8" in self.job.allowed and self.plan.float8 == "none" and not float8.is_installed():
            said.append("float8 is none: it needs the package torchao")
        return said

    def explain(self) -> str:
        """The plan, its memory by row at the largest instant, and its time by kind of operation, as text."""
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
        """As `tightfit explain --json` prints it: bytes and seconds, per device."""
        time = self.time
        return {
            "plan": self.plan.content(),
            "fits": self.fits,
            "not_confirmed": self.not_confirmed,
            "changes_math": self.changes_math,
            "bytes_per_parameter": self.bytes_per_parameter,
            "advice": self.advice,
            "memory": {**{row: round(size) for row, size in self.peak.rows.items()}, "peak": round(self.peak_bytes)},
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
            "tokens_per_s": self.tokens_per_s,
            "samples_per_s": self.samples_per_s,
            "mfu": self.mfu,
            "matrix_utilization": self.matrix_utilization,
            "workspace_bytes": self.workspace_bytes,
            "rejected_because": self.rejected_because,
        }


def fold(profiler: Profiler, plan: Plan, machine: Machine, device: int = 0) -> Ledger:
    """The ledger of a plan: the profiled one, edited by the cost of each method that the plan wants. device: which one of a
    pipeline's it is of."""
    return folded(replace(profiler.ledger(plan), device=device), plan, machine)


def folded(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """A first ledger, edited by the cost of each method that the plan wants."""
    for method in METHODS:
        if method.wanted(plan):
            ledger = method.cost(ledger, plan, machine)
    return ledger


class Estimator:
    """Estimates of one job on one machine; what was traced for one plan serves the others."""

    def __init__(self, job: Job, machine: Machine) -> None:
        self.job, self.machine = job, machine
        self.profiler, self.clock = Profiler(job, machine.device), Clock(machine)
        self.limit_bytes = job.limits.memory or machine.memory_bytes.value
        self.runtime_bytes = (
            psutil.Process().memory_info().rss
            if machine.device == "cpu"
            else CONTEXT_BYTES + workspace_bytes(machine.architecture)
        )

    def estimate(self, plan: Plan) -> Estimate:
        """What `plan` costs. Raises InputError for a model that cannot be traced."""
        ledgers = self._ledgers(plan)
        time, slots = self._time(plan, ledgers)
        peaks = {device: ledger.peak() for device, ledger in ledgers.items()}
        worst = max(peaks, key=lambda device: peaks[device].total)
        ledger, batch = ledgers[worst], self.job.train.batch
        per_sample = self.profiler.tokens / self.profiler.samples
        language = self.profiler.unit == "tokens"
        return Estimate(
            job=self.job,
            plan=plan,
            machine=self.machine,
            ledger=ledger,
            peak=peaks[worst],
            slots=tuple(slots),
            limit_bytes=self.limit_bytes,
            host=self._host(plan, ledger),
            disk=self._disk(plan, ledger),
            limits=self._limits(),
            time=time,
            compile_s=ledger.compile_s,
            samples_per_s=batch / time.step_s,
            tokens_per_s=batch * per_sample / time.step_s if language else None,
        )

    def of(self, job: Job, machine: Machine) -> Estimator:
        """The estimator of a job or a machine that differs in nothing a trace sees: permissions, limits, how many devices there
        are."""
        other = copy.copy(self)
        other.job, other.machine, other.clock = job, machine, Clock(machine)
        other.limit_bytes = job.limits.memory or machine.memory_bytes.value
        return other

    def peak_with_blocks(self, plan: Plan, count: int) -> float:
        """Bytes at the largest instant of a step of the model with only so many of its blocks, of tensors alone."""
        return folded(with_blocks(self.profiler.ledger(plan), count), plan, self.machine).peak().total

    def least_step_s(self, plan: Plan) -> float:
        """Seconds of a step that no plan which cuts the model as this one can beat: replicas say nothing to each other, and share
        the update; nothing is lost on launches and on the beginnings of messages, of which larger micro-batches have fewer."""
        ledgers = {
            device: replace(
                ledger, messages=tuple(replace(one, latency_s=0.0) for one in ledger.messages if one.name == WITHIN)
            )
            for device, ledger in self._ledgers(plan).items()
        }
        time = self._time(plan, ledgers)[0]
        return time.step_s - time.launch_s - time.optimizer_s * (1 - 1 / plan.data_parallel)

    def _ledgers(self, plan: Plan) -> dict[int, Ledger]:
        """Of a pipeline, by device."""
        ledgers = {}
        for device in _looked_at(plan.pp):
            ledger = fold(self.profiler, plan, self.machine, device)
            fixed = {**ledger.fixed, "runtime": float(self.runtime_bytes)}
            ledgers[device] = replace(ledger, fixed=fixed, saving=self._held(plan))
        return ledgers

    def _time(self, plan: Plan, ledgers: dict[int, Ledger]) -> tuple[Time, list[Slot]]:
        if plan.pp > 1:
            return self.clock.pipeline_time(ledgers)
        return self.clock.step_time(ledgers[0]), []

    def _limits(self) -> dict[str, float]:
        """What is limited: by the job, or by a host that is there; how much memory a host has that is not is a guess."""
        limits, host = self.job.limits, self.machine.host_memory_bytes
        found = {
            "host memory": limits.host_memory or (host.value if host.source != "published" else None),
            "disk": limits.disk,
        }
        return {name: float(size) for name, size in found.items() if size}

    def _host(self, plan: Plan, ledger: Ledger) -> dict[str, float]:
        """In the memory of a host, of all processes on it: while it trains, and the most of what comes before or between."""
        processes = min(self.machine.devices_per_node, plan.devices)
        rows = {name: processes * size for name, size in ledger.host.items() if size}
        if self.machine.device == "cpu":
            return rows
        rows = {"processes": processes * HOST_PROCESS_BYTES, **rows}
        passing = {name: processes * size for name, size in ledger.passing.items()}
        passing["checkpoint"] = min(sum(self._saved(plan)), processes * ledger.saving)
        most = max(passing, key=lambda name: passing[name])
        return {**rows, most: passing[most]}

    def _disk(self, plan: Plan, ledger: Ledger) -> dict[str, float]:
        """Of files on a host: what is offloaded, and checkpoints, of which one more than is kept is there while it is written."""
        processes = min(self.machine.devices_per_node, plan.devices)
        rows = {name: processes * size for name, size in ledger.disk.items()}
        return {**rows, "checkpoints": (self.job.train.keep_checkpoints + 1) * sum(self._saved(plan))}

    def _saved(self, plan: Plan) -> tuple[float, float]:
        """Bytes of the whole model and of its optimizer's states in a checkpoint; none where the job saves none."""
        if self.job.train.checkpoint_every == "never":
            return 0.0, 0.0
        parameters = sum(parameter.bytes for parameter in self.profiler.parameters(plan)) * plan.tp
        return parameters, sum(update.state_bytes for update in self.profiler.updates(plan).values()) * plan.tp

    def _held(self, plan: Plan) -> float:
        """Bytes of a checkpoint's files that a process holds while it writes them: on a processor only what was divided."""
        parameters, states = self._saved(plan)
        copied = (
            parameters * (self.machine.device != "cpu" or plan.zero == 3 or plan.tp > 1),
            states * (self.machine.device != "cpu" or plan.zero > 0 or plan.tp > 1),
        )
        return min(sum(copied), HELD * file_bytes(max(copied) / plan.pp, plan.devices // plan.pp))

    def least_bytes(self, plan: Plan) -> float:
        """Bytes that any micro-batch and any recomputation needs: the weights, their states, and gradients."""
        after = plan.replace(update_in_backward=False)  # which makes the same states
        updates, parameters = self.profiler.updates(after), self.profiler.parameters(plan)
        gradients = [parameter.bytes for parameter in parameters if parameter.trainable]
        states = sum(update.state_bytes for update in updates.values()) / (plan.shards if plan.zero >= 1 else 1)
        there = float(max(gradients, default=0) if plan.update_in_backward else sum(gradients))
        weights = sum(parameter.bytes for parameter in parameters) / (plan.shards if plan.zero >= 3 else 1)
        states, weights, there = (
            0.0 if row in plan.offload else size
            for row, size in (("states", states), ("parameters", weights), ("gradients", there))
        )
        whole = weights + states + there / (plan.shards if plan.zero >= 2 else 1)
        return self.runtime_bytes + whole / plan.pp

    @cached_property
    def _runtime_at_last(self) -> float:
        """Bytes of the `runtime` row on a processor, once plans were traced; the same for all that are compared."""
        return float(max(self.runtime_bytes, psutil.Process().memory_info().rss) + KERNELS_BYTES)

    def settle(self, estimate: Estimate) -> Estimate:
        """The estimate with what is known late, or takes too long to ask of every plan: what the allocator takes beyond the
        tensors and, of a process that has traced and will train, what it holds by now."""
        if estimate.settled:
            return estimate
        peak, ledger, on_cpu = estimate.peak, estimate.ledger, self.machine.device == "cpu"
        if ledger.gathered is not None:  # the allocator's model follows whole gradients: here each leaves as it is made
            ledger = replace(ledger, gathered=None, sent=Sent(1, 1.0, always=True))
        tensors = (
            ledger.peak().total - sum(ledger.fixed.values()) if ledger.messages else peak.total - peak.rows["runtime"]
        )
        on_device = partial(reserved_bytes, expandable=estimate.plan.allocator == "tuned")
        taken = of_all_blocks(ledger, held_bytes if on_cpu else on_device)
        if ledger.sent is not None and any(message.at_start for message in ledger.messages):
            taken += ledger.sent.coming  # of a stream of its own, whose memory the allocator keeps for it
        rows = {**peak.rows, "allocator": max(taken - tensors, 0.0)}
        if on_cpu:
            rows["runtime"] = self._runtime_at_last
        total = peak.total + sum(rows[row] - peak.rows[row] for row in ("allocator", "runtime"))
        return replace(estimate, peak=replace(peak, total=total, rows=rows), settled=True)


def _looked_at(devices: int) -> list[int]:
    """Which devices of a pipeline are folded: in a long one those in the middle are alike."""
    return [device for device in range(devices) if devices <= 4 or device in (0, 1, devices // 2, devices - 1)]


def estimate(job: Job, plan: Plan, machine: Machine | None = None) -> Estimate:
    """What `plan` will cost the job on a machine (this one if left out), before anything is allocated.

    Raises InputError for a model that cannot be traced, with the way out.
    """
    estimator = Estimator(job, machine or Machine.detect())
    return estimator.settle(estimator.estimate(plan))


__all__ = ["Estimate", "Estimator", "estimate", "fold", "workspace_bytes"]
