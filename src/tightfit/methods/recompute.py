"""Stores only the inputs of some blocks during forward, and recomputes their activations during
backward (activation checkpointing). It trades time for memory.

Saves   the activations inside each recomputed block; only its input is saved (sqrt: only the input
        of each segment).
Costs   one more forward of each recomputed block, 20 to 30 % of the time; selective: of its cheap
        operations only; selective-2: of these and of every second product with weights
        (torchtitan's default).
When    activations do not fit. Try selective first, then selective-2, every-2, full; sqrt for very
        many thin blocks.
Order   wraps blocks; before compile, so that the recomputation is compiled too.
Source  Chen et al. 2016, arXiv:1604.06174 (sqrt); selective: Korthikanti et al. 2022,
        arXiv:2205.05198.

Example: 16 blocks of (4, 1024, 1024) inputs in fp32, 16 MiB each. `full` saves 16 inputs (256 MiB)
and recomputes one block at a time. `sqrt` makes 4 segments of 4 blocks: it saves 4 inputs (64 MiB),
but holds the activations of 4 recomputed blocks while it runs a segment's backward.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tightfit._torch.fake import active_fake_mode
from tightfit._torch.modules import own_buffers
from tightfit._torch.operations import schema_of
from tightfit._torch.pytree import tree_leaves
from tightfit._torch.tensors import storage_id, version_of
from tightfit.cost.ledger import Ledger
from tightfit.cost.recomputed_step import COMPUTE_INTENSIVE_OPS, WEIGHT_MATMUL_OPS, with_recomputation
from tightfit.errors import InputError
from tightfit.job import Job, ModelSpec
from tightfit.machine import Machine
from tightfit.models import find_blocks
from tightfit.models.objective import Batch, map_tensors
from tightfit.models.tracing import restoring_state
from tightfit.plan import Plan
from tightfit.runtime.method import SearchFacts
from tightfit.runtime.run import Run, to_device

Forward = Callable[..., Any]


FIELDS = ("recompute",)
VARIANTS = (
    {"recompute": "full"},
    {"recompute": "selective"},
    {"recompute": "selective-2"},
    {"recompute": "every-2"},
    {"recompute": "sqrt"},
)


def enabled(plan: Plan) -> bool:
    return plan.recompute != "none"


def candidates(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    return {"recompute": ["none", "selective", "selective-2", "every-2", "full", "sqrt"]}


def leanest(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    return {"recompute": ["full", "sqrt", "none"]}  # "none" is for a model without repeated blocks


def apply(run: Run, plan: Plan) -> Run:
    """Wrap the blocks, or segments of blocks, in recomputation. Raises InputError for a model
    without repeated blocks.
    """
    name = run.job.model.blocks if isinstance(run.job.model, ModelSpec) else None
    blocks = [block for _, block in find_blocks(run.model, name)]
    if not blocks:
        raise InputError(
            f"plan: recompute={plan.recompute}",
            f"{type(run.model).__name__} has no repeated blocks to recompute",
            "name its list of blocks in the job (model: {..., blocks: encoder.layers}), or use recompute: none",
        )
    if plan.recompute == "sqrt":
        segments = make_segments(blocks)
        if active_fake_mode() is None:
            _refuse_other_uses(run, plan, segments)
        ends = [recompute_segment(segment) for segment in segments]

        def loss_sum(batch: Batch) -> Tensor:
            try:
                total = run.loss_sum(batch)
            except BLOCK_FAILURES as error:
                if not _is_unrelated(error):
                    # the failure may come from passing a segment's output in place of one block's
                    for end in ends:
                        end()
                raise
            for end in ends:
                end()
            return total

        return replace(run, loss_sum=loss_sum)
    for block in blocks[:: _every(plan)]:
        block.forward = recomputed(block.forward, [block], _selective(plan))
    return run


def _segments(blocks: int) -> list[range]:
    """The segments of sqrt, each recomputed as one: about as many segments as each has blocks."""
    length = max(round(math.sqrt(blocks)), 1)
    return [range(start, min(start + length, blocks)) for start in range(0, blocks, length)]


def make_segments(blocks: list[nn.Module]) -> list[list[nn.Module]]:
    """The blocks, grouped into the segments of sqrt."""
    return [blocks[segment.start : segment.stop] for segment in _segments(len(blocks))]


def _every(plan: Plan) -> int:
    """Recompute every n-th block: the n of "every-n", else 1."""
    return int(plan.recompute.removeprefix("every-")) if plan.recompute.startswith("every-") else 1


def _selective(plan: Plan) -> int:
    """One in this many products with weights is saved; 0 where recomputation is not selective."""
    if not plan.recompute.startswith("selective"):
        return 0
    return int(plan.recompute.removeprefix("selective").removeprefix("-") or 1)


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Replace the training's forward by the evaluation's, which saves only the segments' inputs,
    and run each segment's forward again before its backward.

    Raises InputError for a model whose blocks cannot form segments, where the plan asks for sqrt.
    """
    if plan.recompute == "sqrt" and ledger.check_segments is not None:
        ledger.check_segments()
    every = [range(block, block + 1) for block in range(0, ledger.blocks, _every(plan))]
    segments = _segments(ledger.blocks) if plan.recompute == "sqrt" else every
    compiled = plan.compile != "none"
    training = with_recomputation(ledger.training, ledger.inference(), tuple(segments), _selective(plan), compiled)
    return replace(ledger, training=training)


