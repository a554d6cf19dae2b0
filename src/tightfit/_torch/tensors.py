"""Storages, version counters, hooks and the autograd graph of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def storage_id(tensor: Tensor) -> int:
    """An identity of a tensor's storage, the same for all views of it. It may be reused once the
    storage is freed."""
    return tensor.untyped_storage()._cdata


def storage_use_count(tensor: Tensor) -> int:
    """How many references a tensor's storage has."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def version_of(tensor: Tensor) -> int:
    """A counter that increases with each write in place to a tensor or to its views."""
    return tensor._version


def swap_contents(one: Tensor, other: Tensor) -> None:
    """Swap what two tensor objects hold, for everybody who has a reference to one of them."""
    torch._C._swap_tensor_impl(one, other)  # type: ignore[attr-defined]


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The indices and the values of a sparse COO tensor, which need not be coalesced."""
    return tensor._indices(), tensor._values()


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether a hook runs when a parameter's gradient is computed or accumulated."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def next_sequence_number() -> int:
    """The sequence number of the next node of the autograd graph. Later nodes have larger ones."""
    return torch.autograd._get_sequence_nr()


def in_backward() -> bool:
    """Whether a backward is running in this thread."""
    return torch._C._current_graph_task_id() != -1


def running_sequence_number() -> int | None:
    """The sequence number of the autograd node that is running; None if none is."""
    node = torch._C._current_autograd_node()
    return node._sequence_nr() if node is not None else None


__all__ = [
    "has_gradient_hooks",
    "in_backward",
    "next_sequence_number",
    "running_sequence_number",
    "sparse_parts",
    "storage_id",
    "storage_use_count",
    "swap_contents",
    "version_of",
]
