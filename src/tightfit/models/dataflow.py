"""Dataflow: one forward of a model on fake tensors, as the list of what each operation reads, makes and overwrites, and of what
each of the model's repeated blocks is called with and returns. `methods/boundaries.py` reads from it what crosses the stages
of a pipeline.

Tensors are told apart by the Python object and by the memory (storage) behind it: views share their storage.
"""

from __future__ import annotations

import functools
import gc
import linecache
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_flatten_with_path, tree_leaves

from tightfit.errors import InputError, Untraceable
from tightfit.models.answers import GROUPED_PRODUCT, failures_unlogged, grouped_product
from tightfit.models.hooks import Hooks, hooks_of, run_hooks_on_direct_calls
from tightfit.models.objective import Batch, map_tensors

ASKED = "plan: pp"
BEFORE = -1  # the place of what runs before the first block; what runs after the last one has the number of blocks
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
_SHAPE_ONLY = frozenset(  # read of a tensor its shape and type, and no value
    {"empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full"}
    | {"rand_like", "randn_like", "new_empty_strided"}
)
_VALUES = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)

PathTo = tuple[Any, ...]  # where a leaf lies in (args, kwargs): indices and keys


class Seen(NamedTuple):
    """A tensor: the Python object, and the storage behind it. Numbers that are never used again."""

    tensor: int
    storage: int


@dataclass(frozen=True)
class Operation:
    """place: the block that it runs in or after; BEFORE the first. inside: whether it runs in that block.

    made     its outputs; written: storages that it overwrites
    is_random, and decides: whether the program reads a value of its input, to branch on it
    line     of the model that called it: (file, number)
    """

    place: int
    inside: bool
    reads: tuple[Seen, ...]
    made: tuple[Seen, ...]
    written: tuple[int, ...]
    is_random: bool
    decides: bool
    line: tuple[str, int] | None


@dataclass(frozen=True)
class Called:
    """A block is called: by path, the tensors that it is given."""

    block: int
    given: dict[PathTo, Seen]


@dataclass(frozen=True)
class Returned:
    """A block has returned: of each tensor that it returns, what it is, and whether it was given this very tensor."""

    block: int
    returned: tuple[tuple[Seen, bool], ...]


Event = Operation | Called | Returned


@dataclass(frozen=True)
class Leaf:
    """One leaf of what a block returns: the tensor that it was given at `same`, one shaped like that at `like`, one of the batch's
    samples by `tail`, or a constant."""

    same: PathTo | None = None
    like: PathTo | None = None
    tail: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    constant: Any = None


@dataclass(frozen=True)
class Returns:
    """What a block returns, in shape. in_place: whether code between the blocks overwrites it."""

    spec: TreeSpec
    leaves: tuple[Leaf, ...]
    in_place: bool = False


@dataclass
class Dataflow:
    """Of one forward of the model and its loss, or of two where the first one leaves something behind.

    parameters  by storage, the names of those that lie there
    persistent  storages that are there before the forward, the batch apart, with a name to say
    uses        by name, where each parameter was used: numbers of blocks, BEFORE, or the count of blocks
    changed     attributes of modules that each forward changes, and that are no tensors
    shapes      of one sample of the batch's tensors
    is_random   whether it draws random numbers; parameter_count: elements of the model's parameters
    blocks      how many are recorded; numbers: which of the model's they are, where others were taken out
    hooks       the model's own on each block; some models install them in their first forward
    """

    forwards: list[list[Event]]
    parameters: dict[int, frozenset[str]]
    persistent: dict[int, str]
    uses: dict[str, tuple[int, ...]]
    changed: list[str]
    returns: list[Returns]
    shapes: tuple[tuple[int, ...], ...]
    blocks: int
    is_random: bool
    parameter_count: int = 0
    numbers: tuple[int, ...] = ()
    hooks: tuple[Hooks, ...] = ()


def at(arguments: tuple[Any, dict[str, Any]], path: PathTo) -> Any:
    """The leaf of (args, kwargs) at `path`; None where there is none."""
    value: Any = arguments
    for key in path:
        try:
            value = getattr(value, key.name) if isinstance(key, _Attribute) else value[key]
        except (LookupError, AttributeError, TypeError):
            return None
    return value


