"""Find the tensors in nested containers, and those that an operation writes to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tightfit._torch.operations import schema_of
from tightfit._torch.pytree import tree_leaves


def tensors_in(tree: Any) -> list[Tensor]:
    """Return all tensors in nested containers, such as a batch or the arguments of an operation."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def bytes_accessed(tensor: Tensor) -> int:
    """Return the bytes that a tensor's elements occupy in memory. A dimension that was expanded
    (stride 0) counts as one element, because its elements are the same memory."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout is torch.strided else ():
        count *= size if stride else 1
    return count * tensor.element_size()


def written_tensors(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments of an operation that it writes to, according to its schema. They are
    tensors, or None for an argument that is missing.

    operation  the operation, such as torch.ops.aten.add_.Tensor

    Version counters do not suffice to find writes: a write to a chunk from torch.chunk or from a
    recurrent cell does not increment the version counter of the full tensor.
    """
    if not schema_of(operation).is_mutable:
        return []
    given = {**dict(zip((argument.name for argument in schema_of(operation).arguments), args, strict=False)), **kwargs}
    writes = [
        argument.name
        for argument in schema_of(operation).arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tree_leaves([given.get(name) for name in writes])


__all__ = ["tensors_in", "written_tensors"]
