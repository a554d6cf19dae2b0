"""Edit a recorded step for activation recomputation: groups of blocks run again in backward.

`recompute` calls `with_recomputation` when it estimates a plan. The recorded step is of training
without recomputation. It is edited as follows: the first forward saves only the input of a group of
blocks, and before the backward of the group's last block, the group's forward runs again.

Example: 12 blocks in groups of 3, that is range(0, 3), range(3, 6), ... Each block saves 340 MiB
for backward, and its input is 16 MiB. Without recomputation, 12 x 340 = 4080 MiB are saved. With
it, the 4 groups save their inputs, 4 x 16 = 64 MiB. In backward, one group at a time is recomputed:
3 x 340 = 1020 MiB, which its blocks' backwards free one after another. The peak falls from 4080 to
about 64 + 1020 = 1084 MiB, and the forward of the blocks runs twice. Groups of 1 block save 12 x 16
= 192 MiB and recompute 340 MiB: a peak of about 532 MiB.

The second forward stops at the last tensor that backward needs. With `selective`, it also skips
products (matrix products, convolutions, attention) whose results the first forward saved.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from tightfit._torch.operations import (
    CPU_FLASH_ATTENTION,
    CUDNN_ATTENTION,
    EFFICIENT_ATTENTION,
    FLASH_ATTENTION,
    MPS_ATTENTION,
    SCALED_MM,
)
from tightfit.cost.recorded_step import CHANNELS_LAST, BatchLinear, Buffer, Operation, Segment, Timeline
from tightfit.errors import Untraceable

COMPUTE_INTENSIVE_OPS = frozenset(
    {
        torch.ops.aten.mm.default,
        SCALED_MM.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten.convolution.default,
        FLASH_ATTENTION.default,
        EFFICIENT_ATTENTION.default,
        CUDNN_ATTENTION.default,
        CPU_FLASH_ATTENTION.default,
        MPS_ATTENTION.default,
    }
)
WEIGHT_MATMUL_OPS = frozenset(  # products with weights: selective-2 saves every second one
    (
        torch.ops.aten.mm.default,
        SCALED_MM.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.convolution.default,
    )
)
_PRODUCT_NAMES, _COUNTED_NAMES = (
    frozenset(str(operation).rsplit(".", 1)[0] + ending for operation in operations for ending in ("", CHANNELS_LAST))
    for operations in (COMPUTE_INTENSIVE_OPS, WEIGHT_MATMUL_OPS)
)


# The time that torch's checkpointing spends in Python in addition to the recomputation itself, in
# units of the time to launch one operation:
GROUP_LAUNCHES = 33  # for each recomputed group of blocks
HOOK_LAUNCHES = 2.3  # for each operation whose tensors pass through saved-tensor hooks
NOTE_LAUNCHES = 12.0  # attention: for each operation of a block's forward and the views of its tensors, to note them
DISPATCH_LAUNCHES = 2.3  # selective: for each operation, in both forwards, to decide whether its result is saved


@lru_cache(64)  # plans that differ only in how they shard the work share an entry
def with_recomputation(
    training: tuple[Segment, ...],
    inference: tuple[Segment, ...],
    groups: tuple[range, ...],
    selective: int,
    compiled: bool = False,
) -> tuple[Segment, ...]:
    """Return the recorded step of a micro-batch in which groups of blocks are recomputed in
    backward.

    training   the recorded step without recomputation, as segments
    inference  the recorded forward of an evaluation, which saves nothing for backward
    groups     the groups, each as a range of block numbers. All blocks of a group are recomputed
               together
    selective  0: recompute everything. 1: save the results of all products. 2: save those of every
               second product with weights, and of all other products. See methods/recompute.py
    compiled   whether blocks are compiled: then the first forward runs the kernels of training, as
               an evaluation is not compiled, and no time is spent in Python
    """
    edit = _RecomputationEdit(training, inference, groups, selective, compiled)
    for group in groups:
        for calls in zip(*(edit.calls.get(block, ()) for block in group), strict=False):
            edit.recompute(calls)
    return tuple(edit.training)


def with_noted_operations(training: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Return the recorded step of recompute: attention with the time that Python takes in each block:
    in forward to note the operations of attention, in backward for the hooks of saved tensors.

    training  the recorded step, in whose backward attention is recomputed
    """
    left = {  # by call of a block: number of operations in its forward
        (segment.block, segment.call): len(segment.timeline.operations)
        for segment in training
        if segment.phase == "forward" and segment.block is not None
    }

    def noted(segment: Segment) -> Segment:
        call = segment.block, segment.call
        if segment.phase == "forward" and call in left:
            count = NOTE_LAUNCHES * left[call]
        elif segment.phase == "backward" and call in left:
            count = HOOK_LAUNCHES * left.pop(call)
        else:
            return segment
        return replace(segment, timeline=segment.timeline.then(_in_python(count)))

    return tuple(map(noted, training))