def said(line: tuple[str, int] | None) -> str:
    """A line of the model, as it is shown: where it is, and what it says."""
    if line is None:
        return "the loss"
    text = linecache.getline(*line).strip()
    return f"{Path(line[0]).name}, line {line[1]}" + (f" ({text[:80]})" if text else "")


def sample_shapes(batch: Batch) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(leaf.shape[1:]) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def not_in_a_row() -> InputError:
    return InputError(ASKED, "the model does not call its blocks in a row, each once", "use pp: 1")


def trace(
    model: nn.Module,
    total: Callable[[nn.Module, Batch], Tensor],
    batch: Batch,
    blocks: list[tuple[str, nn.Module]],
    numbers: tuple[int, ...] = (),
) -> Dataflow:
    """Run `total(model, batch)`, the loss, on tensors without values, and record what it does. The model is left as it was.

    Raises InputError for a model that cannot be followed, or does not call its blocks in a row.
    """
    mode = active_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True)
    was_training = [module for module in model.modules() if not module.training]
    with _left_as_it_was(model) as attributes, failures_unlogged(), mode:
        model.train()
        fakes = _with_fake_tensors(model)
        batch = map_tensors(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype), batch)
        recorder = _Recorder(model, fakes, batch, blocks)
        try:
            with torch.enable_grad(), recorder:
                recorder.forward(total)
                before = attributes.read()
                if recorder.leaves_something() or attributes.changed():
                    recorder.forward(total)
                changed = attributes.changed(before) if len(recorder.forwards) > 1 else []
        except InputError as error:
            if isinstance(error, Untraceable):
                raise
            raise InputError(error.asked, error.found, error.fix) from None
        except Exception as error:
            raise _not_followed(error) from error
    for module in was_training:
        module.training = False
    return recorder.dataflow(changed, numbers or tuple(range(len(blocks))))


def _not_followed(error: Exception) -> InputError:
    message = (str(error).strip() or type(error).__name__).partition("\n")[0]
    return InputError(
        ASKED,
        f"what crosses the stages cannot be found: the model fails on tensors without values "
        f"({type(error).__name__}: {message}; {said(line_of(error))})",
        "use pp: 1; zero: 3 or tp divide a model too",
    )


def line_of(error: Exception) -> tuple[str, int] | None:
    """The innermost line of the model's own code that an error passed through."""
    found, here = None, error.__traceback__
    while here is not None:
        name = here.tb_frame.f_code.co_filename
        found = found if name.startswith(_LIBRARIES) else (name, here.tb_lineno)
        here = here.tb_next
    return found


@dataclass(frozen=True)
class _Attribute:
    """A key of a path that is an attribute."""

    name: str


def _path(keys: Any) -> PathTo:
    found: list[Any] = []
    for key in keys:
        if hasattr(key, "idx"):
            found.append(key.idx)
        elif hasattr(key, "key"):
            found.append(key.key)
        else:
            found.append(_Attribute(key.name))
    return tuple(found)


