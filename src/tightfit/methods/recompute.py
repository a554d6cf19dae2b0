"""Recompute activations in backward instead of keeping them.

Saves   the activations inside each recomputed block; keeps its input (sqrt: the input of each segment).
Costs   one more forward of each recomputed block, 20 to 30 % of the time; selective: of its cheap operations only;
        selective-2: of these and of every second of its products with weights (torchtitan's default).
When    activations are what does not fit. selective first, then selective-2, every-2, full; sqrt for very many thin blocks.
Order   wraps blocks; before compile, so that the recomputation is compiled too.
Source  Chen et al. 2016, arXiv:1604.06174 (sqrt); selective: Korthikanti et al. 2022, arXiv:2205.05198.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tightfit.errors import InputError
from tightfit.job import ModelSpec
from tightfit.ledger import Ledger
from tightfit.machine import Machine
from tightfit.methods.run import Run
from tightfit.models import find_blocks
from tightfit.plan import Plan
from tightfit.program import Buffer, Passage, Timeline

Forward = Callable[..., Any]


_PRODUCTS = frozenset(
    {
        torch.ops.aten.mm.default,
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
_COUNTED = frozenset(  # products with weights, of which selective-2 keeps every second
    (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.convolution.default)
)
_PRODUCT_NAMES = frozenset(str(operation).rsplit(".", 1)[0] for operation in _PRODUCTS)
_COUNTED_NAMES = frozenset(str(operation).rsplit(".", 1)[0] for operation in _COUNTED)
VARIANTS = (
    {"recompute": "full"},
    {"recompute": "selective"},
    {"recompute": "selective-2"},
    {"recompute": "every-2"},
    {"recompute": "sqrt"},
)


def wanted(plan: Plan) -> bool:
    return plan.recompute != "none"


def apply(run: Run, plan: Plan) -> Run:
    name = run.job.model.blocks if isinstance(run.job.model, ModelSpec) else None
    blocks = [block for _, block in find_blocks(run.model, name)]
    if not blocks:
        raise InputError(
            f"plan: recompute={plan.recompute}",
            f"{type(run.model).__name__} has no repeated blocks to recompute",
            "name its list of blocks in the job (model: {..., blocks: encoder.layers}), or use recompute: none",
        )
    if plan.recompute == "sqrt":
        length = round(math.sqrt(len(blocks)))
        for start in range(0, len(blocks), length):
            recompute_segment(blocks[start : start + length])
        return run
    for block in blocks[:: _every(plan)]:
        block.forward = recomputed(block.forward, [block], _selective(plan))
    return run


def _every(plan: Plan) -> int:
    return int(plan.recompute.removeprefix("every-")) if plan.recompute.startswith("every-") else 1


def _selective(plan: Plan) -> int:
    """Of so many products with weights one is kept; 0 where none is."""
    if not plan.recompute.startswith("selective"):
        return 0
    return int(plan.recompute.removeprefix("selective").removeprefix("-") or 1)


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Forward as an evaluation's, which keeps nothing, but for the segments' inputs; backward after another forward."""
    if plan.recompute == "sqrt":
        length = max(round(math.sqrt(ledger.blocks)), 1)
        segments = [range(start, min(start + length, ledger.blocks)) for start in range(0, ledger.blocks, length)]
    else:
        segments = [range(block, block + 1) for block in range(0, ledger.blocks, _every(plan))]
    training = _recomputed(ledger.training, ledger.inference(), tuple(segments), _selective(plan))
    return replace(ledger, training=training)


@lru_cache(64)  # plans that divide the same work differently ask for the same
def _recomputed(
    training: tuple[Passage, ...], inference: tuple[Passage, ...], segments: tuple[range, ...], selective: int
) -> tuple[Passage, ...]:
    edit = _Recomputation(training, inference, segments, selective)
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
    ) -> None:
        self.training, self.selective = list(training), selective
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
        again, last = Timeline(), segment[-1]
        for call in segment:
            before = self.training[self.forward[call]].timeline
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
        self._put(place, again.then(self.training[place].timeline))

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
        self._put(self.forward[call], replace(first, inputs=inputs))
        held = [buffer for buffer in first.born if buffer not in first.gone and buffer not in left]
        soon = [buffer for buffer in held if buffer in self.passing]  # what nobody keeps of what it returns
        after = next(iter(self._after(call)), self.end)
        self._put(after, self.training[after].timeline.then(_freed(soon)))
        stay = [buffer for buffer in held if buffer not in self.passing]  # autocast's copies of weights
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
    """An evaluation's forward that leaves `kept`, its own copies of which are replaced by them in order; inputs stay."""
    born, gone = timeline.born, timeline.gone
    left = [buffer for buffer in born if buffer not in gone or (selective and buffer.maker in _PRODUCT_NAMES)]
    names: dict[Buffer, Buffer] = {}
    for one in reversed(kept):
        same = [copy for copy in left if copy not in names and (copy.maker, copy.size) == (one.maker, one.size)]
        if same:
            names[same[-1]] = one
    own = set(born)
    events = [
        (names.get(buffer, buffer), sign)
        for buffer, sign in timeline.events
        if sign > 0 or (buffer in own and buffer not in names)
    ]
    return Timeline(tuple(events), timeline.operations)


def _freed(buffers: list[Buffer]) -> Timeline:
    return Timeline(tuple((buffer, -1) for buffer in buffers))


