"""Functions that read private properties of tensors: storages, version counters, hooks, and the
autograd graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def storage_id(tensor: Tensor) -> int:
    """Return an integer that identifies the storage of `tensor`. All views of a tensor have the
    same one. After the storage was freed, a new storage may get the same integer."""
    return tensor.untyped_storage()._cdata


def storage_use_count(tensor: Tensor) -> int:
    """Return how many references the storage of `tensor` has."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def version_of(tensor: Tensor) -> int:
    """Return the version counter of `tensor`. It increases with each write in place to the tensor
    or to a view of it."""
    return tensor._version


def saved_factor(node: Any) -> Tensor | None:
    """Return the second factor, or the divisor, that the autograd node of a multiplication or division has saved. Return
    None if it has saved none."""
    found: Tensor | None = getattr(node, "_saved_other", None)
    return found


def swap_contents(one: Tensor, other: Tensor) -> None:
    """Swap the data, shape and dtype of two tensor objects. All existing references to `one` then
    see the contents of `other`, and the reverse."""
    torch._C._swap_tensor_impl(one, other)  # type: ignore[attr-defined]


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return (indices, values) of a sparse COO tensor, also of one that is not coalesced."""
    return tensor._indices(), tensor._values()


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether `parameter` has a hook that runs when its gradient is computed or accumulated."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def has_accumulation_hooks(parameter: Tensor) -> bool:
    """Return whether hooks run each time that a gradient has been added to that of `parameter`."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def has_backward_hooks(parameter: Tensor) -> bool:
    """Return whether hooks get, and may replace, each gradient of `parameter` before it is added to others."""
    return bool(getattr(parameter, "_backward_hooks", None))


def after_gradient_hooks(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return what the hooks of `parameter` make of a gradient: first those that get each gradient, then those
    that change the accumulated one. The parameter's own gradient is not changed."""
    for hook in list((getattr(parameter, "_backward_hooks", None) or {}).values()):
        returned = hook(gradient)
        gradient = gradient if returned is None else returned
    before = parameter.grad
    try:
        parameter.grad = gradient.clone()
        for hook in list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()):
            hook(parameter)
        return gradient if parameter.grad is None else parameter.grad
    finally:
        parameter.grad = before


def next_sequence_number() -> int:
    """Return the sequence number that autograd gives to the next node of its graph. The numbers
    increase in the order in which the nodes are created."""
    return torch.autograd._get_sequence_nr()


def detached(tensor: Tensor) -> Tensor:
    """Return `tensor.detach()`. Dispatch modes do not see this operation, which makes it faster, except
    for a tensor of a subclass."""
    if type(tensor) is not Tensor:
        return tensor.detach()
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


def saved_tensor_hooks_now() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the innermost active hooks for tensors that autograd saves, as (pack, unpack); None if
    there are none. They are those of `torch.autograd.graph.saved_tensors_hooks`."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) or None


def in_backward() -> bool:
    """Return whether this code is called during a backward of this thread, for example from a hook."""
    return torch._C._current_graph_task_id() != -1


def running_sequence_number() -> int | None:
    """Return the sequence number of the autograd node that backward is running now; None outside of
    backward."""
    node = torch._C._current_autograd_node()
    return node._sequence_nr() if node is not None else None


__all__ = [
    "detached",
    "has_accumulation_hooks",
    "has_gradient_hooks",
    "in_backward",
    "next_sequence_number",
    "running_sequence_number",
    "saved_factor",
    "saved_tensor_hooks_now",
    "sparse_parts",
    "storage_id",
    "storage_use_count",
    "swap_contents",
    "version_of",
]
