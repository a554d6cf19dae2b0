"""Recomputes groups of consecutive blocks (plan field recompute: sqrt), and refuses models for
which this would be wrong..

When the model calls the first block of a group, all blocks of the group run. When it calls the
other blocks, they return their input unchanged. So only the group's input is saved for backward.
The result is right only for a model that does nothing between its blocks but pass the output of one
block to the next.

Example: with blocks 0 to 3 as one group, block 0 computes the output of block 3. The model then
passes this output to blocks 1, 2 and 3, which return it unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tightfit._torch.modules import plain_attributes
from tightfit._torch.pytree import tree_leaves
from tightfit.errors import InputError
from tightfit.models.fake_forward import WatchedWrites
from tightfit.models.replaced_forward import replace_forward
from tightfit.models.tensors import tensors_in
from tightfit.models.tracing import restoring_state
from tightfit.runtime.recomputation import Forward, recomputed
from tightfit.runtime.recomputed_draws import GlobalGenerators

Result = TypeVar("Result")
BLOCK_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError)
"""Errors that a block may raise when it is called with another block's arguments."""


def recompute_group(blocks: list[nn.Module], generators: GlobalGenerators | None = None) -> Callable[[], None]:
    """Replace the forwards of `blocks`, so that a call of the first block runs all of them as one
    recomputed function, and the other blocks return their input unchanged.

    The model still calls its blocks one after another. Each block's output must be the first
    argument of the next block, and all blocks must get the same objects as their other arguments,
    such as a mask. Otherwise the result would be wrong, so the forward raises InputError.

    blocks      the blocks of the group, in order
    generators  Python's and NumPy's random number generators, see `recomputed`

    Returns a function to call after each forward of the model. It raises InputError if the model
    did not call all blocks of the group.
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

    run_chain = recomputed(chain, blocks, generators=generators)
    last_call: dict[str, Any] = {}

    def run_group(*args: Any, **kwargs: Any) -> Any:
        first, args, kwargs = _with_first(forwards[0], args, kwargs)
        if last_call:  # the previous output of the group did not reach its last block
            raise _not_sequential()
        output = run_chain(first, *args, **kwargs)
        if len(forwards) > 1:
            last_call.update(output=output, args=args, kwargs=kwargs, modes=_modes())
        return output

    def pass_through(position: int, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_sequential
        first, args, kwargs = _with_first(forwards[position], args, kwargs)
        if not last_call:
            raise _not_sequential()
        if first is not last_call["output"] or not _are_same(args, kwargs, last_call["args"], last_call["kwargs"]):
            raise _not_sequential()
        if _modes() != last_call["modes"]:  # the whole group has run in the modes of its first block
            raise InputError(
                "plan: recompute=sqrt",
                "the model runs some blocks of a group under torch.no_grad or another autocast than the others",
                "use recompute: full, which recomputes each block alone",
            )
        if position == len(forwards) - 1:
            last_call.clear()
            is_sequential = True
        return first

    def end() -> None:
        if not torch.compiler.is_compiling() and last_call:
            raise _not_sequential()

    replace_forward(blocks[0], run_group)
    for position, block in enumerate(blocks[1:], start=1):
        replace_forward(block, partial(pass_through, position))
    return end


def _modes() -> tuple[Any, ...]:
    """Return the modes of torch in which a block may run otherwise than its neighbours: whether
    gradients are recorded, and autocast."""
    devices = ("cpu", "cuda")
    autocast = tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices)
    return torch.is_grad_enabled(), autocast


def _are_same(
    args: tuple[Any, ...], kwargs: dict[str, Any], other_args: tuple[Any, ...], other_kwargs: dict[str, Any]
) -> bool:
    """Return whether two calls have identical arguments: the same objects, not only equal ones."""
    if len(args) != len(other_args) or kwargs.keys() != other_kwargs.keys():
        return False
    same = all(a is b for a, b in zip(args, other_args, strict=True))
    return same and all(kwargs[name] is other_kwargs[name] for name in kwargs)


def _with_first(
    forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Split the arguments of a call of `forward`. Return (first argument, other positional
    arguments, other keyword arguments). The first argument may have been passed by its name. Raises
    InputError if the call has no first argument."""
    if args:
        return args[0], args[1:], kwargs
    name = next(iter(inspect.signature(forward).parameters))
    if name not in kwargs:
        raise _not_sequential()
    return kwargs[name], (), {key: value for key, value in kwargs.items() if key != name}


