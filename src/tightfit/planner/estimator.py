"""Estimate what a plan costs in memory and time, without allocating a tensor.

The estimate starts from the ledger that the profiler traced for the model: a list of buffers in
bytes and of operations in FLOPs and bytes. Every method that the plan enables then edits this
ledger with its `cost` function. Once the model is traced, an estimate takes milliseconds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import psutil

from tightfit.calibration.this_machine import measured_machine_of
from tightfit.cost.entries import BucketedReduction, Parameter, with_fp32_gradients
from tightfit.cost.fewer_blocks import with_depth
from tightfit.cost.ledger import Ledger
from tightfit.cost.pipeline_schedule import ScheduledAction
from tightfit.cost.remembered import remembered
from tightfit.distributed.nccl import communicator_bytes
from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.methods import METHODS, recompute
from tightfit.parallel.fsdp.planning import least_unsharded_bytes
from tightfit.plan import Plan, plan_of
from tightfit.planner.allocators.cuda import reserved_bytes
from tightfit.planner.allocators.deep_models import extrapolate_layers
from tightfit.planner.allocators.glibc import peak_heap_bytes
from tightfit.planner.estimate import Estimate, workspace_bytes
from tightfit.planner.model_convolutions import measure_model
from tightfit.planner.time_model import Time, TimeModel
from tightfit.planner.tracing.profiler import Profiler
from tightfit.rules import check
from tightfit.tensor_files import FILES_IN_MEMORY, file_bytes

# device memory of a CUDA process outside of torch's allocator: the context and the loaded kernels
CONTEXT_BYTES = 500 * 2**20
KERNELS_BYTES = 40 * 2**20  # bytes that kernel libraries allocate on a CPU when they are first called
# host memory of a CUDA process: Python, torch and transformers 0.4 GiB (measured), the driver's
# libraries 1 GiB (assumed)
HOST_PROCESS_BYTES = 1.4 * 2**30
FAR_TOO_LARGE = 2.0  # a plan that is expected to need this many times the memory is not estimated
TOO_LARGE = 1.3  # the same, if each size of its micro-batch needs a trace that takes seconds


def estimated_ledger(profiler: Profiler, plan: Plan, machine: Machine, pipeline_rank: int = 0) -> Ledger:
    """Return the ledger of a plan: the base ledger that was traced for the model, edited by every
    method that the plan enables.

    profiler       traces the model, and returns the base ledger
    pipeline_rank  the pipeline rank whose ledger is returned; 0 without a pipeline

    Raises InputError if the model cannot be traced or a method does not support it.

    Example: ZeRO-1 over 8 devices. The base ledger of a model with 1 GiB of fp32 parameters holds 2
    GiB of Adam states. `zero.cost` divides the states by 8 (0.25 GiB) and adds the messages of the
    reduced gradients and the gathered parameters, each with its bytes and bandwidth.
    """
    return apply_costs(replace(profiler.ledger(plan), pipeline_rank=pipeline_rank), plan, machine)


def apply_costs(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Return `ledger`, the traced base ledger, edited by the `cost` of each method that `plan`
    enables. The methods run in the order of METHODS."""
    for method in METHODS:
        if method.enabled(plan):
            ledger = method.cost(ledger, plan, machine)
            assert isinstance(ledger, Ledger), f"{method.__name__}.cost returns no Ledger"
    return ledger