def recomputed(forward: Forward, modules: list[nn.Module], selective: int = 0) -> Forward:
    """`forward` of `modules`, keeping its inputs only (selective: and its products, of those with weights one in so many).

    The second forward draws dropout's numbers again, and begins from the buffers that the first began from and leaves
    them as it found them: running statistics are updated once, and a buffer that the output depends on is the same.
    """
    buffers = ChangingBuffers([buffer for module in modules for buffer in module.buffers()])
    casts = Casts()

    def forward_again_in_backward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # see compile.py for buffers that it would change
            contexts: dict[str, Any] = {"context_fn": partial(selective_contexts, selective)} if selective else {}
            return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)
        before = buffers.values()
        contexts = {"context_fn": partial(contexts_of, buffers, before, casts, selective)}
        with casts.first_forward() if selective else nullcontext():
            output = checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)
        buffers.notice(before)
        return output

    return forward_again_in_backward


class ChangingBuffers:
    """The buffers of a block that its forward changes, found in the first forward (batch_norm moves no version counter)."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self.buffers, self.known = buffers, False

    def values(self) -> list[tuple[Tensor, Tensor]]:
        """(buffer, copy) of each buffer that may change."""
        return [(buffer, buffer.clone()) for buffer in self.buffers]

    def notice(self, before: list[tuple[Tensor, Tensor]]) -> None:
        """After the first forward: keep the buffers that it changed, and no others."""
        if not self.known:
            self.buffers, self.known = [buffer for buffer, copy in before if not torch.equal(buffer, copy)], True

    @contextmanager
    def rewound(self, before: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Within, the buffers are as they were before the forward; afterwards as they were on entering."""
        changed = [(buffer, copy) for buffer, copy in before if any(buffer is one for one in self.buffers)]
        now = [buffer.clone() for buffer, _ in changed]
        with torch.no_grad():
            for buffer, copy in changed:
                buffer.copy_(copy)
        try:
            yield
        finally:
            with torch.no_grad():
                for (buffer, _), value in zip(changed, now, strict=True):
                    buffer.copy_(value)


class Casts:
    """Autocast's copies of a block's weights, which it makes once in a forward and uses again in later calls of the block. What is
    computed again makes its own: a later call does so the first time, too, for both have to be the same operations."""

    def __init__(self) -> None:
        self.calls = 0  # whose second forward is still to come

    @contextmanager
    def first_forward(self) -> Iterator[None]:
        used = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(used and self.calls == 0)
        self.calls += 1
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(used)

    @contextmanager
    def second_forward(self) -> Iterator[None]:
        self.calls = max(self.calls - 1, 0)
        yield


def contexts_of(
    buffers: ChangingBuffers, before: list[tuple[Tensor, Tensor]], casts: Casts, selective: int
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What surrounds the first forward and the second."""
    first, second = selective_contexts(selective) if selective else (nullcontext(), nullcontext())
    return first, _Again([lambda: buffers.rewound(before), casts.second_forward], second)


class _Again:
    """What surrounds each of the forwards that are computed again: two where the first took gradients of its own."""

    def __init__(self, around: list[Callable[[], AbstractContextManager[None]]], kept: AbstractContextManager[Any]) -> None:
        self.around, self.kept = around, kept
        self.open: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for begin in self.around:
                stack.enter_context(begin())
            stack.enter_context(self.kept)
            self.open.append(stack.pop_all())

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool | None:
        done = self.open.pop().__exit__(kind, error, trace)
        if isinstance(error, RuntimeError) and "has been mutated" in str(error):
            raise InputError(
                "plan: recompute=selective",
                "a block writes in place to what is kept of it (relu(inplace=True), add_)",
                "use recompute: full, or write to a new tensor",
            ) from error
        return done


def selective_contexts(selective: int) -> Any:
    """Of one block's forward and its recomputation: attention and one in so many matrix products and convolutions are kept;
    what is cheap to compute again is not."""
    counted = {False: 0, True: 0}  # in the first forward, and in the second

    def keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operation in _PRODUCTS
        if operation in _COUNTED:
            kept = counted[context.is_recompute] % selective == 0
            counted[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(keep)


def recompute_segment(blocks: list[nn.Module]) -> None:
    """Make the first block run the whole segment, recomputed as one, and the others hand its output on.

    The model keeps calling its blocks in a row and need not know. That only works where each block's output is the
    next one's first argument and the other arguments are shared; a model that does otherwise is refused when it runs.
    """
    forwards = [block.forward for block in blocks]

    def chain(first: Any, *args: Any, **kwargs: Any) -> Any:
        for forward in forwards:
            if not isinstance(first, Tensor):
                raise _not_in_a_row()
            first = forward(first, *args, **kwargs)
        return first

    whole = recomputed(chain, blocks)
    last_call: dict[str, Any] = {}

    def head(first: Any, *args: Any, **kwargs: Any) -> Any:
        if last_call:  # nobody took what it gave last: it was called by itself
            raise _not_in_a_row()
        output = whole(first, *args, **kwargs)
        if len(forwards) > 1:
            last_call.update(output=output, args=args, kwargs=kwargs)
        return output

    def hand_on(position: int, first: Any, *args: Any, **kwargs: Any) -> Any:
        if not last_call:
            raise _not_in_a_row()
        shared = len(args) == len(last_call["args"]) and kwargs.keys() == last_call["kwargs"].keys()
        shared = shared and all(a is b for a, b in zip(args, last_call["args"], strict=True))
        shared = shared and all(kwargs[name] is last_call["kwargs"][name] for name in kwargs)
        if first is not last_call["output"] or not shared:
            raise _not_in_a_row()
        if position == len(forwards) - 1:
            last_call.clear()
        return first

    blocks[0].forward = head
    for position, block in enumerate(blocks[1:], start=1):
        block.forward = partial(hand_on, position)


def _not_in_a_row() -> InputError:
    return InputError(
        "plan: recompute=sqrt",
        "the model does more between its blocks than hand one's output to the next",
        "use recompute: full, which needs no such order",
    )
