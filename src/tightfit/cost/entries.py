"""A ledger's entries beside its recorded steps: parameters, updates, communication, pipeline
stages.

`Ledger` holds them, and the methods' `cost` functions write them. All figures are those of one
device.

Example of `BucketedReduction`: 100 MiB of gradients, buckets of 25 MiB, and backward has completed
60 MiB of gradients. The third bucket has begun, so buckets take 75 MiB. Without ZeRO (shards = 1)
the buckets become the gradients: 75 MiB of gradients. With ZeRO-2 over 4 ranks (shards = 4) the
reduce-scattered shards take 60 / 4 = 15 MiB of gradients, and two buckets are in memory at most,
the one that is filled and the one that is reduced: 50 MiB of communication.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from tightfit.cost.pipeline_schedule import FORWARD, WEIGHTS, Action, Schedule, consumer_of
from tightfit.cost.recorded_step import BatchLinear, Operation, Segment

NOTHING = BatchLinear()
# places of a (small) buffer that belongs to no block: before the blocks and after them
EVERYWHERE = (-1, 10**9)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter or buffer of the model, in the dtype that it is stored in.

    shape      the unsharded shape's sizes
    bytes      bytes of its storage
    trainable  whether it gets a gradient; buffers and frozen parameters do not
    places     where it is used: the numbers of blocks; -1 before the blocks, and the number of
               blocks after them (see models/blocks.py)
    """

    name: str
    shape: tuple[int, ...]
    bytes: int
    trainable: bool
    places: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Its number of elements."""
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True, slots=True)
class Update:
    """What the optimizer does to one parameter.

    state_bytes      optimizer states, which live from step to step
    transient_bytes  temporary bytes during the update
    operations       the update's kernels
    foreach_bytes    the part of transient_bytes that a multi-tensor (foreach) kernel holds for all
                     parameters at once
    left_bytes       the part of transient_bytes that is still allocated while the next parameter of
                     the same group is updated
    group            index of the optimizer's parameter group
    elements, dtype  for a parameter that is updated in one batch with others: how many elements it
                     has, and its dtype. The first update of a batch carries the transient bytes and
                     the operations of the whole batch
    unpacked_bytes   of quantized states: their bytes where a rank's shard is not a whole number of
                     quantization blocks, which stays in fp32
    comes            bytes of offloaded tensors that are copied to the device for this update, while
                     the update before it runs
    leaves           bytes that are copied back while the update after it runs
    """

    state_bytes: int
    transient_bytes: int
    operations: tuple[Operation, ...] = ()
    foreach_bytes: int = 0
    left_bytes: int = 0
    group: int = 0
    elements: int = 0
    dtype: str = ""
    comes: int = 0
    leaves: int = 0
    unpacked_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PeakInstant:
    """The instant of a step with the most memory: its bytes, in all and by row, phase and part."""

    total: float = 0.0
    rows: dict[str, float] = field(default_factory=dict)
    phase: str = ""
    part: str = ""


@dataclass(frozen=True, slots=True)
class BucketedReduction:
    """Gradients that are reduced over the data-parallel ranks in buckets, while backward runs.

    shards   ranks that each gradient is sharded over (reduce-scatter); 1: every rank gets the full
             gradient (all-reduce)
    bucket   bytes of one bucket
    always   whether the gradients of each micro-batch are reduced, or only their sums, in the last
             micro-batch
    coming   bytes of buffers in which updated weights are gathered
    stays    whether those buffers live until the next forward begins
    """

    shards: int
    bucket: float
    always: bool
    coming: float = 0.0
    stays: bool = False

    def begun_bytes(self, done: float, whole: float) -> float:
        """Bytes of the buckets that have begun when `done` of the `whole` bytes of gradients are
        complete."""
        return min(math.ceil(done / self.bucket) * self.bucket, whole)

    def rows_during(self, done: float, whole: float) -> dict[str, float]:
        """Bytes by row of the shards and buckets when `done` of the `whole` bytes are complete."""
        if self.shards == 1:
            return {"gradients": self.begun_bytes(done, whole)}
        return {"gradients": done / self.shards, "communication": min(2 * self.bucket, self.begun_bytes(done, whole))}


@dataclass(frozen=True, slots=True)
class ShardedParameters:
    """Parameters that are unsharded only while their block computes (ZeRO-3, FSDP).

    shards   ranks that parameters and gradients are sharded over. Infinity if gradients leave for
             other memory, because this device then keeps none of them
    block    bytes of the largest block's parameters, in the dtype that they are gathered in
    rest     bytes of the parameters outside the blocks, unsharded from forward to backward
    reduced  bytes of the largest block's gradients, in the dtype that they are reduced in
    prefetched  bytes of the next block's parameters, which are gathered during a block's backward
    ahead    whether they are gathered ahead in forward, too
    """

    shards: float
    block: float
    rest: float
    reduced: float
    prefetched: float
    ahead: bool = False

    @property
    def reduce_dtype_ratio(self) -> float:
        """Bytes of a gradient as it is reduced, over its bytes as backward computes it: 2 if bf16
        gradients are reduced in fp32."""
        return self.reduced / self.block if self.block else 1.0


@dataclass(frozen=True, slots=True)
class Message:
    """What one device sends in a step by one kind of communication.

    bytes        bytes that the device sends
    bytes_per_s  bandwidth of the slowest link on the way
    overlaps     whether the communication overlaps with computation
    latency_s    seconds that all its calls take even if nothing is sent
    at_start     of weights that are gathered during the next forward: the share that the forward needs
                 before it begins; 0 for other messages
    during       of copies between a device and its host: the work that they overlap with (forward,
                 backward or update), in all micro-batches; empty between devices
    way          in or out; copies in both directions overlap; empty between devices
    """

    name: str
    bytes: float
    bytes_per_s: float
    overlaps: bool
    latency_s: float = 0.0
    during: str = ""
    way: str = ""
    at_start: float = 0.0

    def times(self, share: float) -> Message:
        """A share of the message: of its bytes and of its calls' latency."""
        return replace(self, bytes=self.bytes * share, latency_s=self.latency_s * share)


