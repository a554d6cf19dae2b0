"""Recomputes only the attention core of a block in backward: the scores, their softmax, dropout, and
what is between them (plan field recompute: attention).

Attention without a fused kernel saves several tensors of batch x heads x length^2 numbers for
backward. This module saves none of them. It finds the core by its operations, so it works for any
nn.Module: the core begins with a batched matrix product (queries x keys), contains a softmax, and
ends with the next matrix product (probabilities x values), whose result is saved. In a fused
attention kernel, the core is the kernel itself: its output and its log-sum-exps are not saved.

Forward notes the core's operations and their arguments, and autograd gets placeholders for the
core's tensors. When backward first needs one of them, the noted operations run again, with the same
random numbers. Nothing else of the block runs twice.

Example: 16 heads, 2,048 tokens, bf16, no fused kernel. Per sample and block, the scores after the
softmax in fp32, their cast to bf16, the dropout mask and the dropped-out probabilities are 16 x
2,048^2 x (4 + 2 + 1 + 2) bytes = 576 MiB. In backward, one block at a time needs them.

Source  Korthikanti et al. 2022, arXiv:2205.05198, section 5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tightfit._torch.dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from tightfit._torch.fake import active_fake_mode
from tightfit._torch.pytree import tree_leaves
from tightfit._torch.tensors import detached, saved_tensor_hooks_now, storage_id, version_of
from tightfit.errors import InputError
from tightfit.models.tensors import written_tensors

Forward = Callable[..., Any]

# what an operation is to an attention core
SCORES, PRODUCT, SOFTMAX, KERNEL, COPY, VIEW, OTHER = range(7)
_KINDS = {
    SCORES: ("aten.bmm", "aten.baddbmm"),
    PRODUCT: (
        "aten.mm", "aten.addmm", "aten.addbmm", "aten.mv", "aten.addmv", "aten.dot", "aten.convolution", "aten._scaled_mm",
        "aten._grouped_mm", "aten.linear",
    ),
    SOFTMAX: ("aten._softmax", "aten._safe_softmax"),
    KERNEL: (
        "aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention", "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_attention_math_for_mps", "aten._scaled_dot_product_fused_attention_overrideable",
        "aten._flash_attention_forward", "aten._efficient_attention_forward", "flash_attn._flash_attn_forward",
        "flash_attn._flash_attn_varlen_forward", "tightfit.blocked_attention",
    ),
    COPY: ("aten.clone", "aten._to_copy"),
}  # fmt: skip
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}


@cache
def kind_of(operation: Any) -> int:
    """Return what an operation, such as torch.ops.aten.bmm.default, is to an attention core: SCORES
    (it may begin one), PRODUCT, SOFTMAX, KERNEL (fused attention), COPY, VIEW or OTHER."""
    return _KIND_OF.get(str(operation).rsplit(".", 1)[0], VIEW if operation.is_view else OTHER)


@dataclass
class Found:
    """Counts the attention cores that forwards have found.

    calls  number of forwards of blocks
    cores  number of cores in them
    """

    calls: int = 0
    cores: int = 0


class _Counted:
    """Holds the counter of the last function that `recompute_attention` has made. Compiled code
    counts there: if it referred to a counter of its own, it would be compiled again for each model."""

    found = Found()


_COUNTED = _Counted()


def recompute_attention(forward: Forward, found: Found) -> Forward:
    """Return a function that computes the same as `forward`, but saves no tensor of its attention
    cores for backward, which recomputes them.

    forward  the forward of a block, or of any module
    found    counts the cores
    """

    _COUNTED.found = found

    @wraps(forward)  # its signature says what the model takes
    def forward_without_core(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(forward, *args, use_reentrant=False, context_fn=_compiled_contexts, **kwargs)
        outer_pack, outer_unpack = saved_tensor_hooks_now() or (_without_graph, _unchanged)
        cores = _AttentionCores(outer_pack)

        def unpack(packed: Any) -> Tensor:
            return packed.tensor(outer_unpack) if isinstance(packed, _Placeholder) else outer_unpack(packed)

        with cores, saved_tensors_hooks(cores.pack, unpack):
            output = forward(*args, **kwargs)
        found.calls += 1
        found.cores += cores.end()
        return output

    return forward_without_core


def no_attention(name: str) -> InputError:
    """Return the error for a model in which no attention was found.

    name  the class of the model
    """
    return InputError(
        "plan: recompute=attention",
        f"{name} computes no attention: no fused attention kernel, and no softmax between two batched matrix products",
        "use recompute: selective or full",
    )


def _without_graph(tensor: Tensor) -> Tensor:
    # an operation's own result must not refer to its node in the graph, which refers to the result
    return tensor if tensor.grad_fn is None else detached(tensor)


def _unchanged(packed: Any) -> Any:
    return packed


@dataclass(frozen=True)
class _Part:
    """A tensor of a core: a part of the storage with this number."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, whole: Tensor) -> Tensor:
        return whole.as_strided(self.size, self.stride, self.offset)


