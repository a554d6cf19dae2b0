"""The recorded step: the buffers that one micro-batch allocates and frees, and its operations.

planner/tracing/recorder.py records it on fake tensors, each method's `cost` edits it, and `Ledger`
replays it to find the peak. A recorded step is a tuple of segments, in the order in which they run:
the forward of each part of the model, then the backwards in reverse order. Every size is linear in
the samples of a micro-batch, so one recorded step holds for every micro-batch size.

Example: two equal blocks, sizes in MiB for one sample. A block's forward allocates an activation
h of 4, which is saved for backward, and a temporary t of 2, which is freed at once. Its backward
allocates the gradient dh of h (a temporary of 4) and the weights' gradient g of 3, which does not
grow with the samples, and then frees h and dh.

    segment            events of its timeline               before   peak   after
    forward, block 0   h0 +1, t0 +1, t0 -1                       0      6       4
    forward, block 1   h1 +1, t1 +1, t1 -1                       4     10       8
    backward, block 1  dh1 +1, g1 +1, g1 0, h1 -1, dh1 -1        8     15       7
    backward, block 0  dh0 +1, g0 +1, g0 0, h0 -1, dh0 -1        7     14       6

The peak is 15 MiB, in the backward of block 1: activations 8, temporaries 4, gradients 3. With two
samples it is 27 MiB: 16, 8 and 3. In a later micro-batch (`accumulate_gradients`) g1 is a temporary
that is added to the gradients that exist already, 6 MiB, so the peak for one sample is 21 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

# the rows of the ledger that a recorded buffer may count under
TRACED_ROWS = ("activations", "temporaries", "gradients", "optimizer", "parameters")

CHANNELS_LAST = " of channels_last"  # ends the name of an operation on an image of that memory format
OVERLAPPING = " of overlapping windows"  # in the name of an operation on such windows of an image
# ends the name of an operation on numbers that lie in memory in another order than its result's
BETWEEN_FORMATS = " between formats"
WEIGHT_PRODUCTS = ("aten.mm", "aten.addmm")  # matrix products with a layer's weight


@dataclass(frozen=True, slots=True)
class BatchLinear:
    """A size or a count that is a linear function of the number of samples in a micro-batch: fixed
    + per_sample x samples."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, samples: float) -> float:
        return self.fixed + self.per_sample * samples

    def __add__(self, other: BatchLinear) -> BatchLinear:
        return BatchLinear(self.fixed + other.fixed, self.per_sample + other.per_sample)

    def times(self, factor: float) -> BatchLinear:
        return BatchLinear(self.fixed * factor, self.per_sample * factor)


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """The storage of one tensor. Two buffers are equal only if they are the same object.

    size       bytes
    row        the ledger's row under which the buffer is counted, one of TRACED_ROWS
    maker      the operation that allocates the buffer, such as aten.mm
    parameter  name of a parameter, if the buffer is the parameter's gradient, the product from
               which this gradient is cast, or a cast of the parameter to another dtype; else ""
    operands   for a gradient that is a matrix product: the two buffers that are multiplied
    terms      for the gradient of a parameter that is used several times: the gradients from the
               single uses, whose sum is this gradient
    retained   whether the step leaves it until the next step replaces it, such as a tensor that a module
               keeps in an attribute
    """

    size: BatchLinear
    row: str
    maker: str = ""
    parameter: str = ""
    operands: tuple[Buffer, ...] = ()
    terms: tuple[Buffer, ...] = ()
    retained: bool = False