@dataclass(frozen=True)
class StageProgram:
    """What a device does with one micro-batch in one pipeline stage of the model.

    forward, backward  the stage's recorded step
    weights   the gradients of linear layers' weights, if the schedule gives them an action of their
              own (zero bubble); else empty
    """

    forward: tuple[Segment, ...]
    backward: tuple[Segment, ...]
    weights: tuple[Segment, ...] = ()

    @property
    def segments(self) -> tuple[Segment, ...]:
        return (*self.forward, *self.backward, *self.weights)


@dataclass(frozen=True, slots=True)
class StageBoundary:
    """What one pipeline stage sends to the next for a micro-batch, and gets back.

    forward   bytes of each tensor that the stage sends
    backward  bytes of each gradient that comes back; not every tensor has one
    saved     bytes of the sent tensors that the sender has saved for its own backward. They stay in
              its memory anyway, so they are not counted twice
    """

    forward: tuple[BatchLinear, ...] = ()
    backward: tuple[BatchLinear, ...] = ()
    saved: BatchLinear = NOTHING

    def sent(self, kind: str) -> tuple[BatchLinear, ...]:
        """Bytes of each tensor that crosses the boundary in an action of this kind."""
        return self.forward if kind == FORWARD else self.backward


@dataclass(frozen=True, eq=False)
class RankProgram:
    """What one pipeline rank does in a step.

    stage_programs  by the number of each stage that the rank holds: its recorded step
    schedule     the actions of every rank; pipeline_rank: which rank this is
    boundaries   by the number of each stage but the first: what it receives from the stage before
    bytes_per_s  bandwidth of the link to the next rank
    messages     for each action of this rank: (sent, coming), the messages in its memory beside the
                 action's own input, each named by the action that consumes it
    late         the actions whose message is requested only when they begin
    latency_s    latency of one message, in seconds
    versions     versions of the weights that are kept beside the newest one (pipedream)
    continuous   whether the next step begins without waiting for the last backward (pipedream)
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
        """Bytes of each tensor that an action receives from its neighbour."""
        crossing = self.boundaries.get(taken.stage if taken.kind == FORWARD else taken.stage + 1, StageBoundary())
        return crossing.sent(taken.kind)

    def sent_bytes(self, samples: int) -> float:
        """Bytes that this rank sends to its neighbours in one step of the schedule."""
        own = (consumer_of(action) for action in self.schedule[self.pipeline_rank] if action.kind != WEIGHTS)
        return sum(size.at(samples) for taken in own if taken.stage >= 0 for size in self.message_bytes(taken))

    def resident_message_bytes(self, place: int) -> BatchLinear:
        """Bytes of the messages in memory beside the action at index `place` of this rank."""
        sent, coming = self.messages[place]
        total = BatchLinear()
        for taken in (*sent, *coming):
            total = sum(self.message_bytes(taken), total)
        for taken in sent:
            if taken.kind == FORWARD:
                total += self.boundaries[taken.stage].saved.times(-1.0)
        return total


@dataclass(frozen=True, slots=True)
class MicroBatchRun:
    """Segments of one micro-batch that run without a break: the whole forward and backward, or in a
    pipeline one action.

    reduces   whether the gradients that it completes are reduced over the data-parallel ranks
    later     whether gradients of earlier micro-batches exist already
    ends      whether it ends the backward of the micro-batch
    updates   whether an update follows it while other micro-batches are in flight (pipedream)
    """

    segments: tuple[Segment, ...]
    reduces: bool
    later: bool
    ends: bool = True
    updates: bool = False
