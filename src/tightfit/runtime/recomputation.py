"""Recomputes a block's forward in backward, so that only its inputs are saved (activation
checkpointing).

The method `recompute` wraps blocks in `recomputed`, which calls torch's checkpoint. The second
forward must compute the same as the first one. So this module undoes, for the second forward, what
the first one changed: buffers such as BatchNorm's running statistics, the states of the random
number generators, and autocast's cached copies of weights.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
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
from tightfit._torch.modules import buffer_names, own_buffers
from tightfit._torch.pytree import tree_leaves
from tightfit._torch.tensors import storage_id, version_of
from tightfit.cost.recomputed_step import COMPUTE_INTENSIVE_OPS, WEIGHT_MATMUL_OPS
from tightfit.errors import InputError
from tightfit.models.tensors import tensors_in, written_tensors
from tightfit.runtime.recomputed_draws import GlobalGenerators, SameDraws

Forward = Callable[..., Any]
SMALL_BUFFER = 2**16  # bytes; copying a smaller buffer costs next to nothing
SavedBuffers = list[tuple[nn.Module, str, Tensor, Tensor]]  # (module, name, buffer, copy of its values)


def recomputed(
    forward: Forward, modules: list[nn.Module], selective: int = 0, generators: GlobalGenerators | None = None
) -> Forward:
    """Return a function that computes the same as `forward`, but saves only its inputs for
    backward. Backward runs `forward` a second time (activation checkpointing).

    forward     the forward of a block or of several blocks
    modules     the modules that `forward` runs
    selective   0: save only the inputs. n > 0: also save the output of attention, and of every n-th
                matrix product or convolution with weights
    generators  Python's and NumPy's random number generators. A caller that recomputes several
                blocks passes the same object for all of them, which saves time

    The second forward draws the same random numbers from the global generators of torch, Python and
    NumPy. It starts with the buffer values that the first one started with, and afterwards the
    buffers get back their newest values, so running statistics are updated only once. The returned
    function raises InputError if `forward` modifies its inputs in place.
    """
    buffers = ChangingBuffers(modules)
    generators = generators or GlobalGenerators()
    casts = AutocastCache()

    @wraps(forward)
    def forward_again_in_backward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        run = SameDraws(forward, generators).run
        if torch.compiler.is_compiling():  # compile.py refuses blocks that change buffers
            contexts: dict[str, Any] = {"context_fn": partial(selective_contexts, selective, True)} if selective else {}
            return checkpoint(run, *args, use_reentrant=False, **contexts, **kwargs)
        _refuse_caches(modules[0], (*args, *kwargs.values()))
        before = buffers.values()
        given = [(leaf, version_of(leaf)) for leaf in tensors_in((args, kwargs))]
        contexts = {"context_fn": partial(recompute_contexts, buffers, before, casts, selective)}
        with casts.first_forward() if selective else nullcontext():
            output = checkpoint(run, *args, use_reentrant=False, **contexts, **kwargs)
        if any(version_of(leaf) != version for leaf, version in given):
            raise InputError(
                "plan: recompute",
                f"{type(modules[0]).__name__} modifies its inputs in place, but would be recomputed from these inputs",
                "use recompute: none, or let the block write to a new tensor",
            )
        buffers.track_changed(before)
        return output

    return forward_again_in_backward


def _refuse_caches(module: nn.Module, given: Iterable[Any]) -> None:
    """Raise InputError if `given`, the arguments of a block, have a cache of keys and values of
    transformers. The second forward would add its keys once more. XLM makes a cache in training, too."""
    transformers = sys.modules.get("transformers")
    if transformers is not None and any(isinstance(one, transformers.Cache) for one in given):
        raise InputError(
            "plan: recompute",
            f"{type(module).__name__} gets a cache of keys and values, to which a second forward would add its keys again",
            "use recompute: none, or let the model call its blocks without a cache in training",
        )


class ChangingBuffers:
    """Finds the buffers that the forward of `modules` changes, in place or by assignment, and
    rewinds them for the recomputation.

    Small buffers are copied before each forward, because a forward may begin to change one at any
    time: the running statistics of a block that random depth skips at first, or a moving average
    that begins after some steps. A large buffer, such as a mask, is copied if the first forward
    changes it. This is seen from its values, because batch_norm changes its buffers without
    counting a version. A later change is refused, because the values before it are lost.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        each = dict.fromkeys(module for block in modules for module in block.modules())
        self.tracked = [(module, name) for module in each for name in buffer_names(module)]
        self._constant: list[tuple[nn.Module, str]] = []  # large buffers that the first forward did not write
        self._versions: list[tuple[Tensor | None, int]] = []  # all buffers before the current forward
        self._knows_constant = False

    def values(self) -> SavedBuffers:
        """Return a list of (module, name, buffer, copy of its values) for each buffer that may
        change. Call it before each original forward."""
        self._versions = self._current_versions()
        found = [(module, name, own_buffers(module)[name]) for module, name in self.tracked]
        return [(module, name, buffer, buffer.clone()) for module, name, buffer in found if buffer is not None]

    def track_changed(self, before: SavedBuffers) -> None:
        """Call after each original forward. The first call finds the large buffers that this forward
        has not written; from then on, these are no longer copied.

        before  what `values` returned before the forward

        Raises InputError if a later forward has written one of these.
        """
        written = [
            now is not known or version != known_version
            for (now, version), (known, known_version) in zip(self._current_versions(), self._versions, strict=True)
        ]
        if self._knows_constant:
            for (module, name), is_written in zip(self._constant, written, strict=True):
                if is_written:
                    raise InputError(
                        "plan: recompute",
                        f"{type(module).__name__} changes its buffer {name}, which its first forward did not change, and "
                        "of which there is no copy",
                        "use recompute: none, or let the first forward change the buffer, too",
                    )
            return
        unwritten = {buffer for buffer, is_written in zip(self.tracked, written, strict=True) if not is_written}
        self._constant = [
            (module, name)
            for module, name, buffer, copy in before
            if buffer.nbytes > SMALL_BUFFER and (module, name) in unwritten and torch.equal(buffer, copy)
        ]
        constant = set(self._constant)
        self.tracked = [buffer for buffer in self.tracked if buffer not in constant]
        self._knows_constant = True

    def _current_versions(self) -> list[tuple[Tensor | None, int]]:
        """Return (buffer, number of its changes so far) for each buffer of which `track_changed` has to know whether a
        forward writes it."""
        places = self._constant if self._knows_constant else self.tracked
        found = [own_buffers(module)[name] for module, name in places]
        return [(buffer, -1 if buffer is None else version_of(buffer)) for buffer in found]

    @contextmanager
    def rewound(self, before: SavedBuffers) -> Iterator[None]:
        """Context manager for the recomputation of a forward. Inside, the buffers that the forward
        changes, such as BatchNorm's running mean, have their old values from `before`. At the end
        they get back the values that they had before the context.

        before  what `values` returned before the original forward
        """
        keys = {(id(module), name) for module, name in self.tracked}
        changed = [saved for saved in before if (id(saved[0]), saved[1]) in keys]
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
    """Switches off autocast's cache of cast weights while a recomputation of a block is pending.

    Autocast casts a weight at the block's first call, and reuses the copy in later calls. A
    recomputation, however, casts the weight anew. torch requires that the original forward of a
    call and its recomputation run the same operations. So, while a recomputation is pending, the
    cache is off, and later calls cast the weight anew in their original forward, too.
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
    """Return two context managers for one call of a block: one for its original forward, one for
    its recomputation.

    buffers    the buffers to rewind for the recomputation
    before     the values of these buffers before the original forward
    casts      autocast's cache
    selective  0: save only the inputs. n > 0: see `selective_contexts`
    """
    first, second = selective_contexts(selective) if selective else (nullcontext(), nullcontext())
    return first, _RecomputeContext([lambda: buffers.rewound(before), casts.second_forward], second)


class _RecomputeContext:
    """Context manager for the recomputations of a call of a block. It can be entered several times:
    a forward that computes gradients itself recomputes the block before backward does.

    around  functions that return the context managers to enter first, each time
    kept    a further context manager, which is entered last
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