class _Attributes:
    """What the modules of a model hold beside parameters, buffers and modules."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.first = self.read()

    def read(self) -> dict[tuple[str, str], Any]:
        found = {}
        for path, module in self.model.named_modules():
            for name, value in vars(module).items():
                if name not in ("_parameters", "_buffers", "_modules", "training") and not name.endswith("_hooks"):
                    found[path, name] = list(value) if isinstance(value, list | tuple | set | dict) else value
        return found

    def changed(self, before: dict[tuple[str, str], Any] | None = None) -> list[str]:
        """Of those that changed since `before`, the names; where that is given, tensors and what holds only tensors apart."""
        old, now = before or self.first, self.read()
        names = []
        for key in old.keys() | now.keys():
            one, other = old.get(key), now.get(key)
            if _same(one, other) or (before is not None and _only_tensors(one) and _only_tensors(other)):
                continue
            names.append(".".join(filter(None, key)))
        return sorted(names)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    plain = (bool, int, float, str, bytes)
    return isinstance(one, plain) and isinstance(other, plain) and one == other


def _only_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list) and all(isinstance(one, Tensor) for one in value))


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[_Attributes]:
    """Within, a forward may leave what it likes on the model's modules, and draw numbers; afterwards all is as before."""
    kept = []
    for module in model.modules():
        own = dict(vars(module))
        contents = {name: value.copy() for name, value in own.items() if isinstance(value, list | dict | set)}
        kept.append((module, own, contents))
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield _Attributes(model)
    finally:
        for module, own, contents in kept:
            for name, content in contents.items():
                held = own[name]
                held.clear()
                held.extend(content) if isinstance(held, list) else held.update(content)
            vars(module).clear()
            vars(module).update(own)
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _with_fake_tensors(model: nn.Module) -> dict[int, Tensor]:
    """Put fake tensors in the place of the model's parameters and buffers; by id of each real one, what stands for it."""
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return fakes.setdefault(id(tensor), tensor)
        if id(tensor) not in fakes:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            fakes[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        return fakes[id(tensor)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = fake(tensor)  # type: ignore[assignment]
    return fakes


@dataclass
class _Block:
    """What is known of a block's call: its arguments, and of what it returned the leaves."""

    arguments: dict[PathTo, Any] = field(default_factory=dict)
    spec: TreeSpec | None = None
    leaves: list[Leaf] = field(default_factory=list)
    storages: set[int] = field(default_factory=set)


class _Recorder(TorchDispatchMode):
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
        self.caches = _library_caches()
        self.parameters: dict[int, set[str]] = {}
        self.persistent: dict[int, str] = {}
        for path, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.parameters.setdefault(self.see(parameter).storage, set()).add(f"{path}.{name}".lstrip("."))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self.persistent.setdefault(self.see(buffer).storage, f"{path}.{name}".lstrip("."))
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

    def forget(self) -> None:
        """What a library keeps for the whole process: another stage makes it for itself, and a run could not use what has no
        values."""
        for cache in self.caches:
            cache.cache_clear()

    def forward(self, total: Callable[[nn.Module, Batch], Tensor]) -> None:
        """One forward. Raises InputError where blocks are not called in a row."""
        self.forwards.append([])
        self.place, self.inside = BEFORE, False
        hooks: list[Any] = []
        for number, (_, block) in enumerate(self.blocks):
            if len(self.forwards) == 1:
                run_hooks_on_direct_calls(block, partial(self._is_running, number))
            hooks.append(block.register_forward_pre_hook(self._calling(number), with_kwargs=True, prepend=True))
            hooks.append(block.register_forward_hook(self._returning(number), with_kwargs=True))
        try:
            total(self.model, self.batch)
        finally:
            self.forget()
            for hook in hooks:
                hook.remove()
        self._see_hooks()
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
            self.forget()
            if self.inside or number != self.place + 1:
                raise not_in_a_row()
            self.place, self.inside = number, True
            leaves = {_path(keys): leaf for keys, leaf in tree_flatten_with_path((args, kwargs))[0]}
            self.known[number].arguments = leaves
            given = {path: self.see(leaf) for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
            self.forwards[-1].append(Called(number, given))

        return called

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
        """Whether the forward overwrites what is there before it."""
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
        output = self._value(func, args) if decides else _answer(func, args, kwargs)
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


def _library_caches() -> list[Any]:
    """Of transformers' models, functions that remember what they returned, tensors among it."""
    if "transformers" not in sys.modules:
        return []
    found = (one for one in gc.get_objects() if type(one) is functools._lru_cache_wrapper)
    return [one for one in found if str(getattr(one, "__module__", "")).startswith("transformers.models.")]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device)


def _line() -> tuple[str, int] | None:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_LIBRARIES) and not name.startswith("<"):
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


def _answer(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation gives on tensors without values: where the shape depends on values, the largest that it may have."""
    aten = torch.ops.aten
    if func is aten.nonzero.default:
        return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
    if func is aten.masked_select.default:
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return args[0].new_empty(shape.numel())
    if func is aten.index.Tensor and any(
        isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1]
    ):
        indices: list[Any] = []
        for one in args[1]:
            if isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8):
                indices += [one.new_empty(one.numel(), dtype=torch.int64) for _ in range(one.dim())]
            else:
                indices.append(one)
        return func(args[0], indices)
    if func is GROUPED_PRODUCT.default:
        return grouped_product(*args, **kwargs)
    return func(*args, **kwargs)


__all__ = [
    "BEFORE",
    "Called",
    "Dataflow",
    "Operation",
    "Returned",
    "Seen",
    "at",
    "line_of",
    "not_in_a_row",
    "said",
    "trace",
]