@dataclass(eq=False)
class _Step:
    """An operation of a core.

    number    position among all noted operations of the block's forward
    arguments (args, kwargs), with a `_Part` in place of each tensor of the core
    versions  (tensor, its version) of the other tensors among the arguments
    made      position among the outputs -> number of the storage that the operation allocates
    reads     numbers of the core's storages among the arguments
    writes    numbers of the storages that it allocates or changes
    random    (device, state of its random number generator before the operation); None if it draws
              no random numbers
    """

    number: int
    operation: Any
    arguments: Any
    versions: list[tuple[Tensor, int]]
    made: dict[int, int]
    reads: set[int]
    writes: set[int]
    random: tuple[torch.device, Tensor] | None

    def run(self, storages: dict[int, Tensor]) -> None:
        """Run the operation again.

        storages  number of a storage -> a tensor in it. What the operation allocates is added
        """
        if any(version_of(tensor) != version for tensor, version in self.versions):
            raise InputError(
                "plan: recompute=attention",
                "the model modifies in place a tensor from which attention would be recomputed",
                "use recompute: full or none, or let the model write to a new tensor",
            )
        args, kwargs = _replaced(self.arguments, _Part, lambda part: part.of(storages[part.storage]))
        if self.random is None:
            output = self.operation(*args, **kwargs)
        else:
            output = _with_random_state(self.random, lambda: self.operation(*args, **kwargs))
        leaves = tree_leaves(output)
        storages.update({storage: leaves[index] for index, storage in self.made.items()})


class _Core:
    """One attention core in one call of a block.

    fused      whether it is a fused kernel
    confirmed  whether it is attention for certain: a softmax or a fused kernel was seen
    steps      its operations, in order; empty after the recomputation
    uses       number of a storage -> placeholders that refer to it
    storages   number of a storage -> a tensor in it, from the recomputation to its last use
    pending    until the core is confirmed: the placeholders, which still have their tensors
    """

    def __init__(self, fused: bool) -> None:
        self.fused = self.confirmed = fused
        self.discarded = False
        self.steps: list[_Step] = []
        self.uses: Counter[int] = Counter()
        self.storages: dict[int, Tensor] = {}
        self.pending: list[_Placeholder] = []
        self.merged_into: _Core | None = None

    def root(self) -> _Core:
        return self if self.merged_into is None else self.merged_into.root()

    def merge(self, other: _Core) -> None:
        """Take over the operations of `other`, whose tensors are an input of this core."""
        self.steps = sorted([*self.steps, *other.steps], key=lambda step: step.number)
        self.uses.update(other.uses)
        self.pending += other.pending
        if other.confirmed:
            self.confirm()
        other.steps, other.uses, other.pending, other.merged_into = [], Counter(), [], self

    def confirm(self) -> None:
        self.confirmed = True
        for one in self.pending:
            one.kept = None
        self.pending.clear()

    def discard(self, pack: Callable[[Tensor], Any]) -> None:
        """Forget a core that turned out to be no attention: its tensors are saved as others are."""
        self.discarded = True
        for one in self.pending:
            one.kept = pack(one.kept)
        self.pending.clear()
        self.steps.clear()

    def recompute(self) -> None:
        """Run those operations again whose results backward needs."""
        steps, self.steps = self.steps, []
        needed = {storage for storage, count in self.uses.items() if count > 0}
        again: list[_Step] = []
        for step in reversed(steps):
            if not needed.isdisjoint(step.writes):
                again.append(step)
                needed |= step.reads
        last = {storage: step for step in reversed(again) for storage in step.reads}
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            for step in reversed(again):
                step.run(self.storages)
                for storage in step.reads | step.writes:
                    if last.get(storage, step) is step and self.uses[storage] <= 0:
                        self.storages.pop(storage, None)


