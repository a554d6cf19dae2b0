"""Recorder: notes what a model's forwards do, operation by operation and block by block, as a `Dataflow`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from tightfit.errors import InputError
from tightfit.models.answers import answer
from tightfit.models.caches import forget_tensors
from tightfit.models.dataflow import (
    ASKED,
    BEFORE,
    LIBRARIES,
    Called,
    Dataflow,
    Event,
    Leaf,
    Operation,
    PathTo,
    Returned,
    Returns,
    Seen,
    not_in_a_row,
    path_of,
    sample_shapes,
)
from tightfit.models.hooks import hooks_of, run_hooks_on_direct_calls
from tightfit.models.objective import Batch

_SHAPE_ONLY = frozenset(  # read of a tensor its shape and type, and no value
    {"empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full"}
    | {"rand_like", "randn_like", "new_empty_strided"}
)
_VALUES = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)


@dataclass
class _Block:
    """What is known of a block's call: its arguments, and of what it returned the leaves."""

    arguments: dict[PathTo, Any] = field(default_factory=dict)
    spec: TreeSpec | None = None
    leaves: list[Leaf] = field(default_factory=list)
    storages: set[int] = field(default_factory=set)


class Recorder(TorchDispatchMode):
    """Records a model's forwards; see `Dataflow`."""

    def __init__(
        self, model: nn.Module, fakes: dict[int, Tensor], batch: Batch, blocks: list[tuple[str, nn.Module]]
    ) -> None:
        super().__init__()
        self.model, self.batch, self.blocks = model, batch, blocks
        self.forwards: list[list[Event]] = []
        self.place, self.inside, self.count = BEFORE, False, len(blocks)
        self.known: list[_Block] = [_Block() for _ in blocks]
        self.tensors: dict[int, tuple[int, Tensor]] = {}  # by id: its number, and itself, so that no other gets its id
        self.storages: dict[int, tuple[int, Any]] = {}
        self.is_random = False
        self.hooks = tuple(hooks_of(block) for _, block in blocks)
        self.parameters: dict[int, set[str]] = {}
        self.persistent: dict[int, str] = {}
        self.buffers: list[
            tuple[str, dict[str, Tensor | None], str, Tensor]
        ] = []  # whole name, where it is, and what it was
        self.replaced: dict[str, int] = {}
        for path, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.parameters.setdefault(self.see(parameter).storage, set()).add(f"{path}.{name}".lstrip("."))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    whole = f"{path}.{name}".lstrip(".")
                    self.persistent.setdefault(self.see(buffer).storage, whole)
                    self.buffers.append((whole, module._buffers, name, buffer))
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.parameters.setdefault(self.see(parameter).storage, set()).add(name)
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        self.given = {self.see(tensor).storage for tensor in tensors}
        self.samples = tensors[0].shape[0] if tensors else 0

    def see(self, tensor: Tensor) -> Seen:
        if id(tensor) not in self.tensors:
            self.tensors[id(tensor)] = len(self.tensors), tensor
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages:
            self.storages[storage._cdata] = len(self.storages), storage
        return Seen(self.tensors[id(tensor)][0], self.storages[storage._cdata][0])

    def forward(self, total: Callable[[nn.Module, Batch], Tensor]) -> None:
        """One forward. Raises InputError where blocks are not called in a row."""
        self.forwards.append([])
        self.place, self.inside = BEFORE, False
        hooks: list[Any] = []
        for number, (_, block) in enumerate(self.blocks):
            if len(self.forwards) == 1:
                run_hooks_on_direct_calls(block, partial(self._is_running, number))
            hooks.append(block.register_forward_pre_hook(self._calling(number), with_kwargs=True, prepend=True))
            hooks.append(block.register_forward_hook(partial(self._apart, number), prepend=True))
            hooks.append(block.register_forward_hook(self._returning(number), with_kwargs=True))
        try:
            total(self.model, self.batch)
        finally:
            forget_tensors()
            for hook in hooks:
                hook.remove()
        self._see_hooks()
        if len(self.forwards) == 1:
            for whole, held, name, before in self.buffers:
                now = held[name]
                if now is not None and now is not before:
                    self.replaced[whole] = self.see(now).tensor
        if self.place != self.count:
            raise not_in_a_row()

    def _see_hooks(self) -> None:
        """Some models install hooks in their first forward. transformers tells blocks by their class; others would put them on what
        stands for a block."""
        before, self.hooks = self.hooks, tuple(hooks_of(block) for _, block in self.blocks)
        for (name, _), old, new in zip(self.blocks, before, self.hooks, strict=True):
            for hook, _ in {*new.before, *new.after} - {*old.before, *old.after}:
                if not str(getattr(hook, "__module__", "")).startswith("transformers."):
                    raise InputError(
                        ASKED,
                        f"the model's forward registers a hook on {name}, which only one stage has",
                        "register it where the model is made, or use pp: 1",
                    )

    def _is_running(self, number: int) -> bool:
        return self.inside and self.place == number

    def _calling(self, number: int) -> Callable[..., None]:
        def called(module: nn.Module, args: Any, kwargs: Any) -> None:
            forget_tensors()
            if self.inside or number != self.place + 1:
                raise not_in_a_row()
            self.place, self.inside = number, True
            leaves = {path_of(keys): leaf for keys, leaf in tree_flatten_with_path((args, kwargs))[0]}
            self.known[number].arguments = leaves
            given = {path: self.see(leaf) for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
            self.forwards[-1].append(Called(number, given))

        return called

    def _apart(self, number: int, module: nn.Module, args: Any, output: Any) -> Any:
        """What a block returns, as tensors of their own: what it also leaves in a list or an attribute is then known not to have
        come this way, the only one that leads to another stage."""
        given = {id(leaf) for leaf in self.known[number].arguments.values()}
        leaves, spec = tree_flatten(output)
        made = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in given}
        if not made:
            return output
        with torch.enable_grad():  # a view that is made without may not be overwritten with it
            apart = {key: torch.ops.aten.alias.default(leaf) for key, leaf in made.items()}
        return tree_unflatten([apart.get(id(leaf), leaf) for leaf in leaves], spec)

    def _returning(self, number: int) -> Callable[..., None]:
        def returned(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not self.inside or number != self.place:
                raise not_in_a_row()
            leaves, spec = tree_flatten(output)
            known = self.known[number]
            known.spec, known.leaves = spec, [self._leaf(known, leaf, number) for leaf in leaves]
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            same = [any(leaf is one for one in known.arguments.values()) for leaf in tensors]
            found = tuple((self.see(leaf), is_same) for leaf, is_same in zip(tensors, same, strict=True))
            known.storages.update(seen.storage for seen, is_same in found if not is_same)
            self.forwards[-1].append(Returned(number, found))
            self.inside = False
            self.place = self.count if number == self.count - 1 else number

        return returned

    def _leaf(self, known: _Block, leaf: Any, number: int) -> Leaf:
        paths = known.arguments.items()
        same = next((path for path, one in paths if one is leaf), None) if not _is_plain(leaf) else None
        if same is not None:
            return Leaf(same=same)
        if isinstance(leaf, Tensor):
            like = (
                path
                for path, one in paths
                if isinstance(one, Tensor) and one.shape == leaf.shape and one.dtype == leaf.dtype
            )
            path = next(like, None)
            if path is not None:
                return Leaf(like=path)
            if leaf.dim() and leaf.shape[0] == self.samples:
                return Leaf(tail=tuple(leaf.shape[1:]), dtype=leaf.dtype)
            if not leaf.dim():
                return Leaf(tail=None, dtype=leaf.dtype)
            raise self._cannot_stand_in(number, f"a tensor of shape {tuple(leaf.shape)}")
        if _is_plain(leaf) and (isinstance(leaf, bool | float) or not isinstance(leaf, int)):
            return Leaf(constant=leaf)
        raise self._cannot_stand_in(number, f"{type(leaf).__name__}")

    def _cannot_stand_in(self, number: int, what: str) -> InputError:
        return InputError(
            ASKED,
            f"{self.blocks[number][0]} returns {what}, which other devices would not know",
            "let blocks return tensors shaped like what they are given, or use pp: 1",
        )

    def leaves_something(self) -> bool:
        """Whether the forward overwrites or replaces what is there before it."""
        if self.replaced:
            return True
        there = self.persistent.keys() | self.parameters.keys() | self.given
        events = self.forwards[0]
        return any(isinstance(event, Operation) and there.intersection(event.written) for event in events)

    def dataflow(self, changed: list[str], numbers: tuple[int, ...]) -> Dataflow:
        uses: dict[str, set[int]] = {}
        overwritten: set[int] = set()
        for event in self.forwards[0]:
            if not isinstance(event, Operation):
                continue
            for seen in event.reads:
                for name in self.parameters.get(seen.storage, ()):
                    uses.setdefault(name, set()).add(event.place)
            if not event.inside:
                overwritten.update(event.written)
        returns = [
            Returns(one.spec, tuple(one.leaves), bool(one.storages & overwritten))
            for one in self.known
            if one.spec is not None
        ]
        found = Dataflow(
            self.forwards,
            {storage: frozenset(names) for storage, names in self.parameters.items()},
            self.persistent,
            {name: tuple(sorted(places)) for name, places in uses.items()},
            changed,
            returns,
            sample_shapes(self.batch),
            self.count,
            self.is_random,
            sum(parameter.numel() for parameter in self.model.parameters()),
            numbers,
            self.hooks,
            self.replaced,
        )
        self.tensors.clear()
        self.storages.clear()
        for one in self.known:
            one.arguments.clear()
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim" or func in (torch.ops.aten.sym_size.int, torch.ops.aten.detach_.default):
            return func(*args, **kwargs)
        decides = func in _VALUES
        output = self._value(func, args) if decides else answer(func, args, kwargs)
        name = func._overloadpacket.__name__
        read = [] if name in _SHAPE_ONLY else [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        is_random = torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs)
        self.is_random = self.is_random or is_random
        event = Operation(
            self.place,
            self.inside,
            tuple(map(self.see, read)),
            tuple(map(self.see, made)),
            tuple(self.see(tensor).storage for tensor in _overwritten(func, args, kwargs)),
            is_random,
            decides,
            _line(),
        )
        self.forwards[-1].append(event)
        return output

    def _value(self, func: Any, args: Any) -> Any:
        tensor = args[0]
        if isinstance(tensor, FakeTensor) and tensor.constant is None:
            if func is torch.ops.aten.equal.default or tensor.dtype is torch.bool:
                return False
            return 1.0 if tensor.is_floating_point() else 1
        return func(*args)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device)


def _line() -> tuple[str, int] | None:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(LIBRARIES) and not name.startswith("<"):
            return name, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _overwritten(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """What an operation writes to: as its schema says, and BatchNorm's statistics, of which some schemas do not say it."""
    statistics = (
        ("running_mean", "running_var") if "batch_norm" in func._schema.name and _trains(func, args, kwargs) else ()
    )
    if not (func._schema.is_mutable or statistics):
        return
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in statistics or (argument.alias_info is not None and argument.alias_info.is_write):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _trains(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a BatchNorm computes statistics; its backward and its evaluation only read them."""
    if "backward" in func._schema.name:
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "training":
            return bool(args[place] if place < len(args) else kwargs.get("training"))
    return False


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation that may draw random numbers does: attention without dropout does not."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(value)
    return True


__all__ = ["Recorder"]
