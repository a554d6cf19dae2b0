"""Recomputes several blocks as one segment (recompute: sqrt), and refuses models that do not allow
it.

A segment's first block runs all of its blocks, and the others pass the result through. That is
right only for a model that does nothing between its blocks but pass one's output to the next.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tightfit._torch.pytree import tree_leaves
from tightfit.errors import InputError
from tightfit.models.tensors import tensors_in
from tightfit.models.tracing import restoring_state
from tightfit.runtime.recomputation import Forward, recomputed

Result = TypeVar("Result")
BLOCK_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError)
"""Errors that a block may raise when it gets the input of another one."""


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
        if first is not last_call["output"] or not _are_same(args, kwargs, last_call["args"], last_call["kwargs"]):
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


def _are_same(
    args: tuple[Any, ...], kwargs: dict[str, Any], other_args: tuple[Any, ...], other_kwargs: dict[str, Any]
) -> bool:
    """Whether two calls have the same objects as arguments."""
    if len(args) != len(other_args) or kwargs.keys() != other_kwargs.keys():
        return False
    same = all(a is b for a, b in zip(args, other_args, strict=True))
    return same and all(kwargs[name] is other_kwargs[name] for name in kwargs)


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
            given = tensors_in((args, kwargs))
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
            self.returned.extend(tensors_in(output))
        return output


_METADATA = frozenset({"shape", "size", "dim", "ndim", "numel", "dtype", "device", "requires_grad", "layout", "is_cuda", "stride",
                    "is_contiguous", "is_floating_point", "get_device", "__len__", "element_size", "grad_fn"})  # fmt: skip


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
        ending_segments([recompute_segment(segment) for segment in segments], forward)


def ending_segments(ends: list[Callable[[], None]], forward: Callable[[], Result]) -> Result:
    """Run a model's forward, then check that it called all blocks of its segments.

    ends: what `recompute_segment` returned for each segment. Returns the result of `forward`.
    """
    try:
        result = forward()
    except BLOCK_FAILURES as error:
        if not _is_unrelated(error):
            # the failure may come from passing a segment's output in place of one block's
            for end in ends:
                end()
        raise
    for end in ends:
        end()
    return result


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