class _Placeholder:
    """What autograd saves in place of a tensor of a core. When it is freed, the core may free the
    tensor that it has recomputed.

    kept  the tensor itself, while it is not certain that the core is attention. If it turns out
          not to be, what the surrounding hooks make of the tensor
    """

    def __init__(self, core: _Core, part: _Part, kept: Tensor | None) -> None:
        self.core, self.part = core, part
        self.kept: Any = kept
        core.uses[part.storage] += 1

    def tensor(self, unpack: Callable[[Any], Tensor]) -> Tensor:
        core = self.core.root()
        if core.discarded:
            return unpack(self.kept)
        if self.kept is not None:
            return self.kept  # type: ignore[no-any-return]
        if self.part.storage not in core.storages:
            core.recompute()
        return self.part.of(core.storages[self.part.storage])

    def __del__(self) -> None:
        core = self.core.root()
        core.uses[self.part.storage] -= 1
        if core.uses[self.part.storage] <= 0:
            core.storages.pop(self.part.storage, None)


@dataclass(eq=False)
class _Storage:
    """A storage that an operation of a core has allocated.

    alive  a weak reference, which keeps the storage's id from being used for another storage
    """

    number: int
    core: _Core
    dtype: torch.dtype
    alive: StorageWeakRef


class _AttentionCores(TorchDispatchMode):
    """Finds the attention cores in one call of a block, and notes their operations.

    A core is found by following tensors: the result of a batched product, and what other operations
    make of it, up to the next product. It is discarded if there is no softmax between the two.
    """

    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        """
        pack  makes of a tensor that is no core's what autograd saves for it
        """
        super().__init__()
        self.outer_pack = pack
        self.cores: list[_Core] = []
        self.storages: dict[int, _Storage] = {}  # by id, those that may still be alive
        self.numbered = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def end(self) -> int:
        """End the block's forward: discard what is not attention. Return the number of cores."""
        found = [core for core in self.cores if core.merged_into is None]
        for core in found:
            if not core.confirmed and not core.discarded:
                core.discard(self.outer_pack)
        self.storages.clear()
        return sum(core.confirmed for core in found)

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd saves in place of `tensor`."""
        made = self._made_by_core(tensor)
        if made is None or tensor.dtype != made.dtype:
            return self.outer_pack(tensor)
        core = made.core.root()
        held = _Placeholder(core, _part(tensor, made), None if core.confirmed else _without_graph(tensor))
        if not core.confirmed:
            core.pending.append(held)
        return held

    def _made_by_core(self, tensor: Any) -> _Storage | None:
        if not self.storages or not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return None
        made = self.storages.get(storage_id(tensor))
        return None if made is None or made.core.root().discarded else made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # the mode sees the operations on the inner tensors
        kind = kind_of(func)
        if kind == VIEW or (not self.storages and kind not in (SCORES, KERNEL)):
            return func(*args, **kwargs)
        inputs = [made for made in map(self._made_by_core, _tensors(args, kwargs)) if made] if self.storages else []
        if kind in (SCORES, PRODUCT):
            ends = self._end_cores(inputs)
            return func(*args, **kwargs) if kind == PRODUCT or ends else self._begin(func, args, kwargs, False)
        if kind == KERNEL:
            return self._begin(func, args, kwargs, True)
        cores = list(dict.fromkeys(made.core.root() for made in inputs))
        if not cores or (kind != COPY and any(core.fused for core in cores)):
            return func(*args, **kwargs)
        if kind == SOFTMAX:
            cores[0].confirm()
        for other in cores[1:]:
            cores[0].merge(other)
        return self._note(cores[0], func, args, kwargs)

    def _end_cores(self, inputs: list[_Storage]) -> bool:
        """End the cores whose tensors are multiplied. Return whether one of them is attention, so
        that the product is that with the values."""
        cores = {made.core.root() for made in inputs}
        for core in cores:
            if not core.confirmed:
                core.discard(self.outer_pack)
        for key in [key for key, made in self.storages.items() if made.alive.expired()]:
            del self.storages[key]
        return any(core.confirmed and not core.fused for core in cores)

    def _begin(self, func: Any, args: Any, kwargs: Any, fused: bool) -> Any:
        core = _Core(fused)
        self.cores.append(core)
        return self._note(core, func, args, kwargs)

    def _note(self, core: _Core, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation of a core, note it, and return its output."""
        given = {id(tensor): tensor for tensor in _tensors(args, kwargs)}
        made_by = {key: self._made_by_core(tensor) for key, tensor in given.items()}
        parts = {key: _part(given[key], made) for key, made in made_by.items() if made is not None}
        changed = [id(tensor) for tensor in written_tensors(func, args, kwargs) if isinstance(tensor, Tensor)]
        random = _random_state(func, args, kwargs)
        versions = [(tensor, version_of(tensor)) for key, tensor in given.items() if key not in parts]
        output = func(*args, **kwargs)
        if any(key not in parts for key in changed):  # it writes to a tensor that is no core's
            return output
        made = {} if changed else self._made(core, output, [tensor for tensor, _ in versions])
        writes = {*made.values(), *(parts[key].storage for key in changed)}
        if writes:
            arguments = _replaced((args, kwargs), Tensor, lambda tensor: parts.get(id(tensor), tensor))
            reads = {part.storage for part in parts.values()}
            core.steps.append(_Step(self.numbered, func, arguments, versions, made, reads, writes, random))
            self.numbered += 1
        return output

    def _made(self, core: _Core, output: Any, others: list[Tensor]) -> dict[int, int]:
        """Number the storages that an operation of `core` has allocated. Return position among its
        outputs -> number of the storage.

        others  the arguments of the operation that are no core's, in whose storages outputs may be
        """
        made: dict[int, int] = {}
        for index, tensor in enumerate(tree_leaves(output)):
            if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or self._made_by_core(tensor):
                continue
            key = storage_id(tensor)
            if any(key == storage_id(other) for other in others if other.layout is torch.strided):
                continue
            alive = StorageWeakRef(tensor.untyped_storage())
            self.storages[key] = _Storage(self.numbered, core, tensor.dtype, alive)
            made[index] = self.numbered
            self.numbered += 1
        return made


