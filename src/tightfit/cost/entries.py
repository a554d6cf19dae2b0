"""Define the entries of a ledger: parameters, updates, gradient reduction, messages and pipeline
stages.

`Ledger` holds these entries beside its recorded steps, and the methods' `cost` functions write
them. All figures are those of one device.

Example of `BucketedReduction`: 100 MiB of gradients, buckets of 25 MiB, and backward has completed
60 MiB of gradients. A bucket is allocated whole. 60 MiB fill two buckets and a part of the third,
so three buckets, 75 MiB, are allocated. Without ZeRO (shards = 1) the gradients stay in these
buckets: 75 MiB of gradients. With ZeRO-2 over 4 ranks (shards = 4) the reduce-scattered shards take
60 / 4 = 15 MiB of gradients. At most two buckets are in memory, the bucket that is being filled and
the bucket that is being reduced: 50 MiB of communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from tightfit.cost.pipeline_schedule import FORWARD, WEIGHTS, Action, Schedule, consumer_of
from tightfit.cost.recorded_step import BatchLinear, Operation, Segment
from tightfit.cost.remembered import remembered

NOTHING = BatchLinear()
# `Parameter.used_by_blocks` of a small buffer that belongs to no block: before the blocks and after them
EVERYWHERE = (-1, 10**9)


def passes_of(trained: float, elements: float) -> float:
    """Return the FLOPs of a forward and a backward, divided by those of the forward. Backward computes a product for
    the gradient of each input, and another one for that of each trained weight: 3 if all weights are trained, little
    more than 2 for adapters.

    trained   number of weights that are trained
    elements  number of all weights
    """
    return 2 + (trained / elements if elements else 1.0)


@dataclass(frozen=True, slots=True)
class Parameter:
    """Describes one parameter or buffer of the model, in the dtype in which it is stored.

    name            its dotted name in the model
    shape           the unsharded shape
    bytes           bytes of the tensor's storage on this device
    trainable       whether backward computes a gradient for it; False for buffers and frozen parameters
    used_by_blocks  the numbers of the blocks that use the tensor, -1 for the code before the blocks, and
                    the number of blocks for the code after them (see models/blocks.py). Example: (-1, 12)
                    for the tied embedding of a model with 12 blocks
    buffer          whether it is a buffer, which no method shards
    gradient_ratio  bytes of its gradient divided by its own bytes: 2 for an fp32 gradient of a
                    16-bit parameter, else 1
    """

    name: str
    shape: tuple[int, ...]
    bytes: int
    trainable: bool
    used_by_blocks: tuple[int, ...] = ()
    buffer: bool = False
    gradient_ratio: int = 1

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the parameter's gradient, which exists only if the parameter is trainable."""
        return self.bytes * self.gradient_ratio

    def with_fp32_gradient(self) -> Parameter:
        """Return the parameter with an fp32 gradient if it is trainable and stored in 16 bits. Return
        any other parameter unchanged."""
        return replace(self, gradient_ratio=2) if self.trainable and self.bytes == 2 * self.count else self

    @property
    def count(self) -> int:
        """The number of elements of the unsharded parameter."""
        total = 1
        for size in self.shape:
            total *= size
        return total


