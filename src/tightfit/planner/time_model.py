"""Predict how long a step takes, operation by operation, at the rates that the machine achieves.

This is a roofline model. An operation takes the longer of its arithmetic time (FLOPs / FLOP/s) and
its memory time (bytes accessed / bandwidth), plus the time of a kernel launch. The rates depend on
the kind, dtype and size of the operation. They are measured for each kind of operation, not fitted to
neural networks: if a prediction is wrong, measure the rate of the kind of operation whose time is wrong.
Only the four shares of EFFICIENCIES can be fitted to whole runs (`tightfit machine --record`).

Example: a bf16 matrix product of 4096 x 4096 x 4096 has 2 * 4096**3 = 137 GFLOP and accesses
3 * 32 MiB = 101 MB. At 600 TFLOP/s and 3 TB/s, arithmetic takes 229 us and memory traffic 34 us, so
the product takes 229 us.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tightfit.achieved_rates import COMPILED_ARITHMETIC, achieved, achieved_by_shape, memory_bandwidth
from tightfit.cost.entries import Message, RankProgram, Update
from tightfit.cost.ledger import Ledger
from tightfit.cost.pipeline_schedule import BACKWARD, FORWARD, WEIGHTS, Action, ScheduledAction, consumer_of, simulate
from tightfit.cost.recorded_step import CHANNELS_LAST, BatchLinear, Operation, Segment, Timeline
from tightfit.cost.remembered import remembered
from tightfit.machine import Machine
from tightfit.machines.shapes import (
    LARGE,
    MAX_SHARE,
    TRANSPOSES,
    convolution_products,
    transposed_bytes,
)
from tightfit.planner.allocators.deep_models import extrapolate_layers
from tightfit.planner.allocators.glibc import MAX_MMAP_THRESHOLD, page_fault_bytes
from tightfit.planner.operation_kinds import (
    ARITHMETIC,
    ATTENTION,
    ATTENTION_BACKWARD,
    BATCH_NORMS,
    BATCHED,
    BY_SHAPE,
    CONVOLUTION,
    CONVOLUTIONS,
    IN_CHANNELS_LAST,
    PRODUCT,
    kind_of,
)

# Memory traffic of a GPU's normalization kernels, divided by that of reading and writing each tensor once. A row
# does not fit into a processor, so a forward reads its input for the moments and again to normalize it, and a
# backward reads the input and the output's gradient for two sums and again for the gradient
# (ATen/native/cuda: Normalization.cuh, group_norm_kernel.cu; cuDNN does the same)
PASSES = {
    **dict.fromkeys((*BATCH_NORMS, "aten.native_group_norm"), 3 / 2),
    **dict.fromkeys(
        ("aten.native_batch_norm_backward", "aten.batch_norm_backward", "aten.native_group_norm_backward"), 5 / 3
    ),
}  # fmt: skip
# types in which tensor cores compute convolutions, as a machine names them
_TENSOR_CORES = {"tf32": "tf32", "bfloat16": "bf16", "float16": "fp16"}
EFFICIENCIES = ("compute", "memory", "launch", "link")  # fitted to measured runs: see `fit_machine`
# seconds to start an operation from Python with autograd, if the machine's were not measured
DEFAULT_LAUNCH_S = {"cpu": 5e-6, "cuda": 8e-6}


# Queries in a block of torch's attention kernel on CPUs (FlashAttentionKernel.cpp; more for long
# sequences). A block that is not full is hardly faster: 145 queries take about as long as 160
KERNEL_QUERIES = 32
# share of overlapped copies between a device and its host that no computation hides
EXPOSED_SHARE = 0.05
# Collectives use processors and memory bandwidth of the device, so that computation which overlaps
# with them is slower: by 18.9 % on average (Lee et al. 2025, "Characterizing Compute-Communication
# Overlap in GPU-Accelerated Distributed Deep Learning", arXiv:2507.03114).
CONTENTION = 0.19


@dataclass(frozen=True)
class Time:
    """Seconds of one optimizer step on one device, split by what they are spent on.

    compute_s        matrix products, convolutions and attention in forward and backward
    memory_s         all other operations in forward and backward; memory bandwidth limits them
    launch_s         operation launches, as far as they do not overlap with running operations
    optimizer_s      the optimizer update
    allocation_s     page faults, in which the operating system provides new memory (CPU only)
    input_s          waiting for samples
    communication_s  communication that does not overlap with computation
    bubble_s         idle time of a pipeline rank
    rows             the same work in detail, with its communication before any overlap: (phase,
                     kind of operation, seconds, number of operations), the longest first
    """

    compute_s: float = 0.0
    memory_s: float = 0.0
    launch_s: float = 0.0
    optimizer_s: float = 0.0
    allocation_s: float = 0.0
    input_s: float = 0.0
    communication_s: float = 0.0
    bubble_s: float = 0.0
    rows: tuple[tuple[str, str, float, float], ...] = ()

    @property
    def step_s(self) -> float:
        return (
            self.compute_s
            + self.memory_s
            + self.launch_s
            + self.optimizer_s
            + self.allocation_s
            + self.input_s
            + self.communication_s
            + self.bubble_s
        )


Rows = dict[tuple[str, str], tuple[float, float]]  # (phase, kind) -> (seconds without launches, operations)


class TimeModel:
    """Predicts how many seconds a step, a part of a step or a pipeline takes on one machine.

    The time of each recorded list of operations (a `Timeline`) is computed only once, because a
    model's equal blocks share it.

    assumes_best_shapes  if True, each matrix product takes as long as if its shape were the best one. The
               times are then lower bounds for every size of the micro-batch, of which the shapes
               depend
    """

    def __init__(self, machine: Machine, assumes_best_shapes: bool = False) -> None:
        self.machine = machine
        self.assumes_best_shapes = assumes_best_shapes
        shares = [machine.efficiency[name].value if name in machine.efficiency else 1.0 for name in EFFICIENCIES]
        self.compute_share, self.memory_share, launch_share, self.link_share = shares
        launch_s = machine.launch_s.value if machine.launch_s else DEFAULT_LAUNCH_S[machine.device]
        self.launch_s = launch_s / launch_share
        self._timelines: dict[tuple[Timeline, int], dict[str, tuple[float, float]]] = {}
        self._operations: dict[tuple[int, int], tuple[Operation, tuple[str, float, float]]] = {}
        self._update_rows = remembered(32)(self._rows_of_updates)

    def step_time(self, ledger: Ledger) -> Time:
        """Return the predicted time of one optimizer step on the device that `ledger` describes.
        The idle time of a pipeline (its bubble) is not included."""
        rows: dict[tuple[str, str], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        for segment in ledger.training:
            for kind, (seconds, count) in self._timeline_rows(segment.timeline, ledger.micro_batch).items():
                before = rows[segment.phase, kind]
                rows[segment.phase, kind] = (
                    before[0] + seconds * ledger.micro_batches,
                    before[1] + count * ledger.micro_batches,
                )
        for phase, more in (
            ("backward", self._rows_of(ledger.gradient_sums())),
            ("optimizer", self._rows_of(ledger.once_per_step)),
            ("optimizer", self._update_rows(ledger.updates)),
        ):
            for kind, (seconds, count) in more.items():
                before = rows[phase, kind]
                rows[phase, kind] = before[0] + seconds, before[1] + count
        time = self._time_from_rows(rows, self._allocation_s(ledger))
        time = replace(time, input_s=_input_s(ledger, time.step_s))
        if not ledger.messages:
            return time
        sent: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        for message in ledger.messages:
            seconds, count = sent[message.name]
            sent[message.name] = seconds + self._message_s(message), count + 1.0
        messages = (("sent", name, *both) for name, both in sent.items())
        table = tuple(sorted((*time.rows, *messages), key=lambda row: -row[2]))
        return replace(time, communication_s=self.exposed_communication_s(ledger, time), rows=table)

    def _rows_of_updates(self, updates: dict[str, Update]) -> dict[str, tuple[float, float]]:
        """Return the time of the updates of all parameters, as `_rows_of` does."""
        return self._rows_of(operation for update in updates.values() for operation in update.operations)

    def _rows_of(self, operations: Iterable[Operation]) -> dict[str, tuple[float, float]]:
        """Return the time of operations that run once in a step, as a dict: kind of operation ->
        (seconds without launches, number of launches)."""
        found: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        for operation in operations:
            kind, count = kind_of(operation), operation.count.at(1)
            seconds, launches = found[kind]
            found[kind] = seconds + self.operation_s(operation, 1) * count, launches + count
        return found

    def _message_s(self, message: Message) -> float:
        """Return the seconds that a message takes if nothing overlaps with it."""
        return message.bytes / (message.bytes_per_s * self.link_share) + message.latency_s

    def _transfer_s(self, stage: RankProgram, tensors: tuple[BatchLinear, ...], samples: int) -> float:
        """Return the seconds to send the tensors of one micro-batch from a pipeline stage to the
        next, each tensor as a message of its own.

        stage    gives the bandwidth and latency of the link between the stages
        tensors  the bytes of each tensor, as functions of the number of samples
        samples  number of samples of a micro-batch
        """
        size, latency_s = sum(tensor.at(samples) for tensor in tensors), stage.latency_s * len(tensors)
        return self._message_s(Message("crossing", size, stage.bytes_per_s, False, latency_s))

    def exposed_communication_s(self, ledger: Ledger, time: Time) -> float:
        """Return the seconds of a step's communication that are exposed: no computation overlaps
        with them.

        - Gradient reductions overlap with backward, which is two thirds of the work of those
          micro-batches that reduce gradients. The reduction of the last block is exposed.
        - All-gathers of sharded parameters (ZeRO-3) overlap with forward and backward of all
          micro-batches. The gather of the first block is exposed.
        - The all-gather of updated parameters (ZeRO-1 and ZeRO-2) overlaps with the first forward
          of the next step, a third of the work of a micro-batch. The share `at_start` of this
          message must arrive before that forward begins, so it is exposed.
        - Computation takes 19 % longer while it overlaps with these collectives.
        - Copies between a device and its host overlap with the work that `during` names. Copies to
          the device and copies to the host run at the same time. At least 5 % of each are exposed.
        - Messages that do not overlap are exposed completely.

        ledger  lists the messages; `at_start` and `during` are fields of a message
        time    the step's time without communication

        Example: backward takes 60 ms and the gradient reduction of 31 blocks and the rest 80 ms. Then
        20 ms are exposed, and 0.19 x 60 ms = 11.4 ms are lost by slower computation.
        """
        exposed_s = 0.0
        work_s = time.compute_s + time.memory_s + time.launch_s
        hiding_s = work_s  # computation that has no communication beside it yet
        # copies between device and host: by kind of work, then by direction
        with_host: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for message in ledger.messages:
            seconds = self._message_s(message)
            if not message.overlaps:
                exposed_s += seconds
            elif message.during:
                with_host[message.during][message.way] += seconds
            elif message.at_start:
                forward_s = work_s / 3 / ledger.micro_batches
                exposed_s += seconds * message.at_start + _overlap_cost_s(seconds * (1 - message.at_start), forward_s)
            elif message.name == "parameters":
                exposed_s += _overlap_cost_s(seconds, hiding_s, seconds / 2 / (ledger.blocks + 1))
                hiding_s = max(hiding_s - seconds, 0.0)
            else:
                backward_s = hiding_s * 2 / 3 * message.micro_batches / ledger.micro_batches
                exposed_s += _overlap_cost_s(seconds, backward_s, seconds / (ledger.blocks + 1))
                hiding_s = max(hiding_s - seconds, 0.0)
        lasts = _work_s(time)
        for during, ways in with_host.items():  # both directions run at the same time
            exposed_s += max(max(seconds - lasts[during], seconds * EXPOSED_SHARE) for seconds in ways.values())
        return exposed_s

    def arithmetic_s(self, ledger: Ledger) -> float:
        """Return the seconds that matrix products, convolutions and attention take in a step's
        forwards and backwards."""
        return ledger.micro_batches * sum(
            seconds
            for segment in ledger.training
            for kind, (seconds, _) in self._timeline_rows(segment.timeline, ledger.micro_batch).items()
            if kind in ARITHMETIC
        )

    def gradient_sums_s(self, ledger: Ledger) -> float:
        """Return the seconds of a step in which the gradients of its micro-batches are summed, without
        launches."""
        return sum(seconds for seconds, _ in self._rows_of(ledger.gradient_sums()).values())

    def segments_s(self, segments: Iterable[Segment], samples: int) -> float:
        """Return the seconds that `segments` (recorded parts of a step, such as the forward of one
        block) take for a micro-batch of `samples` samples, operation launches included."""
        busy = launch_s = 0.0
        for segment in segments:
            for seconds, count in self._timeline_rows(segment.timeline, samples).values():
                busy, launch_s = busy + seconds, launch_s + count * self.launch_s
        return max(busy, launch_s) if self.machine.device == "cuda" else busy + launch_s

    def pipeline_time(self, ledgers: dict[int, Ledger]) -> tuple[Time, list[ScheduledAction]]:
        """Predict the time of a pipeline's step by simulating its schedule. Return (time of the
        busiest rank with its idle time, simulated schedule of all ranks).

        ledgers  pipeline rank -> its ledger. A rank without a ledger takes as long as the nearest
                 rank before it that has one
        """
        seconds: dict[tuple[int, str], float] = {}
        table = next(iter(ledgers.values())).rank_program.schedule  # type: ignore[union-attr]
        for rank in range(len(table)):
            ledger = ledgers[max(known for known in ledgers if known <= rank)]
            stages = self._stage_times(ledger, rank)
            sums_s = self.gradient_sums_s(ledger)
            for durations in stages.values():
                durations[BACKWARD] += sums_s / ledger.micro_batches / len(stages)
            busy_s = ledger.micro_batches * sum(sum(durations.values()) for durations in stages.values())
            waited_s = sum(
                self._message_s(message)
                for message in ledger.messages
                if message.has_activations and not message.overlaps
            )
            for stage, durations in stages.items():
                seconds.update({(stage, kind): one_s * (1 + waited_s / busy_s) for kind, one_s in durations.items()})
        first = next(iter(ledgers.values()))
        assert first.rank_program is not None
        travel = {
            (kind, stage): self._transfer_s(first.rank_program, crossing.sent(kind), first.micro_batch)
            for stage, crossing in first.rank_program.boundaries.items()
            for kind in (FORWARD, BACKWARD)
        }

        def lasts(action: Action) -> float:
            return seconds[action.stage, action.kind]

        def travels(action: Action) -> float:
            return travel[action.kind, max(action.stage, consumer_of(action).stage)]

        slots = simulate(table, lasts, travels, first.rank_program.late)
        busy = [sum(map(lasts, actions)) for actions in table]
        if (
            first.rank_program.continuous
        ):  # the schedule has several steps; a step's first message is requested after an update
            steps = len(table[0]) / 2 / first.micro_batches
            firsts = {known: travel.get((FORWARD, known), 0.0) for known in ledgers}
            slowest = max(ledgers, key=lambda known: busy[known] + steps * firsts[known])
            time = self.step_time(ledgers[slowest])
            return replace(time, communication_s=time.communication_s + firsts[slowest]), slots
        slowest = max(ledgers, key=lambda known: busy[known])
        waiting = max(slot.end for slot in slots) - busy[slowest]
        return replace(self.step_time(ledgers[slowest]), bubble_s=waiting), slots

    def _stage_times(self, ledger: Ledger, pipeline_rank: int) -> dict[int, dict[str, float]]:
        """Return stage -> {kind of action: seconds for one micro-batch}, for all stages of the
        rank `pipeline_rank`. `ledger` is that of this rank or of one like it.

        The kinds are "F" (forward), "B" (backward) and "W" (weight gradients), as in
        `cost/pipeline_schedule.py`. W takes 0 s if the schedule does not split the backward.
        """
        assert ledger.rank_program is not None
        times = {}
        for index, part in enumerate(ledger.rank_program.stage_programs.values()):
            stage = index * len(ledger.rank_program.schedule) + pipeline_rank
            whole = self.segments_s(part.backward, ledger.micro_batch)
            weights = min(self._linear_s(part.forward, ledger.micro_batch), whole) if part.weights else 0.0
            times[stage] = {
                FORWARD: self.segments_s(part.forward, ledger.micro_batch),
                BACKWARD: whole - weights,
                WEIGHTS: weights,
            }
        return times

    def _linear_s(self, segments: Iterable[Segment], samples: int) -> float:
        """Return the seconds of the matrix products with weights in the forward that `segments`
        record, for a micro-batch of `samples` samples. Computing the gradients of these weights
        takes about as long."""
        return sum(
            self.operation_s(operation, samples) * operation.count.at(samples)
            for segment in segments
            for operation in segment.timeline.operations
            if kind_of(operation) == PRODUCT
        )

    def _time_from_rows(self, rows: Rows, allocation_s: float) -> Time:
        """Return the time of a step without waiting for samples, communication and pipeline bubble.

        rows          (phase, kind of operation) -> (seconds without launches, number of operations)
        allocation_s  seconds of page faults in the step
        """
        sums: dict[str, float] = defaultdict(float)
        table = []
        for (phase, kind), (seconds, count) in rows.items():
            launch_s = self.launch_s * count
            table.append((phase, kind, seconds + launch_s, count))
            if phase == "optimizer":
                sums["optimizer"] += max(seconds, launch_s) if self.machine.device == "cuda" else seconds + launch_s
            else:
                sums["compute" if kind in ARITHMETIC else "memory"] += seconds
                sums["launch"] += launch_s
        busy = sums["compute"] + sums["memory"]
        return Time(
            compute_s=sums["compute"],
            memory_s=sums["memory"],
            # a CUDA device computes while the CPU launches the next kernels. It waits only if the
            # launches take longer than the kernels
            launch_s=max(sums["launch"] - busy, 0.0) if self.machine.device == "cuda" else sums["launch"],
            optimizer_s=sums["optimizer"],
            allocation_s=allocation_s,
            rows=tuple(sorted(table, key=lambda row: -row[2])),
        )

    def _timeline_rows(self, timeline: Timeline, samples: int) -> dict[str, tuple[float, float]]:
        """Return the time of a recorded list of operations for a micro-batch of `samples` samples,
        as a dict: kind of operation -> (seconds without launches, number of launches)."""
        key = timeline, samples
        if key not in self._timelines:
            found: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
            for operation in timeline.operations:
                kind, more, launches = self._operation_row(operation, samples)
                if kind != "nothing":
                    seconds, before = found[kind]
                    found[kind] = seconds + more, before + launches
            self._timelines[key] = found
        return self._timelines[key]

    def _operation_row(self, operation: Operation, samples: int) -> tuple[str, float, float]:
        """Return (kind of the operation, seconds without launches, number of launches) in a
        micro-batch of `samples` samples. Recomputed blocks repeat the operations of others."""
        key = id(operation), samples
        if key not in self._operations:
            kind, count = kind_of(operation), operation.count.at(samples)
            # the arithmetic of a compiled kernel has no launch of its own
            launches = 0.0 if kind in COMPILED_ARITHMETIC else count
            seconds = 0.0 if kind == "nothing" else self.operation_s(operation, samples) * count
            self._operations[key] = operation, (kind, seconds, launches)  # the operation is kept: no other gets its id
        return self._operations[key][1]

    def operation_s(self, operation: Operation, samples: int) -> float:
        """Return the seconds of one operation in a micro-batch of `samples` samples, without its
        launch. They follow from the machine's rate for the operation's kind, dtype and size."""
        kind = kind_of(operation)
        flops, moved = operation.flops.at(samples) * operation.computed_share, operation.bytes_accessed.at(samples)
        if kind not in ARITHMETIC:
            return moved / self._bytes_per_s(kind, operation, moved) / self.memory_share
        if kind in CONVOLUTIONS and (rate := self._rate_of_itself(kind, operation, samples)):
            return flops / rate / self.compute_share
        if kind in CONVOLUTIONS and self._knows_convolutions_by_shape(operation):
            return self._convolution_s(kind, operation, samples, moved)
        arithmetic_s = flops / self._arithmetic_rate(kind, operation, samples)
        return max(arithmetic_s / self.compute_share, moved / memory_bandwidth(self.machine, moved) / self.memory_share)

    def _bytes_per_s(self, kind: str, operation: Operation, moved: float) -> float:
        """Return the rate of an operation that is no arithmetic, in bytes accessed per second."""
        passes = PASSES.get(operation.name.removesuffix(CHANNELS_LAST), 1.0) if self.machine.device == "cuda" else 1.0
        if passes > 1 and f"{kind}/{operation.dtype}" not in self.machine.rates:
            return memory_bandwidth(self.machine, moved) / passes
        if f"{operation.name}/{operation.dtype}" in self.machine.rates:
            kind = operation.name  # timed by name: see `calibration/single_operations.py`
        return achieved(self.machine, kind, operation.dtype, moved)

    def _rate_of_itself(self, kind: str, operation: Operation, samples: int) -> float | None:
        """Return the rate in FLOP/s that this very convolution reached when it was timed on the machine
        (see `planner/model_convolutions.py`), None if it was not."""
        name = operation.convolution.rate_name(kind) if operation.convolution else ""
        if f"{name}/{operation.dtype}" not in self.machine.rates:
            return None
        return achieved(self.machine, name, operation.dtype, operation.sizes[0].at(samples))

    def _knows_convolutions_by_shape(self, operation: Operation) -> bool:
        """Return whether the time of a convolution follows from its shape: on NVIDIA's GPUs, if no rate
        of convolutions was measured."""
        measured = f"{CONVOLUTION}/{operation.dtype}" in self.machine.rates
        return not measured and self.machine.architecture.startswith("sm_")

    def _convolution_s(self, kind: str, operation: Operation, samples: int, moved: float) -> float:
        """Return the seconds of a convolution by cuDNN, without its launch.

        Tensor cores compute it as matrix products. In the layout NCHW, transposes come on top. With few
        channels in a group, tensor cores are hardly used, and the direct kernels are faster, at the
        rate of products in fp32.

        kind   a kind of CONVOLUTIONS
        moved  the operation's bytes accessed
        """
        shape = operation.convolution
        assert shape is not None
        channels, depth = map(float, shape.channels)
        groups, window = shape.groups, shape.window
        positions = shape.positions * max(operation.sizes[0].at(samples), 1.0)
        forward_flops = 2 * groups * positions * channels * depth * window
        gradients = shape.gradients
        seconds = 0.0
        for product in convolution_products((groups, positions, channels, depth, window), gradients):
            rate = MAX_SHARE * achieved(self.machine, PRODUCT, operation.dtype, LARGE)
            if not self.assumes_best_shapes:
                rate = achieved_by_shape(self.machine, PRODUCT, operation.dtype, (1.0, *product), False)
            if groups > 1:
                rate = max(rate, achieved(self.machine, PRODUCT, "float32", LARGE))
            seconds += forward_flops / rate
        seconds = max(seconds / self.compute_share, moved / memory_bandwidth(self.machine, moved) / self.memory_share)
        has_units = _TENSOR_CORES.get(operation.dtype) in self.machine.matrix_flops_per_s
        if kind in IN_CHANNELS_LAST or not has_units or self.assumes_best_shapes:
            return seconds
        share = TRANSPOSES[operation.dtype in ("bfloat16", "float16")]
        transposed = transposed_bytes(moved, gradients)
        return seconds + transposed / memory_bandwidth(self.machine, transposed) / share / self.memory_share

    def _arithmetic_rate(self, kind: str, operation: Operation, samples: int) -> float:
        """Return the rate of an operation's arithmetic in FLOP/s.

        kind     a kind of ARITHMETIC
        samples  number of samples of a micro-batch
        """
        causal = operation.computed_share < 1.0 and kind in (ATTENTION, ATTENTION_BACKWARD)
        if self.machine.device == "cuda" and operation.sizes and kind in BY_SHAPE:
            batches, rows, columns, depth = (max(size.at(samples), 1.0) for size in operation.sizes)
            if self.assumes_best_shapes and kind in (PRODUCT, BATCHED):
                return MAX_SHARE * achieved(self.machine, PRODUCT, operation.dtype, LARGE)
            sizes, flash = (batches, rows, columns, depth), "efficient" not in operation.name
            return achieved_by_shape(self.machine, kind, operation.dtype, sizes, causal, operation.alignment, flash)
        masked = f"causal {kind}" if causal else kind
        if kind in CONVOLUTIONS:
            kind, size = similar_convolution(kind, operation)
            return achieved(self.machine, kind, operation.dtype, size)
        rate = achieved(self.machine, masked, operation.dtype, _product_size(operation, samples))
        if kind in (ATTENTION, ATTENTION_BACKWARD) and operation.sizes:
            queries = max(operation.sizes[1].at(samples), 1.0)
            rate *= queries / KERNEL_QUERIES / math.ceil(queries / KERNEL_QUERIES)
        return rate

    def _allocation_s(self, ledger: Ledger) -> float:
        """Return the seconds of page faults in a step on a CPU; 0 on a GPU.

        glibc returns freed memory to the operating system. When a process uses that memory again, a
        page fault occurs for each page, and the system fills the page with zeros.
        """
        if self.machine.device != "cpu":
            return 0.0
        return extrapolate_layers(ledger, page_fault_bytes) / achieved(
            self.machine, "fetch", "float32", MAX_MMAP_THRESHOLD
        )


def _overlap_cost_s(message_s: float, work_s: float, edge_s: float = 0.0) -> float:
    """Return the seconds that a step takes longer because a message overlaps with computation.

    message_s  seconds of the message if nothing overlaps with it
    work_s     seconds of the computation beside it, which takes longer meanwhile
    edge_s     seconds of the message at its beginning or end that no computation can hide
    """
    return max(message_s - work_s, edge_s) + CONTENTION * min(message_s, work_s)


def _work_s(time: Time) -> dict[str, float]:
    """Return the seconds of a step's work: {"forward": all forwards, "backward": all backwards,
    "update": the optimizer update}. These keys are the values of `Message.during`."""
    sums: dict[str, float] = defaultdict(float)
    for phase, _, seconds, _ in time.rows:
        sums[phase] += seconds
    passes = sum(seconds for phase, seconds in sums.items() if phase != "optimizer")
    whole = time.compute_s + time.memory_s + time.launch_s
    backward = whole * sums["backward"] / passes if passes else 0.0
    return {"forward": whole - backward, "backward": backward, "update": time.optimizer_s}


def _input_s(ledger: Ledger, work_s: float) -> float:
    """Return the seconds that a step waits for its samples.

    The training loop waits for all the work on samples that it does itself. If loader workers
    prepare the samples ahead, the loop waits only for the time by which they take longer than the
    step's work.

    ledger  names the work on samples, with its seconds per step, and which of it is done ahead
    work_s  seconds of the step's other work
    """
    own = sum(seconds for name, seconds in ledger.host_work_s.items() if name not in ledger.overlapped_work)
    return own + max(
        [seconds - work_s for name, seconds in ledger.host_work_s.items() if name in ledger.overlapped_work] + [0.0]
    )


FEW_CHANNELS = 8  # a group with fewer channels is as slow as a depthwise convolution


def similar_convolution(kind: str, operation: Operation) -> tuple[str, float]:
    """Return (kind, size) of the calibration's convolution that is most like `operation`, as
    `calibration/convolutions.py` names them: the geometric mean of the channels of input and output, or for
    a depthwise convolution the pixels of its window."""
    shape = operation.convolution
    assert shape is not None
    channels, depth = shape.channels
    if shape.transposed:
        return f"transposed {kind}", math.sqrt(channels * depth)
    if shape.groups > 1 and min(channels, depth) < FEW_CHANNELS:
        return f"depthwise {kind}", shape.window
    return (f"pointwise {kind}" if shape.window == 1 else kind), math.sqrt(channels * depth)


def _product_size(operation: Operation, samples: int) -> float:
    """Return the size of a matrix product by which the machine's rate for it is looked up: the cube
    root of rows x columns x depth of a single product, also for batched products. If they are unknown, it is
    the cube root of half of the FLOPs.

    samples  number of samples of a micro-batch, on which rows and columns depend
    """
    if not operation.sizes:
        return max(operation.flops.at(samples) / 2, 1.0) ** (1 / 3)
    sizes = (max(size.at(samples), 1.0) for size in operation.sizes[1:])
    return math.prod(sizes) ** (1 / 3)
