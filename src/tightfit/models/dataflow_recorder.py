"""Recorder: a torch dispatch mode that records forwards of a model as a `Dataflow`, the list of
operations with the tensors that they read and make.

`models/tracing.py` enters the recorder around one or two forwards on fake tensors. The recorder
records every operation, and, by hooks, every call and return of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tightfit._torch.dispatch import TorchDispatchMode
from tightfit._torch.fake import FakeTensor, known_value
from tightfit._torch.modules import own_buffers
from tightfit._torch.operations import LOCAL_SCALAR_DENSE, schema_of
from tightfit._torch.pytree import TreeSpec, tree_flatten, tree_flatten_with_path, tree_unflatten
from tightfit._torch.tensors import saved_tensor_hooks_now, storage_id
from tightfit.errors import InputError
from tightfit.models.batches import Batch
from tightfit.models.block_hooks import hooks_of, run_hooks_on_direct_calls
from tightfit.models.caches import clear_tensor_caches
from tightfit.models.dataflow import (
    BEFORE_BLOCKS,
    PP_FIELD,
    BlockCall,
    BlockReturn,
    Dataflow,
    Event,
    Leaf,
    OperationCall,
    OutputStructure,
    PathTo,
    TensorId,
    blocks_out_of_order,
    model_line,
    path_of,
    sample_shapes,
)
from tightfit.models.fake_kernels import fake_output
from tightfit.models.tensors import tensors_in
from tightfit.models.value_reads import ValueReads

_SHAPE_ONLY = frozenset(  # operations that read the shape and type of a tensor, but no values
    {"empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full"}
    | {"rand_like", "randn_like", "new_empty_strided"}
)
_VALUES = (LOCAL_SCALAR_DENSE.default, torch.ops.aten.equal.default)


@dataclass
class _BlockRecord:
    """The record of one block's last call.

    arguments  {path in (args, kwargs): the argument}; the path (0, 2) leads to args[2]
    spec       the nested containers of the output; None before the block has returned
    leaves     the tensors and constants in these containers
    storages   the numbers of the storages of the output tensors that are not inputs of the block
    """

    arguments: dict[PathTo, Any] = field(default_factory=dict)
    spec: TreeSpec | None = None
    leaves: list[Leaf] = field(default_factory=list)
    storages: set[int] = field(default_factory=set)


class Recorder(TorchDispatchMode):
    """Records forwards of a model. Call `forward` for each, inside this mode, and then `dataflow`,
    which returns the record.

    The recorder keeps all tensors until `dataflow` is called, so that no two of them have the same
    identity. The planner's dispatch modes (`planner/tracing/storages.py`) must not keep any
    tensors, because they observe when tensors are freed.

    model   the model, whose parameters and buffers are fake tensors
    fakes   {id() of a real parameter or buffer: the fake tensor in its place}
    batch   the batch, of fake tensors
    blocks  the model's blocks as (full name, module)
    """

    def __init__(
        self, model: nn.Module, fakes: dict[int, Tensor], batch: Batch, blocks: list[tuple[str, nn.Module]]
    ) -> None:
        super().__init__()
        self.model, self.batch, self.blocks = model, batch, blocks
        self.forwards: list[list[Event]] = []
        self.block_index, self.in_block, self.count = BEFORE_BLOCKS, False, len(blocks)
        self.block_records: list[_BlockRecord] = [_BlockRecord() for _ in blocks]
        # by id: the tensor's number, and the tensor itself, which keeps its id from being reused
        self.tensors: dict[int, tuple[int, Tensor]] = {}
        self.storages: dict[int, tuple[int, Any]] = {}
        self.is_random, self.reads = False, ValueReads()
        self.hooks = tuple(hooks_of(block) for _, block in blocks)
        self.parameters: dict[int, set[str]] = {}
        self.persistent: dict[int, str] = {}
        # full name, the dict of the module that contains the buffer, its key in this dict, the buffer
        self.buffers: list[tuple[str, dict[str, Tensor | None], str, Tensor]] = []
        self.replaced: dict[str, int] = {}
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                self.parameters.setdefault(self.tensor_id(parameter).storage, set()).add(f"{path}.{name}".lstrip("."))
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                full_name = f"{path}.{name}".lstrip(".")
                self.persistent.setdefault(self.tensor_id(buffer).storage, full_name)
                self.buffers.append((full_name, own_buffers(module), name, buffer))
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.parameters.setdefault(self.tensor_id(parameter).storage, set()).add(name)
        tensors = tensors_in(batch)
        self.batch_storages = {self.tensor_id(tensor).storage for tensor in tensors}
        self.samples = tensors[0].shape[0] if tensors else 0

    def tensor_id(self, tensor: Tensor) -> TensorId:
        """Return the number of a tensor and the number of its storage. Each of them is new if it
        was not seen before, and the same as before otherwise."""
        if id(tensor) not in self.tensors:
            self.tensors[id(tensor)] = len(self.tensors), tensor
        storage = storage_id(tensor)
        if storage not in self.storages:
            self.storages[storage] = len(self.storages), tensor.untyped_storage()
        return TensorId(self.tensors[id(tensor)][0], self.storages[storage][0])

    def forward(self, total: Callable[[nn.Module, Batch], Tensor]) -> None:
        """Record one forward of the model and its loss.

        total  (model, batch) -> the loss

        Raises InputError if the model does not call each block once, in order.
        """
        self.forwards.append([])
        self.block_index, self.in_block = BEFORE_BLOCKS, False
        hooks: list[Any] = []
        for number, (_, block) in enumerate(self.blocks):
            if len(self.forwards) == 1:
                run_hooks_on_direct_calls(block, partial(self._is_running, number))
            hooks.append(block.register_forward_pre_hook(self._before_block(number), with_kwargs=True, prepend=True))
            hooks.append(block.register_forward_hook(partial(self._alias_outputs, number), prepend=True))
            hooks.append(block.register_forward_hook(self._after_block(number), with_kwargs=True))
        try:
            total(self.model, self.batch)
        finally:
            clear_tensor_caches()
            for hook in hooks:
                hook.remove()
        self._update_hooks()
        if len(self.forwards) == 1:
            for full_name, held, name, before in self.buffers:
                now = held[name]
                if now is not None and now is not before:
                    self.replaced[full_name] = self.tensor_id(now).tensor
        if self.block_index != self.count:
            raise blocks_out_of_order()

    def _update_hooks(self) -> None:
        """Read the blocks' hooks again, because some models register hooks in their first forward.
        Raise InputError if a new hook is a function from any package but transformers.

        In a pipeline, a model may register such a hook on a stub, which replaces a block of another
        stage. transformers does not do this: it finds blocks by their class, and so skips stubs.
        """
        before, self.hooks = self.hooks, tuple(hooks_of(block) for _, block in self.blocks)
        for (name, _), old, new in zip(self.blocks, before, self.hooks, strict=True):
            for hook, _ in {*new.pre_hooks, *new.post_hooks} - {*old.pre_hooks, *old.post_hooks}:
                if not str(getattr(hook, "__module__", "")).startswith("transformers."):
                    raise InputError(
                        PP_FIELD,
                        f"the model's forward registers a hook on {name}, and only one pipeline stage has this block",
                        "register the hook where the model is created, or use pp: 1",
                    )

    def _is_running(self, number: int) -> bool:
        return self.in_block and self.block_index == number

    def _before_block(self, number: int) -> Callable[..., None]:
        def called(module: nn.Module, args: Any, kwargs: Any) -> None:
            clear_tensor_caches()
            if self.in_block or number != self.block_index + 1:
                raise blocks_out_of_order()
            self.block_index, self.in_block = number, True
            leaves = {path_of(keys): leaf for keys, leaf in tree_flatten_with_path((args, kwargs))[0]}
            self.block_records[number].arguments = leaves
            tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
            inputs = {path: self.tensor_id(leaf) for path, leaf in tensors.items()}
            cut = not torch.is_grad_enabled() and any(leaf.requires_grad for leaf in tensors.values())
            hooks = saved_tensor_hooks_now()
            checkpointed = hooks is not None and hooks[0].__module__ == checkpoint.__module__
            self.forwards[-1].append(BlockCall(number, inputs, cut, checkpointed))

        return called

    def _alias_outputs(self, number: int, module: nn.Module, args: Any, output: Any) -> Any:
        """Return a block's output with each tensor replaced by an alias: another tensor object with
        the same storage. Tensors that are inputs of the block are not replaced.

        A block may also store a returned tensor in a list or an attribute. With the alias, the
        stored tensor and the returned one have different identities. This matters because only
        returned tensors are sent to another stage.

        number: the number of the block. The parameters are those of a forward hook.
        """
        inputs = {id(leaf) for leaf in self.block_records[number].arguments.values()}
        leaves, spec = tree_flatten(output)
        made = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in inputs}
        if not made:
            return output
        with torch.enable_grad():  # a view made under no_grad may not be changed under enable_grad
            apart = {key: torch.ops.aten.alias.default(leaf) for key, leaf in made.items()}
        return tree_unflatten([apart.get(id(leaf), leaf) for leaf in leaves], spec)

    def _after_block(self, number: int) -> Callable[..., None]:
        def returned(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not self.in_block or number != self.block_index:
                raise blocks_out_of_order()
            leaves, spec = tree_flatten(output)
            record = self.block_records[number]
            record.spec, record.leaves = spec, [self._leaf(record, leaf, number) for leaf in leaves]
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            same = [any(leaf is argument for argument in record.arguments.values()) for leaf in tensors]
            found = tuple((self.tensor_id(leaf), is_same) for leaf, is_same in zip(tensors, same, strict=True))
            record.storages.update(tensor_id.storage for tensor_id, is_same in found if not is_same)
            self.forwards[-1].append(BlockReturn(number, found))
            self.in_block = False
            self.block_index = self.count if number == self.count - 1 else number

        return returned

    def _leaf(self, record: _BlockRecord, leaf: Any, number: int) -> Leaf:
        paths = record.arguments.items()
        same = next((path for path, one in paths if one is leaf), None) if not _is_plain(leaf) else None
        if same is not None:
            return Leaf(same_as=same)
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
                return Leaf(sample_shape=tuple(leaf.shape[1:]), dtype=leaf.dtype)
            if not leaf.dim():
                return Leaf(sample_shape=None, dtype=leaf.dtype)
            raise self._not_reproducible(number, f"a tensor of shape {tuple(leaf.shape)}")
        if _is_plain(leaf) and (isinstance(leaf, bool | float) or not isinstance(leaf, int)):
            return Leaf(constant=leaf)
        raise self._not_reproducible(number, f"{type(leaf).__name__}")

    def _not_reproducible(self, number: int, what: str) -> InputError:
        return InputError(
            PP_FIELD,
            f"{self.blocks[number][0]} returns {what}, which the other pipeline stages cannot derive from the block's inputs",
            "let blocks return only tensors with the shape and type of one of their inputs, or use pp: 1",
        )

    def changes_persistent_state(self) -> bool:
        """Return whether the first forward overwrites a parameter, a buffer or a tensor of the
        batch, or replaces a buffer."""
        if self.replaced:
            return True
        persistent = self.persistent.keys() | self.parameters.keys() | self.batch_storages
        events = self.forwards[0]
        return any(isinstance(event, OperationCall) and persistent.intersection(event.written) for event in events)

    def dataflow(self, changed: list[str], numbers: tuple[int, ...]) -> Dataflow:
        """Return the record of all forwards so far, and release the recorder's tensors.

        changed  names of module attributes that every forward changes
        numbers  the numbers of the recorded blocks among all of the model's blocks
        """
        uses: dict[str, set[int]] = {}
        overwritten: set[int] = set()
        for event in self.forwards[0]:
            if not isinstance(event, OperationCall):
                continue
            for read in event.reads:
                for name in self.parameters.get(read.storage, ()):
                    uses.setdefault(name, set()).add(event.block)
            if not event.inside:
                overwritten.update(event.written)
        returns = [
            OutputStructure(block_record.spec, tuple(block_record.leaves), bool(block_record.storages & overwritten))
            for block_record in self.block_records
            if block_record.spec is not None
        ]
        found = Dataflow(
            self.forwards,
            {storage: frozenset(names) for storage, names in self.parameters.items()},
            self.persistent,
            {name: tuple(sorted(block_numbers)) for name, block_numbers in uses.items()},
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
        for block_record in self.block_records:
            block_record.arguments.clear()
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim" or func in (torch.ops.aten.sym_size.int, torch.ops.aten.detach_.default):
            return func(*args, **kwargs)
        decides = func in _VALUES
        output = self._value(func, args) if decides else fake_output(func, args, kwargs)
        name = func.overloadpacket.__name__
        read = [] if name in _SHAPE_ONLY else tensors_in((args, kwargs))
        made = tensors_in(output)
        is_random = torch.Tag.nondeterministic_seeded in func.tags and _draws_random_numbers(func, args, kwargs)
        self.is_random = self.is_random or is_random
        event = OperationCall(
            self.block_index,
            self.in_block,
            tuple(map(self.tensor_id, read)),
            tuple(map(self.tensor_id, made)),
            tuple(self.tensor_id(tensor).storage for tensor in _overwritten(func, args, kwargs)),
            is_random,
            decides,
            model_line(),
            is_random and any(isinstance(argument, torch.Generator) for argument in (*args, *kwargs.values())),
        )
        self.forwards[-1].append(event)
        return output

    def _value(self, func: Any, args: Any) -> Any:
        """Return the value that `func`, an operation such as .item(), reads from a tensor. If the
        value is not known, because the tensor is fake, return False for a comparison or a bool (True
        where that ends a loop or passes a check), and 1 for a number."""
        tensor = args[0]
        if isinstance(tensor, FakeTensor) and known_value(tensor) is None:
            if func is torch.ops.aten.equal.default or tensor.dtype is torch.bool:
                return self.reads.value(False)
            return 1.0 if tensor.is_floating_point() else 1
        return func(*args)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device)


def _overwritten(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors that the call func(*args, **kwargs) of an operation overwrites: those that
    its schema declares as overwritten, and the running statistics of BatchNorm, which some schemas
    do not declare."""
    statistics = (
        ("running_mean", "running_var")
        if "batch_norm" in schema_of(func).name and _updates_statistics(func, args, kwargs)
        else ()
    )
    if not (schema_of(func).is_mutable or statistics):
        return
    for index, argument in enumerate(schema_of(func).arguments):
        if argument.name in statistics or (argument.alias_info is not None and argument.alias_info.is_write):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)


def _updates_statistics(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a call of a BatchNorm operation updates its running statistics. In backward
    and in evaluation mode, BatchNorm only reads them."""
    if "backward" in schema_of(func).name:
        return False
    for index, argument in enumerate(schema_of(func).arguments):
        if argument.name == "training":
            return bool(args[index] if index < len(args) else kwargs.get("training"))
    return False


def _draws_random_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a call of an operation that can draw random numbers does draw some. Example:
    attention with a dropout_p of 0 draws none."""
    for index, argument in enumerate(schema_of(func).arguments):
        if argument.name == "dropout_p":
            value = args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(value)
    return True


__all__ = ["Recorder"]