class Estimator:
    """Estimates plans of one job on one machine. A trace of the model is reused for all plans that
    need the same trace.

    profiler       traces the model
    time_model     predicts seconds from a ledger
    lower_bound_model    predicts lower bounds on them, which hold for every size of the micro-batch
    limit_bytes    device memory that a plan may use
    runtime_bytes  device memory of the process that no tensor uses, whatever the plan: on a GPU the
                   CUDA context and the workspaces of cuBLAS
    """

    def __init__(self, job: Job, machine: Machine, profiler: Profiler | None = None) -> None:
        """Create an estimator. It traces the model only when a plan first needs the trace.

        profiler  the profiler of an earlier estimator, to share its traces; None: a new profiler.
                  The job of the earlier estimator may differ from `job` only in permissions, limits
                  and plan. Its machine may differ in everything but the kind of device
        """
        self.job, self.machine = job, machine
        self.profiler, self.time_model = profiler or Profiler(job, machine.device), TimeModel(machine)
        self.lower_bound_model = TimeModel(machine, assumes_best_shapes=True)
        self.limit_bytes = job.limits.memory or machine.memory_bytes.value
        self.runtime_bytes = (
            psutil.Process().memory_info().rss
            if machine.device == "cpu"
            else CONTEXT_BYTES + workspace_bytes(machine.architecture)
        )
        self.untraceable: dict[str, str] = {}  # option, such as "compile: block" -> why it cannot be predicted
        self._estimates: dict[Plan, Estimate] = {}
        self._settled: dict[Plan, Estimate] = {}  # with the allocator's bytes
        # by what plans have in common whose activations are alike: micro-batch -> the fewest bytes per sample
        self._per_sample: dict[tuple[Any, ...], dict[int, float]] = {}

    def runtime_bytes_of(self, plan: Plan) -> float:
        """Return the bytes of the runtime row of `plan`: those that every plan has, and those of
        NCCL's communicators."""
        return float(self.runtime_bytes + communicator_bytes(plan, self.machine))

    def estimate_given(self, plan: Plan) -> Estimate:
        """Return the estimate of a plan that the user has given, with the bytes that the allocator
        reserves. On a calibrated CPU, the model's convolutions are timed first.

        Raises InputError if the job or the machine does not permit the plan, or if the model cannot be
        traced or does not support it.
        """
        check_possible(plan, self.job, self.machine)
        measure_model(self, plan, plan.model_dump())
        found = self.estimate(plan)
        if plan.recomputes_blocks and not found.ledger.blocks and not recompute.changes_trace(plan):
            raise recompute.no_blocks(plan, "the model")
        return self.include_allocator(found)

    def estimate(self, plan: Plan) -> Estimate:
        """Return the estimate of `plan`, without the bytes that the allocator reserves beyond the
        tensors: `include_allocator` adds these. Raises InputError if the model cannot be traced or
        a method of the plan does not support it."""
        if plan not in self._estimates:
            self._estimates[plan] = one = self._estimate(plan)
            if plan.recompute in ("none", "full") and plan.pp == 1 and not plan.offload:
                size = plan.micro_batch_of(self.job.train.batch)
                per_sample = (one.peak.total - self.memory_lower_bound(plan)) / size
                known = self._per_sample.setdefault(_activation_key(plan), {})
                known[size] = min(known.get(size, math.inf), max(per_sample, 0.0))
        return self._estimates[plan]

    def bytes_per_sample(self, plan: Plan) -> float:
        """Return the fewest bytes for each sample of a micro-batch that plans like `plan` needed so
        far, beyond the memory that does not depend on the micro-batch; 0 if there was none.

        Without recomputation, these are plans with numbers of the same width, the same shards and
        the same compiled regions. With recomputation, they are those with recompute: full, compiled
        or not; recompute: sqrt is assumed to need half of their bytes or more, or all of them with
        tensor or context parallelism, where traces take long. If there was no plan with this
        parallelism yet, they are those of plans without it, divided by its degrees.

        If the memory grows faster than the micro-batch, a sample of a larger micro-batch needs more bytes.
        Then only plans with micro-batches of at most the size of that of `plan` count.
        """
        if plan.pp > 1 or "activations" in plan.offload:
            return 0.0
        known = self._known_per_sample(plan)
        if known is None and plan.recompute == "none" and _has_slow_traces(plan):
            known = (self._known_per_sample(plan.replace(tp=1, cp=1, sequence_parallel=False)) or 0.0) / (
                plan.tp * plan.cp
            )
        if known is None:
            known = self._known_per_sample(plan.replace(recompute="full")) or 0.0
        return known / (2 if plan.recompute == "sqrt" and not _has_slow_traces(plan) else 1)

    def _known_per_sample(self, plan: Plan) -> float | None:
        """Return `bytes_per_sample` of plans with the parallelism of `plan`; None if there was none."""
        known, size = self._per_sample.get(_activation_key(plan), {}), plan.micro_batch_of(self.job.train.batch)
        return min((each for at, each in known.items() if at <= size or not self.profiler.superlinear), default=None)

    def is_far_too_large(self, plan: Plan) -> bool:
        """Return whether `plan` is expected to need more than twice the memory (1.3 times where
        traces take long), judged by the estimates of other plans. Such a plan is not worth a
        trace."""
        size, factor = plan.micro_batch_of(self.job.train.batch), TOO_LARGE if _has_slow_traces(plan) else FAR_TOO_LARGE
        return self.memory_lower_bound(plan) + self.bytes_per_sample(plan) * size > factor * self.limit_bytes

    def _estimate(self, plan: Plan) -> Estimate:
        ledgers = self._ledgers(plan)
        time, slots = self._time(plan, ledgers)
        peaks = {rank: ledger.peak() for rank, ledger in ledgers.items()}
        worst = max(peaks, key=lambda rank: peaks[rank].total)
        ledger, batch = ledgers[worst], self.job.train.batch
        per_sample = self.profiler.tokens / self.profiler.samples
        language = self.profiler.unit == "tokens"
        return Estimate(
            job=self.job,
            plan=plan,
            machine=self.machine,
            ledger=ledger,
            peak=peaks[worst],
            schedule=tuple(slots),
            limit_bytes=self.limit_bytes,
            host=self._host_rows(plan, ledger),
            disk=self._disk_rows(plan, ledger),
            limits=self._limits(),
            time=time,
            compile_s=ledger.compile_s,
            samples_per_s=batch / time.step_s,
            tokens_per_s=batch * per_sample / time.step_s if language else None,
            notes=self.profiler.notes,
        )

    def use_machine(self, machine: Machine) -> None:
        """Predict for `machine` from now on, which differs from the machine before only in its rates."""
        self.machine = machine
        self.time_model, self.lower_bound_model = TimeModel(machine), TimeModel(machine, assumes_best_shapes=True)
        self._estimates, self._settled = {}, {}

    def with_job(self, job: Job, machine: Machine) -> Estimator:
        """Return an estimator for `job` and `machine` that shares this estimator's traces.

        The job and the machine may differ from this estimator's only in what a trace does not
        depend on: permissions, limits and the number of devices.
        """
        other = copy.copy(self)
        other.job, other.untraceable = job, {}
        other.use_machine(machine)
        other.limit_bytes = job.limits.memory or machine.memory_bytes.value
        return other

    def with_data(self, **fields: Any) -> Estimator:
        """Return an estimator for the same job with other `fields` of its data, such as
        sequence_length. Both use the same model and the same traces of the optimizer."""
        job = self.job.replace(data=self.job.data.replace(**fields))
        return Estimator(job, self.machine, self.profiler.with_data_of(job))

    def peak_with_blocks(self, plan: Plan, count: int) -> float:
        """Return the peak bytes of a step with `plan` if the model had only `count` blocks, without
        the runtime and allocator rows."""
        return apply_costs(with_depth(self.profiler.ledger(plan), count), plan, self.machine).peak().total

    def step_lower_bound_s(self, plan: Plan) -> float:
        """Return a lower bound on the seconds of a step. It holds for all plans with the tp, pp and
        cp of `plan`, whatever their data parallelism and micro-batch.

        The bound counts no communication between data-parallel replicas, and divides the
        optimizer's time by their number. It counts no launches and no message latency, because
        plans with larger micro-batches have fewer launches and messages, and takes matrix products
        to be as fast as those of the best shape.
        """
        ledgers = {
            rank: replace(
                ledger,
                messages=tuple(
                    replace(message, latency_s=0.0) for message in ledger.messages if message.has_activations
                ),
            )
            for rank, ledger in self._ledgers(plan).items()
        }
        model = self.lower_bound_model
        time = model.pipeline_time(ledgers)[0] if plan.pp > 1 else model.step_time(ledgers[0])
        return time.step_s - time.launch_s - time.optimizer_s * (1 - 1 / plan.data_parallel)

    def _ledgers(self, plan: Plan) -> dict[int, Ledger]:
        """Return pipeline rank -> ledger of `plan` on this rank. In a long pipeline, only a few
        ranks have a ledger, because most ranks are alike. Without a pipeline, the only rank is
        0."""
        ledgers = {}
        for rank in _estimated_ranks(plan.pp):
            ledger = estimated_ledger(self.profiler, plan, self.machine, rank)
            fixed = {**ledger.fixed, "runtime": self.runtime_bytes_of(plan)}
            ledgers[rank] = replace(ledger, fixed=fixed, checkpoint_buffer_bytes=self._checkpoint_buffer_bytes(plan))
        return ledgers

    def _time(self, plan: Plan, ledgers: dict[int, Ledger]) -> tuple[Time, list[ScheduledAction]]:
        """Return (time of a step, simulated schedule of the pipeline). The schedule is an empty
        list without a pipeline. `ledgers` holds the plan's ledger of each estimated pipeline
        rank."""
        if plan.pp > 1:
            return self.time_model.pipeline_time(ledgers)
        return self.time_model.step_time(ledgers[0]), []

    def _limits(self) -> dict[str, float]:
        """Return the bytes that may be used of "host memory" and of "disk"; an unlimited resource
        has no entry.

        The limits are those of the job. If the job does not limit host memory, the limit is the
        host's memory. A machine from the device table then has no limit, because its host memory is a
        guess.
        """
        limits, host = self.job.limits, self.machine.host_memory_bytes
        found = {
            "host memory": limits.host_memory or (host.value if host.source != "published" else None),
            "disk": limits.disk,
        }
        return {name: float(size) for name, size in found.items() if size}

    def _host_rows(self, plan: Plan, ledger: Ledger) -> dict[str, float]:
        """Return the bytes of host memory by purpose, such as "processes", summed over all
        processes on a host. `ledger` is that of one device.

        Some memory is needed only before the first step or between steps, such as that of a
        checkpoint while it is written. Only the largest of these needs is in the result, because
        they do not occur at the same time.
        """
        processes = min(self.machine.devices_per_node, plan.devices)
        rows = {name: processes * size for name, size in ledger.host.items() if size}
        if self.machine.device == "cpu":
            return rows
        rows = {"processes": processes * HOST_PROCESS_BYTES, **rows}
        passing = {name: processes * size for name, size in ledger.transient_host_bytes.items()}
        passing["checkpoint"] = min(sum(self._checkpoint_bytes(plan)), processes * ledger.checkpoint_buffer_bytes)
        most = max(passing, key=lambda name: passing[name])
        return {**rows, most: passing[most]}

    def _disk_rows(self, plan: Plan, ledger: Ledger) -> dict[str, float]:
        """Return the bytes of files on a host by purpose: offloaded tensors, and "checkpoints".
        `ledger` is that of one device.

        `keep_checkpoints` + 1 checkpoints are counted, because an old checkpoint is deleted only
        after the new one is written.
        """
        processes = min(self.machine.devices_per_node, plan.devices)
        rows = {name: processes * size for name, size in ledger.disk.items()}
        return {**rows, "checkpoints": (self.job.train.keep_checkpoints + 1) * sum(self._checkpoint_bytes(plan))}

    def _checkpoint_bytes(self, plan: Plan) -> tuple[float, float]:
        """Return (bytes of all parameters, bytes of all optimizer states) in a checkpoint of the
        entire model. Both are 0 if the job saves no checkpoints."""
        if self.job.train.checkpoint_every == "never":
            return 0.0, 0.0
        parameters = sum(parameter.bytes for parameter in self.profiler.model.parameters(plan)) * plan.tp
        return parameters, self.profiler.model.state_bytes(plan) * plan.tp

    def _checkpoint_buffer_bytes(self, plan: Plan) -> float:
        """Return the bytes of host memory that a process needs, while it saves a checkpoint, for
        the tensors that it is writing to files.

        Tensors on a GPU are copied to host memory first. On a CPU, only sharded tensors are copied.
        """
        parameters, states = self._checkpoint_bytes(plan)
        copied = (
            parameters * (self.machine.device != "cpu" or plan.zero == 3 or plan.tp > 1),
            states * (self.machine.device != "cpu" or plan.zero > 0 or plan.tp > 1),
        )
        return min(sum(copied), FILES_IN_MEMORY * file_bytes(max(copied) / plan.pp, plan.devices // plan.pp))

    def memory_lower_bound(self, plan: Plan) -> float:
        """Return a lower bound on the bytes of device memory that `plan` needs, whatever its
        micro-batch and recompute.

        The bound is the bytes of parameters, optimizer states and gradients, sharded and offloaded
        as in the plan, plus the runtime row; with ZeRO-3, also plus what is not sharded while the
        largest block computes.
        """
        after = plan.replace(update_in_backward=False)  # has the same optimizer states, and shares their trace
        parameters = self.profiler.model.parameters(plan)
        if plan.master_weights:
            parameters = with_fp32_gradients(parameters)
        size, gradients, largest = _sizes_of(parameters)
        states = self.profiler.model.state_bytes(after) / (plan.shards if plan.zero >= 1 else 1)
        held_gradients = float(largest if plan.update_in_backward else gradients)
        weights = size / (plan.shards if plan.zero >= 3 else 1)
        states, weights, held_gradients = (
            0.0 if row in plan.offload else size
            for row, size in (("states", states), ("parameters", weights), ("gradients", held_gradients))
        )
        whole = weights + states + held_gradients / (plan.shards if plan.zero >= 2 else 1)
        gathers = plan.zero == 3 and plan.shards > 1 and plan.pp == 1 and "parameters" not in plan.offload
        unsharded = least_unsharded_bytes(parameters, plan) if gathers else 0.0
        return self.runtime_bytes_of(plan) + whole / plan.pp + unsharded

    @cached_property
    def _runtime_after_tracing(self) -> float:
        """Bytes of the runtime row (memory of the process that belongs to no tensor) on a CPU. It
        is the memory of this process after the model was traced, plus that of kernel libraries. It
        is read only once, so that all compared plans have the same value."""
        return float(max(self.runtime_bytes, psutil.Process().memory_info().rss) + KERNELS_BYTES)

    def include_allocator(self, estimate: Estimate) -> Estimate:
        """Return the estimate with an allocator row: the bytes that the allocator reserves beyond
        the tensors. On a CPU, the runtime row is updated, too. An estimate that includes the
        allocator already is returned unchanged.

        The allocator is simulated (`allocators/`), which takes too long for every plan of a search.
        The runtime row of a CPU is the memory of this process, which grows while it traces models,
        so it is read as late as possible.
        """
        if estimate.includes_allocator:
            return estimate
        if estimate is not self._estimates.get(estimate.plan):
            return self._with_allocator(estimate)
        if estimate.plan not in self._settled:
            self._settled[estimate.plan] = self._with_allocator(estimate)
        return self._settled[estimate.plan]

    def _with_allocator(self, estimate: Estimate) -> Estimate:
        peak, ledger, on_cpu = estimate.peak, estimate.ledger, self.machine.device == "cpu"
        if (
            ledger.sharded_parameters is not None
        ):  # the simulation knows full gradients only: let it free each as soon as it is complete
            ledger = replace(
                ledger, sharded_parameters=None, bucketed_reduction=BucketedReduction(1, 1.0, each_micro_batch=True)
            )
        tensors = (
            ledger.peak().total - sum(ledger.fixed.values()) if ledger.messages else peak.total - peak.rows["runtime"]
        )
        on_device = partial(reserved_bytes, expandable=estimate.plan.allocator == "tuned")
        taken = extrapolate_layers(ledger, peak_heap_bytes if on_cpu else on_device)
        if ledger.bucketed_reduction is not None and any(message.at_start for message in ledger.messages):
            # weights are gathered on a side stream, for which the allocator keeps memory blocks apart
            taken += ledger.bucketed_reduction.gather_bytes
        rows = {**peak.rows, "allocator": max(taken - tensors, 0.0)}
        whole = estimate.ledger
        if on_cpu:
            rows["runtime"] = self._runtime_after_tracing
            whole = replace(whole, fixed={**whole.fixed, "runtime": rows["runtime"]})
        total = peak.total + sum(rows[row] - peak.rows[row] for row in ("allocator", "runtime"))
        return replace(estimate, ledger=whole, peak=replace(peak, total=total, rows=rows), includes_allocator=True)


@remembered(16)
def _sizes_of(parameters: tuple[Parameter, ...]) -> tuple[int, int, int]:
    """Return bytes of (the parameters and buffers, all gradients, the largest gradient)."""
    gradients = [parameter.gradient_bytes for parameter in parameters if parameter.trainable]
    return sum(parameter.bytes for parameter in parameters), sum(gradients), max(gradients, default=0)


def _has_slow_traces(plan: Plan) -> bool:
    """Return whether a trace of `plan` takes seconds, because the traced blocks communicate. Of such
    plans, each size of the micro-batch is traced by itself."""
    return plan.tp * plan.cp > 1


def _activation_key(plan: Plan) -> tuple[Any, ...]:
    """Return a key that is equal for plans whose activations take the same bytes for a sample, without
    recomputation or with recompute: full."""
    kept = plan.compile if plan.recompute == "none" else "recomputed"
    return plan.tp, plan.cp, plan.sequence_parallel, plan.precision in ("fp32", "tf32"), kept


def _estimated_ranks(ranks: int) -> list[int]:
    """Return which pipeline ranks are estimated, of a pipeline over `ranks` ranks.

    Up to 4 ranks are all estimated. Of a longer pipeline, these are the first two ranks, a middle
    one and the last, because the middle ranks are alike.
    """
    return [rank for rank in range(ranks) if ranks <= 4 or rank in (0, 1, ranks // 2, ranks - 1)]


def check_possible(plan: Plan, job: Job, machine: Machine) -> None:
    """Raise InputError if the job does not permit `plan`, if it breaks a rule, or if the machine has
    fewer GPUs. On CPUs any number of processes can train."""
    check(plan, job, machine.device)
    count = machine.devices_per_node * machine.nodes
    if plan.devices > count and machine.device != "cpu":
        raise InputError(
            f"plan: {plan}",
            f"is for {plan.devices} devices, and the machine has {count}",
            f"predict for a machine of {plan.devices} devices, such as h100-sxm:{plan.devices}, or use a plan for {count}",
        )


def estimate(job: Job, plan: Plan | Mapping[str, Any] | None = None, machine: Machine | str | None = None) -> Estimate:
    """Predict the memory and time of training `job` with `plan`, before anything is allocated.

    plan     the plan, or a mapping of its fields; None: the reference plan `Plan()`, with the fields
             that the job's `plan` sets
    machine  the devices, or their name, such as "h100-sxm:8"; None: the machine that runs this
             process. If it is a CPU that was never calibrated, its speed is measured (some seconds)

    Raises InputError if the job or the machine does not permit the plan, if the model cannot be
    traced, or if a method of the plan does not support it; the message says what to do instead.
    """
    return Estimator(job, measured_machine_of(machine)).estimate_given(plan_of(plan, job))


__all__ = ["Estimator", "check_possible", "estimate", "estimated_ledger"]
