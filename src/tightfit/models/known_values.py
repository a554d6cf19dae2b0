"""Values of small tensors that a model computes from numbers, while it is created or runs on fake tensors.

Some constructors compute sizes with tensors, such as the widths of RegNet's stages, and read them:

    widths = torch.round(torch.arange(depth) * slope / 8) * 8
    stages = len(torch.unique(widths))

A model that is created with other values has other layers, so a prediction would be of another model. In a
forward, such values are numbers of steps, lists of dimensions, or the edges of a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tightfit._torch.dispatch import OpOverload, TorchDispatchMode, without_dispatch_modes
from tightfit._torch.fake import FakeTensor, detect_fake_mode
from tightfit._torch.pytree import tree_leaves, tree_map_only
from tightfit.models.tensors import written_tensors

MOST_ELEMENTS = 2**14  # a tensor with more is not computed: it is a table or a weight, not a size
_VALUE = "_tightfit_value"  # attribute of a fake tensor: its _Value
UNKNOWN = object()  # the result of an operation that is not computed
_aten = torch.ops.aten
_UNDEFINED = {
    _aten.empty,
    _aten.empty_strided,
    _aten.empty_like,
    _aten.new_empty,
    _aten.new_empty_strided,
    _aten.empty_permuted,
}


@dataclass(frozen=True)
class _Value:
    """A real tensor on the CPU with the values of a fake tensor.

    real   the real tensor. It shares its memory with those of views
    known  one item, shared by all views: whether `real` still has the values. It is False after a write of
           unknown values
    """

    real: Tensor
    known: list[bool]


class KnownValues(TorchDispatchMode):
    """A mode in which fake tensors have known values if they are small and computed from numbers, not
    drawn at random. `.item()`, `.tolist()`, conditions and shapes that depend on values get these."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = compute_known(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if result is UNKNOWN else result


def compute_known(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation whose inputs are numbers, real tensors or fake tensors with known values: a
    fake tensor with known values, or what `.item()` returns. Return UNKNOWN, without running it, if an input is not
    known, if the operation draws at random, or if its input is too large."""
    known = _known_inputs(func, args, kwargs)
    if known is None:
        return UNKNOWN
    if _depends_on_values(func, args):
        return _without_values(_compute(func, args, kwargs, known), args)
    made = func(*args, **kwargs)
    _note(func, args, kwargs, known, made)
    return made


def read_known(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation whose type or shape depends on values, such as `.item()`, if they are known.
    Return UNKNOWN, without running it, for any other operation."""
    if not isinstance(func, OpOverload) or not _depends_on_values(func, args):
        return UNKNOWN
    known = _known_inputs(func, args, kwargs)
    return UNKNOWN if known is None else _without_values(_compute(func, args, kwargs, known), args)


def note_known(func: Any, args: Any, kwargs: dict[str, Any], made: Any) -> None:
    """Note the values of `made`, the result of an operation, if they are known. If it has written unknown values to a
    tensor with known ones, they are not known any more."""
    known = _known_inputs(func, args, kwargs)
    if known is not None:
        _note(func, args, kwargs, known, made)


def _known_inputs(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[int, _Value] | None:
    """Return id of a tensor -> its values, for all inputs of an operation. Return None if some are not known, or the
    operation is none whose result they determine; what it writes to is then not known any more."""
    first = args[0] if args else None
    if isinstance(first, FakeTensor) and not hasattr(first, _VALUE):
        return None  # most operations of a model end here
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    known: dict[int, _Value] = {}
    for tensor in inputs:
        value = _value_of(tensor)
        if value is None:
            break
        known[id(tensor)] = value
    else:
        if _is_computable(func):
            return known
    _forget_written(func, args, kwargs)
    return None


def _note(func: Any, args: Any, kwargs: dict[str, Any], known: dict[int, _Value], made: Any) -> None:
    outputs = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
    if any(one.numel() > MOST_ELEMENTS or not isinstance(one, FakeTensor) for one in outputs):
        _forget_written(func, args, kwargs)
        return
    real = [leaf for leaf in tree_leaves(_compute(func, args, kwargs, known)) if isinstance(leaf, Tensor)]
    for output, value in zip(outputs, real, strict=True):
        _set_value(output, value, known)


def _value_of(tensor: Tensor) -> _Value | None:
    """Return the known values of a tensor, or None if they are not known."""
    if not isinstance(tensor, FakeTensor):
        if type(tensor) is not Tensor or tensor.device.type != "cpu" or tensor.numel() > MOST_ELEMENTS:
            return None
        with without_dispatch_modes():
            return _Value(tensor.detach().clone(), [True])  # a copy: a trace must not write to the model's own
    value: _Value | None = getattr(tensor, _VALUE, None)
    return value if value is not None and value.known[0] else None


def known_values(tensor: Tensor) -> Tensor | None:
    """Return a real tensor with the values of a tensor that was made inside `KnownValues`, or None if they
    are not known."""
    value = _value_of(tensor)
    return None if value is None else value.real


def _set_value(output: Tensor, real: Tensor, inputs: dict[int, _Value]) -> None:
    storage = real.untyped_storage().data_ptr()
    of_base = [value.known for value in inputs.values() if value.real.untyped_storage().data_ptr() == storage != 0]
    setattr(output, _VALUE, _Value(real, of_base[0] if of_base else [True]))


def _is_computable(func: Any) -> bool:
    """Return whether an operation gives the same result each time, and no new shape to its input."""
    tags = getattr(func, "tags", ())
    if not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims"):
        return False
    if torch.Tag.nondeterministic_seeded in tags or torch.Tag.inplace_view in tags:
        return False
    return func.overloadpacket not in _UNDEFINED


def _depends_on_values(func: Any, args: Any) -> bool:
    """Return whether the type or shape of an operation's result depends on the values of its inputs."""
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        indices = args[1] if func.overloadpacket in (_aten.index, _aten.index_put, _aten.index_put_) else None
        return indices is None or any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices
        )
    return False


def _compute(func: Any, args: Any, kwargs: Any, known: dict[int, _Value]) -> Any:
    """Return the result of an operation on the real tensors in `known`, by the id of the tensors in args."""
    args, kwargs = tree_map_only(Tensor, lambda one: known[id(one)].real, (args, kwargs))
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    with without_dispatch_modes(), torch.no_grad():
        return func(*args, **kwargs)


def _without_values(result: Any, args: Any) -> Any:
    """Return the real result of an operation on `args` as fake tensors, whose values are known."""
    mode = detect_fake_mode([leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)])
    if mode is None:  # all inputs are real
        return result

    def hide(real: Tensor) -> Tensor:
        with without_dispatch_modes():
            hidden = mode.from_tensor(real)
        setattr(hidden, _VALUE, _Value(real, [True]))
        return hidden

    return tree_map_only(Tensor, hide, result)


def _forget_written(func: Any, args: Any, kwargs: Any) -> None:
    """Forget the values of the tensors that an operation writes to."""
    if not isinstance(func, OpOverload):
        return
    for tensor in tree_leaves(written_tensors(func, args, kwargs)):
        value = getattr(tensor, _VALUE, None)
        if value is not None:
            value.known[0] = False


__all__ = ["UNKNOWN", "KnownValues", "compute_known", "known_values", "note_known", "read_known"]