@remembered(16)
def with_fp32_gradients(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    """Return the parameters, with fp32 gradients of those that are stored in 16 bits."""
    return tuple(parameter.with_fp32_gradient() for parameter in parameters)


@dataclass(frozen=True, slots=True)
class Update:
    """The optimizer's update of one parameter: what it costs in memory and operations.

    state_bytes           bytes of the optimizer states, which live from step to step
    transient_bytes       bytes of temporary tensors during the update
    operations            the update's kernels
    foreach_bytes         the part of transient_bytes that a multi-tensor (foreach) kernel allocates for
                          all parameters at once
    held_into_next_bytes  the part of transient_bytes that is still allocated while the next parameter of
                          the same group is updated
    group                 index of the optimizer's parameter group
    elements, dtype       for a parameter that is updated in one batch with other parameters: its number
                          of elements and its dtype. The first update of a batch has the transient bytes
                          and the operations of the whole batch
    upload_bytes          bytes of offloaded tensors that are copied to the device for this update, while
                          the update of the parameter before it runs
    download_bytes        bytes of offloaded tensors that are copied back after this update, while the
                          update of the parameter after it runs
    fp32_state_bytes      for states that are quantized to 8 or 4 bits: their bytes in fp32. A rank's
                          shard stays in fp32 if it is not a whole number of quantization blocks
    """

    state_bytes: int
    transient_bytes: int
    operations: tuple[Operation, ...] = ()
    foreach_bytes: int = 0
    held_into_next_bytes: int = 0
    group: int = 0
    elements: int = 0
    dtype: str = ""
    upload_bytes: int = 0
    download_bytes: int = 0
    fp32_state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PeakInstant:
    """The instant of a step with the most memory, and its bytes.

    total  bytes of all rows together
    rows   bytes by row of the ledger
    phase  "forward", "backward", "optimizer" or "evaluation"
    part   the part of the model or of the phase, such as "block" or "update"
    """

    total: float = 0.0
    rows: dict[str, float] = field(default_factory=dict)
    phase: str = ""
    part: str = ""


@dataclass(frozen=True, slots=True)
class BucketedReduction:
    """Says how gradients are reduced over the data-parallel ranks in buckets, while backward runs.

    shards                number of ranks over which each gradient is sharded (reduce-scatter); 1: every
                          rank gets the full gradient (all-reduce)
    bucket_bytes          bytes of one bucket
    each_micro_batch      True: the gradients of each micro-batch are reduced. False: gradients are summed
                          over the micro-batches, and the sums are reduced during the last micro-batch
    gather_bytes          bytes of the buffers in which updated weights are gathered after the update
    keeps_gather_buffers  whether these buffers live until the next forward begins
    """

    shards: int
    bucket_bytes: float
    each_micro_batch: bool
    gather_bytes: float = 0.0
    keeps_gather_buffers: bool = False

    def begun_bytes(self, done: float, whole: float) -> float:
        """Return the bytes of the allocated buckets when `done` of the `whole` bytes of gradients
        are complete: `done` rounded up to whole buckets, and at most `whole`."""
        return min(math.ceil(done / self.bucket_bytes) * self.bucket_bytes, whole)

    def rows_during(self, done: float, whole: float) -> dict[str, float]:
        """Return the bytes of gradient shards (row "gradients") and of buckets (row
        "communication") when `done` of the `whole` bytes of gradients are complete. If gradients
        are not sharded, the buckets are in the row "gradients"."""
        if self.shards == 1:
            return {"gradients": self.begun_bytes(done, whole)}
        return {
            "gradients": done / self.shards,
            "communication": min(2 * self.bucket_bytes, self.begun_bytes(done, whole)),
        }


@dataclass(frozen=True, slots=True)
class ShardedParameters:
    """Sizes of parameters that are unsharded only while their block computes (ZeRO-3, FSDP).

    shards                  number of ranks over which parameters and gradients are sharded. Infinity if
                            gradients are offloaded, because this device then keeps no gradient
    block_bytes             bytes of the largest block's parameters, in the dtype in which they are gathered
    outside_bytes           bytes of the parameters outside the blocks, which stay unsharded from the
                            beginning of forward to the end of backward
    reduced_bytes           bytes of the largest block's gradients, in the dtype in which they are reduced
    prefetched_bytes        bytes of the next block's parameters, which are gathered while a block computes
                            its backward
    prefetches_in_forward   whether the next block's parameters are prefetched in forward, too
    each_micro_batch        True: the gradients of each micro-batch are reduced. False: full gradients are
                            summed over the micro-batches in fp32, and the sums are reduced during the last
                            micro-batch
    block_sum_ratio         bytes of the fp32 sum of a block's gradients, divided by their bytes in the
                            dtype in which backward computes them
    outside_sum_ratio       the same for the gradients outside of blocks
    """

    shards: float
    block_bytes: float
    outside_bytes: float
    reduced_bytes: float
    prefetched_bytes: float
    prefetches_in_forward: bool = False
    each_micro_batch: bool = True
    block_sum_ratio: float = 1.0
    outside_sum_ratio: float = 1.0

    @property
    def reduce_dtype_ratio(self) -> float:
        """Bytes of a gradient in the dtype in which it is reduced, divided by its bytes in the
        dtype in which backward computes it. Example: 2 if bf16 gradients are reduced in fp32."""
        return self.reduced_bytes / self.block_bytes if self.block_bytes else 1.0


@dataclass(frozen=True, slots=True)
class Message:
    """Describes everything that one device sends in a step by one kind of communication, such as
    the all-reduce of the gradients, or the copies of offloaded tensors.

    name         what is sent, such as "gradients"
    bytes        bytes that the device sends in the step
    bytes_per_s  bandwidth of the slowest link that the bytes pass
    overlaps     whether the communication overlaps with computation
    latency_s    seconds that the calls of a step take together, even if they send nothing
    during       for copies between device and host memory: the work that the copies overlap with
                 ("forward", "backward" or "update"), over all micro-batches; "" for communication
                 between devices
    way          for copies between device and host memory: "in" (to the device) or "out". Copies in
                 different directions overlap; "" for communication between devices
    micro_batches  for gradients: number of micro-batches of a step in which they are reduced
    at_start     for weights that are gathered during the next forward: the share of the bytes that
                 must have arrived before this forward can begin; 0 for other messages
    """

    name: str
    bytes: float
    bytes_per_s: float
    overlaps: bool
    latency_s: float = 0.0
    during: str = ""
    way: str = ""
    at_start: float = 0.0
    micro_batches: int = 1

    @property
    def has_activations(self) -> bool:
        """Whether it sends activations or their gradients: for tensor and context parallelism, or to
        offload them. Its bytes grow with the samples."""
        return self.name == "activations"

    def times(self, share: float) -> Message:
        """Return the message with its bytes and the latency of its calls multiplied by `share`."""
        return replace(self, bytes=self.bytes * share, latency_s=self.latency_s * share)


@dataclass(frozen=True)
class StageProgram:
    """What one pipeline stage of the model does with one micro-batch, as recorded segments.

    forward, backward  segments of the stage's forward and backward
    weights            segments that compute the weight gradients of linear layers, if the schedule
                       has separate W actions for them (zero bubble). Otherwise it is empty, and
                       `backward` computes these gradients
    """

    forward: tuple[Segment, ...]
    backward: tuple[Segment, ...]
    weights: tuple[Segment, ...] = ()

    @property
    def segments(self) -> tuple[Segment, ...]:
        return (*self.forward, *self.backward, *self.weights)


@dataclass(frozen=True, slots=True)
class StageBoundary:
    """Sizes of the tensors of one micro-batch that pass between one pipeline stage and the next.

    forward   bytes of each tensor that the first of the two stages sends to the next
    backward  bytes of each gradient that the next stage sends back. A tensor that needs no gradient
              has none
    saved     bytes of the sent tensors that the sender has also saved for its own backward. They
              count as the sender's activations, so they are not counted again as messages
    """

    forward: tuple[BatchLinear, ...] = ()
    backward: tuple[BatchLinear, ...] = ()
    saved: BatchLinear = NOTHING

    def sent(self, kind: str) -> tuple[BatchLinear, ...]:
        """Return the bytes of each tensor that is sent across this boundary: the activations for a
        forward (kind "F") of the next stage, or the gradients for a backward (kind "B") of the
        stage before."""
        return self.forward if kind == FORWARD else self.backward


@dataclass(frozen=True, eq=False)
class RankProgram:
    """Describes everything that one pipeline rank does in a step.

    stage_programs  stage number -> what the stage does with a micro-batch, for each stage that the
                    rank holds
    schedule        the actions of every rank
    pipeline_rank   this rank's index in `schedule`
    boundaries      stage number -> the tensors that pass between this stage and the stage before
                    it, for each stage but the first
    bytes_per_s     bandwidth of the link to the next rank
    messages        for each action of this rank (sent, coming): the messages that are in its memory
                    during the action, beside the action's own input. `sent` are messages to other
                    ranks that may not have arrived yet; `coming` are inputs of later actions that
                    are being received. A message is named by the action that consumes it
    latency_s       seconds that one message takes in addition to the transfer of its bytes
    late            actions whose input is not requested before they begin (see
                    `pipeline_schedule.late`)
    versions        number of older versions of the weights that are kept beside the newest one
                    (pipedream)
    continuous      whether the next step begins without waiting for the last backward (pipedream)
    """

    stage_programs: dict[int, StageProgram]
    schedule: Schedule
    pipeline_rank: int
    boundaries: dict[int, StageBoundary]
    bytes_per_s: float
    messages: tuple[tuple[tuple[Action, ...], tuple[Action, ...]], ...]
    latency_s: float = 0.0
    late: frozenset[Action] = frozenset()
    versions: int = 0
    continuous: bool = False

    def message_bytes(self, taken: Action) -> tuple[BatchLinear, ...]:
        """Return the bytes of each tensor that the action `taken` receives: from the stage before
        it (forward) or from the stage after it (backward)."""
        crossing = self.boundaries.get(taken.stage if taken.kind == FORWARD else taken.stage + 1, StageBoundary())
        return crossing.sent(taken.kind)

    def sent_bytes(self, samples: int) -> float:
        """Return the bytes that this rank sends to its neighbours in all actions of the schedule.

        samples  number of samples in one micro-batch
        """
        own = (consumer_of(action) for action in self.schedule[self.pipeline_rank] if action.kind != WEIGHTS)
        return sum(size.at(samples) for taken in own if taken.stage >= 0 for size in self.message_bytes(taken))

    def resident_message_bytes(self, index: int) -> BatchLinear:
        """Return the bytes of the messages that are in this rank's memory during its action
        number `index`, without the action's own input.

        Sent tensors that the rank has saved for its own backward are subtracted, because they count
        as activations.
        """
        return self._resident_bytes(*(tuple((one.kind, one.stage) for one in part) for part in self.messages[index]))

    @cached_property
    def _resident_bytes(self) -> Callable[..., BatchLinear]:
        """The function that `resident_message_bytes` calls, with a cache: most actions of a long
        step have messages of the same kinds and stages. Its arguments are the kinds and stages of
        the sent and of the coming messages."""

        @cache
        def total_bytes(sent: tuple[tuple[str, int], ...], coming: tuple[tuple[str, int], ...]) -> BatchLinear:
            total = BatchLinear()
            for kind, stage in (*sent, *coming):
                total = sum(self.message_bytes(Action(kind, stage, 0)), total)
            for kind, stage in sent:
                if kind == FORWARD:
                    total += self.boundaries[stage].saved.times(-1.0)
            return total

        return total_bytes


@dataclass(frozen=True, slots=True)
class MicroBatchRun:
    """A part of a step that runs without a break: a micro-batch's whole forward and backward, or
    one action of a pipeline.

    segments  the recorded segments of this part, in order
    reduces   whether the gradients that these segments complete are reduced over the data-parallel
              ranks
    later     whether gradients of earlier micro-batches exist when the segments begin
    ends      whether the micro-batch's backward is complete after these segments
    updates   whether an optimizer update follows while other micro-batches are still in flight
              (pipedream)
    """

    segments: tuple[Segment, ...]
    reduces: bool
    later: bool
    ends: bool = True
    updates: bool = False