@dataclass(frozen=True, slots=True)
class Convolution:
    """The shape of a convolution, without the number of samples. A convolution in one dimension, as of
    audio, has one number in place of the height and the width.

    image           (input channels, height, width) of a sample
    weight          (output channels, input channels of a group, height, width of the window); of a
                    transposed one, (input channels, output channels of a group, height, width)
    stride, padding, dilation, output_padding  as those of `torch.convolution`
    groups          number of groups of channels
    transposed      whether it is a transposed convolution
    gradients       0 for a forward; for a backward the number of gradients of the image and the weight
    """

    image: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    gradients: int = 0

    @classmethod
    def of(cls, tuples: Iterable[tuple[int, ...]], groups: int, transposed: bool, gradients: int) -> Convolution:
        """Return the convolution with these values of the fields, of which `tuples` has the first six."""
        image, weight, stride, padding, dilation, output_padding = tuples
        return cls(image, weight, stride, padding, dilation, output_padding, groups, transposed, gradients)

    def __str__(self) -> str:
        """Return the shape as text, such as "64x56x56 by 128x64x3x3, stride 2x2, padding 1x1"."""
        text = f"{_sizes(self.image)} by {_sizes(self.weight)}"
        for name, sizes, usual in (
            ("stride", self.stride, 1),
            ("padding", self.padding, 0),
            ("dilation", self.dilation, 1),
            ("output padding", self.output_padding, 0),
        ):
            text += f", {name} {_sizes(sizes)}" if set(sizes) != {usual} else ""
        text += f", {self.groups} groups" if self.groups > 1 else ""
        text += ", transposed" if self.transposed else ""
        return text + (", of the weight alone" if self.gradients == 1 else "")

    @property
    def window(self) -> int:
        """Pixels of the window."""
        return math.prod(self.weight[2:])

    @property
    def channels(self) -> tuple[int, int]:
        """(output channels, input channels) of a group."""
        first, second = self.weight[:2]
        return (second, first // self.groups) if self.transposed else (first // self.groups, second)

    @property
    def positions(self) -> int:
        """Positions of the window in a sample: pixels of the output, or of a transposed one's input."""
        if self.transposed:
            return math.prod(self.image[1:])
        sides = zip(self.image[1:], self.weight[2:], self.stride, self.padding, self.dilation, strict=True)
        return math.prod(
            (side + 2 * padding - dilation * (window - 1) - 1) // stride + 1
            for side, window, stride, padding, dilation in sides
        )

    @property
    def flops(self) -> int:
        """FLOPs for one sample."""
        return 2 * self.positions * self.groups * math.prod(self.channels) * self.window * max(self.gradients, 1)

    def rate_name(self, kind: str) -> str:
        """Return the name under which a machine has the rate that this convolution itself reached.

        kind  the kind of operation, such as "channels-last convolution"
        """
        return f"{kind} of {self}"


def _sizes(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


@dataclass(frozen=True, slots=True)
class Operation:
    """One kernel, or `count` equal kernels. `flops` and `bytes_accessed` are those of one kernel.

    name            the operation's name, such as aten.mm
    dtype           the dtype in which the kernel computes
    flops           model FLOPs: attention counts all pairs of queries and keys, also under a causal
                    mask
    bytes_accessed  bytes that the kernel reads and writes
    sizes           for a matrix product: (batches, rows, columns, depth), depth being the summed
                    dimension. For a convolution: (images,). Else empty
    count           number of equal kernels
    computed_share  share of `flops` that the kernel really computes: less than 1 for attention that
                    skips the pairs that a causal mask hides
    alignment       for a matrix product: bytes of which the beginnings of its matrices' rows are
                    multiples, at most 16
    convolution     the shape of a convolution; None for other operations
    """

    name: str
    dtype: str
    flops: BatchLinear
    bytes_accessed: BatchLinear
    sizes: tuple[BatchLinear, ...] = ()
    count: BatchLinear = BatchLinear(1.0)
    computed_share: float = 1.0
    alignment: int = 16
    convolution: Convolution | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BlockInput:
    """Describes one tensor among the arguments of a block's call.

    path          where the tensor is in the arguments (args, kwargs), as text: "(0, 2)" is args[2]
    size          bytes of the tensor, which may be a view of a part of its storage
    buffer        the tensor's storage; None if the step did not allocate it
    has_gradient  whether backward computes a gradient of the tensor
    """

    path: str
    size: BatchLinear
    buffer: Buffer | None = None
    has_gradient: bool = False


@dataclass(frozen=True, eq=False)
class Timeline:
    """Everything that happens in one segment: allocations and frees of buffers, in order, and
    operations.

    events         (buffer, +1) when the buffer is allocated, (buffer, -1) when it is freed. A
                   parameter's gradient has one more event, (buffer, 0), when it is complete
    operations     the operations that run, in order
    recompute_end  for a forward: (number of events, number of operations) up to the last tensor
                   that backward needs. A recomputation of this forward stops there
    inputs         for a block: those storages of its arguments that this step has allocated
    saved          for a forward: the buffers, its own or earlier ones, that are saved for backward
    block_inputs   for a block: every tensor among its arguments, also views of a storage and tensors
                   that the step has not allocated, such as the batch
    """

    events: tuple[tuple[Buffer, int], ...] = ()
    operations: tuple[Operation, ...] = ()
    recompute_end: tuple[int, int] = (0, 0)
    inputs: tuple[Buffer, ...] = ()
    saved: frozenset[Buffer] = frozenset()
    block_inputs: tuple[BlockInput, ...] = ()

    def then(self, other: Timeline) -> Timeline:
        """Return a timeline in which `other` follows this timeline: the events and operations of
        both, in order."""
        events, operations = other.recompute_end
        needed = (len(self.events) + events, len(self.operations) + operations) if events else self.recompute_end
        return Timeline(
            self.events + other.events,
            self.operations + other.operations,
            needed,
            self.inputs + other.inputs,
            self.saved | other.saved,
            self.block_inputs or other.block_inputs,
        )

    @property
    def allocated(self) -> list[Buffer]:
        return [buffer for buffer, sign in self.events if sign > 0]

    @cached_property
    def collective_bytes(self) -> float:
        """The bytes that the collectives read and write for one sample."""
        return sum(
            operation.bytes_accessed.at(1) * operation.count.at(1)
            for operation in self.operations
            if operation.name.startswith(("c10d.", "_c10d_functional."))  # the second in compiled blocks
        )

    @cached_property
    def freed(self) -> frozenset[Buffer]:
        return frozenset(buffer for buffer, sign in self.events if sign < 0)


@dataclass(frozen=True, slots=True)
class Segment:
    """The work of one micro-batch in one part of the model in one phase, such as the forward of one
    block.

    part      "block" for a repeated block, else a name for the code before, between or after the
              blocks
    phase     forward, backward, inference (a forward that saves nothing for backward) or optimizer
    timeline  the allocations, frees and operations of the segment
    block     the block's number, from 0; None if the part is no block
    call      for a block that a forward calls more than once: the number of the call, from 0
    """

    part: str
    phase: str
    timeline: Timeline
    block: int | None = None
    call: int = 0

    @property
    def key(self) -> tuple[str, str, int | None, int]:
        """A tuple that identifies the segment within a recorded step: (part, phase, block,
        call)."""
        return self.part, self.phase, self.block, self.call


@dataclass(frozen=True, slots=True)
class ReplayedSegment:
    """The result of `replay`: the bytes by row at the peak and at the end of a timeline. They are
    relative to the bytes that are allocated when the timeline begins.

    at_peak              row -> bytes that the timeline adds at its peak
    at_end               row -> bytes that the timeline adds at its end
    completed_gradients  (at the peak, at the end): bytes of the gradients that the timeline has
                         completed by then
    largest_gradient     bytes of the largest gradient that the timeline completes
    """

    at_peak: dict[str, float]
    at_end: dict[str, float]
    completed_gradients: tuple[float, float] = (0.0, 0.0)
    largest_gradient: float = 0.0


def replay(timeline: Timeline, samples: float) -> ReplayedSegment:
    """Add up a timeline's allocations and frees for a micro-batch of `samples` samples. Return the
    bytes by row at the peak of this sum and at its end."""
    rows = dict.fromkeys(TRACED_ROWS, 0.0)
    total, best, largest = 0.0, 0.0, dict(rows)
    made, made_then, gradient = 0.0, 0.0, 0.0
    for buffer, sign in timeline.events:
        size = buffer.size.at(samples)
        if sign == 0:
            made, gradient = made + size, max(gradient, size)
            continue
        rows[buffer.row] += sign * size
        total += sign * size
        if total > best:
            best, largest, made_then = total, dict(rows), made
    return ReplayedSegment(largest, rows, (made_then, made), gradient)


def edit_backward(
    recorded_step: tuple[Segment, ...], edits: list[Callable[[Timeline], Timeline]]
) -> tuple[Segment, ...]:
    """Return `recorded_step` with the timeline (allocations, frees and operations) of each backward
    segment changed by all functions in `edits`, in order.

    Equal blocks share one timeline. It is edited only once, so that they also share the result.
    """
    known: dict[Timeline, Timeline] = {}

    def changed(segment: Segment) -> Segment:
        if segment.phase != "backward" or not edits:
            return segment
        if segment.timeline not in known:
            timeline = segment.timeline
            for edit in edits:
                timeline = edit(timeline)
            known[segment.timeline] = timeline
        return replace(segment, timeline=known[segment.timeline])

    return tuple(map(changed, recorded_step))


def free_completed_gradients(timeline: Timeline) -> Timeline:
    """Return the timeline of a backward in which each gradient is freed as soon as it is complete,
    because it is copied to a bucket or to other memory. The bucket is not in the timeline: the
    caller has to count its bytes."""
    events: list[tuple[Buffer, int]] = []
    for buffer, sign in timeline.events:
        if buffer.row != "gradients" or sign > 0:
            events.append((buffer, sign))
        elif sign == 0:
            events += [(buffer, 0), (buffer, -1)]
    return replace(timeline, events=tuple(events))


def accumulate_gradients(timeline: Timeline) -> Timeline:
    """Return the backward of a later micro-batch, made from `timeline`, the backward of the first
    one. In the later one, each new gradient is a temporary: it is added to the gradient of the
    earlier micro-batches and then freed."""
    events: list[tuple[Buffer, int]] = []
    passing: dict[Buffer, Buffer] = {}
    for buffer, sign in timeline.events:
        if buffer.row != "gradients":
            events.append((buffer, sign))
        elif sign > 0:
            passing[buffer] = replace(buffer, row="temporaries")
            events.append((passing[buffer], 1))
        elif buffer in passing:
            events += [(buffer, sign), (passing.pop(buffer), -1)] if sign == 0 else [(passing.pop(buffer), -1)]
    return replace(timeline, events=(*events, *((buffer, -1) for buffer in passing.values())))


def fuse_updates(timeline: Timeline, update_bytes: Mapping[str, float]) -> Timeline:
    """Return the timeline of a backward in which each parameter is updated as soon as its gradient
    is complete. The gradient is then freed.

    timeline      the backward without these updates
    update_bytes  parameter name -> temporary bytes that its update needs
    """
    events: list[tuple[Buffer, int]] = []
    for buffer, sign in timeline.events:
        if buffer.row != "gradients" or sign > 0:
            events.append((buffer, sign))
        elif sign == 0:
            transient = Buffer(BatchLinear(update_bytes.get(buffer.parameter, 0.0)), "temporaries")
            events += [(transient, 1), (transient, -1), (buffer, -1)]
    return replace(timeline, events=tuple(events))
