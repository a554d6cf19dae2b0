"""Record what one micro-batch does on fake tensors: its allocations, frees and operations, in
segments (parts of the step, such as the forward of one block).

The profiler calls `record_step` and builds a ledger from the result. `Recorder` is a torch dispatch mode:
it sees every operation, the storages that the operation allocates, and when these are freed.

Of each kind of repeated block, only the first two and the last run. A block between them returns
its input, and the recorder uses the segments of the second block in its place. A deep model
therefore costs no more to trace than a shallow one.

Example: a model of 32 equal blocks runs blocks 0, 1 and 31. The recorded step still has 32 forward
and 32 backward segments of blocks: those of blocks 2 to 30 are copies of block 1's.
"""

from __future__ import annotations

import bisect
import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tightfit._torch.operations import (
    LOCAL_SCALAR_DENSE,
    schema_of,
)
from tightfit._torch.pytree import tree_flatten_with_path
from tightfit._torch.tensors import in_backward, next_sequence_number
from tightfit.cost.recorded_step import (
    BatchLinear,
    BlockInput,
    Buffer,
    Operation,
    Segment,
    Timeline,
)
from tightfit.errors import Untraceable
from tightfit.models.dataflow import path_of
from tightfit.models.tensors import tensors_in
from tightfit.planner.tracing.operations import describe_operation
from tightfit.planner.tracing.repeated_blocks import record_blocks
from tightfit.planner.tracing.storages import ACCUMULATES, StorageMode, backward_node, keys_of, storages_of
from tightfit.planner.tracing.working_memory import working_bytes
from tightfit.runtime.repeated_iterations import iterations_chosen_by

_READ_VALUES = (LOCAL_SCALAR_DENSE.default, torch.ops.aten.equal.default)
_NO_COST = frozenset({"aten.detach.default", "aten.sym_size.int", "prim.layout.default"})
_PRODUCT, _CAST, _SUM = "aten.mm", "aten._to_copy", "aten.add"  # operations that produce a weight's gradient
_GRADIENTS = frozenset((_PRODUCT, _CAST, _SUM))


@dataclass
class _OpenSegment:
    """A segment (a part of the step, such as the forward of one block) that is still being
    recorded. `_closed_segments` converts it to a `Segment`."""

    part: str
    phase: str
    block: int | None = None  # number of the block; between blocks, number of the block before
    call: int = 0  # number of this call of the block
    first: int = 0  # sequence number of its first autograd node
    copy_of: int | None = None  # for a skipped block: number of the block whose segments are copied
    events: list[tuple[_Storage, int]] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    recompute_end: tuple[int, int] = (0, 0)
    inputs: list[_Storage] = field(default_factory=list)
    saved: set[_Storage] = field(default_factory=set)
    block_inputs: list[_BlockInput] = field(default_factory=list)


@dataclass(eq=False)
class _Storage:
    """A storage while the step is recorded. `_buffer` converts it to a `Buffer`, whose fields have
    the same meaning.

    sources  if a matrix product, cast or sum in backward allocated the storage: the storages of its
             inputs
    """

    size: int
    maker: str
    row: str = "temporaries"
    parameter: str = ""
    operands: tuple[_Storage, ...] = ()
    terms: tuple[_Storage, ...] = ()
    sources: tuple[_Storage, ...] = ()
    retained: bool = False
    buffer: Buffer | None = None


@dataclass(eq=False)
class _BlockInput:
    """A tensor argument of a block while the step is recorded. `_to_given` converts it to a
    `BlockInput`.

    path          position among the block's arguments
    size          bytes of the tensor
    storage       the argument's storage if this step allocated it, else None
    has_gradient  whether backward has computed a gradient of the argument
    """

    path: str
    size: int
    storage: _Storage | None
    has_gradient: bool = False

    def note_gradient(self, gradient: Tensor) -> None:
        self.has_gradient = True