def recomputed(forward: Forward, modules: list[nn.Module], selective: int = 0) -> Forward:
    """`forward` of `modules`, which saves only its inputs for backward.

    selective: also save its attention, and one in this many products with weights; 0 saves neither.

    The second forward draws dropout's random numbers again. It starts from the buffers that the
    first one started from, and leaves them as it found them: running statistics are updated once,
    and a buffer on which the output depends has the same value. Raises InputError where the block
    writes in place to its inputs.
    """
    buffers = ChangingBuffers(modules)
    casts = AutocastCache()

    def forward_again_in_backward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # compile.py refuses blocks that change buffers
            contexts: dict[str, Any] = {"context_fn": partial(selective_contexts, selective)} if selective else {}
            return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)
        before = buffers.values()
        given = [(leaf, version_of(leaf)) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        contexts = {"context_fn": partial(recompute_contexts, buffers, before, casts, selective)}
        with casts.first_forward() if selective else nullcontext():
            output = checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)
        if any(version_of(leaf) != version for leaf, version in given):
            raise InputError(
                "plan: recompute",
                f"{type(modules[0]).__name__} writes in place to its inputs, from which it would be recomputed",
                "use recompute: none, or write to a new tensor",
            )
        buffers.track_changed(before)
        return output

    return forward_again_in_backward


SavedBuffers = list[tuple[nn.Module, str, Tensor, Tensor]]


class ChangingBuffers:
    """The buffers of a block that its forward changes, in place or by assignment.

    They are found in the first forward, by comparing values: batch_norm changes its buffers without
    incrementing their version counters.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        each = dict.fromkeys(module for block in modules for module in block.modules())
        self.tracked = [(module, name) for module in each for name in own_buffers(module)]
        self.known = False

    def values(self) -> SavedBuffers:
        """(module, name, buffer, copy of its values) for each buffer that may change."""
        found = [(module, name, own_buffers(module)[name]) for module, name in self.tracked]
        return [(module, name, buffer, buffer.clone()) for module, name, buffer in found if buffer is not None]

    def track_changed(self, before: SavedBuffers) -> None:
        """After the first forward: track only the buffers that it changed."""
        if not self.known:
            self.tracked = [
                (module, name)
                for module, name, buffer, copy in before
                if own_buffers(module)[name] is not buffer or not torch.equal(buffer, copy)
            ]
            self.known = True

    @contextmanager
    def rewound(self, before: SavedBuffers) -> Iterator[None]:
        """Within, the buffers have their values from before the forward; afterwards, those from
        before this context.
        """
        places = {(id(module), name) for module, name in self.tracked}
        changed = [one for one in before if (id(one[0]), one[1]) in places]
        now = self.values()
        _restore(changed)
        try:
            yield
        finally:
            _restore(now)


@torch.no_grad()
def _restore(values: SavedBuffers) -> None:
    for module, name, buffer, copy in values:
        buffer.copy_(copy)
        own_buffers(module)[name] = buffer


class AutocastCache:
    """Controls autocast's cached copies of a block's weights.

    Autocast makes the copies once in a forward and reuses them in later calls of the block. A
    recomputation makes its own. A later call must therefore make its own in the first forward too,
    because both forwards must run the same operations.
    """

    def __init__(self) -> None:
        self.pending_recomputations = 0  # calls that are not recomputed yet

    @contextmanager
    def first_forward(self) -> Iterator[None]:
        used = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(used and self.pending_recomputations == 0)
        self.pending_recomputations += 1
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(used)

    @contextmanager
    def second_forward(self) -> Iterator[None]:
        self.pending_recomputations = max(self.pending_recomputations - 1, 0)
        yield


def recompute_contexts(
    buffers: ChangingBuffers, before: SavedBuffers, casts: AutocastCache, selective: int
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The context managers around the first forward and around its recomputation."""
    first, second = selective_contexts(selective) if selective else (nullcontext(), nullcontext())
    return first, _RecomputeContext([lambda: buffers.rewound(before), casts.second_forward], second)