class _OutputUses(TorchFunctionMode):
    """Finds out whether the model's own code, outside its blocks, uses the output of a block other
    than the last of its group.

    If several blocks are recomputed together, only the output of the last one exists. Code
    may read metadata of the other outputs, such as a shape. `used` becomes True at the first use of
    their values. Passing an output to the next block does not count.
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
            given = tensors_in((args, kwargs))
            self.used = self.used or any(leaf is one for leaf in given for one in self.returned)
        return func(*args, **(kwargs or {}))

    def call(self, forward: Forward, is_last: bool, *args: Any, **kwargs: Any) -> Any:
        """Run a block's `forward`, remember its output, and return it.

        is_last  whether the block is the last of its group, so that the model may use its output
        """
        self.inside = True
        try:
            output = forward(*args, **kwargs)
        finally:
            self.inside = False
        if not is_last and not any(output is leaf for leaf in tree_leaves((args, kwargs))):
            self.returned.extend(tensors_in(output))
        return output


_METADATA = frozenset({"shape", "size", "dim", "ndim", "numel", "dtype", "device", "layout", "is_cuda", "stride",
                    "is_contiguous", "is_floating_point", "get_device", "__len__", "element_size"})  # fmt: skip


@contextmanager
def _undoing_writes(model: nn.Module) -> Iterator[None]:
    """Context manager that undoes the writes of the code inside to the parameters of `model` and to
    tensors that are attributes of its modules, such as a codebook or a running mean. Only what is
    written to is copied."""
    attributes = [value for module in model.modules() for _, value in plain_attributes(module)]
    held = dict(enumerate([*model.parameters(), *tensors_in(attributes)]))
    copies: list[tuple[Tensor, Tensor]] = []
    try:
        with WatchedWrites(held, lambda _, tensor: copies.append((tensor, tensor.detach().clone()))):
            yield
    finally:
        with torch.no_grad():
            for tensor, copy in copies:
                tensor.copy_(copy)


def refuse_other_uses(model: nn.Module, groups: list[list[nn.Module]], forward: Callable[[], Any]) -> None:
    """Run the model once without gradients. Raise InputError if the model's own code, outside its
    blocks, uses the output of a block that is not the last of its group. Passing this output on
    to the next block is allowed.

    groups   the blocks of each group, in order
    forward  a function that calls the model

    The model is the same afterwards, also its parameters and the tensors that its modules hold as
    attributes, which the forward may write to. Buffers are left to the caller.
    """
    watch = _OutputUses()
    with restoring_state(model), torch.no_grad(), _undoing_writes(model), watch:
        for group in groups:
            for block in group:
                block.forward = partial(watch.call, block.forward, block is group[-1])
        with _naming_gradients():
            forward()
    if watch.used:
        raise _not_sequential()


@contextmanager
def _naming_gradients() -> Iterator[None]:
    """Context manager that turns the RuntimeError of a model that computes gradients in its forward, which runs
    without them here, into an InputError."""
    try:
        yield
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise InputError(
            "plan: recompute=sqrt",
            "the model computes gradients in its forward (torch.autograd.grad), so its groups of blocks cannot be checked",
            "use recompute: full, which recomputes each block alone",
        ) from error


def check_groups(model: nn.Module, groups: list[list[nn.Module]], forward: Callable[[], Any]) -> None:
    """Raise InputError if the blocks of a group cannot be recomputed together. There are two
    reasons: a block does not feed the next one, or other code uses the outputs in between.

    The check runs the model twice on fake tensors. A real run checks the same before its first
    update.

    groups   the groups of blocks
    forward  a function that calls the model
    """
    refuse_other_uses(model, groups, forward)
    with restoring_state(model), torch.no_grad():
        ending_groups([recompute_group(group) for group in groups], forward)


def ending_groups(ends: list[Callable[[], None]], forward: Callable[[], Result]) -> Result:
    """Run a model's forward and return its result. Raise InputError if the forward did not call all
    blocks of its groups, or if it failed for this reason.

    ends     the functions that `recompute_group` returned, one for each group
    forward  a function that calls the model
    """
    try:
        result = forward()
    except BLOCK_FAILURES as error:
        if not _is_unrelated(error):
            # the cause may be that the model got a group's output in place of one block's output
            for end in ends:
                end()
        raise
    for end in ends:
        end()
    return result


def _is_unrelated(error: Exception) -> bool:
    return isinstance(error, InputError) or "memory" in str(error).lower()


def _with_arguments_of_first(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run a block's forward with the arguments that its group's first block got, such as the
    mask. Raises InputError if the block fails with these arguments."""
    try:
        return forward(*args, **kwargs)
    except BLOCK_FAILURES as error:
        if _is_unrelated(error):
            raise
        raise _not_sequential() from error


def _not_sequential() -> InputError:
    return InputError(
        "plan: recompute=sqrt",
        "between its blocks, the model does more than pass the output of one block to the next",
        "use recompute: full, which recomputes each block alone",
    )
