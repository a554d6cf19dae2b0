"""Find the tensors in nested containers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tightfit._torch.pytree import tree_leaves


def tensors_in(tree: Any) -> list[Tensor]:
    """Return all tensors in nested containers, such as a batch or the arguments of an operation."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


__all__ = ["tensors_in"]