class _RecomputeContext:
    """The context manager around each recomputation. It can be entered twice: the first forward may
    have taken gradients itself.
    """

    def __init__(
        self, around: list[Callable[[], AbstractContextManager[None]]], kept: AbstractContextManager[Any]
    ) -> None:
        self.around, self.kept = around, kept
        self.open: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for begin in self.around:
                stack.enter_context(begin())
            stack.enter_context(self.kept)
            self.open.append(stack.pop_all())

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool | None:
        return self.open.pop().__exit__(kind, error, trace)


def selective_contexts(selective: int) -> Any:
    """The contexts around one block's forward and its recomputation.

    Attention and one in `selective` matrix products and convolutions are saved; operations that are
    cheap to recompute are not. Raises InputError where a block writes in place to a saved tensor.
    """
    counted = {False: 0, True: 0}  # products seen in the first forward, and in the second
    storages: set[int] = set()  # of the saved tensors, which the contexts keep alive

    def keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operation in COMPUTE_INTENSIVE_OPS
        if operation in WEIGHT_MATMUL_OPS:
            kept = counted[context.is_recompute] % selective == 0
            counted[context.is_recompute] += 1
        if not torch.compiler.is_compiling() and not context.is_recompute:
            if not storages.isdisjoint(_storages(written_tensors(operation, args, kwargs))):
                raise _overwrites_saved()
            if kept:
                storages.update(_storages(tree_leaves(context.op_output)))
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(keep)