def _in_python(launches: float) -> Timeline:
    """Return a timeline with only time that is spent in Python, in units of the time to launch one
    operation."""
    called = Operation("call", "float32", BatchLinear(), BatchLinear(), count=BatchLinear(launches))
    return Timeline((), (called,))


Call = tuple[int, int]  # (block, number of its call in the forward, from 0)


class _RecomputationEdit:
    """Edits a recorded training step for recomputation, one group of blocks at a time. The result
    is in `training`, a list of segments. A call below is (block, number of the block's call in the
    forward, from 0).

    passing   buffers that an evaluation frees before its end
    forward   call -> position of its forward in `training`
    backward  call -> positions of its backward in `training`
    copies    block -> casts of its weights that autocast makes in the block's first call
    calls     block -> its calls that have a backward, in order
    kept      buffers that one segment allocates and another one saves for backward, and all inputs
              of recomputed blocks
    end       position of the forward's last segment in `training`
    """

    def __init__(
        self,
        training: tuple[Segment, ...],
        inference: tuple[Segment, ...],
        groups: tuple[range, ...],
        selective: int,
        compiled: bool,
    ) -> None:
        self.training, self.selective, self.compiled = list(training), selective, compiled
        self.inference = {(p.block, p.call): p.timeline for p in inference if p.block is not None}
        self.passing = {buffer for part in inference[:-1] for buffer in part.timeline.freed}
        self.forward: dict[Call, int] = {}
        self.backward: dict[Call, list[int]] = {}
        for index, part in enumerate(self.training):
            if part.block is not None and part.phase == "forward":
                self.forward[part.block, part.call] = index
            elif part.block is not None:
                self.backward.setdefault((part.block, part.call), []).append(index)
        self.copies: dict[int, list[Buffer]] = {}
        self.calls: dict[int, list[Call]] = {}
        for call in self.forward:
            if call in self.backward:
                self.calls.setdefault(call[0], []).append(call)
        blocks = {block for group in groups for block in group}
        for block in blocks:
            for call in self.calls.get(block, ()):
                self._drop_retained(call)
        self.kept: set[Buffer] = set()
        for part in self.training:
            if part.phase == "forward":
                timeline, whole = part.timeline, part.block in blocks
                self.kept.update(timeline.inputs if whole else timeline.saved.difference(timeline.allocated))
        self.end = max(index for index, part in enumerate(self.training) if part.phase == "forward")

    def _drop_retained(self, call: Call) -> None:
        """Let backward free the tensors that a module keeps, as it does with others: the second forward leaves
        the attributes of modules as the first one has set them."""
        before = self.training[self.forward[call]].timeline
        retained = [buffer for buffer, sign in before.events if buffer.retained and sign > 0]
        if retained:
            events = tuple((buffer, sign) for buffer, sign in before.events if not (buffer.retained and sign < 0))
            end = sum(not (buffer.retained and sign < 0) for buffer, sign in before.events[: before.recompute_end[0]])
            self._replace_timeline(
                self.forward[call], replace(before, events=events, recompute_end=(end, before.recompute_end[1]))
            )
            self._replace_timeline(self.backward[call][-1], self._backward_of(call).then(_freeing(retained)))

    def recompute(self, group: tuple[Call, ...]) -> None:
        """Edit the step so that a group of blocks saves only the first block's input, and all its
        blocks are recomputed before the last block's backward.

        group  one call of each of its blocks, as (block, number of the call), in order
        """
        again, last, asked = Timeline(), group[-1], 0
        for call in group:
            before = self.training[self.forward[call]].timeline
            asked += len(before.operations)
            saved = {buffer for index in self.backward[call] for buffer in self.training[index].timeline.freed}
            # autocast caches the cast of a weight within a forward, so the second forward casts again
            anew = [replace(copy) for copy in self.copies.get(call[0], [])]
            self._replace_timeline(self.backward[call][-1], self._backward_of(call).then(_freeing(anew)))
            again = again.then(Timeline(tuple((copy, 1) for copy in anew)))
            again = again.then(self._second_forward(before, saved, stops=call == last))
            if call != group[0]:
                again = again.then(_freeing([buffer for buffer in before.inputs if self._is_freed_after(call, buffer)]))
            handed_on = self._left_to_others(before, saved) if call == last else {}
            self._forward(call, before, saved, handed_on, keep_input=call == group[0])
            again = _freeing(list(handed_on.values())).then(again)
        index = self.backward[last][0]
        if not self.compiled:
            again = again.then(self._python_time(len(again.operations), asked))
        self._replace_timeline(index, again.then(self.training[index].timeline))

    def _python_time(self, again: int, asked: int) -> Timeline:
        """Return a timeline with only the time that torch spends in Python to recompute one group
        of blocks, in units of the time to launch one operation.

        again  number of operations that run again
        asked  number of operations for which `selective` decides whether the result is saved
        """
        count = GROUP_LAUNCHES + HOOK_LAUNCHES * again + (2 * DISPATCH_LAUNCHES * asked if self.selective else 0.0)
        return _in_python(count)

    def _replace_timeline(self, index: int, timeline: Timeline) -> None:
        self.training[index] = replace(self.training[index], timeline=timeline)

    def _left_to_others(self, before: Timeline, saved: set[Buffer]) -> dict[Buffer, Buffer]:
        """Return {buffer: its copy} for the buffers that both this block's backward and the next
        segment's backward need. An example is the result of a ReLU at the end of the block.

        The first forward allocates the copy, which the next segment saves. The second forward
        allocates the buffer itself again, for this block's backward.

        before  the block's forward as recorded, without recomputation
        saved   the buffers that the block's backward frees
        """
        products = _saved_products(before, self.selective) if self.selective else set()
        return {buffer: replace(buffer) for buffer in before.allocated if buffer in (saved & self.kept) - products}

    def _forward(
        self, call: Call, before: Timeline, saved: set[Buffer], handed_on: dict[Buffer, Buffer], keep_input: bool
    ) -> None:
        """Replace the block's first forward in the recorded step. As recorded, it saves everything
        for backward. The new one is the forward of an evaluation. It saves only the block's
        outputs, the copies in `handed_on`, with `keep_input` the block's input, and with
        `selective` the results of products.

        call        the block and the number of its call
        before      the first forward as recorded, without recomputation
        saved       the buffers that the block's backward frees
        handed_on   the result of `_left_to_others`: buffer -> its copy
        keep_input  whether the block's input is saved
        """
        kept = {*_outputs_of(before, saved), *handed_on}
        if self.selective:
            kept |= _saved_products(before, self.selective)
        left = [handed_on.get(buffer, buffer) for buffer in before.allocated if buffer in kept]
        if (call[0], 0) not in self.inference:
            raise Untraceable(
                "plan: recompute",
                f"the model calls block {call[0]} in some forwards only, so what its recomputation takes is unknown",
                "run the job without a prediction: tightfit train measures what it cannot predict",
            )
        first = _forward_leaving(self.inference.get(call, self.inference[call[0], 0]), left, bool(self.selective))
        if self.compiled:
            first = replace(first, operations=before.operations)
        if self.selective:  # each later call casts the weights again
            anew = [replace(copy) for copy in self.copies.get(call[0], [])]
            first = Timeline(tuple((copy, 1) for copy in anew)).then(first).then(_freeing(anew))
        inputs = before.inputs
        if keep_input:
            for buffer in inputs:
                if self._keep_alive(call, buffer):
                    self._replace_timeline(self.backward[call][-1], self._backward_of(call).then(_freeing([buffer])))
        else:
            first = first.then(_freeing([buffer for buffer in inputs if buffer in saved]))
        products = _saved_products(before, self.selective) if self.selective else set()
        own = frozenset((*(inputs if keep_input else ()), *products))
        self._replace_timeline(
            self.forward[call], replace(first, inputs=inputs, saved=own, block_inputs=before.block_inputs)
        )
        held = [buffer for buffer in first.allocated if buffer not in first.freed and buffer not in left]
        soon = [buffer for buffer in held if buffer in self.passing]  # outputs that no segment saves
        after = next(iter(self._after(call)), self.end)
        if soon:  # without this check, the last segment's timeline would be copied for each block
            self._replace_timeline(after, self.training[after].timeline.then(_freeing(soon)))
        stay = [buffer for buffer in held if buffer not in self.passing]  # autocast's casts of weights
        if stay:
            self._replace_timeline(self.end, self.training[self.end].timeline.then(_freeing(stay)))
        self.copies.setdefault(call[0], [buffer for buffer in stay if buffer.maker == "aten._to_copy"])

    def _backward_of(self, call: Call) -> Timeline:
        return self.training[self.backward[call][-1]].timeline

    def _after(self, call: Call) -> list[int]:
        """Return the positions in the recorded step at which an input of the block may be freed
        after the block's forward: the segment right after it, and the last segment of the whole
        forward. Positions of blocks are left out."""
        return [index for index in (self.forward[call] + 1, self.end) if self.training[index].block is None]

    def _is_freed_after(self, call: Call, buffer: Buffer) -> bool:
        """Return whether the buffer is freed in the forward pass, after the forward of the block's
        call `call`, because no segment saves it for backward."""
        return any(buffer in self.training[index].timeline.freed for index in self._after(call))

    def _keep_alive(self, call: Call, buffer: Buffer) -> bool:
        """Keep a buffer allocated until backward: remove the event of the forward pass that frees
        it after the block's forward. Return whether there was such an event.

        call    the block and the number of its call
        buffer  the buffer, an input of the block
        """
        for index in self._after(call):
            timeline = self.training[index].timeline
            if buffer in timeline.freed:
                events = tuple(event for event in timeline.events if event != (buffer, -1))
                self._replace_timeline(index, replace(timeline, events=events))
                return True
        return False

    def _second_forward(self, before: Timeline, saved: set[Buffer], stops: bool) -> Timeline:
        """Return the timeline of a block's second forward, which runs in backward. At its end, the
        buffers that the block's backward frees are allocated.

        before  the first forward as recorded, without recomputation
        saved   the buffers that the block's backward frees
        stops   whether it ends at the last tensor that backward needs, as in the last block of a
                group
        """
        events, operations = before.recompute_end if stops else (len(before.events), len(before.operations))
        saved_products = _saved_products(before, self.selective) if self.selective else set()
        done = [event for event in before.events[:events] if not (event[0] in saved_products and event[1] > 0)]
        alive = [buffer for buffer, sign in done if sign > 0]
        gone = {buffer for buffer, sign in done if sign < 0}
        if stops:
            alive = [buffer for buffer in (*alive, *saved_products) if buffer not in gone and buffer not in saved]
            done += [(buffer, -1) for buffer in alive]
        again = before.operations[:operations]
        if self.selective:
            kept = _is_saved([one.name for one in again], self.selective)
            again = tuple(one for one, is_kept in zip(again, kept, strict=True) if not is_kept)
        return Timeline(tuple(done), again)


