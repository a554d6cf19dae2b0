"""Recomputation: what a micro-batch's program becomes where segments of blocks are computed again in backward."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from tightfit.program import Buffer, Linear, Operation, Passage, Timeline

PRODUCTS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten._scaled_mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten.convolution.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_attention_math_for_mps.default,
    }
)
COUNTED = frozenset(  # products with weights, of which selective-2 keeps every second
    (
        torch.ops.aten.mm.default,
        torch.ops.aten._scaled_mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.convolution.default,
    )
)
_PRODUCT_NAMES = frozenset(str(operation).rsplit(".", 1)[0] for operation in PRODUCTS)
_COUNTED_NAMES = frozenset(str(operation).rsplit(".", 1)[0] for operation in COUNTED)


# launches of an operation take as long as what torch does in Python, beside computing again:
SEGMENT = 33  # for a segment that is computed again
HOOKED = 2.3  # for an operation in it, whose tensors pass through hooks
DISPATCHED = 2.3  # for an operation, each of both times, that is asked whether it is kept


@lru_cache(64)  # plans that divide the same work differently ask for the same
def with_recomputation(
    training: tuple[Passage, ...],
    inference: tuple[Passage, ...],
    segments: tuple[range, ...],
    selective: int,
    compiled: bool = False,
) -> tuple[Passage, ...]:
    """The program in which these segments of blocks are computed again; selective: see recompute.py.

    compiled  kernels that the compiler made compute again what they need: nothing is done in Python
    """
    edit = _Recomputation(training, inference, segments, selective, compiled)
    for segment in segments:
        for calls in zip(*(edit.calls.get(block, ()) for block in segment), strict=False):
            edit.recompute(calls)
    return tuple(edit.training)


Call = tuple[int, int]  # a block, and which of its calls: each is recomputed by itself


class _Recomputation:
    """Edits a training program: segments of blocks that are computed again in backward."""

    def __init__(
        self,
        training: tuple[Passage, ...],
        inference: tuple[Passage, ...],
        segments: tuple[range, ...],
        selective: int,
        compiled: bool,
    ) -> None:
        self.training, self.selective, self.compiled = list(training), selective, compiled
        self.inference = {(p.block, p.call): p.timeline for p in inference if p.block is not None}
        self.passing = {buffer for passage in inference[:-1] for buffer in passage.timeline.gone}  # gone before its end
        self.forward: dict[Call, int] = {}  # call -> where its forward stands
        self.backward: dict[Call, list[int]] = {}
        for place, passage in enumerate(self.training):
            if passage.block is not None and passage.phase == "forward":
                self.forward[passage.block, passage.call] = place
            elif passage.block is not None:
                self.backward.setdefault((passage.block, passage.call), []).append(place)
        self.copies: dict[int, list[Buffer]] = {}  # of a block's weights, which autocast makes in its first call
        self.calls: dict[int, list[Call]] = {}  # of each block, those that backward comes to, in order
        for call in self.forward:
            if call in self.backward:
                self.calls.setdefault(call[0], []).append(call)
        blocks = {block for segment in segments for block in segment}
        self.kept: set[Buffer] = set()  # by others than made it; a recomputed block keeps all that it is called with
        for passage in self.training:
            if passage.phase == "forward":
                here, whole = passage.timeline, passage.block in blocks
                self.kept.update(here.inputs if whole else here.kept.difference(here.born))
        self.end = max(place for place, passage in enumerate(self.training) if passage.phase == "forward")

    def recompute(self, segment: tuple[Call, ...]) -> None:
        """Keep the first block's input alone; before the last block's backward compute the whole segment again."""
        again, last, asked = Timeline(), segment[-1], 0
        for call in segment:
            before = self.training[self.forward[call]].timeline
            asked += len(before.operations)
            saved = {buffer for place in self.backward[call] for buffer in self.training[place].timeline.gone}
            anew = [replace(copy) for copy in self.copies.get(call[0], [])]  # autocast makes them once in a forward
            self._put(self.backward[call][-1], self._backward_of(call).then(_freed(anew)))
            again = again.then(Timeline(tuple((copy, 1) for copy in anew)))
            again = again.then(self._second(before, saved, stops=call == last))
            if call != segment[0]:
                again = again.then(_freed([buffer for buffer in before.inputs if self._leaves(call, buffer)]))
            handed_on = self._handed_on(before, saved) if call == last else {}
            self._forward(call, before, saved, handed_on, keep_input=call == segment[0])
            again = _freed(list(handed_on.values())).then(again)
        place = self.backward[last][0]
        if not self.compiled:
            again = again.then(self._in_python(len(again.operations), asked))
        self._put(place, again.then(self.training[place].timeline))

    def _in_python(self, again: int, asked: int) -> Timeline:
        """What torch does in Python for a segment of which so many operations are computed again."""
        count = SEGMENT + HOOKED * again + (2 * DISPATCHED * asked if self.selective else 0.0)
        return Timeline((), (Operation("call", "float32", Linear(), Linear(), count=Linear(count)),))

    def _put(self, place: int, timeline: Timeline) -> None:
        self.training[place] = replace(self.training[place], timeline=timeline)

    def _handed_on(self, before: Timeline, saved: set[Buffer]) -> dict[Buffer, Buffer]:
        """Of what a block keeps for itself what others keep too, such as the result of a ReLU at its end: to each its copy that
        the first forward leaves to them, for the second makes the block's own."""
        products = _kept_products(before, self.selective) if self.selective else set()
        return {buffer: replace(buffer) for buffer in before.born if buffer in (saved & self.kept) - products}

    def _forward(
        self, call: Call, before: Timeline, saved: set[Buffer], handed_on: dict[Buffer, Buffer], keep_input: bool
    ) -> None:
        """The block's first forward in place of the one that keeps everything; `saved` is what backward would free."""
        kept = {*_survivors(before, saved), *handed_on}
        if self.selective:
            kept |= _kept_products(before, self.selective)
        left = [handed_on.get(buffer, buffer) for buffer in before.born if buffer in kept]
        first = _as(self.inference.get(call, self.inference[call[0], 0]), left, bool(self.selective))
        if self.selective:  # a later call makes its own copies of weights
            anew = [replace(copy) for copy in self.copies.get(call[0], [])]
            first = Timeline(tuple((copy, 1) for copy in anew)).then(first).then(_freed(anew))
        inputs = before.inputs
        if keep_input:
            for buffer in inputs:
                if self._take_away(call, buffer):
                    self._put(self.backward[call][-1], self._backward_of(call).then(_freed([buffer])))
        else:
            first = first.then(_freed([buffer for buffer in inputs if buffer in saved]))
        products = _kept_products(before, self.selective) if self.selective else set()
        own = frozenset((*(inputs if keep_input else ()), *products))
        self._put(self.forward[call], replace(first, inputs=inputs, kept=own, given=before.given))
        held = [buffer for buffer in first.born if buffer not in first.gone and buffer not in left]
        soon = [buffer for buffer in held if buffer in self.passing]  # what nobody keeps of what it returns
        after = next(iter(self._after(call)), self.end)
        if soon:  # else a copy is made of forward's end for each of many blocks
            self._put(after, self.training[after].timeline.then(_freed(soon)))
        stay = [buffer for buffer in held if buffer not in self.passing]  # autocast's copies of weights
        if stay:
            self._put(self.end, self.training[self.end].timeline.then(_freed(stay)))
        self.copies.setdefault(call[0], [buffer for buffer in stay if buffer.maker == "aten._to_copy"])

    def _backward_of(self, call: Call) -> Timeline:
        return self.training[self.backward[call][-1]].timeline

    def _after(self, call: Call) -> list[int]:
        """Where an input of the block may be let go once the block has returned: right after it, or at forward's end."""
        return [place for place in (self.forward[call] + 1, self.end) if self.training[place].block is None]

    def _leaves(self, call: Call, buffer: Buffer) -> bool:
        """Whether the buffer goes after the block's forward, because nothing keeps it for backward."""
        return any(buffer in self.training[place].timeline.gone for place in self._after(call))

    def _take_away(self, call: Call, buffer: Buffer) -> bool:
        """Let the buffer live on after the forward; whether it did not before."""
        for place in self._after(call):
            timeline = self.training[place].timeline
            if buffer in timeline.gone:
                events = tuple(event for event in timeline.events if event != (buffer, -1))
                self._put(place, replace(timeline, events=events))
                return True
        return False

    def _second(self, before: Timeline, saved: set[Buffer], stops: bool) -> Timeline:
        """The forward once more, up to the last tensor that backward needs; it ends with what backward frees."""
        events, operations = before.needed if stops else (len(before.events), len(before.operations))
        there = _kept_products(before, self.selective) if self.selective else set()
        done = [event for event in before.events[:events] if not (event[0] in there and event[1] > 0)]
        alive = [buffer for buffer, sign in done if sign > 0]
        gone = {buffer for buffer, sign in done if sign < 0}
        if stops:
            alive = [buffer for buffer in (*alive, *there) if buffer not in gone and buffer not in saved]
            done += [(buffer, -1) for buffer in alive]
        again = before.operations[:operations]
        if self.selective:
            kept = _kept([one.name for one in again], self.selective)
            again = tuple(one for one, is_kept in zip(again, kept, strict=True) if not is_kept)
        return Timeline(tuple(done), again)