class Recorder(StorageMode[_Storage]):
    """A dispatch mode that records operations, allocations and frees, segment by segment. Each call
    of a block is a segment, and so is what runs between two blocks.

    Enter the mode inside FakeTensorMode. Call `begin_segment` for each segment of the forward, then
    `end_forward`, `begin_backward` and `end_backward`.

    parameters        the model's parameters, by name
    forward_segments  segments of the forward, in order
    all_segments      all segments, in the order in which they ran
    phase             forward, backward or inference
    differentiates    whether the forward itself has computed gradients, as by torch.autograd.grad
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.differentiates = False
        self._has_ended = False
        self.parameters = parameters
        self.forward_segments: list[_OpenSegment] = []
        self.all_segments: list[_OpenSegment] = []
        self._calls: Counter[tuple[str, int | None]] = Counter()  # by (part, block)
        self.phase = "forward"
        self._made_in_forward: list[int] = []
        self._existing: set[int] = set()
        self._weights = {key: name for name, weight in parameters.items() for key in keys_of([weight])}
        self._hooks: list[Any] = []

    def see_kernel(self, bytes_accessed: int, dtype: torch.dtype, kind: str = "compiled") -> None:
        """Record one operation: a kernel that the compiler generated. Its FLOPs are not counted.

        bytes_accessed  bytes that the kernel reads and writes
        dtype           dtype that it computes in
        kind            name of the recorded operation
        """
        name = str(dtype).removeprefix("torch.")
        self.all_segments[-1].operations.append(
            Operation(kind, name, BatchLinear(), BatchLinear(float(bytes_accessed)))
        )

    def mark_existing(self, tensors: Any) -> None:
        """Mark tensors that exist before the step, such as parameters. Their storages are not
        recorded, because the ledger counts them in rows of their own.

        tensors  tensors in any nested structure of lists and dicts
        """
        self._existing.update(keys_of(tensors_in(tensors)))

    def begin_segment(self, part: str, block: int | None = None, copy_of: int | None = None) -> None:
        """Begin a segment of the forward: operations, allocations and frees are recorded in it
        until the next segment begins.

        part     "block", "between" (after a block) or another name
        block    number of the block; for part "between", number of the block that ran before
        copy_of  for a skipped block: number of the block whose segments are copied; None for a
                 block that runs
        """
        first = next_sequence_number()
        opened = _OpenSegment(part, self.phase, block, self._calls[part, block], first, copy_of)
        self._calls[part, block] += 1
        self.forward_segments.append(opened)
        self.all_segments.append(opened)

    def note_inputs(self, arguments: Any) -> None:
        """Record the tensors among `arguments`, with which a block is called, in the current
        segment. Also record their storages if this step allocated them."""
        segment = self.all_segments[-1]
        leaves = tree_flatten_with_path(arguments)[0]
        tensors = [(path_of(keys), leaf) for keys, leaf in leaves if isinstance(leaf, Tensor)]
        segment.inputs += self.notes_of(keys_of(tensor for _, tensor in tensors))
        for path, tensor in tensors:
            made = self.notes_of(keys_of([tensor]))
            given = _BlockInput(str(path), tensor.numel() * tensor.element_size(), made[0] if made else None)
            segment.block_inputs.append(given)
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(given.note_gradient)

    def end_forward(self) -> None:
        """End the forward. Storages that the forward allocated and that are still alive are counted
        as activations, because they are saved for backward."""
        for note in self.notes_of(self._made_in_forward):
            note.row = "activations"
        self._made_in_forward.clear()

    def begin_backward(self) -> None:
        self.phase, self._lowest = "backward", len(self.forward_segments)
        self._starts = [segment.first for segment in self.forward_segments]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._record_gradient, name))
            for name, parameter in self.parameters.items()
            if parameter.requires_grad
        ]
        self._enter_backward(len(self.forward_segments) - 1)

    def end_backward(self) -> None:
        self._enter_backward(-1)

    def mark_saved(self, tensor: Tensor) -> Tensor:
        """Record in the current segment that autograd saves `tensor` for backward, and return the
        tensor without its graph. This is the pack hook that is passed to `saved_tensors_hooks`."""
        segment = self.all_segments[-1]
        segment.recompute_end = len(segment.events), len(segment.operations)
        segment.saved.update(self.notes_of(keys_of([tensor])))
        return tensor.detach()

    def deduplicate_loop(self, of: Sequence[int]) -> Iterator[int]:
        """Yield the indices for a loop of equal iterations, but only the first two and the last, to
        save time. For every iteration that is left out, the events and operations of the second
        iteration are recorded once more.

        Example: a loop of 10 iterations runs iterations 0, 1 and 9. What iteration 1 recorded is
        recorded another 7 times.

        All indices are yielded if the second iteration allocates a buffer that it does not free, or
        frees a buffer that it did not allocate.

        of  the indices of all iterations
        """
        if len(of) <= 3:
            yield from of
            return
        yield of[0]
        segment = self.all_segments[-1]
        events, operations = len(segment.events), len(segment.operations)
        yield of[1]
        came, done = segment.events[events:], segment.operations[operations:]
        left: Counter[_Storage] = Counter()
        for note, sign in came:
            left[note] += sign
        if any(left.values()):
            yield from of[2:]
            return
        segment.events += came * (len(of) - 3)
        segment.operations += done * (len(of) - 3)
        yield of[-1]

    def _record_gradient(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        for note in self.notes_of(keys_of([parameter.grad])):
            note.row = "gradients"
            _describe_gradient(note, name)
            self.all_segments[-1].events.append((note, 0))

    def _enter_backward(self, position: int) -> None:
        """Begin to record a backward segment: the backward of the forward segment
        `forward_segments[position]`. With -1, end the backward.

        Skipped blocks run no backward of their own. So first add the backward segments of the
        skipped blocks between this segment and the last one that was begun.
        """
        for between in range(self._lowest - 1, position, -1):
            passed = self.forward_segments[between]
            if passed.copy_of is not None:
                again = _OpenSegment(passed.part, "backward", passed.block, passed.call, copy_of=passed.copy_of)
                self.all_segments.append(again)
        self._position, self._lowest = position, min(self._lowest, position)
        if position >= 0:
            segment = self.forward_segments[position]
            self.all_segments.append(_OpenSegment(segment.part, "backward", segment.block, segment.call))

    def _find_segment(self) -> None:
        number = backward_node()
        if number >= ACCUMULATES:
            return
        position = bisect.bisect_right(self._starts, number) - 1
        if position >= 0 and position != self._position:
            self._enter_backward(position)

    def run_operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = str(func)
        if name in _NO_COST or func in _READ_VALUES:
            return func(*args, **kwargs)
        if self.phase == "backward":
            self._find_segment()
        elif not self.differentiates:
            self.differentiates = in_backward()
        output = func(*args, **kwargs)
        self._record_outputs(func, name.rsplit(".", 1)[0], args, kwargs, output)
        return output

    def _record_outputs(self, func: Any, name: str, args: Any, kwargs: Any, output: Any) -> None:
        segment = self.all_segments[-1]
        outputs, inputs = tensors_in(output), tensors_in((args, kwargs))
        fresh = False
        for tensor in outputs:
            for storage in storages_of(tensor):
                if id(storage) not in self._live and id(storage) not in self._existing:
                    fresh = True
                    self._record_allocation(storage, name, segment)
                    if name in _GRADIENTS:
                        self._note_sources(self._live[id(storage)][0], inputs)
        if not fresh and func.is_view:
            return
        if working := working_bytes(func, args):
            note = _Storage(working, name)
            segment.events += [(note, 1), (note, -1)]
        mutates = schema_of(func).is_mutable
        # collectives (c10d) mutate their arguments, but their schemas do not say so
        if fresh or mutates or name.startswith("c10d."):
            segment.operations.append(describe_operation(func, name, args, kwargs, inputs, output))

    def _note_sources(self, note: _Storage, inputs: list[Tensor]) -> None:
        keys = keys_of(inputs)
        if self.phase == "backward":
            note.sources = tuple(self.notes_of(keys))
        elif note.maker == _CAST:
            note.parameter = next((self._weights[key] for key in keys if key in self._weights), "")

    def _record_allocation(self, storage: torch.UntypedStorage, name: str, segment: _OpenSegment) -> None:
        note = _Storage(storage.nbytes(), name)
        self.follow(storage, note)
        segment.events.append((note, 1))
        if self.phase == "forward":
            self._made_in_forward.append(id(storage))

    def record_free(self, note: _Storage) -> None:
        if not self._has_ended:
            self.all_segments[-1].events.append((note, -1))

    def mark_retained(self) -> None:
        """Mark the storages that the step has left, such as those of tensors that a module keeps in an
        attribute. Nothing is recorded afterwards."""
        self._has_ended = True
        left = [note for note, _ in self._live.values() if note.row != "gradients"]
        if left:
            gc.collect()  # some are only in cycles of objects
        for note, _ in self._live.values():
            note.retained = note.row != "gradients"

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._live.clear()
        for hook in self._hooks:
            hook.remove()


def record_step(
    model: nn.Module,
    loss_sum: Callable[[Any], Tensor],
    batch: Any,
    blocks: list[nn.Module],
    training: bool = True,
    removed: Mapping[int, int] | None = None,
    run_all: bool = False,
    gradients: bool = False,
    finds_retained: bool = False,
    without_gradient: set[str] | None = None,
) -> tuple[Segment, ...]:
    """Record what one micro-batch of fake tensors does, and return it as segments, in the order in
    which they ran.

    model     a model whose parameters and buffers are fake tensors
    loss_sum  function of a batch that returns its summed loss
    batch     the micro-batch
    blocks    the model's blocks, in order, without those that were removed
    training  True: forward and backward; False: the forward of an evaluation
    removed   number of each block that was removed from the model -> number of the block that it
              repeats
    run_all   whether to run all blocks; otherwise repeated blocks are skipped
    gradients  whether autograd is on in the forward of an evaluation. What it saves then lives until
              the loss is computed; without autograd, nothing is saved
    finds_retained  whether to find the storages that the step leaves until the next one replaces them

    without_gradient  gets the names of the trainable parameters that get no gradient, outside of the blocks that are
              called

    Afterwards all gradients are None, and the model is otherwise unchanged.

    Raises Untraceable if the forward computes gradients itself while blocks are skipped: what their backward
    does in the forward is not known.
    """
    parameters = dict(model.named_parameters())
    recorder = Recorder(parameters)
    recorder.mark_existing([list(parameters.values()), list(model.buffers()), batch])
    if not training:
        recorder.phase = "inference"
    with (
        torch.set_grad_enabled(training or gradients),
        recorder,
        record_blocks(blocks, recorder, removed, run_all) as called,
        iterations_chosen_by(recorder.deduplicate_loop),
        ExitStack() as stack,
    ):
        recorder.begin_segment("start")
        if training:
            stack.enter_context(saved_tensors_hooks(recorder.mark_saved, lambda tensor: tensor))
        loss = loss_sum(batch)
        if recorder.differentiates and any(segment.copy_of is not None for segment in recorder.forward_segments):
            raise Untraceable("job: model", "computes gradients in its forward", "trace all blocks")
        if training:
            stack.close()
            recorder.end_forward()
            recorder.begin_backward()
            loss.detach()  # as the engine does for its sum of losses
            loss.backward(torch.full_like(loss, 1.0))
        del loss
        if training:
            recorder.end_backward()
        if finds_retained:
            recorder.mark_retained()
    if without_gradient is not None:
        inside = {parameter for block in called for parameter in block.parameters()}
        without_gradient |= {
            name for name, one in parameters.items() if one.requires_grad and one.grad is None and one not in inside
        }
    for parameter in parameters.values():
        parameter.grad = None
    return recorded_segments(recorder)


def _closed_segments(opened_segments: list[_OpenSegment]) -> tuple[Segment, ...]:
    """Convert recorded segments to `Segment` objects, in the same order. A segment of a skipped
    block gets the timeline (allocations, frees and operations) of the block that it copies.
    Segments without events and operations are dropped."""
    whole: dict[tuple[str, int, str], dict[int, Timeline]] = defaultdict(dict)  # by call
    births = {
        note: number
        for number, note in enumerate(
            s for opened_segment in opened_segments for s, sign in opened_segment.events if sign > 0
        )
    }
    closed: list[tuple[_OpenSegment, Timeline]] = []
    for opened in opened_segments:
        replaced = sum(note.retained and sign > 0 for note, sign in opened.events[: opened.recompute_end[0]])
        timeline = Timeline(
            tuple((_buffer(note), sign) for note, sign in _with_retained(_with_ordered_casts(opened.events, births))),
            tuple(opened.operations),
            (opened.recompute_end[0] + replaced, opened.recompute_end[1]),
            tuple(_buffer(note) for note in opened.inputs),
            frozenset(_buffer(note) for note in opened.saved),
            tuple(_to_given(one) for one in opened.block_inputs),
        )
        closed.append((opened, timeline))
        if opened.block is not None and opened.copy_of is None:
            calls = whole[opened.part, opened.block, opened.phase]
            calls[opened.call] = calls[opened.call].then(timeline) if opened.call in calls else timeline
    segments = []
    for opened, timeline in closed:
        if opened.copy_of is not None:
            calls = whole[opened.part, opened.copy_of, opened.phase]
            timeline = calls.get(opened.call) or calls.get(max(calls, default=0), Timeline())
        if timeline.events or timeline.operations:
            block = opened.block if opened.part == "block" else None
            segments.append(Segment(opened.part, opened.phase, timeline, block, opened.call))
    return tuple(segments)


def _with_ordered_casts(events: list[tuple[_Storage, int]], births: dict[_Storage, int]) -> list[tuple[_Storage, int]]:
    """Return the events of a segment in which casts of parameters that are freed one after another
    are freed in the order of their allocation.

    At the end of a forward, autocast frees its casts in the order of their addresses, which differs
    from trace to trace.

    births  storage -> its number in the order of allocation
    """
    ordered: list[tuple[_Storage, int]] = []
    for is_cast, run in groupby(events, lambda event: event[1] < 0 and event[0].maker == _CAST):
        ordered += sorted(run, key=lambda event: births.get(event[0], -1) if is_cast else 0)
    return ordered


def _with_retained(events: list[tuple[_Storage, int]]) -> list[tuple[_Storage, int]]:
    """Return the events with a free after each allocation of a retained storage: that of the one that the step
    before has left, and that is replaced now. The ledger has their bytes for the whole step."""
    found: list[tuple[_Storage, int]] = []
    for note, sign in events:
        found += [(note, sign), (note, -1)] if note.retained and sign > 0 else [(note, sign)]
    return found


def _describe_gradient(note: _Storage, parameter: str) -> None:
    """Record in `note` that this storage holds the gradient of `parameter` (a name), and from which
    storages the matrix product, cast or sum in backward computed it.

    Example: fp32 weights under bf16 autocast. The weight gradient is a cast of the bf16 product
    grad_output.T @ input, so its operands are the storages of grad_output and input.
    """
    note.parameter = parameter
    if note.maker == _PRODUCT:
        note.operands = note.sources
    elif note.maker == _CAST:
        for source in note.sources:
            _describe_gradient(source, parameter)
            note.operands = source.operands
    elif note.maker == _SUM and note.row == "gradients":
        note.terms = tuple(source for source in note.sources if source.size == note.size)
        for term in note.terms:
            _describe_gradient(term, parameter)


def _buffer(note: _Storage) -> Buffer:
    if note.buffer is None:
        operands, terms = (tuple(map(_buffer, storages)) for storages in (note.operands, note.terms))
        size = BatchLinear(float(note.size))
        note.buffer = Buffer(size, note.row, note.maker, note.parameter, operands, terms, note.retained)
    return note.buffer


def _to_given(given: _BlockInput) -> BlockInput:
    buffer = None if given.storage is None else _buffer(given.storage)
    return BlockInput(given.path, BatchLinear(float(given.size)), buffer, given.has_gradient)


def recorded_segments(recorder: Recorder) -> tuple[Segment, ...]:
    """Return the segments that `recorder` has recorded, in the order in which they ran."""
    return _closed_segments(recorder.all_segments)


__all__ = ["Recorder", "record_step", "recorded_segments"]