def _is_saved(names: list[str], selective: int) -> list[bool]:
    """Return, for each of these consecutive operations, whether its result is saved in the first
    forward instead of being recomputed.

    names      names of the operations, such as "aten.mm"
    selective  1: all products are saved; 2: every second product with weights, and all other
               products
    """
    counted, found = 0, []
    for name in names:
        found.append(name in _PRODUCT_NAMES and (name not in _COUNTED_NAMES or counted % selective == 0))
        counted += name in _COUNTED_NAMES
    return found


def _saved_products(timeline: Timeline, selective: int) -> set[Buffer]:
    """Return the results of matrix products, convolutions and attention that the first forward
    saves, so that they are not recomputed.

    timeline   the first forward of a block
    selective  1: all products are saved; 2: every second product with weights, and all other
               products
    """
    born = timeline.allocated
    kept = _is_saved([buffer.maker for buffer in born], selective)
    return {buffer for buffer, is_kept in zip(born, kept, strict=True) if is_kept}


def _outputs_of(timeline: Timeline, saved: set[Buffer]) -> list[Buffer]:
    """Return the outputs of a forward: the buffers that it allocates and does not free, and that
    its own backward does not need.

    saved  the buffers that its backward frees
    """
    gone = timeline.freed
    return [buffer for buffer in timeline.allocated if buffer not in gone and buffer not in saved]