def selective_contexts(selective: int, compiled: bool = False) -> Any:
    """Return two context managers for one call of a block: one for its original forward, one for
    its recomputation.

    The original forward saves the outputs of attention and of every `selective`-th matrix product
    or convolution with weights. Operations that are cheap to recompute are not saved. The first
    context raises InputError if the block writes in place to a saved tensor. The second one raises
    InputError if it is entered again, because the first recomputation has used up the saved outputs.

    selective  n: save the output of every n-th product or convolution
    compiled   whether torch.compile traces the block. Then neither is checked: compiled code writes
               to no saved tensor
    """
    counted = {False: 0, True: 0}  # products seen in the first forward, and in the second
    saved = _SavedOutputs()

    def keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_saved = operation in COMPUTE_INTENSIVE_OPS
        if operation in WEIGHT_MATMUL_OPS:
            is_saved = counted[context.is_recompute] % selective == 0
            counted[context.is_recompute] += 1
        if not compiled and not context.is_recompute:
            if not saved.storages.isdisjoint(_storages(written_tensors(operation, args, kwargs))):
                raise _overwrites_saved()
            saved.last_is_saved = is_saved
            if is_saved and POLICY_GETS_OUTPUT:
                saved.add(context.op_output)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    first, second = create_selective_checkpoint_contexts(keep)
    if compiled:
        return first, second
    return first if POLICY_GETS_OUTPUT else _Nested(first, saved), _OneRecomputation(second, saved, selective)