def _kept(names: list[str], selective: int) -> list[bool]:
    """Of operations in a row, by name, which ones' results are kept."""
    counted, found = 0, []
    for name in names:
        found.append(name in _PRODUCT_NAMES and (name not in _COUNTED_NAMES or counted % selective == 0))
        counted += name in _COUNTED_NAMES
    return found


def _kept_products(timeline: Timeline, selective: int) -> set[Buffer]:
    born = timeline.born
    kept = _kept([buffer.maker for buffer in born], selective)
    return {buffer for buffer, is_kept in zip(born, kept, strict=True) if is_kept}


def _survivors(timeline: Timeline, saved: set[Buffer]) -> list[Buffer]:
    """What a forward leaves that is not for its own backward: its outputs."""
    gone = timeline.gone
    return [buffer for buffer in timeline.born if buffer not in gone and buffer not in saved]


def _as(timeline: Timeline, kept: list[Buffer], selective: bool) -> Timeline:
    """An evaluation's forward that leaves `kept`, its own copies of which are replaced by them in order; inputs stay.

    A compiled forward makes its results by other operations than an evaluation does: these are told by their sizes alone.
    """
    born, gone = timeline.born, timeline.gone
    left = [buffer for buffer in born if buffer not in gone or (selective and buffer.maker in _PRODUCT_NAMES)]
    names: dict[Buffer, Buffer] = {}
    unlike: list[Buffer] = []
    for one in reversed(kept):
        same = [copy for copy in left if copy not in names and (copy.maker, copy.size) == (one.maker, one.size)]
        if same:
            names[same[-1]] = one
        else:
            unlike.append(one)
    made: list[Buffer] = []  # of which an evaluation makes no copy
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


def _freed(buffers: list[Buffer]) -> Timeline:
    return Timeline(tuple((buffer, -1) for buffer in buffers))


__all__ = ["COUNTED", "PRODUCTS", "with_recomputation"]