def _part(tensor: Tensor, made: _Storage) -> _Part:
    return _Part(made.number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _tensors(args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments: these are tensors, or lists of tensors."""
    for argument in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from (inner for inner in argument if isinstance(inner, Tensor))


def _replaced(arguments: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return an operation's arguments, (args, kwargs), with `change(one)` in place of each one of the
    type `kind`."""

    def replaced(one: Any) -> Any:
        if isinstance(one, kind):
            return change(one)
        if isinstance(one, list | tuple) and type(one) in (list, tuple):
            return type(one)(map(replaced, one))
        return one

    args, kwargs = arguments
    return tuple(map(replaced, args)), {name: replaced(argument) for name, argument in kwargs.items()}


def _random_state(operation: Any, args: Any, kwargs: dict[str, Any]) -> tuple[torch.device, Tensor] | None:
    """Return (device, state of its random number generator) if the operation, which is called with
    these arguments, draws random numbers; else None."""
    if torch.Tag.nondeterministic_seeded not in operation.tags or active_fake_mode() is not None:
        return None
    device = next(_tensors(args, kwargs)).device
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return device, state


def _with_random_state(random: tuple[torch.device, Tensor], run: Callable[[], Any]) -> Any:
    """Call `run` with this state of the device's random number generator, restore the generator, and
    return the result."""
    device, state = random
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
        return run()


class _Policy:
    """Decides, while torch.compile traces a block, which operations are recomputed: those of the
    attention cores. Of all other tensors, the compiler saves what it would save without it.

    The compiler's trace does not show which tensors share a storage. So a core begins at a batched
    product and ends at the next product, whatever they multiply. A batched product that turns out
    to be no attention may be recomputed, too.
    """

    def __init__(self, found: Found) -> None:
        self.found = found
        self.inside = self.seen_softmax = self.after_kernel = False
        found.calls += 1

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE if self._is_of_core(operation) else CheckpointPolicy.PREFER_SAVE

    def _is_of_core(self, operation: Any) -> bool:
        kind = kind_of(operation)
        if kind == KERNEL:
            self.found.cores += 1
            self.inside, self.after_kernel = False, True
            return True
        if kind in (SCORES, PRODUCT):
            ends = self.inside and self.seen_softmax
            self.found.cores += ends
            self.inside, self.seen_softmax, self.after_kernel = kind == SCORES and not ends, False, False
            return self.inside
        if self.after_kernel:  # the kernel's output, copied or seen in another shape
            self.after_kernel = kind in (VIEW, COPY)
            return self.after_kernel
        self.seen_softmax = self.seen_softmax or (self.inside and kind == SOFTMAX)
        return self.inside


def _compiled_contexts() -> Any:
    """Return two context managers for torch's checkpoint in compiled code: one for a block's forward,
    one for its recomputation."""
    return create_selective_checkpoint_contexts(_Policy(_COUNTED.found))


__all__ = ["Found", "no_attention", "recompute_attention"]