# up to torch 2.11, torch calls the policy before the operation runs, so without its output
POLICY_GETS_OUTPUT = "op_output" in inspect.signature(SelectiveCheckpointContext).parameters


class _SavedOutputs(TorchDispatchMode):
    """Remembers the storages of the tensors that a block's forward saves, so that a write to one of
    them can be detected.

    Up to torch 2.11, torch calls the policy of a selective checkpoint before the operation runs.
    Then this dispatch mode, entered inside torch's own, sees the operation's output afterwards.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()
        self.last_is_saved = False

    def add(self, output: Any) -> None:
        """Remember the storages of an operation's output, which is saved."""
        self.storages.update(_storages(tree_leaves(output)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.last_is_saved = False
        output = func(*args, **(kwargs or {}))
        if self.last_is_saved:
            self.add(output)
        return output


class _OneRecomputation:
    """Context manager for the recomputation of a call whose forward has saved some outputs. torch
    gives each of them to the first recomputation and then frees it, so a second one is refused.

    inner      torch's context manager for the recomputation
    saved      the outputs that the forward has saved
    selective  n: the forward has saved the output of every n-th product or convolution
    """

    def __init__(self, inner: AbstractContextManager[Any], saved: _SavedOutputs, selective: int) -> None:
        self.inner, self.saved, self.selective = inner, saved, selective
        self.is_used = False

    def __enter__(self) -> None:
        if self.is_used and self.saved.storages:
            raise _recomputed_twice(self.selective)
        self.is_used = True
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)


class _Nested:
    """Context manager that enters `outer` and then `inner`, and leaves them in the reverse order."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self.outer, self.inner = outer, inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        self.outer.__exit__(*error)


def _storages(leaves: list[Any]) -> set[int]:
    return {storage_id(leaf) for leaf in leaves if isinstance(leaf, Tensor)}


def _overwrites_saved() -> InputError:
    return InputError(
        "plan: recompute=selective",
        "a block writes in place to one of its saved tensors (relu(inplace=True), add_, the gates of a recurrent cell)",
        "use recompute: full, or let the block write to a new tensor",
    )


def _recomputed_twice(selective: int) -> InputError:
    return InputError(
        "plan: recompute=selective" + (f"-{selective}" if selective > 1 else ""),
        "a block has to be recomputed twice, because the model computes gradients in its forward "
        "(torch.autograd.grad), but the outputs that the block saves serve one recomputation only",
        "use recompute: full",
    )