def written_tensors(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that an operation writes to, according to its schema.

    Version counters are not enough: a write through the chunks of torch.chunk or of a recurrent
    cell does not increment that of the full tensor.
    """
    schema = schema_of(operation)
    if not schema.is_mutable:
        return []
    given = {**dict(zip((one.name for one in schema.arguments), args, strict=False)), **kwargs}
    writes = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return tree_leaves([given.get(name) for name in writes])


def _storages(leaves: list[Any]) -> set[int]:
    return {storage_id(leaf) for leaf in leaves if isinstance(leaf, Tensor)}


def _overwrites_saved() -> InputError:
    return InputError(
        "plan: recompute=selective",
        "a block writes in place to one of its saved tensors (relu(inplace=True), add_, the gates of a recurrent cell)",
        "use recompute: full, or write to a new tensor",
    )


def recompute_segment(blocks: list[nn.Module]) -> Callable[[], None]:
    """Make the first block run the whole segment, recomputed as one, and the others pass its output
    through.

    The model calls its blocks one after another as before. That works only where each block's
    output is the next one's first argument and the other arguments are shared; any other model is
    refused when it runs. Returns a function to call after the model's forward: it raises InputError
    if the model did not call all blocks of the segment.
    """
    forwards = [block.forward for block in blocks]
    is_sequential = len(forwards) == 1  # set by the first complete forward

    def chain(first: Any, *args: Any, **kwargs: Any) -> Any:
        for number, forward in enumerate(forwards):
            if not isinstance(first, Tensor):
                raise _not_sequential()
            known = torch.compiler.is_compiling() or number == 0 or is_sequential
            first = (forward if known else partial(_with_arguments_of_first, forward))(first, *args, **kwargs)
        return first

    run_chain = recomputed(chain, blocks)
    last_call: dict[str, Any] = {}

    def run_segment(*args: Any, **kwargs: Any) -> Any:
        first, args, kwargs = _with_first(forwards[0], args, kwargs)
        if last_call:  # no other block took its last output: it was called by itself
            raise _not_sequential()
        output = run_chain(first, *args, **kwargs)
        if len(forwards) > 1:
            last_call.update(output=output, args=args, kwargs=kwargs)
        return output

    def pass_through(position: int, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_sequential
        first, args, kwargs = _with_first(forwards[position], args, kwargs)
        if not last_call:
            raise _not_sequential()
        shared = len(args) == len(last_call["args"]) and kwargs.keys() == last_call["kwargs"].keys()
        shared = shared and all(a is b for a, b in zip(args, last_call["args"], strict=True))
        shared = shared and all(kwargs[name] is last_call["kwargs"][name] for name in kwargs)
        if first is not last_call["output"] or not shared:
            raise _not_sequential()
        if position == len(forwards) - 1:
            last_call.clear()
            is_sequential = True
        return first

    def end() -> None:
        if not torch.compiler.is_compiling() and last_call:
            raise _not_sequential()

    blocks[0].forward = run_segment
    for position, block in enumerate(blocks[1:], start=1):
        block.forward = partial(pass_through, position)
    return end


def _with_first(
    forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The first argument of a call of `forward`, which may have been passed by name, and the other
    arguments.
    """
    if args:
        return args[0], args[1:], kwargs
    name = next(iter(inspect.signature(forward).parameters))
    if name not in kwargs:
        raise _not_sequential()
    return kwargs[name], (), {key: value for key, value in kwargs.items() if key != name}


class _OutputUses(TorchFunctionMode):
    """Finds out whether a model, outside its blocks, uses block outputs that would not exist inside
    a segment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[Tensor] = []
        self.inside = self.used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
        if not self.inside and name not in _METADATA:
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.used = self.used or any(leaf is one for leaf in given for one in self.returned)
        return func(*args, **(kwargs or {}))

    def call(self, forward: Forward, is_last: bool, *args: Any, **kwargs: Any) -> Any:
        """Run a block's `forward` and track its output. is_last: the block is the last of its
        segment, whose output may be used anywhere.
        """
        self.inside = True
        try:
            output = forward(*args, **kwargs)
        finally:
            self.inside = False
        if not is_last and not any(output is leaf for leaf in tree_leaves((args, kwargs))):
            self.returned.extend(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        return output


_METADATA = frozenset({"shape", "size", "dim", "ndim", "numel", "dtype", "device", "requires_grad", "layout", "is_cuda", "stride",
                    "is_contiguous", "is_floating_point", "get_device", "__len__", "element_size", "grad_fn"})  # fmt: skip


def _refuse_other_uses(run: Run, plan: Plan, segments: list[list[nn.Module]]) -> None:
    """Run one example batch without gradients, and raise InputError where the model cannot be
    recomputed in these segments.

    A segment returns its last block's output in the place of each block's. So the model must use
    the output of a block inside a segment only as the next block's input.
    """
    buffers = ChangingBuffers([run.model])
    before = buffers.values()
    devices = [run.device] if run.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        batch = to_device(run.data.example(), run)
        if plan.is_true:  # the weights are in 16 bits already, the batch is not
            narrow = Counter(parameter.dtype for parameter in run.model.parameters()).most_common(1)[0][0]
            batch = map_tensors(lambda tensor: tensor.to(narrow) if tensor.is_floating_point() else tensor, batch)
        try:
            refuse_other_uses(run.model, segments, lambda: run.loss_sum(batch))
        finally:
            _restore(before)


def refuse_other_uses(model: nn.Module, segments: list[list[nn.Module]], forward: Callable[[], Any]) -> None:
    """Run the model's `forward`, and raise InputError where it uses the output of a block inside a
    segment for anything but the next block.

    The modules are left unchanged.
    """
    watch = _OutputUses()
    with restoring_state(model), torch.no_grad(), watch:
        for segment in segments:
            for block in segment:
                block.forward = partial(watch.call, block.forward, block is segment[-1])
        forward()
    if watch.used:
        raise _not_sequential()


def check_segments(model: nn.Module, segments: list[list[nn.Module]], forward: Callable[[], Any]) -> None:
    """Check on tensors without values what a run that recomputes these segments checks before its
    first update. Raises InputError.
    """
    refuse_other_uses(model, segments, forward)
    with restoring_state(model), torch.no_grad():
        ends = [recompute_segment(segment) for segment in segments]
        try:
            forward()
        except BLOCK_FAILURES as error:
            if not _is_unrelated(error):
                for end in ends:
                    end()
            raise
        for end in ends:
            end()


BLOCK_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError)
"""Errors that a block may raise when it gets the input of another one."""


def _is_unrelated(error: Exception) -> bool:
    return isinstance(error, InputError) or "memory" in str(error).lower()


def _with_arguments_of_first(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """A block's forward with the first block's arguments, such as its mask, which may not fit this
    block.
    """
    try:
        return forward(*args, **kwargs)
    except BLOCK_FAILURES as error:
        if _is_unrelated(error):
            raise
        raise _not_sequential() from error


def _not_sequential() -> InputError:
    return InputError(
        "plan: recompute=sqrt",
        "the model does more between its blocks than pass one's output to the next",
        "use recompute: full, which allows that",
    )
