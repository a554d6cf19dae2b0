"""Recomputes a block's forward in backward: only its inputs are saved (activation checkpointing).

The method `recompute` wraps blocks in `recomputed`, which calls torch's checkpoint. The second
forward must compute the same as the first one. So this module restores what the first forward
changed: buffers such as BatchNorm's running statistics, and autocast's cached copies of weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tightfit._torch.dispatch import TorchDispatchMode
from tightfit._torch.modules import own_buffers
from tightfit._torch.operations import schema_of
from tightfit._torch.pytree import tree_leaves
from tightfit._torch.tensors import storage_id, version_of
from tightfit.cost.recomputed_step import COMPUTE_INTENSIVE_OPS, WEIGHT_MATMUL_OPS
from tightfit.errors import InputError
from tightfit.models.tensors import tensors_in

Forward = Callable[..., Any]
SavedBuffers = list[tuple[nn.Module, str, Tensor, Tensor]]  # (module, name, buffer, copy of its values)


def recomputed(forward: Forward, modules: list[nn.Module], selective: int = 0) -> Forward:
    """Return `forward` with activation checkpointing: it saves only its inputs, and backward runs
    it a second time.

    modules    the modules that `forward` runs
    selective  0: save nothing else. n > 0: also save the output of attention, and of every n-th
               matrix product or convolution with weights

    The second forward draws the same random numbers for dropout, and starts with the buffer values
    with which the first one started. Afterwards the buffers get back the values that they had
    before the second forward. So running statistics are updated only once. Raises InputError if the
    block modifies its inputs in place.
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
        given = [(leaf, version_of(leaf)) for leaf in tensors_in((args, kwargs))]
        contexts = {"context_fn": partial(recompute_contexts, buffers, before, casts, selective)}
        with casts.first_forward() if selective else nullcontext():
            output = checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)
        if any(version_of(leaf) != version for leaf, version in given):
            raise InputError(
                "plan: recompute",
                f"{type(modules[0]).__name__} modifies its inputs in place, but would be recomputed from these inputs",
                "use recompute: none, or let the block write to a new tensor",
            )
        buffers.track_changed(before)
        return output

    return forward_again_in_backward


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
        """Return (module, name, buffer, copy of its values) for each buffer that may change."""
        found = [(module, name, own_buffers(module)[name]) for module, name in self.tracked]
        return [(module, name, buffer, buffer.clone()) for module, name, buffer in found if buffer is not None]

    def track_changed(self, before: SavedBuffers) -> None:
        """Call after each first forward. From the first call on, only the buffers that this forward
        changed are tracked. before: what `values` returned before the forward.
        """
        if not self.known:
            self.tracked = [
                (module, name)
                for module, name, buffer, copy in before
                if own_buffers(module)[name] is not buffer or not torch.equal(buffer, copy)
            ]
            self.known = True

    @contextmanager
    def rewound(self, before: SavedBuffers) -> Iterator[None]:
        """Context manager for the recomputation of a forward that changes buffers, such as
        BatchNorm's running mean. Inside, these buffers have the values in `before`, which were
        saved before the first forward. At the end they get back their values from before the
        context.
        """
        places = {(id(module), name) for module, name in self.tracked}
        changed = [one for one in before if (id(one[0]), one[1]) in places]
        now = self.values()
        restore_buffers(changed)
        try:
            yield
        finally:
            restore_buffers(now)


@torch.no_grad()
def restore_buffers(values: SavedBuffers) -> None:
    for module, name, buffer, copy in values:
        buffer.copy_(copy)
        own_buffers(module)[name] = buffer


class AutocastCache:
    """Controls autocast's cached copies of a block's weights.

    Autocast casts a weight at the first call of the block, and reuses the copy in later calls. But
    the recomputation of each call casts the weight anew. The original forward of a call and its
    recomputation must run the same operations. So while a recomputation is pending, the cache is
    disabled, and later calls cast the weight anew in their original forward, too.
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
    """Return (the context manager around a first forward, that around its recomputation)."""
    first, second = selective_contexts(selective) if selective else (nullcontext(), nullcontext())
    return first, _RecomputeContext([lambda: buffers.rewound(before), casts.second_forward], second)


class _RecomputeContext:
    """The context manager around each recomputation of a block. It can be entered more than once:
    if a forward computes gradients itself, it recomputes the block before backward does.
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
    """Return (the context around one block's forward, the context around its recomputation).

    In the forward, the outputs of attention and of every `selective`-th matrix product or
    convolution with weights are saved. Operations that are cheap to recompute are not saved. The
    first context raises InputError if the block writes in place to a saved tensor.
    """
    counted = {False: 0, True: 0}  # products seen in the first forward, and in the second
    saved = _SavedOutputs()

    def keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operation in COMPUTE_INTENSIVE_OPS
        if operation in WEIGHT_MATMUL_OPS:
            kept = counted[context.is_recompute] % selective == 0
            counted[context.is_recompute] += 1
        if not torch.compiler.is_compiling() and not context.is_recompute:
            if not saved.storages.isdisjoint(_storages(written_tensors(operation, args, kwargs))):
                raise _overwrites_saved()
            saved.last_is_saved = kept
            if kept and POLICY_GETS_OUTPUT:
                saved.add(context.op_output)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    first, second = create_selective_checkpoint_contexts(keep)
    if POLICY_GETS_OUTPUT or torch.compiler.is_compiling():
        return first, second
    return _Nested(first, saved), second


# up to torch 2.11, torch calls the policy before the operation runs, so without its output
POLICY_GETS_OUTPUT = "op_output" in inspect.signature(SelectiveCheckpointContext).parameters


class _SavedOutputs(TorchDispatchMode):
    """The storages of a block's saved tensors, which the checkpoint's contexts keep alive.

    Where torch does not give the policy an operation's output, this is also a dispatch mode within
    torch's own. It sees the output of each operation after torch has called the policy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()
        self.last_is_saved = False

    def add(self, output: Any) -> None:
        """Add the storages of an operation's output."""
        self.storages.update(_storages(tree_leaves(output)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.last_is_saved = False
        output = func(*args, **(kwargs or {}))
        if self.last_is_saved:
            self.add(output)
        return output


class _Nested:
    """Enters two context managers as one: `outer` first, then `inner`."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self.outer, self.inner = outer, inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        self.outer.__exit__(*error)


def written_tensors(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the tensors that an operation writes to, according to its schema.

    Version counters do not suffice: a write to a chunk from torch.chunk or from a recurrent cell
    does not increment the version counter of the full tensor.
    """
    if not schema_of(operation).is_mutable:
        return []
    given = {**dict(zip((one.name for one in schema_of(operation).arguments), args, strict=False)), **kwargs}
    writes = [
        one.name for one in schema_of(operation).arguments if one.alias_info is not None and one.alias_info.is_write
    ]
    return tree_leaves([given.get(name) for name in writes])


def _storages(leaves: list[Any]) -> set[int]:
    return {storage_id(leaf) for leaf in leaves if isinstance(leaf, Tensor)}


def _overwrites_saved() -> InputError:
    return InputError(
        "plan: recompute=selective",
        "a block writes in place to one of its saved tensors (relu(inplace=True), add_, the gates of a recurrent cell)",
        "use recompute: full, or let the block write to a new tensor",
    )