def _forward_leaving(timeline: Timeline, kept: list[Buffer], selective: bool) -> Timeline:
    """Return the timeline of an evaluation's forward, changed so that the buffers `kept` are still
    allocated at its end, and so that it does not free its inputs.

    An evaluation allocates other `Buffer` objects than training does. So each buffer of `kept`
    replaces a buffer of the evaluation that has the same size and was allocated by the same
    operation. A compiled forward allocates its results by other operations than an evaluation;
    there the size alone decides.

    timeline   the evaluation's forward of the block
    kept       buffers that training allocates
    selective  whether results of products may be among `kept`
    """
    born, gone = timeline.allocated, timeline.freed
    left = [buffer for buffer in born if buffer not in gone or (selective and buffer.maker in _PRODUCT_NAMES)]
    names: dict[Buffer, Buffer] = {}
    unlike: list[Buffer] = []
    for one in reversed(kept):
        same = [copy for copy in left if copy not in names and (copy.maker, copy.size) == (one.maker, one.size)]
        if same:
            names[same[-1]] = one
        else:
            unlike.append(one)
    made: list[Buffer] = []  # buffers to which none of the evaluation's buffers corresponds
    for one in unlike:
        same = [copy for copy in left if copy not in names and copy.size == one.size]
        if same:
            names[same[-1]] = one
        else:
            made.append(one)
    own = set(born)
    events = [
        (names.get(buffer, buffer), sign)
        for buffer, sign in timeline.events
        if sign > 0 or (buffer in own and buffer not in names)
    ]
    return Timeline((*events, *((one, 1) for one in made)), timeline.operations)


def _freeing(buffers: list[Buffer]) -> Timeline:
    return Timeline(tuple((buffer, -1) for buffer in buffers))


__all__ = ["COMPUTE_INTENSIVE_OPS", "WEIGHT_MATMUL_OPS", "with_noted_operations", "with_recomputation"]
